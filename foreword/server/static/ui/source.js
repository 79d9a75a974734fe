// The text of an answer with its tokens: which drafter proposed each, and how sure it was.

import { h } from "./dom.js";

/** Drafters in the order of the legend; those of plug-ins share the last style. */
export const DRAFTERS = ["suffix", "draft", "prediction", "grammar", "ngram", "replay", "text"];

const HEADS = ["eagle3", "dflash", "mtp"]; // run instead of a draft model, in its style

export const styleOf = drafter => HEADS.includes(drafter) ? "draft" : DRAFTERS.includes(drafter) ? drafter : "other";

/** A text that grows by tokens. `pieces` are [text, drafter or "", confidence or null], as kept and exported. */
export class Source {
  constructor(pieces = []) {
    this.pieces = [];
    this.ends = []; // offset in the text after each piece
    this.length = 0;
    for (const piece of pieces) if (typeof piece?.[0] === "string") this.push(piece[0], piece[1] || "", piece[2] ?? null);
  }

  /** Texts without a drafter are joined with the one before, so that a plain answer is one piece a line. */
  push(text, drafter = "", confidence = null) {
    if (!text) return;
    const last = this.pieces.length - 1;
    this.length += text.length;
    if (!drafter && last >= 0 && !this.pieces[last][1] && this.pieces[last][0].length < 256) {
      this.pieces[last][0] += text;
      this.ends[last] = this.length;
    } else {
      this.pieces.push([text, drafter, confidence]);
      this.ends.push(this.length);
    }
  }

  get text() {
    return this.slice(0, this.length);
  }

  /** Index of the piece that holds the character at `offset`. */
  at(offset) {
    let low = 0, high = this.ends.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.ends[middle] > offset) high = middle;
      else low = middle + 1;
    }
    return low;
  }

  slice(from, to) {
    const parts = [];
    this.each(from, to, text => parts.push(text));
    return parts.join("");
  }

  /** Call visit(text, drafter, confidence, index) for each piece in a range. */
  each(from, to, visit) {
    for (let i = this.at(from); i < this.pieces.length && from < to; i++) {
      const [text, drafter, confidence] = this.pieces[i];
      const start = this.ends[i] - text.length;
      visit(text.slice(from - start, to - start), drafter, confidence, i);
      from = this.ends[i];
    }
  }

  /** Append a range as nodes: plain texts, and a span for each accepted draft token. */
  append(parent, from, to) {
    let plain = "";
    this.each(from, to, (text, drafter, confidence) => {
      if (!drafter) return void (plain += text);
      if (plain) parent.append(plain);
      plain = "";
      parent.append(h("span", { class: `tok d-${styleOf(drafter)}`, "data-drafter": drafter,
        "data-confidence": confidence }, text));
    });
    if (plain) parent.append(plain);
  }
}
