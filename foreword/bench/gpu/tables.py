"""What `foreword bench gpu` prints at its end: JSON first, then tables, the most important last.

Where only the end of the output comes back, it holds the verdicts, what failed and as many figures as fit.
Plain text: the machine with the GPU may lack rich.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foreword.bench.gpu.config import BenchConfig
from foreword.bench.gpu.report import RAW_PART, Report

MAX_CHARS = 11_500  # of all tables
LINE_CHARS = (600, 400, 280, 200, 140, 100, 70)  # limits of a line: the first with which all fits
NOT_MEASURED = "not measured"
MAX_LIST = 3  # items of a list that is a figure


def show(report: Report, config: BenchConfig) -> None:
    if not sys.stdout.isatty():
        targets = {row.label: row.verdict for row in judge(report, config)}
        result = {**report.as_json(), "failed_checks": report.failed_checks(), "targets": targets}
        print(json.dumps(result, allow_nan=False))
    print(format_tables(report, config))


def format_tables(report: Report, config: BenchConfig) -> str:
    """At most MAX_CHARS: lines of figures and reasons are clipped so that all parts fit."""
    for width in LINE_CHARS:
        text = "\n".join(
            line if len(line) <= width else f"{line[:width]} ..." for line in _lines(report, config)
        )
        if len(text) <= MAX_CHARS:
            return text
    return text[-MAX_CHARS:]


def _lines(report: Report, config: BenchConfig) -> Iterator[str]:
    note = " (dry run: not a GPU's figures)" if config.is_dry_run else ""
    for section, parts in report.figures.items():
        yield from ("", f"== {section}{note}")
        for part, figures in parts.items():
            if not part.startswith(RAW_PART):
                yield f"{part}: {_format(figures)}"
    yield from _table("processes", [f"{name}: {_facts(facts)}" for name, facts in report.processes.items()])
    yield from _table("warnings", _warnings(report))
    yield from _table("skipped", [f"{name}: {reason}" for name, reason in report.skipped.items()])
    yield from _table("broken", [line for name in report.broken for line in _broken(name, report)])
    yield from _table("failed checks", report.failed_checks() or ["none of those that ran"])
    verdicts = judge(report, config)
    measured = [row.as_line() for row in verdicts if row.verdict != NOT_MEASURED]
    yield from _table("targets", [*measured, f"{len(verdicts) - len(measured)} not measured"])


def _table(title: str, lines: Sequence[str]) -> list[str]:
    return ["", f"== {title}", *lines] if lines else []


def _format(value: Any) -> str:
    if isinstance(value, list):
        more = f" and {len(value) - MAX_LIST} more" if len(value) > MAX_LIST else ""
        return "[" + "; ".join(map(_format, value[:MAX_LIST])) + more + "]"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_format(item)}" for name, item in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _facts(facts: Mapping[str, Any]) -> str:
    return _format({name: value for name, value in facts.items() if value and name != "warnings"})


def _broken(name: str, report: Report) -> list[str]:
    """The first line, which says how a process ended, and the last, which names the error."""
    lines = report.broken[name].splitlines()
    return [
        f"{name}: {lines[-1]}" if lines[0].startswith("Traceback") else f"{name}: {lines[0]}",
        *lines[1:][-1:],
    ]


def _warnings(report: Report) -> list[str]:
    """Each warning once, with the first process that logged it."""
    first: dict[str, str] = {}
    for name, facts in report.processes.items():
        for line in facts.get("warnings", ()):
            first.setdefault(line, name)
    return [f"{name}: {line}" for line, name in first.items()]


@dataclass(frozen=True, slots=True)
class VerdictRow:
    label: str
    bound: str
    measured: str
    verdict: str  # "met", "missed", "not measured", or "rehearsal"

    def as_line(self) -> str:
        return f"{self.verdict:9} {self.measured:>8} {self.bound:>8}  {self.label}"


def thresholds(config: BenchConfig) -> list[tuple[str, str, str, str]]:
    """Targets of an H200: label, bound, "section/part", and name of the figure."""
    large, small = config.large.name, config.small.name
    first, middle, last = config.streams
    ends, suffixes = (first, last), ("", " with a draft model")
    prompt, batched = f"{large}: prompt of {config.long_prompt}", f"draft model paid, {last} streams"
    decode, fast_math = "steps/large decode", "steps/large fast-math"
    over, paid = "exact over", "draft model paid"
    return [
        (f"{large}, 1 stream: share of bandwidth", ">= 0.85", decode, "1 of bandwidth"),
        (f"{large}, 1 stream: tok/s", ">= 225", decode, f"{first} tok/s"),
        (f"{small}, 1 stream: tok/s", ">= 900", "steps/small decode", f"{first} tok/s"),
        (f"{large}: step of {middle} rows over 1", "<= 1.05", decode, f"{middle} step over 1"),
        (f"{large}: step of {last} rows over 1", "<= 1.3", decode, f"{last} step over 1"),
        *[
            (f"{large}, {n} streams{s}: device idle", "<= 0.03", f"steps/large idle{s}", f"{n} between steps")
            for n in ends
            for s in suffixes
        ],
        *[
            (f"{large}, {n} streams: {name}", "<= 150", "steps/large host drafters", f"{n} {name}")
            for n in ends
            for name in ("ngram us a step", "suffix us a step", "grammar us a step")
        ],
        *[
            (f"{large}, {n} streams: {over} --fast-math", "<= 1.1", fast_math, f"{n} {over} fast")
            for n in config.fast_streams
        ],
        (f"{prompt}, share of product", ">= 0.5", "steps/large prompt", "of product"),
        ("replay 0.8, 1 stream: times off", ">= 2.8", "speculation/replay 0.8, 1 stream", "times off"),
        ("replay 0, 1 stream: times off", ">= 0.99", "speculation/replay 0, 1 stream", "times off"),
        (f"{paid}, 1 stream: times off", ">= 1.3", f"speculation/{paid}, 0.6, 1 streams", "times off"),
        (f"{batched}: times off", ">= 0.98", f"speculation/{paid}, 0.6, {last} streams", "times off"),
        (f"{large}: times transformers", ">= 1", "peers/transformers large", "times transformers"),
        (f"{small}: times transformers", ">= 1", "peers/transformers small", "times transformers"),
    ]


def judge(report: Report, config: BenchConfig) -> Sequence[VerdictRow]:
    """The verdict on every target; a dry run meets and misses nothing."""
    rows = []
    for label, bound, place, name in thresholds(config):
        section, _, part = place.partition("/")
        value: Any = report.get(section, part, name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            rows.append(VerdictRow(label, bound, "", NOT_MEASURED))
            continue
        sign, limit = bound.split()
        is_met = value >= float(limit) if sign == ">=" else value <= float(limit)
        verdict = "rehearsal" if config.is_dry_run else "met" if is_met else "missed"
        rows.append(VerdictRow(label, bound, f"{value:.3g}", verdict))
    return rows
