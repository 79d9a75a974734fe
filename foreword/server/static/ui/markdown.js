// A small Markdown that grows: whole lines are parsed once, and only the block at the end is built again.
// It builds nodes, keeps the tokens of the source apart, and follows no address by itself.

import { button, copy, h } from "./dom.js";

const LONG_LEAF = 2000; // characters after which an open block is closed, so that a frame's work is bounded
const LONG_RAW = 4000; // characters in one element of plain text
const FENCE = /^ {0,3}(`{3,}|~{3,})[ \t]*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})[ \t]+/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const ITEM = /^( *)([-*+]|(\d{1,9})[.)])[ \t]+/;
const QUOTE = /^ {0,3}> ?/;
const ROW = /^ {0,3}\|.*\|[ \t]*$/;
const DIVIDER = /^ {0,3}\|[-:| \t]+\|[ \t]*$/;
const SAFE = /^(?:https?:|mailto:)/i;

/** A link that opens apart and tells the other side nothing; null for an address that may run or read anything. */
export function link(address) {
  const trimmed = address.trim();
  if (!SAFE.test(trimmed) || /[\s<>"]/.test(trimmed)) return null;
  return h("a", { href: trimmed, target: "_blank", rel: "noopener noreferrer nofollow", title: trimmed });
}

/** Plain text, in elements of bounded length: one line of a megabyte must not be laid out again and again. */
export class RawView {
  constructor(root, source) {
    Object.assign(this, { root, source, position: 0, current: null, room: 0 });
  }

  /** Append what is new, until `deadline`; returns whether all is shown. */
  flush(deadline) {
    const { source } = this;
    while (this.position < source.length) {
      if (this.room <= 0) {
        this.current = h("div", { class: "raw", dir: "auto" });
        this.root.append(this.current);
        this.room = LONG_RAW;
      }
      const end = Math.min(source.length, this.position + this.room);
      source.append(this.current, this.position, end);
      this.room -= end - this.position;
      this.position = end;
      if (performance.now() > deadline) break;
    }
    return this.position >= source.length;
  }
}

/** Formatted text. `root` gets blocks; offsets are those of the source. */
export class MarkdownView {
  constructor(root, source) {
    this.root = root;
    this.source = source;
    this.lineStart = 0; // offset of the first line that is not parsed
    this.tail = 0; // offset up to which that line is shown
    this.leaf = null; // the open block: {element, ranges, kind}
    this.lists = []; // open lists, outermost first: {element, indent}
    this.table = null; // {body, rows}
    this.fence = null; // the open code block: {mark, code, room, shown}
  }

  /** The text is complete: what looks like the beginning of a fence or of a table is none. */
  finish() {
    this.complete = true;
  }

  /** Show what is new, until `deadline`; returns whether all is shown. */
  flush(deadline) {
    while (this.lineStart < this.source.length) {
      const end = this.lineEnd(this.lineStart);
      if (end < 0) {
        if (this.partial()) break;
        if (performance.now() > deadline) return false;
        continue;
      }
      this.line(this.lineStart, end, true);
      this.lineStart = this.tail = end + 1;
      if (performance.now() > deadline) return this.lineStart >= this.source.length;
    }
    return true;
  }

  /** Offset of the next line break, or -1. Each piece is searched once. */
  lineEnd(from) {
    from = Math.max(from, this.searched || 0);
    const { pieces, ends } = this.source;
    for (let i = this.source.at(from); i < pieces.length; i++) {
      const start = ends[i] - pieces[i][0].length;
      const index = pieces[i][0].indexOf("\n", Math.max(from - start, 0));
      if (index >= 0) return start + index;
    }
    this.searched = this.source.length;
    return -1;
  }

  /** Show a line that may go on. A long one is closed in parts; returns false if parts are left. */
  partial() {
    const { length } = this.source;
    if (this.complete && (this.fence || length - this.lineStart <= LONG_LEAF)) {
      this.line(this.lineStart, length, true);
      this.lineStart = this.tail = length;
      return true;
    }
    if (this.fence) {
      const mayClose = length - this.lineStart < 12
        && /^\s*[`~]+$/.test(this.source.slice(this.lineStart, length));
      if (!mayClose) {
        this.code(this.tail, length);
        this.tail = length;
      }
      return true;
    }
    if (length - this.lineStart <= LONG_LEAF) {
      this.line(this.lineStart, length, false);
      return true;
    }
    this.line(this.lineStart, this.lineStart + LONG_LEAF, true);
    this.lineStart = this.tail = this.lineStart + LONG_LEAF;
    this.close();
    return this.lineStart >= length;
  }

  /** Take a line; `whole`: it is complete, else it will come again. */
  line(from, to, whole) {
    const text = this.source.slice(from, to);
    if (this.undo) this.undo();
    this.undo = null;
    const before = whole ? null : this.snapshot();
    this.take(text, from, to, whole);
    if (!whole) this.undo = () => this.restore(before);
  }

  /** The state that a line which is not complete may change; its nodes are taken back with it. */
  snapshot() {
    const { leaf, lists, table, blank } = this;
    return {
      leaf, lists: [...lists], table, blank, rows: table && table.element.children.length,
      ranges: leaf && leaf.ranges.length, count: this.root.childNodes.length,
      items: lists.map(list => [list.element, list.element.childNodes.length,
        list.element.lastElementChild && list.element.lastElementChild.childNodes.length]),
    };
  }

  restore(before) {
    while (this.root.childNodes.length > before.count) this.root.lastChild.remove();
    for (const [element, count, inner] of before.items) {
      while (element.childNodes.length > count) element.lastChild.remove();
      if (inner !== null) while (element.lastElementChild.childNodes.length > inner) element.lastElementChild.lastChild.remove();
    }
    if (before.table) while (before.table.element.children.length > before.rows) before.table.element.lastElementChild.remove();
    this.leaf = before.leaf;
    this.lists = before.lists;
    this.table = before.table;
    this.blank = before.blank;
    this.fence = null;
    if (this.leaf) {
      this.leaf.ranges.length = before.ranges;
      this.leaf.element.replaceChildren();
      inline(this.leaf.element, this.source, this.leaf.ranges);
    }
  }

  take(text, from, to, whole) {
    if (this.fence) {
      const closing = text.trim();
      if (closing.length >= this.fence.mark.length && closing === this.fence.mark[0].repeat(closing.length)) {
        this.fence = null;
        return;
      }
      this.code(Math.max(from, this.tail), to + 1);
      return;
    }
    if (!text.trim()) {
      this.closeLeaf();
      this.table = null;
      this.blank = true;
      return;
    }
    if (!whole && /^ {0,3}(?:`{1,3}|~{1,3}|\|)/.test(text) && !/^ {0,3}`[^`]/.test(text)) return;
    const afterBlank = this.blank;
    this.blank = false;
    const fence = FENCE.exec(text);
    if (fence && whole) {
      this.closeLeaf();
      this.table = null;
      if (!/^ /.test(text)) this.lists = [];
      this.openFence(fence);
      return;
    }
    const item = RULE.test(text) ? null : ITEM.exec(text);
    if (item) {
      this.item(item, from + item[0].length, to);
      return;
    }
    const indent = /^ */.exec(text)[0].length;
    if (this.lists.length && afterBlank && !indent) this.lists = [];
    if (ROW.test(text)) {
      this.row(text, from, to, whole);
      return;
    }
    this.table = null;
    const heading = HEADING.exec(text);
    if (heading || (RULE.test(text) && whole)) {
      this.close();
      if (!heading) return void this.root.append(h("hr"));
      this.open("heading", h(`h${Math.min(heading[1].length + 2, 6)}`, { dir: "auto" }), this.root);
      this.extend(from + heading[0].length, to);
      this.closeLeaf();
      return;
    }
    const quote = QUOTE.exec(text);
    if (quote) {
      if (!this.leaf || this.leaf.kind !== "quote") {
        this.close();
        const element = h("p", { dir: "auto" });
        this.open("quote", element, this.root, h("blockquote", null, element));
      }
      this.extend(from + quote[0].length, to);
      return;
    }
    if (!this.leaf || this.leaf.kind === "quote") {
      const holder = this.lists.length ? this.lists.at(-1).element.lastElementChild : this.root;
      this.open("p", h("p", { dir: "auto" }), holder);
    }
    this.extend(from + Math.min(indent, 12), to);
  }

  open(kind, element, parent, outer = element) {
    this.closeLeaf();
    parent.append(outer);
    this.leaf = { kind, element, ranges: [] };
  }

  closeLeaf() {
    this.leaf = null;
  }

  close() {
    this.leaf = null;
    this.lists = [];
    this.table = null;
  }

  /** Add a range to the open block and build it again. */
  extend(from, to) {
    const { leaf } = this;
    leaf.ranges.push([from, to]);
    leaf.element.replaceChildren();
    inline(leaf.element, this.source, leaf.ranges);
    if (leaf.ranges.at(-1)[1] - leaf.ranges[0][0] > LONG_LEAF) this.closeLeaf();
  }

  item([, spaces, , number], from, to) {
    this.closeLeaf();
    this.table = null;
    const indent = spaces.length;
    while (this.lists.length && indent < this.lists.at(-1).indent) this.lists.pop();
    const tag = number === undefined ? "ul" : "ol";
    let list = this.lists.at(-1);
    if (!list || indent >= list.indent + 2) {
      const parent = list ? list.element.lastElementChild : this.root;
      list = this.openList(tag, number, indent, parent);
    } else if (list.element.localName !== tag) {
      this.lists.pop();
      list = this.openList(tag, number, indent, list.element.parentNode);
    }
    const element = h("p", { dir: "auto" });
    this.open("item", element, list.element, h("li", null, element));
    this.extend(from, to);
  }

  openList(tag, number, indent, parent) {
    const list = { element: h(tag, { start: number && number !== "1" ? Number(number) : null }), indent };
    parent.append(list.element);
    this.lists.push(list);
    return list;
  }

  row(text, from, to, whole) {
    this.closeLeaf();
    this.lists = [];
    if (!this.table) {
      const element = h("tbody");
      this.table = { element };
      this.root.append(h("div", { class: "table-wrap", tabindex: "0" }, h("table", null, element)));
    }
    if (DIVIDER.test(text)) {
      const first = this.table.element.firstElementChild;
      if (whole && first) for (const cell of first.children) cell.classList.add("head");
      return;
    }
    const row = h("tr"), cells = [];
    let start = text.indexOf("|") + 1;
    for (let i = start; i < text.length; i++) {
      if (text[i] === "\\") i += 1;
      else if (text[i] === "|") { cells.push([start, i]); start = i + 1; }
    }
    for (const [a, b] of cells) {
      const cell = h("td", { dir: "auto" });
      const raw = text.slice(a, b), lead = raw.length - raw.trimStart().length;
      inline(cell, this.source, [[from + a + lead, from + a + lead + raw.trim().length]]);
      row.append(cell);
    }
    this.table.element.append(row);
  }

  openFence([, mark, language]) {
    const code = h("code"), { source } = this;
    const fence = { mark, code, room: 0, from: null, to: null };
    const take = () => copy(source.slice(fence.from ?? 0, fence.to ?? 0));
    const block = h("figure", { class: "code" },
      h("figcaption", null, h("span", null, language || "text"), button("Copy code", "copy", take)),
      h("pre", { tabindex: "0", dir: "ltr", "aria-label": `Code${language ? `, ${language}` : ""}` }, code));
    (this.lists.length ? this.lists.at(-1).element.lastElementChild : this.root).append(block);
    this.fence = fence;
  }

  /** Append a range to the open code block, in parts of bounded length that end with a line where they can. */
  code(from, to) {
    const { fence, source } = this;
    to = Math.min(to, source.length);
    if (from >= to) return;
    fence.from ??= from;
    fence.to = to;
    while (from < to) {
      if (fence.room <= 0) {
        fence.part = h("span", { class: "part" });
        fence.code.append(fence.part);
        fence.room = LONG_RAW;
      }
      const end = Math.min(to, from + fence.room);
      source.append(fence.part, from, end);
      fence.room -= end - from;
      from = end;
    }
    if (fence.room < LONG_RAW / 2 && source.slice(to - 1, to) === "\n") fence.room = 0;
  }
}

/** Emphasis, code and links of some ranges of the source, which are one text with line breaks between. */
function inline(parent, source, ranges) {
  const starts = [];
  let text = "";
  for (const [from, to] of ranges) {
    if (text) text += "\n";
    starts.push([text.length, from]);
    text += source.slice(from, to);
  }
  const emit = (element, from, to) => {
    for (let i = 0; i < starts.length && from < to; i++) {
      const [start, offset] = starts[i];
      const end = i + 1 < starts.length ? starts[i + 1][0] - 1 : text.length;
      if (from > end || to <= start) continue;
      const a = Math.max(from, start), b = Math.min(to, end);
      if (a < b) source.append(element, offset + a - start, offset + b - start);
      if (to > end && i + 1 < starts.length) element.append(h("br"));
    }
  };
  parse(parent, text, 0, text.length, emit, 0);
}

const SPECIAL = /[\\`*_~[<]|https?:\/\//g;
const MAX_DEPTH = 8;

function parse(parent, text, from, to, emit, depth) {
  let plain = from;
  const place = (element, start, end, next) => {
    emit(parent, plain, start);
    parent.append(element);
    plain = next ?? end;
  };
  for (let i = from; i < to;) {
    SPECIAL.lastIndex = i;
    const found = SPECIAL.exec(text);
    if (!found || found.index >= to) break;
    i = found.index;
    const char = text[i];
    if (char === "\\") {
      if (i + 1 < to && /[!-/:-@[-`{-~]/.test(text[i + 1])) { emit(parent, plain, i); plain = i + 1; }
      i += 2;
    } else if (char === "`") {
      const mark = /^`+/.exec(text.slice(i, Math.min(to, i + 8)))[0];
      const end = text.indexOf(mark, i + mark.length);
      if (end < 0 || end + mark.length > to) { i += mark.length; continue; }
      const element = h("code");
      emit(element, i + mark.length, end);
      place(element, i, end + mark.length);
      i = plain;
    } else if (char === "*" || char === "_" || char === "~") {
      const double = text[i + 1] === char;
      const mark = double ? char + char : char;
      const end = depth < MAX_DEPTH && (char !== "~" || double) ? closing(text, i, to, mark) : -1;
      if (end < 0) { i += mark.length; continue; }
      const element = h(char === "~" ? "del" : double ? "strong" : "em");
      parse(element, text, i + mark.length, end, emit, depth + 1);
      place(element, i, end + mark.length);
      i = plain;
    } else if (char === "[") {
      const label = /^\[([^\][]{0,400})\]\(([^()\s]{1,800}(?:\([^()\s]*\))?)\)/.exec(text.slice(i, Math.min(to, i + 1300)));
      const element = label && link(label[2]);
      if (!element) { i += 1; continue; }
      parse(element, text, i + 1, i + 1 + label[1].length, emit, MAX_DEPTH);
      place(element, i, i + label[0].length);
      i = plain;
    } else {
      const angle = char === "<";
      const shown = (angle ? /^<((?:https?:|mailto:)[^\s<>]{1,800})>/i : /^(https?:\/\/[^\s<>"`]{1,800})/i)
        .exec(text.slice(i, Math.min(to, i + 820)));
      const address = shown && (angle ? shown[1] : shown[1].replace(/[.,;:!?)\]*_~]+$/, ""));
      const element = address && parent.localName !== "a" && link(address);
      if (!element) { i += angle ? 1 : 4; continue; }
      const start = i + (angle ? 1 : 0);
      emit(element, start, start + address.length);
      place(element, i, start + address.length, start + address.length + (angle ? 1 : 0));
      i = plain;
    }
  }
  emit(parent, plain, to);
}

/** Where the emphasis that begins at `from` ends, or -1. */
function closing(text, from, to, mark) {
  const start = from + mark.length;
  if (start >= to || /\s/.test(text[start])) return -1;
  // Inside of a word, as in 2*3*4 and snake_case_name, a single mark is a character.
  if ((mark[0] === "_" || mark === "*") && from > 0 && /[\p{L}\p{N}_]/u.test(text[from - 1])) return -1;
  for (let end = text.indexOf(mark, start); end >= 0 && end + mark.length <= to; end = text.indexOf(mark, end + 1)) {
    if (end === start || /\s/.test(text[end - 1])) continue;
    if (mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark)) { end += 1; continue; }
    if (mark[0] === "_" && /[\p{L}\p{N}_]/u.test(text[end + mark.length] || " ")) continue;
    return end;
  }
  return -1;
}

const frames = new Set();
let scheduled = false;
const FRAME_MS = 8;

/** Show what is new in a view in the next frame; `after` is called when there is something. */
export function show(view, after) {
  view.after = after || view.after;
  view.isShown = false;
  frames.add(view);
  if (!scheduled) { scheduled = true; requestAnimationFrame(draw); }
}

function draw() {
  scheduled = false;
  const deadline = performance.now() + FRAME_MS;
  for (const view of [...frames]) {
    frames.delete(view);
    view.isShown = view.flush(deadline);
    if (!view.isShown) frames.add(view); // behind the others
    if (view.after) view.after();
    if (performance.now() > deadline) break;
  }
  if (frames.size) { scheduled = true; requestAnimationFrame(draw); }
}
