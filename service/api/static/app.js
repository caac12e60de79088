// The playground: a box for each task, each an ordinary call to the API it is served from.

import { showAttention } from "./attention.js";
import { modelCard } from "./card.js";
import { address, call, key, post, problem, useKey } from "./client.js";
import { LANGUAGES } from "./code.js";
import { count, fact, milliseconds, node, refused, showError, tokens } from "./dom.js";
import { EXAMPLES } from "./examples.js";

const of = (task) => (head) => head.task === task;
const scoresPairs = (head) => head.task === "classification" && head.labels.length === 1;
const entails = (head) => head.task === "classification" && head.labels.some((label) => /^entail/i.test(label));
const givesVectors = (head) => ["embedding", "late-interaction", "sparse-embedding"].includes(head.task);
const readsTexts = (head) => ["classification", "ner", "embedding"].includes(head.task);
const lines = (text) => text?.split("\n").filter((line) => line.trim());

// reads: whether a head can answer; the box is hidden where none can. headless: no single head answers.
// serves: whether the model can, where that depends on more than its heads.
const TASKS = {
  classify: {
    reads: of("classification"),
    path: "classify",
    empty: "Labels and their scores will appear here.",
    request: ({ inputs }) => ({ inputs }),
    show: showLabels,
  },
  entities: {
    reads: of("ner"),
    path: "ner",
    empty: "The text will appear here with its names marked.",
    request: ({ inputs }) => ({ inputs }),
    show: showEntities,
  },
  labelled: {
    reads: of("zero-shot-ner"),
    path: "ner",
    empty: "The text will appear here with what your labels name marked.",
    request: ({ inputs, labels, threshold, nested }) =>
      ({ inputs, labels: lines(labels), threshold: Number(threshold), nested }),
    show: showEntities,
  },
  answers: {
    reads: of("qa"),
    path: "qa",
    empty: "The best answers will appear here, marked in the context.",
    request: (fields) => ({ ...fields, top_k: 3 }),
    show: showAnswers,
  },
  similarity: {
    reads: of("embedding"),
    path: "embed",
    empty: "Each sentence's closeness to the first will appear here.",
    request: ({ inputs, prompt_name }) => ({ inputs: lines(inputs), prompt_name }),
    show: showSimilarity,
  },
  rerank: {
    reads: (head) => scoresPairs(head) || givesVectors(head),
    named: true,
    path: "rerank",
    empty: "The documents will appear here, the most relevant first.",
    request: ({ query, documents }) => ({ query, documents: lines(documents) }),
    show: showRanking,
  },
  "zero-shot": {
    reads: (head) => entails(head) || head.task === "zero-shot-classification",
    path: "zero-shot",
    empty: "Your labels and their scores will appear here.",
    request: ({ inputs, labels, multi_label }) => ({ inputs, labels: lines(labels), multi_label }),
    show: showLabels,
  },
  analyze: {
    reads: readsTexts,
    headless: true,
    path: "analyze",
    empty: "The answers of all heads will appear here.",
    request: ({ inputs }) => ({ inputs }),
    show: showAnalysis,
  },
  tokenize: {
    reads: () => true,
    headless: true,
    path: "tokenize",
    empty: "The tokens that the model reads will appear here.",
    request: ({ inputs }) => ({ inputs }),
    show: showTokens,
  },
  attention: {
    reads: () => true,
    headless: true,
    serves: (model) => model.attention_layers,
    path: "attention",
    empty: "Lines between the tokens will appear here.",
    request: ({ inputs, layer }) => ({ inputs, layer: Number(layer) }),
    show: showAttention,
  },
  masks: {
    reads: of("fill-mask"),
    path: "fill-mask",
    empty: "The best tokens for each mask will appear here.",
    request: ({ inputs }) => ({ inputs }),
    show: showFilledMasks,
  },
  weights: {
    reads: of("sparse-embedding"),
    path: "embed-sparse",
    empty: "The tokens with the largest weights will appear here.",
    request: ({ inputs }) => ({ inputs, top_k: 12, return_tokens: true }),
    show: showWeights,
  },
};
const MASK = "[MASK]"; // in the examples

const DEMO = "A demo head: it shows the task at work. Do not rely on its answers.";
const HUES = { PER: 1, PERSON: 1, ORG: 2, LOC: 3, GPE: 3, MISC: 4 };
const MANY_LABELS = 8;

// ---- small tools

