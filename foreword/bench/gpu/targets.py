"""What `foreword bench gpu` is held against."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from foreword.bench.gpu.config import BenchConfig
from foreword.bench.gpu.report import Report

__all__ = ["VerdictRow", "judge", "make_thresholds"]


@dataclass(frozen=True, slots=True)
class Threshold:
    """A figure (section, part, name) and its bound: at least, or at most."""

    what: str
    figure: tuple[str, str, str]
    bound: float
    least: bool = True


@dataclass(frozen=True, slots=True)
class VerdictRow:
    what: str
    bound: str
    measured: str
    verdict: str


def make_thresholds(scale: BenchConfig) -> tuple[Threshold, ...]:
    """Of an H200, in the words of its first user; `large` and `small` are the two shapes of the scale."""
    large, small = scale.large.name, scale.small.name
    first, middle, last = scale.streams
    idle = [
        Threshold(
            f"{large}, {count} streams{words}: device idle",
            ("steps", part, f"{count} between steps"),
            0.03,
            False,
        )
        for count in (first, last)
        for words, part in (("", "large idle"), (" with a draft model", "large idle with a draft model"))
    ]
    host = [
        Threshold(
            f"{large}, {count} streams: {name} us a step",
            ("steps", "large host drafters", f"{count} {name} us a step"),
            150,
            False,
        )
        for count in (first, last)
        for name in ("ngram", "suffix", "grammar")
    ]
    fast = [
        Threshold(
            f"{large}, {count} streams: exact over --fast-math",
            ("steps", "large fast-math", f"{count} exact over fast"),
            1.1,
            False,
        )
        for count in scale.fast_streams
    ]
    return (
        Threshold(
            f"{large}, 1 stream: share of bandwidth", ("steps", "large decode", "1 of bandwidth"), 0.85
        ),
        Threshold(f"{large}, 1 stream: tok/s", ("steps", "large decode", f"{first} tok/s"), 225),
        Threshold(f"{small}, 1 stream: tok/s", ("steps", "small decode", f"{first} tok/s"), 900),
        Threshold(
            f"{large}: step of {middle} rows over 1",
            ("steps", "large decode", f"{middle} step over 1"),
            1.05,
            False,
        ),
        Threshold(
            f"{large}: step of {last} rows over 1",
            ("steps", "large decode", f"{last} step over 1"),
            1.3,
            False,
        ),
        *idle,
        *host,
        *fast,
        Threshold(
            f"{large}: prompt of {scale.long_prompt}, share of product",
            ("steps", "large prompt", "of product"),
            0.5,
        ),
        Threshold(
            "replay 0.8, 1 stream: times off", ("speculation", "replay 0.8, 1 stream", "times off"), 2.8
        ),
        Threshold("replay 0, 1 stream: times off", ("speculation", "replay 0, 1 stream", "times off"), 0.99),
        Threshold(
            "draft model paid, 1 stream: times off",
            ("speculation", "draft model paid, 0.6, 1 streams", "times off"),
            1.3,
        ),
        Threshold(
            f"draft model paid, {last} streams: times off",
            ("speculation", f"draft model paid, 0.6, {last} streams", "times off"),
            0.98,
        ),
        Threshold(f"{large}: times transformers", ("peers", "transformers large", "times transformers"), 1.0),
        Threshold(f"{small}: times transformers", ("peers", "transformers small", "times transformers"), 1.0),
    )


def judge(findings: Report, scale: BenchConfig) -> Sequence[VerdictRow]:
    """Met, missed or not measured; a rehearsal meets and misses nothing."""
    return [_row(target, findings, scale) for target in make_thresholds(scale)]


def _row(target: Threshold, findings: Report, scale: BenchConfig) -> VerdictRow:
    value = findings.get(*target.figure)
    bound = f"{'at least' if target.least else 'at most'} {target.bound:g}"
    if not isinstance(value, int | float) or not math.isfinite(value):
        return VerdictRow(target.what, bound, "", "not measured")
    met = value >= target.bound if target.least else value <= target.bound
    return VerdictRow(
        target.what, bound, f"{value:.3g}", "rehearsal" if scale.is_dry_run else "met" if met else "missed"
    )
