// Elements and words that the pages share. Data reaches a page through textContent only, never as markup.

export function node(tag, properties = {}, ...children) {
  const { dataset, aria, ...rest } = properties;
  const element = Object.assign(document.createElement(tag), rest);
  Object.assign(element.dataset, dataset);
  for (const [name, value] of Object.entries(aria ?? {})) element.setAttribute(`aria-${name}`, value);
  element.append(...children);
  return element;
}

export function vector(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const count = (n, word) => `${n} ${word}${n === 1 ? "" : "s"}`;
export const tokens = (n) => count(n, "token");
export const milliseconds = (value) => `${value.toFixed(value < 100 ? 1 : 0)} ms`;

export function fact(name, label, value) {
  return node("div", { dataset: { fact: name } }, node("dt", {}, label), node("dd", {}, value));
}

export function showError(place, error, ...more) {
  const seconds = Number(error.retryAfter);
  const wait = seconds > 0 ? ` Try again in ${count(seconds, "second")}.` : "";
  const details = [error.status, error.code, error.param && `at ${error.param}`].filter(Boolean).join(" · ");
  place.replaceChildren(node("div", { className: "error" },
    node("p", {}, error.message, wait), node("p", { className: "mono" }, details), ...more));
}

export const refused = ({ status }) => status === 401 || status === 403;