const score = (value) => value.toFixed(3);

// Marks each span of a text, and the spans within it. A span that overlaps an earlier one is left out. Offsets are code
// points, but a JavaScript string counts UTF-16 units: an emoji would shift what follows.
function highlight(text, spans, mark) {
  const points = Array.from(text);
  const marked = (from, to, within) => {
    const parts = [];
    let at = from;
    for (const span of within) {
      if (span.start < at || span.end <= span.start) continue;
      const inner = within.filter((other) => other !== span && span.start <= other.start && other.end <= span.end);
      parts.push(points.slice(at, span.start).join(""), mark(marked(span.start, span.end, inner), span));
      at = span.end;
    }
    return [...parts, points.slice(at, to).join("")];
  };
  return marked(0, points.length, [...spans].sort((a, b) => a.start - b.start || b.end - a.end));
}

function bar(value) {
  const fill = node("span", { className: "bar-fill" });
  fill.style.width = `${100 * Math.min(1, Math.max(0, value))}%`;
  return node("span", { className: "bar", aria: { hidden: "true" } }, fill);
}

function scored(tag, properties, label, value, share = value) {
  return node(tag, properties, node("span", { className: "bar-label" }, label),
    node("span", { className: "bar-score" }, score(value)), bar(share));
}

function bars(rows) {
  return node("ol", { className: "bars" },
    ...rows.map(([label, value]) => scored("li", { className: "bar-row" }, label, value)));
}

// ---- results of each task

function showLabels({ results: [labels] }) {
  const rows = labels.map(({ label, score: value }) => [label, value]);
  const rest = rows.slice(MANY_LABELS);
  const more = node("details", {}, node("summary", {}, count(rest.length, "more label")), bars(rest));
  return [bars(rows.slice(0, MANY_LABELS)), ...(rest.length ? [more] : [])];
}

function hue(label) {
  const spread = Array.from(label).reduce((sum, letter) => sum + letter.codePointAt(0), 0);
  return `hue-${HUES[label] ?? 5 + spread % 3}`;
}

function entityMark(parts, entity) {
  const label = entity.entity_group ?? entity.entity.replace(/^[BI]-/, "");
  const title = `${label}, score ${score(entity.score)}`;
  const value = node("span", { className: "entity-score" }, entity.score.toFixed(2));
  return node("mark", { className: `entity ${hue(label)}`, title, dataset: { label } },
    node("span", { className: "entity-text" }, ...parts),
    node("span", { className: "entity-tag" }, label, value));
}

function showEntities({ results: [entities] }, { inputs }) {
  const summary = entities.length ? `Entities found: ${entities.length}` : "No entities in this text";
  return [node("p", { className: "summary" }, summary),
    node("p", { className: "prose" }, ...highlight(inputs, entities, entityMark))];
}

function showAnswers({ results: [answers] }, { context }) {
  const prose = node("p", { className: "prose" });
  const buttons = answers.map(({ answer, score: value }) =>
    scored("button", { type: "button", className: "choice" }, answer || "No answer in this context", value));
  const choose = (chosen) => {
    buttons.forEach((button, index) => button.setAttribute("aria-pressed", index === chosen));
    const mark = (parts) => node("mark", { className: "answer" }, ...parts);
    prose.replaceChildren(...highlight(context, answers.slice(chosen, chosen + 1), mark));
  };
  buttons.forEach((button, index) => button.addEventListener("click", () => {
    choose(index);
    prose.querySelector("mark")?.scrollIntoView({ block: "nearest" });
  }));
  choose(0);
  const summary = answers.length ? [] : [node("p", { className: "summary" }, "No answer in this context")];
  const choices = buttons.map((button) => node("li", {}, button));
  return [...summary, node("ol", { className: "choices" }, ...choices), prose];
}

function cosine(a, b) {
  const dot = (x, y) => x.reduce((sum, value, index) => sum + value * y[index], 0);
  return dot(a, b) / (Math.sqrt(dot(a, a) * dot(b, b)) || 1);
}

function showSimilarity({ embeddings: [first, ...others] }, { inputs }) {
  const rows = others.map((vector, index) => [inputs[index + 1], cosine(first, vector)]);
  const ranked = rows.sort((a, b) => b[1] - a[1]);
  const alone = node("p", { className: "notice" }, "Write a second sentence to compare it with the first.");
  return [node("p", { className: "summary" }, `Cosine similarity in ${first.length} dimensions to`),
    node("p", { className: "reference" }, inputs[0]), ranked.length ? bars(ranked) : alone];
}

