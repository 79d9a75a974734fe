"""Percentiles, and ratios between rounds with their 95 % intervals. Only the standard library."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

Item = TypeVar("Item")

# Student's t at 97.5 % by degrees of freedom from 1 on; the last serves all beyond.
# fmt: off
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.12, 2.05,
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Ratio:
    """A geometric mean with its 95 % interval; one round has no interval."""

    value: float
    low: float | None = None
    high: float | None = None

    def as_dict(self) -> dict[str, float]:
        bounds = {} if self.low is None or self.high is None else {"low": self.low, "high": self.high}
        return {"ratio": self.value, **bounds}


def geometric_mean(values: Iterable[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def geometric_mean_ratio(ratios: Sequence[float]) -> Ratio | None:
    """`ratios` by round; None of no rounds."""
    if not ratios:
        return None
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Ratio(math.exp(mean))
    t = T_975[min(len(logs) - 1, len(T_975)) - 1]
    width = t * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(mean), math.exp(mean - width), math.exp(mean + width))


def verdict(ratio: Mapping[str, float]) -> str:
    """ "faster" or "slower" where the 95 % interval excludes 1, else "unclear"."""
    if "low" not in ratio or ratio["low"] <= 1 <= ratio["high"]:
        return "unclear"
    return "faster" if ratio["low"] > 1 else "slower"


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Nearest rank; None of no values."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(percent / 100 * len(values)) - 1, 0)]


def rotate(items: Sequence[Item], by: int) -> tuple[Item, ...]:
    """Another order each round, so that none always goes first."""
    by %= len(items)
    return (*items[by:], *items[:by])


def time_call(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
