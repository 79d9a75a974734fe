// The server at work: its models, its figures over the last minutes, and for operators its requests and keys.

import { getJson, getText, key, postJson } from "./api.js";
import { benchView } from "./bench.js";
import { button, fmt, h, numberCell, pickFiles, put, rowHead, tableHead, toast } from "./dom.js";
import { Reading, rate } from "./metrics.js";
import { lines, meter, sparkline, stacked } from "./plot.js";
import { styleOf } from "./source.js";

const PERIOD_MS = 2000;
const KEPT = 150; // readings: five minutes
const MAX_EVENTS = 30;
const PROGRESS_MS = 500;

const clock = seconds => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });

export class ServerView {
  constructor(root, app) {
    this.app = app;
    this.readings = [];
    this.events = []; // errors that were counted while this page looked: {at, text}
    this.model = "";
    this.build(root);
  }

  build(root) {
    this.facts = h("p", { class: "soft" });
    this.select = h("select", { "aria-label": "Figures of", hidden: true, onchange: () => { this.model = this.select.value; this.draw(); } });
    this.note = h("p", { class: "note bad", role: "alert", hidden: true });
    this.tiles = h("div", { class: "tiles" });
    const card = (title, ...content) => h("section", { class: "card", tabindex: "0", "aria-label": title }, h("h2", null, title), content);
    const box = () => h("div");
    Object.assign(this, { models: box(), throughput: box(), drafters: box(), places: box(), stages: box(), outcomes: box(), errors: box(), requests: box(), keys: box(), usage: box(), bench: box() });
    this.usageCard = card("Usage by key since the server started", this.usage);
    this.usageCard.hidden = true;
    this.operators = h("div", { class: "cards", hidden: true }, card("Open requests", this.requests), card("Keys", this.keys));
    this.adminNote = h("span", { class: "soft" });
    this.adminButton = button("Show them", "key", () => { this.admin = true; this.readAdmin(); }, { text: true });
    this.adminCard = card("Open requests and keys", h("p", { class: "row" }, this.adminButton, this.adminNote));
    this.benchCard = card("A benchmark's result",
      h("p", { class: "soft" }, "Open what ", h("code", null, "foreword bench speculate --json FILE"), " wrote. The file stays in this browser."),
      button("Open a file", "up", () => this.openBench(), { text: true }), this.bench);
    put(root, h("div", { class: "page" },
      h("div", { class: "page-head" }, h("h1", null, "Server"), this.select, this.facts), this.note,
      card("Models", this.models), this.tiles,
      h("div", { class: "cards" }, card("Tokens a second", this.throughput), card("Time by stage", this.stages),
        card("Drafts by drafter", this.drafters), card("Acceptance by place in the draft", this.places),
        card("Requests", this.outcomes), card("Errors seen from here", this.errors)),
      this.usageCard, this.adminCard, this.operators, this.benchCard));
  }

  start() {
    this.running = true;
    this.onVisible ||= () => document.hidden ? this.pause() : this.poll();
    document.addEventListener("visibilitychange", this.onVisible);
    this.poll();
  }

  stop() {
    this.running = false;
    this.pause();
    document.removeEventListener("visibilitychange", this.onVisible);
  }

  pause() {
    clearTimeout(this.timer);
    clearTimeout(this.soon);
  }

  /** Read everything once, then again while somebody looks. */
  async poll() {
    clearTimeout(this.timer);
    await Promise.all([this.readMetrics(), this.readModels(), this.readAdmin()]);
    if (this.running && !document.hidden) this.timer = setTimeout(() => this.poll(), PERIOD_MS);
  }

  async readMetrics() {
    try {
      const reading = new Reading(await getText("metrics"), Date.now() / 1000);
      this.note.hidden = true;
      this.watch(this.readings.at(-1), reading);
      this.readings = [...this.readings, reading].slice(-KEPT);
      this.draw();
    } catch (error) {
      this.note.hidden = false;
      this.note.textContent = `No figures: ${error.message}.`;
      this.app.checkHealth();
    }
  }

