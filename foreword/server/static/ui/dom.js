// Elements are built from nodes and text. No text ever becomes markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element: h("button", {class: "x", onclick: f, "aria-label": "Close"}, child, "text", ...). */
export function h(tag, props, ...children) {
  return fill(document.createElement(tag), props, children);
}

/** The same for SVG. */
export function s(tag, props, ...children) {
  return fill(document.createElementNS(SVG, tag), props, children);
}

function fill(element, props, children) {
  for (const [name, value] of Object.entries(props || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "class") element.setAttribute("class", value);
    else if (name === "value" || name === "checked") element[name] = value;
    else if (name === "vars") for (const [key, item] of Object.entries(value)) element.style.setProperty(key, item);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...shown(children));
  return element;
}

/** Children of all depths, without those that are null, undefined or false. */
const shown = children => children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== false);

/** The head of a table; columns of numbers are aligned to the right. */
export const tableHead = (names, numeric = []) => h("thead", null, h("tr", null,
  names.map(name => h("th", { scope: "col", class: numeric.includes(name) ? "num" : null }, name))));
export const rowHead = (...children) => h("th", { scope: "row" }, children);
export const numberCell = (...children) => h("td", { class: "num" }, children);

const ICONS = {
  plus: "M8 3v10M3 8h10",
  stop: "M4.5 4.5h7v7h-7z",
  edit: "M3 13l.7-3L10.5 3.2l2.3 2.3L6 12.3z",
  copy: "M5.5 5.5h7v7h-7zM3.5 10.5v-7h7",
  redo: "M12.5 7a4.5 4.5 0 1 0-1.2 4M12.8 3.5V7H9.3",
  dice: "M3.5 3.5h9v9h-9zM6 6h.01M10 10h.01M8 8h.01",
  trash: "M3.5 4.5h9M6.5 4V3h3v1M4.7 4.5l.6 8.5h5.4l.6-8.5",
  clip: "M11.5 7.5 7.6 11.4a2.2 2.2 0 0 1-3.1-3.1l4.6-4.6a1.5 1.5 0 0 1 2.1 2.1L6.7 10.3",
  tune: "M3 5h5M11 5h2M3 11h2M8 11h5M9.5 3.5v3M6.5 9.5v3",
  list: "M3 4.5h10M3 8h10M3 11.5h10",
  key: "M10.7 2.8a2.6 2.6 0 1 0 0 5.2 2.6 2.6 0 0 0 0-5.2M8.8 7.2 3 13M5 11l1.8 1.8",
  sun: "M8 5.2a2.8 2.8 0 1 0 0 5.6 2.8 2.8 0 0 0 0-5.6M8 1.8v1M8 13.2v1M1.8 8h1M13.2 8h1M3.6 3.6l.7.7M11.7 11.7l.7.7M3.6 12.4l.7-.7M11.7 4.3l.7-.7",
  close: "M4 4l8 8M12 4l-8 8",
  link: "M6.7 9.3l2.6-2.6M7.5 4.7 9 3.2a2.7 2.7 0 0 1 3.8 3.8l-1.5 1.5M8.5 11.3 7 12.8A2.7 2.7 0 0 1 3.2 9l1.5-1.5",
  down: "M8 3v10M3.5 8.5 8 13l4.5-4.5",
  up: "M8 13V3M3.5 7.5 8 3l4.5 4.5",
  replay: "M4 3.5v9l4-4.5zM9 3.5v9l4-4.5z",
  prev: "M10 3.5 5.5 8l4.5 4.5",
  next: "M6 3.5 10.5 8 6 12.5",
  pin: "M6 2.5h4l-.6 4 2.1 2.5H4.5l2.1-2.5zM8 9v4.5",
};

export function icon(name) {
  return s("svg", { viewBox: "0 0 16 16", class: "icon", "aria-hidden": "true" }, s("path", { d: ICONS[name] }));
}

/** A button with an icon; its label is read aloud, and shown if `text` is true. */
export function button(label, iconName, onclick, props = {}) {
  const { text, ...rest } = props;
  const shown = text ? [iconName && icon(iconName), h("span", null, label)] : [icon(iconName)];
  return h("button", { type: "button", class: text ? "btn" : "btn icon-only", title: text ? null : label,
    "aria-label": text ? null : label, onclick, ...rest }, shown);
}

/** A sentence whose words between backticks are code. */
export const coded = text => (text || "").split("`").map((part, index) => index % 2 ? h("code", null, part) : part);

/** Replace the children of an element. */
export function put(element, ...children) {
  element.replaceChildren(...shown(children));
  return element;
}

const live = h("div", { class: "visually-hidden", role: "status", "aria-live": "polite" });
const toasts = h("div", { class: "toasts" });

export function mountMessages() {
  document.body.append(live, toasts);
}

/** Say a sentence to screen readers. */
export function announce(text) {
  live.textContent = text;
}

/** Show a sentence for some seconds. */
export function toast(text, kind = "") {
  const box = h("div", { class: `toast ${kind}`, role: kind === "bad" ? "alert" : null }, text);
  toasts.append(box);
  if (kind !== "bad") announce(text);
  setTimeout(() => box.remove(), 6000);
}

/** Save a text as a file. */
export function download(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = h("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** The files that the user chooses. */
export function pickFiles(accept, multiple = false) {
  return new Promise(resolve => {
    // In the document until it has answered: one that nobody refers to may be collected before.
    const input = h("input", { type: "file", accept, multiple, hidden: true });
    const end = files => { input.remove(); resolve(files); };
    input.addEventListener("change", () => end([...input.files]));
    input.addEventListener("cancel", () => end([]));
    document.body.append(input);
    input.click();
  });
}

export async function copy(text, what = "Copied") {
  try {
    await navigator.clipboard.writeText(text);
    toast(what);
  } catch {
    toast("The browser does not let this page write to the clipboard", "bad");
  }
}

const numbers = new Intl.NumberFormat("en-US", { maximumFractionDigits: 1 });
const counts = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export const fmt = {
  count: value => counts.format(value),
  number: value => (Math.abs(value) >= 100 ? counts : numbers).format(value),
  percent: value => `${numbers.format(value * 100)} %`,
  seconds: value => value < .01 ? `${numbers.format(value * 1000)} ms` : value < 1 ? `${counts.format(value * 1000)} ms` : value < 120 ? `${numbers.format(value)} s`
    : `${counts.format(value / 60)} min`,
  bytes: value => {
    const units = ["B", "KiB", "MiB", "GiB", "TiB"];
    let index = 0;
    while (value >= 1024 && index < units.length - 1) { value /= 1024; index += 1; }
    return `${numbers.format(value)} ${units[index]}`;
  },
  plural: (count, one, many = `${one}s`) => `${counts.format(count)} ${count === 1 ? one : many}`,
};
