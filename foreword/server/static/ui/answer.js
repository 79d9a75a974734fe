// One choice of an answer: its data as the stream tells it, and how it is shown, with the drafts in sight.

import { announce, button, copy, fmt, h, icon, put, s } from "./dom.js";
import { MarkdownView, RawView, show } from "./markdown.js";
import { Source, styleOf } from "./source.js";

/** What a stream said about one choice. */
export class Choice {
  constructor(data = {}) {
    this.reasoning = new Source(data.reasoning);
    this.content = new Source(data.content);
    this.calls = (Array.isArray(data.calls) ? data.calls : []).map(readCall);
    for (const name of ["finish", "error", "seed", "tokens", "accepted", "seconds", "first", "metrics", "speculation"]) {
      this[name] = data[name] ?? null;
    }
    this.replay = data.replay ?? null; // the same answer without speculation: {seconds, first, metrics, equal, at, together}
  }

  toJSON() {
    const { reasoning, content, calls, ...rest } = this;
    const plain = Object.fromEntries(Object.entries(rest).filter(([, value]) => value !== null));
    return { ...plain, reasoning: reasoning.pieces, content: content.pieces,
      calls: calls.map(call => ({ ...call, arguments: call.arguments.pieces })) };
  }

  /** Take a choice of a chunk; `now` is in seconds since the request was sent. */
  take(chunk, now) {
    const delta = chunk.delta || {};
    const reasoning = delta.reasoning_content, [call] = delta.tool_calls || [];
    let target = null, text = "";
    if (call) {
      const { index, id, type } = call;
      const part = call.function || call.custom || {};
      if (!this.calls[index]) this.calls[index] = readCall({ id, type, name: part.name });
      target = this.calls[index].arguments;
      text = part.arguments ?? part.input ?? "";
    } else if (reasoning) {
      [target, text] = [this.reasoning, reasoning];
    } else if (delta.content) {
      [target, text] = [this.content, delta.content];
    }
    if (target && text) {
      if (this.first === null) this.first = now;
      if (chunk.tokens && chunk.tokens.length) for (const [piece, , drafter, sure] of chunk.tokens) target.push(piece, drafter, sure);
      else target.push(text);
    }
    this.accepted = (this.accepted || 0) + (chunk.accepted_draft_tokens || 0);
    if (chunk.finish_reason) this.finish = chunk.finish_reason;
    if (chunk.metrics) this.metrics = chunk.metrics;
    this.seconds = now;
  }

  /** The whole text of the model, to compare two answers. */
  get transcript() {
    return JSON.stringify([this.reasoning.text, this.content.text,
      this.calls.map(call => [call.name, call.arguments.text])]);
  }

  /** Steps of the engine: each adds one token to the draft tokens that it accepts. */
  get steps() {
    return this.tokens ? Math.max(this.tokens - (this.accepted || 0), 1) : null;
  }

  /** Accepted tokens by drafter, most first, as the marks show them. */
  get drafters() {
    const counts = new Map();
    for (const source of [this.reasoning, this.content, ...this.calls.map(call => call.arguments)]) {
      for (const [, drafter] of source.pieces) if (drafter) counts.set(drafter, (counts.get(drafter) || 0) + 1);
    }
    return [...counts].sort((a, b) => b[1] - a[1]);
  }
}

const readCall = call => ({ id: String(call?.id ?? ""), type: call?.type === "custom" ? "custom" : "function",
  name: String(call?.name ?? ""), arguments: new Source(call?.arguments), result: String(call?.result ?? "") });

const FINISH = { stopped: "Stopped by you", length: "Stopped at the token limit", repetition: "Ended: the text repeated itself" };

/** A choice on the screen. */
export class AnswerView {
  constructor(choice, { plain = false, live = false, actions = [], onResults = null, after = null } = {}) {
    Object.assign(this, { choice, plain, onResults });
    this.after = () => { this.settle(); if (after) after(); };
    this.root = h("div", { class: "answer" });
    this.parts = new Map(); // Source -> the view of its text
    this.boxes = new Map(); // call -> where its arguments are
    this.stats = h("div", { class: "stats" });
    this.legend = h("div", { class: "legend" });
    this.comparison = h("div");
    this.note = h("div");
    this.callsBox = h("div", { class: "calls" });
    this.body = h("div", { class: "text" });
    this.waitingText = h("span");
    this.waiting = h("div", { class: "waiting" }, h("span", { class: "dots", "aria-hidden": "true" }), this.waitingText);
    this.actions = h("div", { class: "actions" }, actions);
    this.root.append(this.waiting, this.body, this.callsBox, this.note,
      h("footer", null, this.stats, this.legend, this.comparison, this.actions));
    this.live = live;
    this.update();
  }

  /** Show what is new. */
  update() {
    const { choice } = this;
    this.waiting.hidden = !this.live || choice.first !== null || Boolean(choice.error);
    this.waitingText.textContent = this.comment || "Waiting for the first token";
    if (choice.reasoning.length) this.showReasoning();
    if (choice.content.length) this.showText(choice.content, this.body, this.plain ? RawView : MarkdownView);
    choice.calls.forEach((call, index) => this.showCall(call, index));
    this.root.classList.toggle("streaming", this.live);
    this.actions.hidden = this.live;
    this.showStats();
    this.settle();
  }

