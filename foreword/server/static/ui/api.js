// Requests to this server. All addresses are relative to the page, so a proxy's prefix works.

const ROOT = new URL(".", document.baseURI);
const KEY = "foreword.key";

export const address = path => new URL(path, ROOT).href;

/** The API key, kept in this browser alone: for good, or until the tab is closed. */
export const key = {
  get() {
    try { return sessionStorage.getItem(KEY) || localStorage.getItem(KEY) || ""; } catch { return this.memory || ""; }
  },
  set(value, keep) {
    this.memory = value;
    try {
      sessionStorage.removeItem(KEY);
      localStorage.removeItem(KEY);
      if (value) (keep ? localStorage : sessionStorage).setItem(KEY, value);
    } catch { /* storage is blocked: the key lives as long as the page */ }
  },
  get kept() {
    try { return localStorage.getItem(KEY) !== null; } catch { return false; }
  },
};

/** An error of the server, or of the way to it (status 0). */
export class ApiError extends Error {
  constructor(status, error = {}, requestId = null) {
    super(error.message || (status ? `the server answered ${status}` : "the server cannot be reached"));
    Object.assign(this, { status, code: error.code || null, param: error.param || null, requestId });
  }
}

async function request(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(address(path), {
      method, headers, signal, cache: "no-store", body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0);
  }
  if (response.ok) return response;
  let parsed = {};
  try { parsed = (await response.json()).error || {}; } catch { /* not of this server: a proxy's page */ }
  throw new ApiError(response.status, parsed, response.headers.get("x-request-id"));
}

export const getJson = async (path, options) => (await request(path, options)).json();
export const postJson = (path, body, options) => getJson(path, { method: "POST", body, ...options });
export const getText = async path => (await request(path)).text();

/** The body of /health, which has the same fields with 200 and 503; null if the server cannot be reached. */
export async function getHealth() {
  try {
    const response = await fetch(address("health"), { cache: "no-store" });
    const body = await response.json();
    return "status" in body ? body : null;
  } catch {
    return null;
  }
}

/** Stream an answer: `onEvents` gets lists of parsed events as they arrive. Throws ApiError, AbortError. */
export async function stream(path, body, onEvents, signal) {
  const response = await request(path, { method: "POST", body, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "", searched = 0;
  for (;;) {
    let item;
    try {
      item = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new ApiError(0, { message: "the connection broke before the answer's end" });
    }
    if (item.done) break;
    buffer += item.value;
    const events = [];
    let start = 0, end;
    while ((end = buffer.indexOf("\n\n", Math.max(start, searched))) >= 0) {
      const event = parse(buffer.slice(start, end));
      if (event === DONE) return void (events.length && onEvents(events));
      if (event && event.error) {
        if (events.length) onEvents(events);
        throw new ApiError(response.status, event.error, response.headers.get("x-request-id"));
      }
      if (event) events.push(event);
      start = end + 2;
    }
    buffer = buffer.slice(start);
    searched = Math.max(buffer.length - 1, 0);
    if (events.length) onEvents(events);
  }
  throw new ApiError(0, { message: "the connection broke before the answer's end" });
}

const DONE = Symbol("done");

/** One event: DONE, an object, or {comment} of a server that waits (a model that loads). */
function parse(text) {
  if (text.startsWith(":")) return { comment: text.slice(1).trim() };
  const data = text.startsWith("data: ") ? text.slice(6) : "";
  return !data ? null : data === "[DONE]" ? DONE : JSON.parse(data);
}