  /** Note which counters of errors grew. */
  watch(before, after) {
    if (!before) return;
    const grown = (name, describe, counts = () => true) => {
      const old = new Map(before.list(name).map(({ labels, value }) => [JSON.stringify(labels), value]));
      for (const { labels, value } of after.list(name)) {
        const more = value - (old.get(JSON.stringify(labels)) || 0);
        if (more > 0 && counts(labels)) this.events.unshift({ at: after.at, text: describe(labels), more });
      }
    };
    grown("http_requests_total", labels => `${labels.status} on ${labels.route}`, labels => labels.status >= 400 && labels.status !== "499");
    grown("requests_finished_total", () => "a request failed", labels => labels.reason === "error");
    grown("requests_finished_total", () => "a text repeated itself", labels => labels.reason === "repetition");
    grown("engine_restarts_total", () => "the engine died and was replaced");
    grown("engine_faults_total", labels => `an error of one request in the stage ${labels.stage}`);
    grown("spec_drafter_errors_total", labels => `the drafter ${labels.drafter} failed`);
    this.events.length = Math.min(this.events.length, MAX_EVENTS);
  }

  // Figures

  draw() {
    const { readings } = this;
    for (const reading of readings) reading.model = this.model;
    const now = readings.at(-1);
    if (!now) return;
    this.drawFacts(now);
    this.drawTiles(now);
    this.drawThroughput();
    this.drawDrafters(now);
    this.drawStages(now);
    this.drawOutcomes(now);
    this.drawUsage(now);
    put(this.errors, this.events.length ? h("ul", { class: "events" }, this.events.map(({ at, text, more }) =>
      h("li", null, h("time", null, clock(at)), text, more > 1 ? ` (${fmt.count(more)} times)` : ""))) : h("p", { class: "soft" }, "None since this page was opened; the server's log has all."));
  }

  drawFacts(now) {
    const infos = now.list("info").map(({ labels }) => labels);
    put(this.facts, infos.slice(0, 1).map(info => [`Foreword ${info.version}, ${info.device} (${info.backend}), ${info.dtype}`,
      info.quantization && info.quantization !== "none" && `, ${info.quantization}`, `, speculation ${info.speculate}`].filter(Boolean).join("")));
    const names = [...new Set(now.samples.get("generation_tokens_total")?.map(({ labels }) => labels.model))];
    if (names.length > 1 && this.select.children.length !== names.length + 1) {
      put(this.select, h("option", { value: "" }, "All models"), names.map(name => h("option", { value: name }, name)));
      this.select.value = this.model;
    }
    this.select.hidden = names.length < 2;
  }

  /** The rate of a counter in each period. */
  rates(name) {
    const { readings } = this;
    return readings.slice(1).map((reading, i) => [reading.at, rate(readings[i], reading, name)]);
  }

