// Settings of a conversation: their panel, and the body of its requests.

import { getJson } from "./api.js";
import { coded, fmt, h, put } from "./dom.js";

const NUMBERS = [
  ["temperature", { min: 0, max: 2, step: 0.1 }],
  ["top_p", { min: 0, max: 1, step: 0.05 }],
  ["top_k", { min: 0, step: 1 }],
  ["min_p", { min: 0, max: 1, step: 0.01 }],
  ["repetition_penalty", { min: 0.1, max: 2, step: 0.05 }],
  ["presence_penalty", { min: -2, max: 2, step: 0.1 }],
  ["frequency_penalty", { min: -2, max: 2, step: 0.1 }],
];
const LIMITS = [
  ["max_tokens", { min: 1, step: 1 }],
  ["n", { min: 1, max: 8, step: 1 }],
  ["seed", { min: 0, max: Number.MAX_SAFE_INTEGER, step: 1 }],
];
const EFFORTS = ["", "none", "minimal", "low", "medium", "high", "xhigh", "max"];
const METHOD = "method", MAX_DRAFT = "draft_tokens";

/** A seed that JSON and JavaScript both hold exactly. */
export const randomSeed = () => crypto.getRandomValues(new Uint32Array(1))[0];

let described = null;

/** Descriptions of the fields of a chat, as the API's schema has them. */
function descriptions() {
  described ||= getJson("openapi.json").then(api => {
    const fields = api.components?.schemas?.ChatBody?.properties || {};
    return Object.fromEntries(Object.entries(fields).map(([name, field]) => [name, field.description]));
  }).catch(() => { described = null; return {}; });
  return described;
}

/** The panel; `changed` is called after each change of `settings`. */
export function settingsPanel(settings, model, changed) {
  const helps = new Map(); // field of the API -> element for its description
  const set = (name, value) => {
    if (value === "" || value === null || Number.isNaN(value)) delete settings[name];
    else settings[name] = value;
    changed();
  };
  const row = (name, control, label = name) => {
    const help = h("small", { id: `help-${name}` });
    helps.set(name, help);
    control.setAttribute("aria-describedby", help.id);
    control.id = `field-${name}`;
    return h("div", { class: "field" }, h("label", { for: control.id }, label), control, help);
  };
  const number = ([name, limits]) => row(name, h("input", {
    type: "number", inputmode: "decimal", ...limits, value: settings[name] ?? "",
    placeholder: model?.sampling_defaults?.[name] ?? "default",
    oninput: event => set(name, event.target.value === "" ? "" : event.target.valueAsNumber),
  }));
  const choose = (name, key, options) => {
    const select = h("select", { onchange: event => set(key, event.target.value) },
      options.map(option => h("option", { value: option }, option || "default")));
    select.value = settings[key] ?? "";
    return row(name, select);
  };
  const area = (name, key, rows, placeholder, check) => {
    const field = h("textarea", { rows, placeholder, spellcheck: "false", value: settings[key] ?? "", oninput: () => {
      set(key, field.value);
      field.setCustomValidity(check && field.value.trim() ? check(field.value) : "");
      field.reportValidity();
    } });
    return row(name, field);
  };
  const drafters = model?.drafters || [];
  const bound = h("input", { type: "number", min: 1, step: 1, placeholder: "server's bound", value: settings[MAX_DRAFT] ?? "",
    oninput: event => set(MAX_DRAFT, event.target.value === "" ? "" : event.target.valueAsNumber) });
  const panel = h("form", { class: "settings", onsubmit: event => event.preventDefault() },
    h("h2", null, "This conversation"),
    h("label", { class: "field" }, h("span", null, "System prompt"),
      h("textarea", { rows: 3, dir: "auto", value: settings.system ?? "", oninput: event => set("system", event.target.value) })),
    h("fieldset", null, h("legend", null, "Speculation"),
      choose("speculation", METHOD, ["", "off", "auto", ...drafters]),
      h("label", { class: "field" }, h("span", null, "most drafted tokens a step"), bound)),
    h("fieldset", null, h("legend", null, "Sampling"), NUMBERS.map(number)),
    h("fieldset", null, h("legend", null, "The answer"), LIMITS.map(number), choose("reasoning_effort", "reasoning_effort", EFFORTS),
      area("stop", "stop", 2, "one text a line")),
    h("fieldset", null, h("legend", null, "Form"),
      area("response_format", "schema", 4, '{"type": "object", "properties": {...}}', jsonError),
      area("tools", "tools", 4, '[{"type": "function", "function": {"name": ...}}]', jsonError)),
    h("details", { class: "field" }, h("summary", null, "Other fields of the body"),
      h("textarea", { rows: 3, placeholder: '{"logit_bias": {"50": -100}}', spellcheck: "false", "aria-label": "Other fields of the body, as JSON",
        value: settings.other ?? "", oninput: event => set("other", event.target.value) })));
  descriptions().then(texts => {
    for (const [name, help] of helps) put(help, coded(texts[name]));
  });
  return panel;
}

function jsonError(text) {
  try { JSON.parse(text); return ""; } catch (error) { return String(error.message); }
}

/** Parse a JSON setting. Throws Error with the field's name. */
function parseJson(settings, name, label) {
  const text = (settings[name] || "").trim();
  if (!text) return undefined;
  try { return JSON.parse(text); } catch (error) { throw new Error(`${label} is not JSON: ${error.message}`); }
}

/** The body of a request for an answer to `messages`. Throws Error for a setting that is not JSON. */
export function makeBody(settings, model, messages, seed) {
  const body = { ...parseJson(settings, "other", "Other fields") };
  for (const [name] of [...NUMBERS, ...LIMITS]) if (settings[name] !== undefined) body[name] = settings[name];
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  const stop = (settings.stop || "").split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (settings[METHOD] || settings[MAX_DRAFT]) {
    body.speculation = { method: settings[METHOD] || "auto", ...(settings[MAX_DRAFT] ? { max_tokens: settings[MAX_DRAFT] } : {}) };
  }
  const schema = parseJson(settings, "schema", "The schema"), tools = parseJson(settings, "tools", "The list of tools");
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (tools) body.tools = tools;
  return {
    ...body, model, messages, seed, stream: true, metrics: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
  };
}

/** Settings that differ from the defaults, in a few words. */
export function summarize(settings) {
  const parts = [...NUMBERS, ...LIMITS].filter(([name]) => settings[name] !== undefined)
    .map(([name]) => `${name} ${fmt.number(settings[name])}`);
  if (settings.schema) parts.push("schema");
  if (settings.tools) parts.push("tools");
  if (settings.system) parts.push("system prompt");
  return parts.join(", ");
}
