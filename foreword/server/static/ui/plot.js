// Plots as SVG: lines over time or place, sparklines, and bars. Series differ by dash as well as by colour.

import { s } from "./dom.js";

const LEFT = 46, BOTTOM = 20, TOP = 8, RIGHT = 8;

const NARROW = 760; // window width in CSS pixels
const MAX_LOG_RATIO = Math.log(10); // limit of the axis: intervals of few rounds have no end

/** Width of a plot in its own coordinates: smaller in a narrow window, so that texts stay readable. */
const plotWidth = () => innerWidth < NARROW ? 330 : 560;

/** A round number at or above `value`, of which axes are made. */
function ceiling(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].find(step => step * power >= value) * power;
}

/** Lines through the points [x, y] of each series {name, kind, points}. `label` says it in words. */
export function lines({ series, label, format = String, xFormat = String, height = 150, top = null }) {
  const width = plotWidth();
  const points = series.flatMap(each => each.points);
  const xs = points.map(point => point[0]);
  const [x0, x1] = [Math.min(...xs), Math.max(...xs)];
  const y1 = top ?? ceiling(Math.max(...points.map(point => point[1]), 0));
  const x = value => LEFT + (x1 > x0 ? (value - x0) / (x1 - x0) : .5) * (width - LEFT - RIGHT);
  const y = value => TOP + (1 - Math.min(value / y1, 1)) * (height - TOP - BOTTOM);
  const svg = s("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  for (const share of [0, .5, 1]) {
    svg.append(s("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(share * y1), y2: y(share * y1) }),
      s("text", { class: "tick", x: LEFT - 6, y: y(share * y1) + 4, "text-anchor": "end" }, format(share * y1)));
  }
  if (!points.length) {
    svg.append(s("text", { class: "tick", x: width / 2, y: height / 2 - 14, "text-anchor": "middle" }, "nothing yet"));
    return svg;
  }
  svg.append(s("text", { class: "tick", x: LEFT, y: height - 4 }, xFormat(x0)),
    s("text", { class: "tick", x: width - RIGHT, y: height - 4, "text-anchor": "end" }, xFormat(x1)));
  for (const { kind, points: own } of series) {
    if (own.length === 1) svg.append(s("circle", { class: `dot ${kind}`, cx: x(own[0][0]), cy: y(own[0][1]), r: 3 }));
    else svg.append(s("polyline", { class: `line ${kind}`, points: own.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ") }));
  }
  return svg;
}

/** A small line without axes. */
export function sparkline(values, kind = "first") {
  const most = Math.max(...values, 1e-9), step = 100 / Math.max(values.length - 1, 1);
  return s("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("polyline", { class: `line ${kind}`, points: values.map((value, i) => `${(i * step).toFixed(1)},${(23 - 22 * value / most).toFixed(1)}`).join(" ") }));
}

/** One bar of a share between 0 and 1. */
export function meter(share, kind = "first") {
  return s("svg", { class: "meter", viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
    s("rect", { class: "rail", width: 100, height: 8, rx: 1 }), s("rect", { class: `fill ${kind}`, width: Math.max(Math.min(share, 1), 0) * 100, height: 8, rx: 1 }));
}

/** Shares of a whole, side by side: [name, value] in the order of their colours. */
export function stacked(parts, label) {
  const sum = parts.reduce((total, [, value]) => total + value, 0) || 1;
  let start = 0;
  return s("svg", { class: "stacked", viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img", "aria-label": label },
    parts.map(([, value], index) => {
      const rect = s("rect", { class: `fill part-${index % 8}`, x: start, width: Math.max(100 * value / sum - .25, 0), height: 10 });
      start += 100 * value / sum;
      return rect;
    }));
}

/** Ratios with their intervals on a log scale around 1: [{name, ratio, low, high}]. */
export function intervals(rows, label) {
  const values = rows.flatMap(row => [row.low, row.high, row.ratio]).filter(value => value > 0);
  const width = plotWidth();
  const limit = Math.min(Math.max(...values.map(value => Math.abs(Math.log(value))), Math.log(2)), MAX_LOG_RATIO) * 1.05;
  const x = value => 110 + (1 + Math.max(Math.min(Math.log(Math.max(value, 1e-9)) / limit, 1), -1)) / 2 * (width - 160);
  const height = rows.length * 20 + 26;
  const svg = s("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const ticks = [.25, .5, 1, 2, 4, 8].filter(value => Math.abs(Math.log(value)) <= limit);
  for (const value of ticks) {
    svg.append(s("line", { class: value === 1 ? "grid one" : "grid", x1: x(value), x2: x(value), y1: 2, y2: height - 20 }),
      s("text", { class: "tick", x: x(value), y: height - 6, "text-anchor": "middle" }, `${value}×`));
  }
  rows.forEach((row, index) => {
    const middle = index * 20 + 12;
    const kind = row.low > 1 ? "good" : row.high < 1 ? "bad" : "unclear";
    svg.append(s("text", { class: "name", x: 102, y: middle + 4, "text-anchor": "end" }, row.name),
      s("line", { class: `range ${kind}`, x1: x(row.low), x2: x(row.high), y1: middle, y2: middle }),
      s("circle", { class: `point ${kind}`, cx: x(row.ratio), cy: middle, r: 4 }),
      s("text", { class: "tick", x: width - 4, y: middle + 4, "text-anchor": "end" }, row.ratio < 99 ? row.ratio.toFixed(2) : ">99"));
  });
  return svg;
}