  drawTiles(now) {
    const first = this.readings[0];
    const history = name => this.readings.map(reading => reading.sum(name));
    const generated = this.rates("generation_tokens_total"), prompt = this.rates("prompt_tokens_total");
    const share = (part, whole) => {
      const all = now.sum(whole);
      return all ? now.sum(part) / all : null;
    };
    const firstToken = now.quantile("time_to_first_token_seconds", .5, first) ?? now.quantile("time_to_first_token_seconds", .5);
    const tiles = [
      ["running", fmt.count(now.sum("requests_running")), history("requests_running")],
      ["waiting", fmt.count(now.sum("requests_waiting")), history("requests_waiting")],
      ["generated tokens/s", fmt.number(generated.at(-1)?.[1] ?? 0), generated.map(point => point[1])],
      ["prompt tokens/s", fmt.number(prompt.at(-1)?.[1] ?? 0), prompt.map(point => point[1])],
      ["of the KV cache in use", fmt.percent(now.sum("kv_cache_usage_ratio") / Math.max(now.list("kv_cache_usage_ratio").length, 1)), history("kv_cache_usage_ratio")],
      ["of prompt tokens cached", share("prefix_cache_hits_total", "prefix_cache_queries_total"), null, fmt.percent],
      ...(now.sum("kv_adopted_tokens_total") ? [["tokens of KV taken over by new engines", fmt.count(now.sum("kv_adopted_tokens_total"))]] : []),
      ...[["host", "host memory"], ["disk", "disk"]].flatMap(([tier, name]) => now.sum(`kv_${tier}_bytes_total`) ? this.tierTiles(now, share, tier, name) : []),
      ["of drafted tokens accepted", share("spec_accepted_tokens_total", "spec_draft_tokens_total"), null, fmt.percent],
      ["to the first token (median)", firstToken, null, fmt.seconds],
    ];
    put(this.tiles, tiles.map(([label, value, values, format]) => h("div", { class: "tile" },
      h("b", null, format ? (value === null ? "–" : format(value)) : value), h("span", null, label), values && values.length > 1 ? sparkline(values) : null)));
  }

  /** What a tier of the KV cache has brought since the start. */
  tierTiles(now, share, tier, place) {
    const read = name => now.by(name, "direction").get("read") || 0;
    const saved = Math.max(now.sum(`kv_${tier}_avoided_seconds_total`) - read(`kv_${tier}_seconds_total`), 0);
    return [
      [`of prompt tokens read from ${place}`, share(`kv_${tier}_hit_tokens_total`, "prefix_cache_queries_total"), null, fmt.percent],
      [`of KV read from ${place}`, fmt.bytes(read(`kv_${tier}_bytes_total`))],
      [`of computing saved by the ${place}`, fmt.seconds(saved)],
    ];
  }

  drawThroughput() {
    const series = [["generated", "first", "generation_tokens_total"], ["prompt", "second", "prompt_tokens_total"]]
      .map(([name, kind, metric]) => ({ name, kind, points: this.rates(metric) }));
    put(this.throughput, lines({ series, label: "Tokens a second over the last minutes", format: fmt.number, xFormat: clock }), legend(series));
  }

  drawDrafters(now) {
    const drafted = now.by("spec_draft_tokens_total", "drafter"), accepted = now.by("spec_accepted_tokens_total", "drafter");
    const drafts = now.by("spec_drafts_total", "drafter");
    const used = [...drafted].filter(([, count]) => count > 0);
    const forced = now.sum("spec_forced_tokens_total");
    put(this.drafters, used.length ? h("table", { class: "wide" },
      tableHead(["drafter", "drafted", "accepted", "share", "a draft"], ["drafted", "accepted", "a draft"]),
      h("tbody", null, used.map(([name, count]) => h("tr", null,
        rowHead(h("span", { class: `swatch d-${styleOf(name)}` }, "ab"), ` ${name}`),
        numberCell(fmt.count(count)), numberCell(fmt.count(accepted.get(name) || 0)),
        h("td", null, h("span", { class: "with-meter" }, meter((accepted.get(name) || 0) / count, `d-${styleOf(name)}`), fmt.percent((accepted.get(name) || 0) / count))),
        numberCell(`${fmt.number(count / Math.max(drafts.get(name), 1))} → ${fmt.number((accepted.get(name) || 0) / Math.max(drafts.get(name), 1))}`)))))
      : h("p", { class: "soft" }, now.has("spec_drafts_total") ? "Nothing was drafted yet." : now.has("info") ? "Speculation is off." : "No model is loaded."),
      forced > 0 && h("p", { class: "soft" }, `${fmt.plural(forced, "token")} more ${forced === 1 ? "was" : "were"} forced by a grammar.`));
    const series = used.map(([name]) => {
      const hits = now.by("spec_accepted_tokens_per_position_total", "position", { drafter: name });
      const tries = now.by("spec_draft_tokens_per_position_total", "position", { drafter: name });
      const points = [...tries].filter(([, count]) => count > 0).map(([place, count]) => [Number(place) + 1, (hits.get(place) || 0) / count]).sort((a, b) => a[0] - b[0]);
      return { name, kind: `d-${styleOf(name)}`, points };
    });
    put(this.places, lines({ series, label: "Share of drafted tokens accepted, by their place in the draft", format: fmt.percent, xFormat: place => `place ${place}`, top: 1 }), legend(series, false));
  }

