// The live view: frames of an event stream, which is open only while the page is visible and not paused.

import { key, stream, useKey } from "./client.js";
import { count, milliseconds, node, refused, tokens, vector } from "./dom.js";

const SHOWN = 12; // batches
const RATE_S = 3; // over which rates are measured
const WRITE_MS = 500; // between two updates of the numbers, so that they can be read
const RETRY_MS = 2000;
const LINE = 5; // height of a text in the picture of a batch, with the gap

const find = (id) => document.getElementById(id);
const whole = (value) => Math.round(value).toLocaleString("en");
const percent = (part) => `${Math.round(100 * part)} %`;

let paused = false;
let flight = null;
let recent = []; // frames of the last seconds
let last = null; // frame
let scale = 0; // tokens of the longest text so far
const refusals = {};

// ---- a batch

function lines(batch, shade) {
  return batch.lengths.map((length, index) =>
    batch.requests[index] % 2 === shade ? `M0 ${index * LINE}h${length}v${LINE - 1}h-${length}z` : "").join("");
}

function picture(batch) {
  const longest = Math.max(...batch.lengths);
  scale = Math.max(scale, longest);
  const height = batch.lengths.length * LINE - 1;
  const about = `${count(batch.size, "text")} of ${batch.lengths.join(", ")} tokens`;
  const shapes = { padding: `M0 0h${longest}v${height}h-${longest}z`, even: lines(batch, 0), odd: lines(batch, 1) };
  const paths = Object.entries(shapes).map(([name, d]) => vector("path", { class: name, d }));
  const attributes = { viewBox: `0 0 ${scale} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": about };
  const svg = vector("svg", attributes, ...paths);
  svg.style.height = `${height}px`;
  return svg;
}

function showBatch(batch) {
  const padding = percent(1 - batch.tokens / batch.slots);
  const heads = Object.entries(batch.heads).map(([head, number]) => `${number} × ${head}`);
  const rest = batch.size - batch.lengths.length;
  const facts = [
    `${count(batch.size, "text")} of ${count(Math.max(...batch.requests) + 1, "request")}`,
    tokens(batch.tokens),
    ...(batch.slots > batch.tokens ? [batch.padded ? `${padding} padding` : `${padding} padding saved`] : []),
    milliseconds(1000 * batch.seconds),
    ...(batch.bulk ? [`${batch.bulk} bulk`] : []),
    ...(rest ? [`${rest} not drawn`] : []),
  ];
  return node("li", { className: "batch" },
    node("p", { className: "batch-facts" }, node("strong", {}, batch.model), ...facts.map((fact) => node("span", {}, fact))),
    picture(batch), node("p", { className: "summary" }, heads.join(", ")));
}

// ---- the numbers

const sum = (name) => recent.reduce((total, { ran }) => total + (ran[name] ?? 0), 0);

function row(name, { requests, tokens: waiting }, latency) {
  const seconds = (value) => (latency ? milliseconds(1000 * value) : "–");
  const cells = [whole(requests), whole(waiting), seconds(latency?.p50), seconds(latency?.p99), whole(latency?.number ?? 0)];
  return node("tr", {}, node("th", { scope: "row" }, name), ...cells.map((cell) => node("td", {}, cell)));
}

function write() {
  if (!last) return;
  const covered = Math.max(1, recent.reduce((total, { seconds }) => total + seconds, 0));
  find("texts").textContent = `${whole(sum("texts") / covered)} /s`;
  find("rate").textContent = `${whole(sum("tokens") / covered)} /s`;
  find("size").textContent = sum("batches") ? (sum("texts") / sum("batches")).toFixed(1) : "–";
  find("saved").textContent = sum("slots") ? percent(sum("saved") / sum("slots")) : "–";
  find("classes").replaceChildren(...Object.entries(last.queue).map(([name, waiting]) => row(name, waiting, last.latency[name])));
  const codes = Object.entries(refusals).map(([code, number]) => `${whole(number)} × ${code}`);
  if (codes.length) find("refused").textContent = `Refused since this page was opened: ${codes.join(", ")}.`;
}

function receive(frame) {
  last = frame;
  recent.push(frame);
  let covered = 0;
  recent = recent.filter((_, index) => {
    covered = recent.slice(index + 1).reduce((total, { seconds }) => total + seconds, 0);
    return covered < RATE_S;
  });
  for (const [code, number] of Object.entries(frame.refused)) refusals[code] = (refusals[code] ?? 0) + number;
  if (!frame.batches.length) return;
  const list = find("batches");
  list.prepend(...frame.batches.map(showBatch).reverse());
  while (list.children.length > SHOWN) list.lastChild.remove();
  find("idle").hidden = true;
}

// ---- the stream

function tell(text) {
  if (find("status").textContent !== text) find("status").textContent = text;
}

async function watch() {
  flight?.abort();
  if (paused || document.hidden) return;
  const own = flight = new AbortController();
  let isOpen = false;
  try {
    await stream("live/events", (frame) => {
      if (!isOpen) tell("Connected. Ten updates a second, as long as this page is visible.");
      isOpen = true;
      find("pause").hidden = false;
      receive(frame);
    }, own.signal);
    if (!own.signal.aborted) throw new Error("The stream has ended.");
  } catch (error) {
    if (own.signal.aborted) return;
    if (refused(error)) {
      find("key-form").hidden = false;
      tell(key() ? error.message : "This service requires an API key.");
      return;
    }
    tell(`${error.message} Trying again…`);
    setTimeout(() => { if (own === flight) watch(); }, RETRY_MS);
  }
}

find("pause").addEventListener("click", () => {
  paused = !paused;
  find("pause").textContent = paused ? "Resume" : "Pause";
  if (paused) tell("Paused. The service sends nothing.");
  watch();
});
find("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(find("key").value);
  find("key-form").hidden = true;
  watch();
});
document.addEventListener("visibilitychange", watch);
setInterval(write, WRITE_MS);
watch();
