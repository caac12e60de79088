// One call to the service: its response and timing, or an Error that describes the failure.

const STORED = "quartet-key"; // by this tab, until it is closed

const NATIVE = "native/"; // the prefix under which the service always has this API

let held = "";
try {
  held = sessionStorage.getItem(STORED) ?? "";
} catch { /* storage is not allowed: the key is kept until the page is left */ }

export const key = () => held;

export const address = (path) => new URL(NATIVE + path, document.baseURI);

export function useKey(value) {
  held = value.trim();
  try {
    sessionStorage.setItem(STORED, held);
  } catch { /* as above */ }
}

export const problem = (message, details) => Object.assign(new Error(message), details);
const unreachable = () => problem("The service could not be reached. Check that it is running, then try again.");

const bearer = () => held && { Authorization: `Bearer ${held}` };

// Call a function with the data of each server-sent event, until the stream ends.
export async function stream(path, receive, signal) {
  let response;
  try {
    response = await fetch(address(path), { headers: { ...bearer() }, signal });
  } catch (cause) {
    throw cause.name === "AbortError" ? cause : unreachable();
  }
  if (!response.ok) throw failure(response, parse(await response.text()));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (let read = await reader.read(); !read.done; read = await reader.read()) {
    const events = (rest + read.value).split("\n\n");
    rest = events.pop();
    for (const event of events) receive(JSON.parse(event.slice("data: ".length)));
  }
}

export async function call(path, init) {
  const started = performance.now();
  let response, text;
  try {
    response = await fetch(address(path), { ...init, headers: { ...init?.headers, ...bearer() } });
    text = await response.text();
  } catch (cause) {
    if (cause.name === "AbortError") throw cause;
    throw unreachable();
  }
  const roundTrip = performance.now() - started;
  const answer = parse(text);
  if (!response.ok || answer === undefined) throw failure(response, answer);
  return { answer, roundTrip, timing: serverTiming(response), batch: batchHeader(response) };
}

export function post(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  return call(path, { method: "POST", headers, body: JSON.stringify(body), signal });
}

function parse(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined; // a proxy's own page, most likely
  }
}

function failure(response, answer) {
  const message = response.ok ? "The answer was not JSON." : `The service answered ${response.status}.`;
  const retryAfter = response.headers.get("Retry-After");
  return problem(message, { status: response.status, retryAfter, ...answer?.error });
}

function serverTiming(response) {
  const header = response.headers.get("Server-Timing") ?? "";
  const metrics = [...header.matchAll(/([^\s,;]+)[^,]*?;\s*dur="?([\d.]+)/g)]
    .map(([, name, duration]) => ({ name, duration: Number(duration) }));
  const parts = metrics.filter(({ name }) => name !== "total");
  const sum = parts.reduce((soFar, { duration }) => soFar + duration, 0);
  const total = metrics.find(({ name }) => name === "total")?.duration ?? sum;
  return metrics.length ? { total, parts } : null;
}

function batchHeader(response) {
  const header = response.headers.get("X-Quartet-Batch");
  return header && Object.fromEntries(header.split(";").map((pair) => pair.trim().split("=")));
}