  drawStages(now) {
    const all = [...now.by("step_seconds_sum", "stage")].filter(([, seconds]) => seconds > 0).sort((a, b) => b[1] - a[1]);
    const sum = all.reduce((total, [, seconds]) => total + seconds, 0);
    put(this.stages, all.length ? [stacked(all, "Time of the engine by stage"),
      h("ul", { class: "stage-list" }, all.map(([name, seconds], index) => h("li", null, h("i", { class: `part-${index % 8}`, "aria-hidden": "true" }), name,
        h("b", null, fmt.percent(seconds / sum)), h("span", { class: "soft" }, fmt.seconds(seconds)))))]
      : h("p", { class: "soft" }, "No step yet."));
  }

  drawOutcomes(now) {
    const row = (name, count) => h("tr", null, rowHead(name), numberCell(fmt.count(count)));
    const finished = [...now.by("requests_finished_total", "reason")].filter(([, count]) => count > 0);
    const refused = [...now.by("requests_rejected_total", "reason")].filter(([, count]) => count > 0);
    const latency = now.quantile("inter_token_latency_seconds", .5);
    put(this.outcomes, finished.length || refused.length ? h("table", { class: "wide" }, h("tbody", null,
      finished.map(([reason, count]) => row(`ended: ${reason}`, count)), refused.map(([reason, count]) => row(`refused: ${reason}`, count)),
      now.sum("preemptions_total") > 0 && row("preempted", now.sum("preemptions_total")),
      now.sum("engine_restarts_total") > 0 && row("engine restarts", now.sum("engine_restarts_total")),
      latency !== null && h("tr", null, rowHead("time a token (median)"), numberCell(fmt.seconds(latency)))))
      : h("p", { class: "soft" }, "No request has ended yet."));
  }

  // Models

  async readModels() {
    try {
      const { data } = await getJson("v1/models");
      this.drawModels(data);
    } catch (error) {
      put(this.models, h("p", { class: "soft" }, error.status === 401 ? ["The list of models wants an API key. ", button("Enter the key", "key", () => this.app.askKey(), { text: true })] : error.message));
    }
  }

  drawModels(cards) {
    // While a model is loaded or unloaded its progress is asked for more often.
    clearTimeout(this.soon);
    if (this.running && !document.hidden && cards.some(card => /ing$/.test(card.status))) this.soon = setTimeout(() => this.readModels(), PROGRESS_MS);
    const state = JSON.stringify(cards);
    if (state === this.modelState || this.models.querySelector("button:active")) return; // a pressed button stays until its click
    this.modelState = state;
    const managed = cards.some(card => typeof card.estimated_bytes === "number"); // a server of one model plans none
    const columns = ["model", ...(managed ? ["state", "memory", "open", "waiting"] : []), "context", "takes", "drafters", ...(managed ? ["actions"] : [])];
    const focused = this.models.contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
    const replicas = cards.filter(isMain).flatMap(card => (card.replicas || []).map(replica => ({ ...replica, model: card.id })));
    put(this.models, h("div", { class: "table-wrap" }, h("table", { class: "wide middle" },
      tableHead(columns, ["memory", "open", "waiting", "context"]),
      h("tbody", null, cards.filter(card => !isAlias(card)).map(card => h("tr", null, rowHead(card.id, nameNotes(card, cards).map(note => h("small", null, ` ${note}`))),
        managed && this.stateCells(card),
        numberCell(card.max_model_len ? fmt.count(card.max_model_len) : "–"),
        h("td", null, isEncoder(card) ? "text, for embeddings" : (card.input_modalities || ["text"]).join(", ")),
        h("td", null, (card.drafters || []).join(", ") || "–"),
        managed && h("td", null, this.modelActions(card)))))),
      (replicas.length > 1 || replicas.some(replica => replica.address)) && replicaTable(replicas)));
    if (focused) this.models.querySelector(`[aria-label="${CSS.escape(focused)}"]`)?.focus();
  }

