// The attention weights of one layer: lines from the tokens that attend, left, to those that they attend to, right.

import { node, vector } from "./dom.js";

const LEAST = 0.01; // smaller weights have no line

export function showAttention({ results: [{ tokens, weights }] }) {
  const mean = tokens.map((_, from) => tokens.map((_, to) =>
    weights.reduce((sum, head) => sum + head[from][to], 0) / weights.length));
  const heads = weights.map((_, index) => node("option", { value: index }, `${index + 1}`));
  const head = node("select", {}, node("option", { value: "" }, "mean of all"), ...heads);
  const lines = vector("svg", { viewBox: `0 0 1 ${tokens.length}`, preserveAspectRatio: "none", "aria-hidden": true });
  lines.style.height = `${1.75 * tokens.length}rem`; // of the rows in style.css
  const summary = node("p", { className: "summary" });
  let chosen = []; // a side and a token's index; empty for all tokens
  const columns = [0, 1].map((side) => tokens.map((token, index) => {
    const button = node("button", { type: "button" }, token);
    button.addEventListener("click", () => {
      chosen = chosen[0] === side && chosen[1] === index ? [] : [side, index];
      draw();
    });
    return button;
  }));

  function draw() {
    const matrix = head.value ? weights[head.value] : mean;
    const [side, index] = chosen;
    const pairs = tokens.flatMap((_, from) => tokens.map((_, to) => [from, to]))
      .filter((pair) => side === undefined || pair[side] === index);
    lines.replaceChildren(...pairs.filter(([from, to]) => matrix[from][to] >= LEAST).map(([from, to]) =>
      vector("line", { x1: 0, y1: from + 0.5, x2: 1, y2: to + 0.5, opacity: matrix[from][to] ** 0.7 })));
    columns.forEach((buttons, own) => buttons.forEach((button, at) => {
      button.setAttribute("aria-pressed", own === side && at === index);
      const share = side === 1 - own ? (own ? matrix[index][at] : matrix[at][index]) : 0;
      button.style.setProperty("--share", `${Math.round(40 * share)}%`);
    }));
    const largest = pairs.map(([from, to]) => [side ? from : to, matrix[from][to]]).sort((a, b) => b[1] - a[1]);
    const named = largest.slice(0, 3).map(([at, value]) => `${tokens[at]} ${(100 * value).toFixed(0)} %`).join(", ");
    const verb = side ? "is attended to most by" : "attends most to";
    summary.textContent = side === undefined ? "Choose a token to see its lines alone." : `${tokens[index]} ${verb}: ${named}`;
  }

  head.addEventListener("change", draw);
  draw();
  const list = (label, buttons) => node("ol", { aria: { label } }, ...buttons.map((button) => node("li", {}, button)));
  return [node("label", { className: "of-attention" }, "Head ", head), summary,
    node("div", { className: "attention" }, list("Tokens that attend", columns[0]), lines,
      list("Tokens that they attend to", columns[1]))];
}