function showRanking({ results }, { documents }) {
  return [bars(results.map(({ index, score: value }) => [documents[index], value]))];
}

function showAnalysis({ results: [found], heads }, sent) {
  const summary = (text) => [node("p", { className: "summary" }, text)];
  const shown = (result) => {
    if (result.indices) return summary(`Weights of ${tokens(result.indices.length)}`);
    if (Array.isArray(result[0])) return summary(`Vectors of ${tokens(result.length)}`);
    if (typeof result[0] === "number") return summary(`A vector of ${result.length} numbers`);
    if (!result.length || "start" in result[0]) return showEntities({ results: [result] }, sent);
    return showLabels({ results: [result] });
  };
  return heads.map((head) => node("section", { className: "of-head" }, node("h3", {}, head), ...shown(found[head])));
}

const OFFERED = 4096; // tokens that are shown

function showTokens({ results: [{ tokens: found, count: number, truncated }], max_length: longest }) {
  const special = found.filter(({ sequence }) => sequence === null).length;
  const capacity = longest - special; // tokens of the text in one window
  const text = number - special;
  let at = 0;
  const chips = found.slice(0, OFFERED).flatMap(({ id, token, start, end, sequence }) => {
    const own = sequence !== null;
    const window = own && at % capacity === 0 && at ? 1 + at / capacity : 0;
    const className = own && at >= capacity ? "cut" : own ? "" : "special";
    if (own) at += 1;
    const edge = node("li", { className: "edge" }, `window ${window}`);
    const place = own ? `${start}–${end}` : "special";
    return [...(window ? [edge] : []), node("li", { className, title: `id ${id}` },
      node("span", { className: "token" }, token), node("span", { className: "place" }, place))];
  });
  const windows = Math.ceil(text / capacity);
  const cut = `: the last ${text - capacity} are cut off, or read in ${count(windows, "window")} with truncate “window”`;
  const more = number > OFFERED ? [node("p", { className: "summary" }, `The first ${OFFERED} are shown.`)] : [];
  return [node("p", { className: "summary" }, `${tokens(number)} of at most ${longest}${truncated ? cut : ""}`),
    node("ol", { className: "tokens" }, ...chips), ...more];
}

function showFilledMasks({ results: [found] }) {
  const several = Array.isArray(found[0]);
  return (several ? found : [found]).flatMap((tokens, index) => [
    ...(several ? [node("p", { className: "summary" }, `Mask ${index + 1}`)] : []),
    bars(tokens.map(({ token_str: token, score: value }) => [token, value])),
    ...(several ? [] : [node("p", { className: "prose" }, tokens[0].sequence)]),
  ]);
}

function showWeights({ embeddings: [{ tokens: names, values }] }) {
  const rows = names.map((name, index) => [name, values[index]]).sort((a, b) => b[1] - a[1]);
  const largest = rows.length ? rows[0][1] : 1;
  return [node("ol", { className: "bars" }, ...rows.map(([name, value]) =>
    scored("li", { className: "bar-row" }, name, value, value / largest)))];
}

// ---- notices about a call

function notices(answer, sent, demo) {
  const many = Array.isArray(sent.inputs) && sent.inputs.length > 1;
  const what = "question" in sent ? "The question" : "The text"; // a context is read to its end
  const cut = (answer.usage?.truncated ?? []).map((index) =>
    `${many ? `Sentence ${index + 1}` : what} is longer than the model reads: its end was cut off.`);
  return [...cut, ...(demo ? [DEMO] : [])].map((text) => node("p", { className: "notice" }, text));
}

function facts({ answer, roundTrip, timing, batch }) {
  const { usage } = answer;
  return node("dl", { className: "facts" },
    fact("round-trip", "Round trip", milliseconds(roundTrip)),
    ...(timing ? [fact("service", "Service", milliseconds(timing.total))] : []),
    ...(batch ? [fact("batch", "Batch", `size ${batch.size} · ${tokens(Number(batch.tokens))}`)] : []),
    ...(usage ? [fact("read", "Read", `${tokens(usage.tokens)} · ${count(usage.windows, "window")}`)] : []),
    fact("model", "Model", [answer.model, ...(answer.heads ?? [answer.head])].filter(Boolean).join(" · ")));
}

