// Prometheus' text format, and what happened between two readings of it.

const LINE = /^(\w+)(?:\{(.*)\})? (\S+)$/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** Samples by name without the prefix: [{labels, value}]. */
export function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const match = line.startsWith("#") ? null : LINE.exec(line);
    if (!match) continue;
    const name = match[1].replace(/^foreword_/, "");
    const labels = {};
    if (match[2]) for (const [, key, value] of match[2].matchAll(LABEL)) labels[key] = value.replace(/\\(.)/g, (_, char) => char === "n" ? "\n" : char);
    if (!samples.has(name)) samples.set(name, []);
    samples.get(name).push({ labels, value: Number(match[3]) });
  }
  return samples;
}

/** One reading of /metrics, of one model or of all. */
export class Reading {
  constructor(text, at) {
    this.samples = parseMetrics(text);
    this.at = at; // seconds
    this.model = "";
  }

  list(name) {
    const all = this.samples.get(name) || [];
    return this.model ? all.filter(({ labels }) => !("model" in labels) || labels.model === this.model) : all;
  }

  has(name) {
    return this.samples.has(name);
  }

  sum(name) {
    return this.list(name).reduce((total, { value }) => total + value, 0);
  }

  /** Sums by the values of one label, of the samples with the `wanted` labels. */
  by(name, label, wanted = {}) {
    const sums = new Map();
    for (const { labels, value } of this.list(name)) {
      if (Object.entries(wanted).some(([key, other]) => labels[key] !== other)) continue;
      sums.set(labels[label], (sums.get(labels[label]) || 0) + value);
    }
    return sums;
  }

  /** The quantile of a histogram, by linear interpolation inside its bucket; null without a value. */
  quantile(name, share, since = null) {
    const buckets = new Map();
    const add = (reading, sign) => {
      for (const { labels, value } of reading.list(`${name}_bucket`)) {
        const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
        buckets.set(bound, (buckets.get(bound) || 0) + sign * value);
      }
    };
    add(this, 1);
    if (since) add(since, -1);
    const sorted = [...buckets].sort((a, b) => a[0] - b[0]);
    const total = sorted.length ? sorted.at(-1)[1] : 0;
    if (!(total > 0)) return null;
    let [below, count] = [0, 0];
    for (const [bound, cumulative] of sorted) {
      if (cumulative >= share * total) {
        if (bound === Infinity) return below;
        return below + (bound - below) * (share * total - count) / Math.max(cumulative - count, 1e-9);
      }
      [below, count] = [bound, cumulative];
    }
    return below;
  }
}

/** The increase of a counter a second between two readings; 0 after a restart of the server. */
export function rate(before, after, name) {
  const seconds = after.at - before.at;
  return seconds > 0 ? Math.max(after.sum(name) - before.sum(name), 0) / seconds : 0;
}