  stateCells(card) {
    if (!isMain(card)) return [1, 2, 3, 4].map(() => h("td")); // it shares its model's engine
    const progress = card.status === "loading" && typeof card.progress === "number";
    return [
      h("td", null, h("span", { class: `badge ${card.status}` }, card.status), card.pinned && h("small", null, " pinned"),
        progress && h("progress", { value: card.progress, max: 1, "aria-label": `Loading ${card.id}` }), card.error && h("small", { class: "bad" }, ` ${card.error}`)),
      numberCell(card.memory_bytes && `${fmt.bytes(card.memory_bytes)} `, h("small", { title: "as planned" }, `${card.memory_bytes ? "of " : ""}≈ ${fmt.bytes(card.estimated_bytes)}`)),
      numberCell(fmt.count(card.open_requests)), numberCell(fmt.count(card.waiting_requests)),
    ];
  }

  modelActions(card) {
    if (!isMain(card)) return null;
    const act = async (path, body) => {
      try {
        await postJson(path, { model: card.id, ...body });
      } catch (error) {
        toast(error.message, "bad");
      }
      this.readModels();
    };
    const label = (name, path, body) => h("button", { type: "button", class: "btn", "aria-label": `${name} ${card.id}`, onclick: () => act(path, body) }, name);
    const here = card.status === "loaded" || card.status === "loading";
    return h("span", { class: "row" },
      here ? label("Unload", "models/unload", {}) : label("Load", "models/load", {}),
      here && label(card.pinned ? "Unpin" : "Pin", "models/load", { pin: !card.pinned }));
  }

  // Operators

  async readAdmin() {
    // Asked for only on demand: without an admin key in the key file the routes do not exist.
    this.adminButton.disabled = !key.get();
    if (!this.admin) return void put(this.adminNote, key.get() ? "" : "for operators: enter an admin key first");
    try {
      const [open, all] = await Promise.all([getJson("admin/requests"), getJson("admin/keys")]);
      this.drawAdmin(open, all.keys);
    } catch (error) {
      this.admin = false;
      this.operators.hidden = true;
      put(this.adminNote, error.status === 404 ? "this server has no admin key" : error.message);
    }
  }

  drawAdmin({ open, requests }, keys) {
    this.operators.hidden = false;
    this.adminCard.hidden = true;
    if (this.requests.querySelector("button:active")) return;
    const cell = value => h("td", { class: typeof value === "number" ? "num" : null }, typeof value === "number" ? fmt.number(value) : value ?? "–");
    put(this.requests, requests.length ? h("table", { class: "wide" }, tableHead(["id", "key", "state", "age", "prompt", "tokens", ""]),
      h("tbody", null, requests.slice(0, 50).map(item => h("tr", null, h("td", null, h("code", null, item.id.slice(-14))), cell(item.account), cell(item.state), cell(fmt.seconds(item.age_s)),
        cell(item.prompt_tokens), cell(item.generated_tokens), h("td", null, button(`Abort ${item.id}`, "close", async () => {
          try { await postJson(`admin/requests/${encodeURIComponent(item.id)}/abort`, {}); } catch (error) { toast(error.message, "bad"); }
        })))))) : h("p", { class: "soft" }, "None."), requests.length < open && h("p", { class: "soft" }, `${fmt.count(open)} are open in all.`));
    put(this.keys, h("table", { class: "wide" }, tableHead(["key", "models", "expires", "a minute", "open", "refused", "tokens today"]),
      h("tbody", null, keys.map(item => h("tr", null, rowHead(item.name, item.admin && h("small", null, " admin")), cell(item.models ? item.models.join(", ") : "all"),
        cell(item.expires ? item.expires.slice(0, 10) : null),
        cell([item.requests_per_minute && fmt.plural(item.requests_per_minute, "request"), item.tokens_per_minute && fmt.plural(item.tokens_per_minute, "token")].filter(Boolean).join(", ") || null),
        cell(item.usage.open), cell(item.usage.refused),
        numberCell(fmt.count(item.usage.tokens_today ?? 0), item.tokens_per_day && [` of ${fmt.count(item.tokens_per_day)} `, meter(item.usage.tokens_today / item.tokens_per_day)]))))));
  }

