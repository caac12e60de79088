// The API's documentation page, rendered from /openapi.json. Data reaches the page through textContent only.

import { call } from "./client.js";

function node(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

// Descriptions hold `code` and nothing else of markdown.
function prose(text = "") {
  return text.split("`").map((part, index) => (index % 2 ? node("code", {}, part) : part));
}

const resolve = (api, value) => value?.$ref
  ? value.$ref.slice(2).split("/").reduce((place, key) => place[key], api)
  : value ?? {};

// ---- schemas

function typeOf(api, schema) {
  if (schema.allOf) return typeOf(api, schema.allOf[0]);
  if (schema.$ref && resolve(api, schema).enum) return typeOf(api, resolve(api, schema));
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  if (schema.anyOf) return schema.anyOf.map((option) => typeOf(api, option)).join(" | ");
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.type === "array") return list(typeOf(api, schema.items ?? {}));
  return [schema.type ?? "any"].flat().join(" | ");
}

const list = (type) => (type.includes(" | ") ? `[${type}]` : `${type}[]`);

// A body in the form of an example: field names with types in place of values.
function shapeOf(api, schema) {
  const found = resolve(api, schema);
  if (found.properties) {
    return Object.fromEntries(Object.entries(found.properties).map(([name, value]) => [name, shapeOf(api, value)]));
  }
  if (found.anyOf) return shapeOf(api, found.anyOf[0]);
  if (found.type === "array") return [shapeOf(api, found.items ?? {})];
  return found.examples?.[0] ?? typeOf(api, found);
}

function limits({ minimum, minItems, default: standard }, required) {
  const least = minimum ?? minItems;
  const parts = [least !== undefined && `at least ${least}`, required && "required",
    standard !== undefined && standard !== null && `default ${JSON.stringify(standard)}`];
  return parts.filter(Boolean).join(", ");
}

function fieldRows(api, schema) {
  const required = new Set(schema.required);
  const fields = Object.entries(schema.properties ?? {}).filter(([, field]) => field.type !== "null");
  fields.sort(([a], [b]) => required.has(b) - required.has(a));
  return fields.map(([name, field]) =>
    row(node("code", {}, name), node("code", {}, typeOf(api, field)),
      [...prose(field.description), note(limits(field, required.has(name)))]));
}

const note = (text) => node("span", { className: "limits" }, text);

// ---- the parts of a route

function row(...cells) {
  return node("tr", {}, ...cells.map((cell) => node("td", {}, ...[cell].flat())));
}

function table(title, heads, rows) {
  if (!rows.length) return [];
  const head = node("tr", {}, ...heads.map((text) => node("th", { scope: "col" }, text)));
  return [node("h3", {}, title),
    node("div", { className: "scroll" }, node("table", {}, node("thead", {}, head), node("tbody", {}, ...rows)))];
}

function code(title, text) {
  return [node("h3", {}, title), node("pre", { className: "sample", tabIndex: 0 }, node("code", {}, text))];
}

function curl(path, body) {
  const data = JSON.stringify(body).replaceAll("'", String.raw`'\''`);
  const url = new URL(path.slice(1), document.baseURI);
  return [`curl -sS ${url}`, "-H 'Content-Type: application/json'", `-d '${data}'`].join(" \\\n  ");
}

function requestParts(api, path, content) {
  if (!content) return [];
  const schema = resolve(api, content.schema);
  const examples = Object.values(content.examples ?? {}).flatMap(({ summary, value }) =>
    code(`Example: ${summary}`, curl(path, value)));
  const bodies = schema.anyOf?.map((option) => resolve(api, option)) ?? [schema];
  const tables = bodies.flatMap((body, index) =>
    table(index ? "Or body" : "Body", ["Field", "Type", ""], fieldRows(api, body)));
  const fields = bodies.flatMap((body) => Object.values(body.properties ?? {}));
  return [...tables, ...fields.flatMap((field) => objectsIn(api, field)), ...examples];
}

// The objects that a field's type refers to, one table each.
function objectsIn(api, field) {
  const inner = field.anyOf?.flatMap((option) => objectsIn(api, option)) ?? [];
  if (field.type === "array") return objectsIn(api, field.items ?? {});
  if (!field.$ref || resolve(api, field).enum) return inner;
  return table(typeOf(api, field), ["Field", "Type", ""], fieldRows(api, resolve(api, field)));
}

function answerParts(api, answer) {
  const [type, { schema, examples } = {}] = Object.entries(answer?.content ?? {})[0] ?? [];
  const [example] = Object.values(examples ?? {});
  const body = example?.value ?? shapeOf(api, schema);
  const sample = type === "application/json" ? JSON.stringify(body, null, 2) : type;
  const headers = Object.entries(answer?.headers ?? {}).map(([name, { description }]) =>
    row(node("code", {}, name), prose(description)));
  return [...(sample ? code("Answer", sample) : []), ...table("Answer headers", ["Header", ""], headers)];
}

function route(api, path, method, operation) {
  const { 200: answer, ...refusals } = operation.responses;
  const headers = (operation.parameters ?? []).map(({ name, description }) => row(node("code", {}, name), prose(description)));
  const errors = Object.entries(refusals).map(([status, { description }]) => row(status, prose(description)));
  return node("section", { className: "operation", id: operation.operationId },
    node("header", { className: "operation-head" },
      node("h2", {}, node("code", {}, `${method.toUpperCase()} ${path}`)), node("p", {}, ...prose(operation.description))),
    ...requestParts(api, path, operation.requestBody?.content["application/json"]),
    ...table("Request headers", ["Header", ""], headers),
    ...answerParts(api, answer),
    ...table("Errors", ["Status", ""], errors));
}

// ---- the page

function operations(api) {
  return Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, operation]) => ({ path, method, operation })));
}

async function show() {
  const place = document.getElementById("routes");
  try {
    const { answer: api } = await call("openapi.json");
    const all = operations(api);
    document.getElementById("about").textContent = `${api.info.description} Version ${api.info.version}.`;
    document.getElementById("contents").append(...all.map(({ path, operation }) =>
      node("a", { href: `#${operation.operationId}` }, path)));
    const refused = node("section", { className: "operation" }, node("h2", {}, "Every error"),
      ...code("Body", JSON.stringify(shapeOf(api, api.components.schemas.ErrorResponse), null, 2)));
    place.replaceChildren(...all.map(({ path, method, operation }) => route(api, path, method, operation)), refused);
    document.getElementById(location.hash.slice(1))?.scrollIntoView();
  } catch (error) {
    place.replaceChildren(node("div", { className: "error" }, node("p", {}, error.message)));
  }
}

show();
