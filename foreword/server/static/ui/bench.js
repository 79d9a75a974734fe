// A result of `foreword bench speculate --json FILE`: the ratios to speculation off, with their intervals.

import { fmt, h, numberCell, rowHead, tableHead } from "./dom.js";
import { intervals } from "./plot.js";

const RATIOS = [["throughput", "Tokens a second"], ["first_token", "First token"], ["slowest_request", "Slowest request"]];

const isRatio = value => value !== undefined && value !== null && typeof value.ratio === "number";
const bounds = ({ ratio, low = ratio, high = ratio }) => ({ ratio, low, high }); // one round has no interval

/** The view of a parsed file. Throws Error for anything else. */
export function benchView(result) {
  if (!Array.isArray(result?.cells)) throw new Error("it is no result of foreword bench speculate");
  const nameOf = cell => `${cell.category} ×${cell.concurrency}${cell.cache_full ? ", full" : ""}`;
  const modes = [...new Set(result.cells.flatMap(cell => Object.keys(cell.modes || {})))].filter(mode => mode !== "off");
  const unequal = result.cells.flatMap(cell => Object.entries(cell.modes || {}).filter(([, mode]) => mode.equal === false).map(([name]) => `${nameOf(cell)} (${name})`));
  const blocks = modes.flatMap(mode => RATIOS.map(([key, title]) => {
    const rows = result.cells.filter(cell => isRatio(cell.modes?.[mode]?.[key])).map(cell => ({ name: nameOf(cell), ...bounds(cell.modes[mode][key]) }));
    return rows.length ? h("figure", null, h("figcaption", null, `${title}: ${mode} over off, above 1 is better`),
      intervals(rows, `${title}, ${mode} over off: ${rows.map(row => `${row.name} ${row.ratio.toFixed(2)}`).join(", ")}`)) : null;
  }));
  const detail = modes.map(mode => h("table", { class: "wide" }, h("caption", null, `Drafts of ${mode}`),
    tableHead(["case", "tokens/s", "tokens a step", "accepted"]),
    h("tbody", null, result.cells.filter(cell => cell.modes?.[mode]).map(cell => {
      const figures = cell.modes[mode], number = value => typeof value === "number" ? fmt.number(value) : "–";
      return h("tr", null, rowHead(nameOf(cell)), numberCell(number(figures.tokens_per_second)), numberCell(number(figures.tokens_per_step)),
        numberCell(typeof figures.acceptance === "number" ? fmt.percent(figures.acceptance) : "–"));
    }))));
  const facts = [result.model, result.rounds && fmt.plural(Number(result.rounds), "round")].filter(value => typeof value === "string");
  return h("div", { class: "bench" }, facts.length ? h("p", { class: "soft" }, facts.join(", ")) : null,
    h("p", { class: unequal.length ? "verdict bad" : "verdict good" }, unequal.length ? `Answers differ in ${unequal.join(", ")}: this is a bug.` : "All answers are equal to those without speculation."),
    blocks, detail);
}