  /** What keys used since the server started; only an admin's scrapes have it, and those of a server without keys. */
  drawUsage(now) {
    const counts = ["key_requests_total", "key_prompt_tokens_total", "key_generation_tokens_total"].map(name => new Map(now.list(name).map(({ labels, value }) => [JSON.stringify([labels.key, labels.model]), value])));
    const rows = [...counts[0].keys()].map(group => [JSON.parse(group), counts.map(each => each.get(group) || 0)]).filter(([[name]]) => name).sort((a, b) => b[1][2] - a[1][2]).slice(0, 100);
    this.usageCard.hidden = !rows.length;
    put(this.usage, h("table", { class: "wide" },
      tableHead(["key", "model", "requests", "prompt tokens", "generated"], ["requests", "prompt tokens", "generated"]),
      h("tbody", null, rows.map(([[name, model], values]) => h("tr", null, rowHead(name), h("td", null, model), values.map(value => numberCell(fmt.count(value))))))));
  }

  async openBench() {
    for (const file of await pickFiles("application/json,.json")) {
      try {
        put(this.bench, benchView(JSON.parse(await file.text())));
      } catch (error) {
        put(this.bench, h("p", { class: "note bad", role: "alert" }, `${file.name}: ${error.message}`));
      }
    }
  }
}

// Names of /v1/models: a model's own, its aliases and variants, its adapters, and encoders.

const isEncoder = card => !("sampling_defaults" in card);
const isMain = card => !isEncoder(card) && !card.parent && !card.variant_of && card.root === card.id;
const isAlias = card => !card.parent && !card.variant_of && card.root !== card.id;

function nameNotes(card, cards) {
  const aliases = cards.filter(other => isAlias(other) && other.root === card.id).map(other => other.id);
  return [card.variant_of ? `variant of ${card.variant_of}` : card.parent && `on ${card.parent}`, aliases.length && `also ${aliases.join(", ")}`].filter(Boolean);
}

function replicaTable(replicas) {
  return h("table", { class: "wide" }, h("caption", null, "Replicas"),
    tableHead(["replica", "state", "running", "waiting"], ["running", "waiting"]),
    h("tbody", null, replicas.map(({ id, model, address, status, detail, running, waiting }) => h("tr", null,
      rowHead(`${model} ${id}`, address && h("small", null, ` ${address}`)),
      h("td", null, h("span", { class: `badge ${REPLICA_BADGES[status] || "loading"}` }, status === "ok" ? "ready" : status), detail && h("small", null, ` ${detail}`)),
      numberCell(fmt.count(running)), numberCell(fmt.count(waiting))))));
}

const REPLICA_BADGES = { ok: "loaded", dead: "failed", different: "failed" };

function legend(series, withLast = true) {
  return h("div", { class: "plot-legend" }, series.map(({ name, kind, points }) => h("span", null,
    h("i", { class: `key-line ${kind}`, "aria-hidden": "true" }), name, withLast && points.length ? h("b", null, fmt.number(points.at(-1)[1])) : null)));
}
