// What a model is: its heads with their measured quality, how it runs, and the terms of its data.

import { fact, node } from "./dom.js";

const megabytes = (bytes) => `${Math.round(bytes / 1e6)} MB`;

function table(title, names, rows) {
  const head = node("thead", {}, node("tr", {}, ...names.map((name) => node("th", { scope: "col" }, name))));
  const lines = rows.map(([first, ...rest]) => node("tr", {},
    node("th", { scope: "row" }, first), ...rest.map((cell) => node("td", {}, cell))));
  const scroller = node("div", { className: "scroller", tabIndex: 0, role: "region", aria: { label: title } },
    node("table", {}, head, node("tbody", {}, ...lines)));
  return [node("h2", {}, title), scroller];
}

function gives({ labels = [], dimensions, vocabulary_size: words, label_prompt: prompt }) {
  if (prompt) return "entities of any labels";
  if (labels.length) return labels.length > 6 ? `${labels.length} labels` : labels.join(", ");
  if (dimensions) return `${dimensions} dimensions`;
  return words ? `${words} tokens of a vocabulary` : "spans of a text";
}

function measured({ metrics = {}, precision }, head) {
  const found = metrics[head]?.[precision] ?? Object.values(metrics[head] ?? {})[0] ?? {};
  return Object.entries(found).map(([name, value]) => `${name} ${value}`).join(", ") || "not measured";
}

function headsTable(model) {
  const byHead = model.commercial_use_by_head ?? {};
  const rows = Object.entries(model.heads ?? {}).map(([name, head]) => [
    head.demo ? `${name} (demo)` : name, head.task, gives(head), measured(model, name), byHead[name] ?? "not stated",
  ]);
  return table("Heads", ["Head", "Task", "Gives", "Measured, in points", "Commercial use"], rows);
}

// A bundle's author writes the origin, so that only a web address becomes a link.
function source({ name, origin }) {
  return /^https?:\/\//.test(origin) ? node("a", { href: origin, rel: "noreferrer" }, name) : name;
}

export function modelCard(model, devices) {
  const { memory, provider, reserved, aliases = [], datasets = [] } = model;
  const facts = {
    State: [model.state, model.problem].filter(Boolean).join(": "),
    Encoder: model.encoder,
    Devices: devices.map(({ name, ready }) => (ready ? name : `${name} (not ready)`)).join(", "),
    "Part of memory_budget": reserved && megabytes(reserved),
    "Also named": aliases.join(", "),
    Graph: [model.precision, model.layout, provider?.replace("ExecutionProvider", "")].filter(Boolean).join(", "),
    Runtime: model.runtime,
    Memory: memory && `${megabytes(memory.opened)}, and up to ${megabytes(Math.max(...Object.values(memory.batches)))} for a batch`,
    "Embedding space": model.embedding_space,
    "SHA-256 of the manifest": model.sha256,
    "Terms of the weights": model.weights_license,
  };
  const rows = datasets.map((data) => [source(data), data.used_for, data.terms, data.commercial_use]);
  return [
    node("dl", { className: "facts" },
      ...Object.entries(facts).filter(([, value]) => value).map(([name, value]) => fact(name, name, value))),
    ...headsTable(model),
    ...(rows.length ? table("Data", ["Data set", "Used for", "Terms", "Commercial use"], rows) : []),
    node("p", {}, node("a", { href: "native/models" }, "All fields as JSON")),
  ];
}
