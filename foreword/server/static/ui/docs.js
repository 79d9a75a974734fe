// Routes and fields of the API, from its own schema, and a place to try them.

import { address, getJson, key, stream } from "./api.js";
import { button, coded, copy, h, put } from "./dom.js";
import { Shell } from "./shell.js";

new Shell("docs");
const main = document.getElementById("main");
const root = h("div", { class: "view docs" });
main.append(root);

const MAX_DEPTH = 3;
const EXAMPLES = {
  "/v1/chat/completions": { messages: [{ role: "user", content: "What is speculative decoding?" }], max_tokens: 64, stream: true, metrics: true },
  "/v1/completions": { prompt: "Speculative decoding", max_tokens: 32 },
  "/v1/responses": { input: "What is speculative decoding?" },
  "/v1/messages": { model: "any", max_tokens: 64, messages: [{ role: "user", content: "Hello" }] },
  "/v1/embeddings": { input: ["a text"] },
  "/tokenize": { prompt: "What is speculative decoding?" },
  "/detokenize": { tokens: [1, 2, 3] },
};

class Schema {
  constructor(api) {
    this.all = api.components?.schemas || {};
  }

  resolve(schema) {
    const name = schema?.$ref?.split("/").pop();
    return name ? this.all[name] || {} : schema || {};
  }

  /** A type in words: "text", "list of integers or null" ... */
  kind(schema) {
    if (schema?.$ref) return schema.$ref.split("/").pop().replace(/Body$/, "").replace(/([a-z])([A-Z])/g, "$1 $2").toLowerCase();
    if (!schema || !Object.keys(schema).length) return "any";
    if (schema.enum) return schema.enum.map(value => JSON.stringify(value)).join(" or ");
    if ("const" in schema) return JSON.stringify(schema.const);
    if (schema.anyOf) return [...new Set(schema.anyOf.map(each => this.kind(each)))].filter(name => name !== "null").join(" or ");
    if (schema.type === "array") return `list of ${this.kind(schema.items)}`;
    return { string: "text", number: "number", integer: "integer", boolean: "true or false", object: "object" }[schema.type] || schema.type || "any";
  }

  /** Objects that a field may hold, for their own fields. */
  objects(schema) {
    const inner = schema.anyOf || (schema.type === "array" ? [schema.items] : [schema]);
    return inner.flatMap(each => each?.anyOf || each?.type === "array" ? this.objects(each) : [this.resolve(each)]).filter(each => each.properties);
  }
}

function fieldTable(schema, object, depth = 0) {
  const required = new Set(object.required);
  const rows = Object.entries(object.properties || {}).sort(([a], [b]) => required.has(b) - required.has(a));
  return h("table", { class: "wide fields" }, h("tbody", null, rows.map(([name, field]) => h("tr", null,
    h("td", null, h("code", null, name), required.has(name) && h("small", null, " required")),
    h("td", null, schema.kind(field)),
    h("td", null, coded(field.description), depth < MAX_DEPTH && schema.objects(field).map(inner =>
      h("details", null, h("summary", null, "its fields"), fieldTable(schema, inner, depth + 1))))))));
}

function tryIt(path, verb, hasBody) {
  const field = hasBody && h("textarea", { rows: 6, spellcheck: "false", "aria-label": `Body for ${path}`, value: JSON.stringify(EXAMPLES[path] || {}, null, 2) });
  const place = path.includes("{") && h("input", { type: "text", value: path, "aria-label": "Path" });
  const output = h("pre", { tabindex: "0", hidden: true, "aria-label": "Answer", role: "region" });
  let controller = null;
  const send = async () => {
    controller?.abort();
    controller = new AbortController();
    output.hidden = false;
    output.textContent = "…";
    const target = (place ? place.value : path).replace(/^\//, "");
    try {
      const body = hasBody ? JSON.parse(field.value) : undefined;
      if (body?.stream && path.endsWith("completions")) {
        output.textContent = "";
        await stream(target, body, events => { output.append(...events.map(event => `${JSON.stringify(event)}\n`)); }, controller.signal);
        return;
      }
      const options = { method: verb.toUpperCase(), body, signal: controller.signal };
      const text = await fetchText(target, options);
      try { output.textContent = JSON.stringify(JSON.parse(text), null, 2); } catch { output.textContent = text; }
    } catch (error) {
      if (error.name !== "AbortError") output.textContent = error.message;
    }
  };
  const line = () => [`curl ${address((place ? place.value : path).replace(/^\//, ""))}`, verb === "post" || verb === "get" ? "" : ` -X ${verb.toUpperCase()}`,
    key.get() ? " -H \"Authorization: Bearer $KEY\"" : "", hasBody ? ` -H 'Content-Type: application/json' -d '${compact(field.value).replaceAll("'", "'\\''")}'` : ""].join("");
  return h("div", { class: "try" }, place, field, h("div", { class: "row" }, button("Send", "up", send, { text: true, class: "btn primary" }),
    button("Copy as curl", "copy", () => copy(line()), { text: true })), output);
}

function compact(text) {
  try { return JSON.stringify(JSON.parse(text)); } catch { return text; }
}

async function fetchText(path, { method, body, signal }) {
  const headers = { ...(key.get() ? { Authorization: `Bearer ${key.get()}` } : {}), ...(body === undefined ? {} : { "Content-Type": "application/json" }) };
  const response = await fetch(address(path), { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  return response.text();
}

function routeBox(schema, path, verb, facts, id) {
  const content = facts.requestBody?.content?.["application/json"]?.schema;
  const body = content && schema.resolve(content);
  const box = h("details", { class: "route", id }, h("summary", null, h("span", { class: `verb ${verb}` }, verb.toUpperCase()), h("code", null, path), h("span", { class: "soft" }, facts.description)));
  // Built when it is opened: the schema has some thousand fields.
  box.addEventListener("toggle", () => {
    if (box.open && box.children.length === 1) {
      box.append(h("div", { class: "route-body", tabindex: "0", role: "group", "aria-label": `${verb} ${path}` }, tryIt(path, verb, Boolean(body)), body && [h("h2", null, "Fields"), fieldTable(schema, body)]));
    }
  });
  return box;
}

function openTarget() {
  const box = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!box?.matches(".route")) return;
  box.open = true;
  box.scrollIntoView();
}

try {
  const api = await getJson("openapi.json");
  const schema = new Schema(api);
  const routes = Object.entries(api.paths).flatMap(([path, verbs]) => Object.entries(verbs).map(([verb, facts]) => ({ path, verb, facts, id: `${verb}${path.replaceAll("/", "-").replace(/[{}]/g, "")}` })));
  put(root, h("div", { class: "docs-layout" },
    h("nav", { class: "docs-nav", "aria-label": "Routes" }, h("p", { class: "soft" }, "The same as data: ", h("a", { href: "openapi.json" }, "openapi.json")),
      h("div", { class: "routes" }, routes.map(({ path, verb, id }) => h("a", { href: `#${id}` }, h("span", { class: `verb ${verb}` }, verb.toUpperCase()), " ", path)))),
    h("div", { class: "docs-main" }, h("h1", null, "The API"),
      h("p", null, "OpenAI's clients take ", h("code", null, address("v1")), " as their base URL, Anthropic's ", h("code", null, address("").replace(/\/$/, "")), "."),
      routes.map(({ path, verb, facts, id }) => routeBox(schema, path, verb, facts, id)))));
  addEventListener("hashchange", openTarget);
  openTarget();
} catch (error) {
  put(root, h("div", { class: "docs-layout" }, h("p", { class: "note bad", role: "alert" }, `The schema cannot be read: ${error.message}`)));
}