function timeline({ roundTrip, timing }) {
  if (!timing) return [];
  const whole = Math.max(roundTrip, timing.total);
  const segments = timing.parts.map(({ duration }, index) => {
    const segment = node("span", { className: `segment segment-${index % 4}` });
    segment.style.width = `${100 * duration / whole}%`;
    return segment;
  });
  const legend = timing.parts.map(({ name, duration }, index) =>
    node("span", { className: `key segment-${index % 4}` }, `${name} ${duration.toFixed(1)}`));
  legend.push(node("span", { className: "key" }, `network ${(whole - timing.total).toFixed(1)} ms`));
  return [node("div", { className: "timeline", aria: { hidden: "true" } }, ...segments),
    node("p", { className: "keys-of-time" }, ...legend)];
}

function askForKey() {
  document.getElementById("key-form").hidden = false;
  // A link cannot show a key.
  for (const link of document.querySelectorAll("nav [href=metrics], #card [href]")) link.hidden = true;
}

// ---- one box

function fields(form) {
  // A blank field is omitted, so that the service itself reports the missing field.
  const named = [...form.elements].filter((element) => element.name && element.name !== "head");
  return Object.fromEntries(named.map(({ name, type, value, checked }) =>
    [name, type === "checkbox" ? checked : value.trim() ? value : undefined]));
}

function fill(panel, values) {
  for (const element of panel.form.elements) {
    if (element.type === "checkbox") element.checked = values[element.name] ?? false;
    else if (element.name in values) element.value = values[element.name].replaceAll(MASK, panel.mask);
  }
  panel.form.dispatchEvent(new Event("input"));
}

function body(panel) {
  const several = panel.heads.length > 1 || panel.named;
  const head = several && !panel.headless ? panel.head.value : undefined;
  const { input_type } = panel.path === "embed" ? chosenHead(panel) : {};
  return { ...panel.request(fields(panel.form)), model: panel.model?.id, head, input_type };
}

const chosenHead = (panel) => panel.heads.find(([name]) => name === panel.head.value)?.[1] ?? {};
const isDemo = (panel) => Boolean(chosenHead(panel).demo);

// A prompt may be chosen where the head has one with a text. "" is the default prompt, or none.
function offerPrompts(panel) {
  const choice = panel.section.querySelector(".prompt-choice");
  if (!choice) return;
  const { prompts = {}, default_prompt, input_type } = chosenHead(panel);
  const usual = input_type ?? default_prompt;
  const named = Object.entries(prompts);
  const select = choice.querySelector("select");
  const before = select.value;
  const options = named.map(([value, text]) =>
    node("option", { value, title: text }, text ? `${value} (“${text.trim()}”)` : `${value} (no text)`));
  select.replaceChildren(node("option", { value: "" }, usual ? `default: ${usual}` : "none"), ...options);
  select.value = before in prompts ? before : "";
  choice.hidden = !named.some(([, text]) => text);
}

// The address of this box as it is filled in. A fragment is not sent to any server.
function fragment(panel) {
  const { model, head } = body(panel);
  const values = { task: panel.name, model, head, ...fields(panel.form) };
  const known = Object.entries(values).filter(([, value]) => value);
  return `#${new URLSearchParams(known)}`;
}

function refresh(panel) {
  panel.link.href = fragment(panel);
  panel.badge.hidden = !isDemo(panel);
}

let language = "curl"; // of all boxes

function showCode(panel, sent) {
  panel.sent = sent;
  panel.code.hidden = false;
  panel.command.textContent = LANGUAGES[language](address(panel.path), sent, Boolean(key()));
  for (const button of panel.languages) button.setAttribute("aria-pressed", button.textContent === language);
}

function chooseLanguage(name) {
  language = name;
  for (const panel of panels) if (panel.sent) showCode(panel, panel.sent);
}

function markInvalid(panel, param) {
  const path = (param ?? "").split(/[.[\]]+/);
  for (const element of panel.form.elements) {
    if (element.name && path.includes(element.name)) element.setAttribute("aria-invalid", "true");
    else element.removeAttribute("aria-invalid");
  }
}

// Whether a text is missing, which the page then says itself.
function isEmpty(panel) {
  const blank = [...panel.form.elements].find((element) =>
    element.matches("textarea, input[type=text]") && !element.value.trim());
  if (!blank) return false;
  markInvalid(panel, blank.name);
  const text = `“${blank.labels[0].textContent}” is empty: write something, or try an example.`;
  rest(panel, node("p", { className: "notice" }, text));
  blank.focus();
  return true;
}