  /** Say whether text is still coming, or not drawn yet. */
  settle() {
    this.root.setAttribute("aria-busy", String(this.live || [...this.parts.values()].some(view => !view.isShown)));
  }

  finish() {
    this.live = false;
    const view = this.parts.get(this.choice.content);
    if (view && view.finish) { view.finish(); show(view, this.after); }
    if (this.reasoning) this.reasoning.open = false;
    this.update();
    this.showLegend();
    this.showNote();
    this.showComparison();
  }

  showText(source, root, View) {
    if (!this.parts.has(source)) this.parts.set(source, new View(root, source));
    const view = this.parts.get(source);
    if (!this.live && view.finish) view.finish();
    show(view, this.after);
  }

  showReasoning() {
    if (!this.reasoning) {
      this.reasoningTitle = h("span", null, "Reasoning");
      this.reasoningText = h("div", { class: "raw-text" });
      this.reasoning = h("details", { class: "reasoning" }, h("summary", null, this.reasoningTitle), this.reasoningText);
      this.body.before(this.reasoning);
    }
    const done = !this.live || this.choice.content.length || this.choice.calls.length;
    this.reasoningTitle.textContent = done ? `Reasoning, ${fmt.plural(this.choice.reasoning.length, "character")}` : "Reasoning…";
    this.showText(this.choice.reasoning, this.reasoningText, RawView);
  }

  showCall(call, index) {
    let card = this.callsBox.children[index];
    if (!card) {
      const text = h("div", { class: "raw-text", tabindex: "0", role: "group", "aria-label": `Arguments of ${call.name}` });
      card = h("section", { class: "call", "aria-label": `Call of ${call.name}` },
        h("header", null, icon("tune"), h("strong", null, call.name || "unnamed"), h("code", null, call.id)), text);
      this.callsBox.append(card);
      this.boxes.set(call, text);
      if (this.onResults) card.append(this.resultField(call));
    }
    this.showText(call.arguments, this.boxes.get(call), RawView);
  }

  resultField(call) {
    const field = h("textarea", { rows: "2", placeholder: "What the tool answered", value: call.result,
      oninput: () => { call.result = field.value; } });
    return h("label", { class: "result" }, h("span", null, "Result"), field);
  }

  showStats() {
    const { choice } = this, { metrics } = choice;
    const items = [];
    const add = (value, label, title) => items.push(h("span", { class: "stat", title }, h("b", null, value), ` ${label}`));
    if (choice.tokens) add(fmt.count(choice.tokens), choice.tokens === 1 ? "token" : "tokens");
    if (choice.seconds && choice.tokens) add(fmt.seconds(choice.seconds), "", "From sending the request to the last token, in this browser");
    if (choice.first !== null && choice.first < choice.seconds && choice.tokens) add(fmt.seconds(choice.first), "to the first token");
    const rate = metrics?.tokens_per_second
      ?? (choice.tokens > 1 && choice.seconds > choice.first ? choice.tokens / (choice.seconds - choice.first) : null);
    if (rate && choice.tokens) add(fmt.number(rate), "tokens/s", "Over the tokens after the first burst");
    if (choice.tokens && choice.accepted) {
      add(fmt.number(choice.tokens / choice.steps), "tokens a step", `${fmt.count(choice.tokens)} tokens in ${fmt.plural(choice.steps, "step")}; 1 without drafts`);
    }
    if (metrics?.draft_tokens_acceptance !== undefined) {
      add(fmt.percent(metrics.draft_tokens_acceptance), "of drafts accepted", `${fmt.count(metrics.draft_tokens)} tokens were drafted; forced text is not counted`);
    }
    if (metrics?.cached_tokens) add(fmt.count(metrics.cached_tokens), "cached", "Tokens of the prompt found in the prefix cache");
    if (choice.speculation === "off") items.push(h("span", { class: "stat" }, "speculation off"));
    if (choice.seed !== null && !this.live) items.push(h("span", { class: "stat", title: "The same request with this seed gives the same answer" }, "seed ", h("b", null, String(choice.seed))));
    put(this.stats, items);
  }

  showLegend() {
    const { drafters } = this.choice;
    if (!drafters.length) return void put(this.legend);
    const walk = step => {
      const tokens = [...this.root.querySelectorAll(".tok")];
      const at = tokens.indexOf(this.root.querySelector(".tok.here"));
      focusToken(tokens[(at + step + tokens.length) % tokens.length]);
    };
    put(this.legend, h("span", { class: "legend-title" }, "Drafted by"),
      drafters.map(([drafter, count]) => h("span", { class: "key" },
        h("span", { class: `swatch d-${styleOf(drafter)}` }, "ab"), drafter, h("b", null, fmt.count(count)))),
      h("span", { class: "walk" }, button("Previous drafted token", "prev", () => walk(-1)), button("Next drafted token", "next", () => walk(1))));
  }

