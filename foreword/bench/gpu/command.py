"""`foreword bench gpu`: checks and measures an NVIDIA GPU within eight minutes.

Weights are random, in the shapes of Llama-3.1-8B and Qwen2.5-0.5B; nothing is downloaded. Each section has
a budget in seconds, its unused time goes to the next, and parts that do not fit are listed as skipped.
`--out` is written after every part, and Ctrl-C shows what is complete. `--device cpu` is a dry run on tiny
shapes, in Triton's interpreter. Exit code 1: a check failed or a part broke.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from foreword.bench.common import print_table
from foreword.bench.gpu.config import DRY_RUN, FULL, QUICK, SECTIONS, BenchConfig
from foreword.bench.gpu.report import Report
from foreword.bench.session import EXIT_INTERRUPTED, ResultFile
from foreword.config.hardware import probe_hardware
from foreword.errors import ConfigError

__all__ = ["judge", "run", "run_sections", "thresholds"]

Section = Callable[[BenchConfig, Report], None]

GRACE_S = 60.0  # beyond all budgets, after which a hanging run is ended
# Imported when a section runs: TRITON_INTERPRET is read where a kernel is defined.
MODULES = {
    "ceilings": "device",
    "checks": "kernels",
    "engines": "engines",
    "kernels": "kernels",
    "steps": "steps",
    "speculation": "steps",
    "peers": "steps",
}


def run(args: argparse.Namespace) -> int:
    names = _parse_sections(args.only)
    config = _select_config(args)
    regime = {"rehearsal": config.is_dry_run, "quick": args.quick}
    file = ResultFile("--out", args.out) if args.out else None
    report = Report(regime, file)
    sections = {
        name: getattr(importlib.import_module(f"foreword.bench.gpu.{MODULES[name]}"), name) for name in names
    }
    is_complete = True
    with ExitStack() as stack:
        if file is not None:
            stack.callback(file.discard)
        try:
            with _time_limit(sum(config.budgets[name] for name in names) + GRACE_S):
                run_sections(sections, config, report)
        except KeyboardInterrupt:
            is_complete = False
            report.skipped["remaining parts"] = "interrupted"
        code = report.write()
    _show(report, config)
    if not is_complete:
        return EXIT_INTERRUPTED
    return 1 if report.broken or (report.failed_checks() and not config.is_dry_run) else code


def run_sections(sections: Mapping[str, Section], config: BenchConfig, report: Report) -> None:
    """Run sections in order; a section may use the time that those before it left."""
    deadline = report.clock()
    for name, section in sections.items():
        deadline += config.budgets[name]
        report.run_section(name, partial(section, config, report), deadline)


def _select_config(args: argparse.Namespace) -> BenchConfig:
    """Raises ConfigError where there is no GPU."""
    if args.device == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
        return DRY_RUN
    probe_hardware("cuda")
    return QUICK if args.quick else FULL


def _parse_sections(text: str | None) -> tuple[str, ...]:
    """The names of --only in the order of SECTIONS. Raises ConfigError."""
    names = [name.strip() for name in text.split(",")] if text else list(SECTIONS)
    for name in names:
        if name not in SECTIONS:
            raise ConfigError(f"--only: unknown {name!r}; known: {', '.join(SECTIONS)}")
    return tuple(name for name in SECTIONS if name in names)


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """A hanging kernel cannot be interrupted: print every stack and exit."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__ or sys.stderr)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def _show(report: Report, config: BenchConfig) -> None:
    note = " (dry run: not a GPU's figures)" if config.is_dry_run else ""
    for section, parts in report.figures.items():
        rows = [
            (part, name, f"{value:.4g}" if isinstance(value, float) else str(value))
            for part, figures in parts.items()
            for name, value in figures.items()
        ]
        print_table(section + note, ("part", "figure", "value"), rows)
    missing = list(report.skipped.items())
    missing += [(name, error.splitlines()[-1]) for name, error in report.broken.items()]
    if missing:
        print_table("skipped or broken", ("part", "reason"), missing)
    failed = report.failed_checks()
    print_table("failed checks", ("part",), [(name,) for name in failed] or [("none of those that ran",)])
    verdicts = judge(report, config)
    cells = [(row.label, row.bound, row.measured, row.verdict) for row in verdicts]
    print_table("targets", ("figure", "target", "measured", "verdict"), cells)
    targets = {row.label: row.verdict for row in verdicts}
    if not sys.stdout.isatty():
        result = {**report.as_json(), "failed_checks": failed, "targets": targets}
        print(json.dumps(result, allow_nan=False))


@dataclass(frozen=True, slots=True)
class VerdictRow:
    label: str
    bound: str
    measured: str
    verdict: str  # "met", "missed", "not measured", or "rehearsal"


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
            rows.append(VerdictRow(label, bound, "", "not measured"))
            continue
        sign, limit = bound.split()
        is_met = value >= float(limit) if sign == ">=" else value <= float(limit)
        verdict = "rehearsal" if config.is_dry_run else "met" if is_met else "missed"
        rows.append(VerdictRow(label, bound, f"{value:.3g}", verdict))
    return rows