async function run(panel) {
  panel.flight?.abort();
  if (isEmpty(panel)) return;
  const flight = panel.flight = new AbortController();
  const sent = body(panel);
  const demo = isDemo(panel);
  panel.results.setAttribute("aria-busy", "true");
  showCode(panel, sent);
  try {
    const reply = await post(panel.path, sent, flight.signal);
    if (flight.signal.aborted) return; // a newer run owns the box
    markInvalid(panel);
    panel.results.replaceChildren(...panel.show(reply.answer, sent), ...notices(reply.answer, sent, demo));
    panel.measures.replaceChildren(facts(reply), ...timeline(reply));
  } catch (error) {
    if (flight.signal.aborted) return;
    markInvalid(panel, error.param);
    showError(panel.results, error);
    if (refused(error)) askForKey();
    panel.measures.replaceChildren();
  }
  panel.results.removeAttribute("aria-busy");
}

async function copy(text, button, select) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch { // not allowed, or not a secure page: leave it selected for the keyboard
    select?.();
    button.textContent = select ? "Selected" : "See the address bar";
  }
  setTimeout(() => { button.textContent = label; }, 1600);
}

function build(name, settings) {
  const section = document.getElementById(name);
  const form = section.querySelector("form");
  form.querySelector("fieldset").append(document.getElementById("controls").content.cloneNode(true));
  section.append(document.getElementById("outcome").content.cloneNode(true));
  const badge = node("span", { className: "badge", title: DEMO, hidden: true }, "demo");
  section.querySelector("h2").after(badge);
  const find = (selector) => section.querySelector(selector);
  const title = section.querySelector("h2").textContent;
  find(".code pre").setAttribute("aria-label", `${title}: the request as code`);
  const languages = Object.keys(LANGUAGES).map((each) => node("button", { type: "button" }, each));
  find(".languages").append(...languages);
  return {
    ...settings, name, section, form, badge, heads: [], model: null, mask: MASK,
    head: find("[name=head]"), code: find(".code"), command: find(".code code"), languages, link: find(".link"),
    results: find(".results"), measures: find(".measures"),
  };
}

// Empty the outcome, but for a message.
function rest(panel, message) {
  panel.measures.replaceChildren();
  panel.code.hidden = true;
  panel.sent = undefined;
  if (panel.results.textContent === message.textContent) return; // it is read out loud already
  panel.results.replaceChildren(message);
}

const waiting = (panel) => node("p", { className: "empty" }, panel.empty);

function wire(panel) {
  const examples = Object.entries(EXAMPLES[panel.name]).map(([label, values]) => {
    const button = node("button", { type: "button", className: "example" }, label);
    button.addEventListener("click", () => fill(panel, values));
    return button;
  });
  panel.section.querySelector(".examples").append(...examples);
  panel.form.addEventListener("input", () => refresh(panel));
  panel.head.addEventListener("change", () => { offerPrompts(panel); refresh(panel); });
  panel.form.querySelector("[name=layer]")?.addEventListener("change", () => panel.sent && run(panel));
  panel.form.addEventListener("submit", (event) => { event.preventDefault(); run(panel); });
  panel.form.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    panel.form.requestSubmit();
  });
  const button = panel.section.querySelector(".copy");
  const select = () => getSelection().selectAllChildren(panel.command);
  button.addEventListener("click", () => copy(panel.command.textContent, button, select));
  panel.link.addEventListener("click", () => copy(panel.link.href, panel.link));
  for (const each of panel.languages) each.addEventListener("click", () => chooseLanguage(each.textContent));
  rest(panel, waiting(panel));
  fill(panel, Object.values(EXAMPLES[panel.name])[0]);
}

// ---- models

function spellMask(panel, mask) {
  for (const element of panel.form.querySelectorAll("textarea")) {
    element.value = element.value.replaceAll(panel.mask, mask);
  }
  for (const element of panel.section.querySelectorAll(".mask-token")) element.textContent = mask;
  panel.mask = mask;
}