  showNote() {
    const { choice } = this;
    const text = choice.error || FINISH[choice.finish];
    put(this.note, text && h("p", { class: choice.error ? "note bad" : "note", role: choice.error ? "alert" : null }, text));
  }

  /** Both times of the same answer, with and without drafts. */
  showComparison() {
    const { choice } = this, { replay } = choice;
    if (!replay) return void put(this.comparison);
    if (replay.running) {
      put(this.comparison, h("section", { class: "replay" }, h("h3", null, "Without drafts, the same seed…"),
        h("p", null, replay.tokens ? `${fmt.plural(replay.tokens, "token")} so far` : "waiting")));
      return;
    }
    if (replay.error) return void put(this.comparison, h("p", { class: "note bad", role: "alert" }, replay.error));
    const longest = Math.max(choice.seconds, replay.seconds);
    const bar = (label, { seconds, first }, rate, kind) => {
      const start = first < seconds ? first : 0; // equal: the whole answer came at once
      return h("div", { class: "bar-row", title: "Pale: until the first token" },
        h("span", null, label),
        s("svg", { class: `bar ${kind}`, viewBox: `0 0 ${longest} 1`, preserveAspectRatio: "none", "aria-hidden": "true" },
          s("rect", { class: "pale", width: start, height: 1 }), s("rect", { x: start, width: seconds - start, height: 1 })),
        h("span", { class: "figure" }, h("b", null, fmt.seconds(seconds)), rate ? ` ${fmt.number(rate)} tokens/s` : ""));
    };
    const rates = [choice.metrics?.tokens_per_second, replay.metrics?.tokens_per_second];
    const ratio = rates[0] && rates[1] ? rates[0] / rates[1] : replay.seconds / choice.seconds;
    const verdict = replay.equal
      ? h("p", { class: "verdict good" }, h("b", null, "Same answer"), `, character by character (${fmt.count(replay.length)}); `,
        replay.together > 1 ? `with drafts ${fmt.count(replay.together)} answers shared the server, without them one was alone.`
          : ratio >= 1 ? `${fmt.number(ratio)}× the tokens a second with drafts.` : `${fmt.number(1 / ratio)}× the tokens a second without drafts this time.`)
      : h("p", { class: "verdict bad", role: "alert" }, h("b", null, "Not the same answer"), `: the first difference is at character ${fmt.count(replay.at)}. This is a bug of the server: please report it with the seed.`);
    put(this.comparison, h("section", { class: "replay", "aria-label": "Replay without drafts" },
      bar("With drafts", choice, rates[0], "with"), bar("Without", replay, rates[1], "without"), verdict));
    announce(replay.equal ? "The replay without drafts gave the same answer" : "The replay gave another answer");
  }

  /** Text for the clipboard. */
  copy() {
    copy(this.choice.content.text || this.choice.calls.map(call => `${call.name}(${call.arguments.text})`).join("\n"));
  }
}

// The tip of a drafted token, on hover and on focus.

const tip = h("div", { class: "tip", role: "tooltip", id: "token-tip", hidden: true });

function describe(token) {
  const sure = token.dataset.confidence;
  return [token.dataset.drafter, sure === undefined ? "gives no confidence" : `${fmt.count(Number(sure) * 100)} % sure`];
}

function showTip(token) {
  const [drafter, sure] = describe(token);
  put(tip, h("span", { class: `swatch d-${styleOf(drafter)}`, "aria-hidden": "true" }, "ab"), h("b", null, drafter), ` ${sure}, accepted`);
  tip.hidden = false;
  const box = token.getClientRects()[0] || token.getBoundingClientRect();
  const left = Math.min(Math.max(box.left, 8), innerWidth - tip.offsetWidth - 8);
  const above = box.top - tip.offsetHeight - 6;
  tip.style.setProperty("left", `${left}px`);
  tip.style.setProperty("top", `${above < 8 ? box.bottom + 6 : above}px`);
}

function focusToken(token) {
  if (!token) return;
  token.tabIndex = -1;
  token.focus();
}

export function mountTips() {
  document.body.append(tip);
  const token = event => event.target instanceof Element ? event.target.closest(".tok") : null;
  document.addEventListener("pointerover", event => {
    const found = token(event);
    if (found) showTip(found);
    else tip.hidden = true;
  });
  document.addEventListener("click", event => { // a finger does not hover
    const found = token(event);
    if (found) showTip(found);
  });
  document.addEventListener("focusin", event => {
    for (const old of document.querySelectorAll(".tok.here")) old.classList.remove("here");
    const found = token(event);
    tip.hidden = !found;
    if (!found) return;
    found.classList.add("here");
    found.setAttribute("aria-describedby", tip.id);
    showTip(found);
    announce(`${found.textContent.trim() || "space"}: ${describe(found).join(", ")}`);
  });
  document.addEventListener("keydown", event => {
    if (event.key === "Escape") tip.hidden = true;
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], found = step && token(event);
    if (!found) return;
    event.preventDefault();
    const tokens = [...found.closest(".answer").querySelectorAll(".tok")];
    focusToken(tokens[tokens.indexOf(found) + step]);
  });
  document.addEventListener("scroll", () => { tip.hidden = true; }, { capture: true, passive: true });
}