function applyModel(panel, model) {
  const offered = Object.entries(model.heads ?? {}).filter(([, head]) => panel.reads(head));
  const options = offered.map(([name, { demo }]) =>
    node("option", { value: name }, demo ? `${name} (demo)` : name));
  panel.flight?.abort();
  panel.results.removeAttribute("aria-busy");
  Object.assign(panel, { model, heads: offered });
  panel.head.replaceChildren(...options);
  spellMask(panel, offered[0]?.[1].mask_token ?? panel.mask);
  panel.section.querySelector(".head-choice").hidden = offered.length < 2 || panel.headless;
  offerPrompts(panel);
  panel.section.hidden = Boolean(model.heads) && !offered.length || Boolean(panel.serves && !panel.serves(model));
  const layers = Array.from({ length: model.attention_layers ?? 0 }, (_, index) => node("option", {}, `${index + 1}`));
  panel.section.querySelector("[name=layer]")?.replaceChildren(...layers);
  markInvalid(panel);
  rest(panel, waiting(panel));
  refresh(panel);
}

function describe({ precision, provider, max_length: length }) {
  const device = provider?.replace("ExecutionProvider", "");
  return [precision, device, length && `${length} tokens`].filter(Boolean).join(" · ");
}

function terms({ commercial_use: use, commercial_use_by_head: byHead = {} }) {
  if (!use) return [];
  const [answer, names] = use.split(/: (.*)/s);
  const answers = Object.entries(byHead).map(([head, each]) => [head, each.split(":")[0]]);
  const differ = new Set(answers.map(([, each]) => each)).size > 1;
  return [
    "Commercial use, by its data’s terms: ",
    node("strong", {}, answer),
    ...(names ? [` (${names})`] : []),
    ...(differ ? [`; by head: ${answers.map((pair) => pair.join(" ")).join(", ")}`] : []),
  ];
}

// Fill in what a shared link names: a task, its texts, and perhaps a model and a head.
function openLink() {
  const { task, model, head, ...values } = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  const panel = panels.find(({ name }) => name === task);
  if (!panel || select.disabled) return;
  const isServed = [...select.options].some(({ value }) => value === model);
  if (isServed && select.value !== model) {
    select.value = model;
    select.onchange();
  }
  const problems = [
    model && !isServed && `The link is for ${model}, which is not served here.`,
    panel.section.hidden && `${select.value} has no head for the task of the link.`,
  ].filter(Boolean);
  place.replaceChildren(...problems.map((text) => node("p", { className: "notice" }, text)));
  if (panel.heads.some(([name]) => name === head)) panel.head.value = head;
  offerPrompts(panel);
  fill(panel, values);
  panel.section.scrollIntoView();
  panel.section.querySelector(".run").focus({ preventScroll: true });
}

const place = document.getElementById("models-error");
const select = document.getElementById("model");

async function loadModels(panels) {
  if (key()) askForKey();
  try {
    const { models = [], devices = [] } = (await call("models")).answer;
    if (!models.length) throw problem("The service lists no models.");
    select.replaceChildren(...models.map(({ id, state }) =>
      node("option", { value: id }, ["cold", "set_aside"].includes(state) ? `${id} (${state})` : id)));
    select.onchange = () => {
      const model = models.find(({ id }) => id === select.value);
      document.getElementById("model-facts").textContent = describe(model);
      document.getElementById("model-terms").replaceChildren(...terms(model));
      document.getElementById("card-body").replaceChildren(...modelCard(model, devices));
      document.getElementById("card").hidden = false;
      panels.forEach((panel) => applyModel(panel, model));
    };
    select.value = models[0].id;
    select.onchange();
    select.disabled = false;
    place.replaceChildren();
    openLink();
  } catch (error) {
    select.replaceChildren(node("option", {}, "Not available"));
    select.disabled = true;
    if (refused(error)) {
      askForKey();
      document.getElementById("key").focus();
      if (key()) showError(place, error);
      else place.replaceChildren(node("p", { className: "notice" }, "This service requires an API key."));
      return;
    }
    const retry = node("button", { type: "button" }, "Try again");
    retry.addEventListener("click", () => loadModels(panels));
    showError(place, error, retry);
  }
}

document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(document.getElementById("key").value);
  loadModels(panels);
});

const panels = Object.entries(TASKS).map(([name, settings]) => build(name, settings));
panels.forEach(wire);
if (/Mac|iP(hone|ad)/.test(navigator.platform)) {
  for (const kbd of document.querySelectorAll(".keys kbd:first-child")) kbd.textContent = "⌘";
}
addEventListener("hashchange", () => {
  const isOwn = panels.some(({ link }) => link.getAttribute("href") === location.hash); // was just copied
  if (!isOwn) openLink();
});
loadModels(panels);
