"""Modes, medians, estimates and tables of all benchmarks. No torch: light commands import it.

rich is imported with the first table: `foreword bench gpu` runs where it is not installed.
"""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from foreword.config.options import Config
from foreword.core.params import SamplingParams, Speculation

Item = TypeVar("Item")

OFF = "off"
NO_DRAFTS = "no drafts"  # the verdict where none was verified: the ratio is chance
DEMO = "demo"
MODE_LEGEND = "off: no speculation; auto: all drafters, chosen step by step; other names: one drafter alone."
PROBE_TOKENS = 16  # of the answer that an estimate rests on
TABLE_WIDTH = 100  # columns of a table that is not printed to a terminal
MAX_CELL_WIDTH = 40  # a longer cell takes several lines where the table would be too wide
# Student's t at 97.5 % by degrees of freedom from 1 on; the last serves all beyond.
# fmt: off
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.12, 2.05,
)
# fmt: on
# Estimates for expected times: rows that double a step's time, and prompt tokens that cost one step.
ROWS_PER_STEP = 16


def with_all_drafters(config: Config) -> Config:
    """Add the demo's draft model where `auto` serves the demo."""
    if config.speculate != "auto" or config.draft_model is not None or config.model not in (None, DEMO):
        return config
    return replace(config, draft_model=DEMO)


def modes(drafters: Sequence[str]) -> tuple[str, ...]:
    """`off`, each drafter alone where there are several, and `auto`; a single drafter by its name.

    The prompts have no predictions or grammars: the drafters that need them are left out.
    """
    alone = [name for name in drafters if name not in ("prediction", "grammar")]
    if len(drafters) == 1:
        return OFF, drafters[0]
    return (OFF, *(alone if len(alone) > 1 else ()), *(("auto",) if drafters else ()))


def rounds_text(count: int) -> str:
    """ "1 round", "5 rounds"."""
    return f"{count} round" + ("s" if count != 1 else "")


def sampling_params(mode: str, max_tokens: int, temperature: float = 0.0, seed: int = 0) -> SamplingParams:
    speculation = Speculation(mode)
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, speculation=speculation)


def rotate(items: Sequence[Item], by: int) -> tuple[Item, ...]:
    """Another order each round, so that none always goes first."""
    by %= len(items)
    return (*items[by:], *items[:by])


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Nearest rank; None of no values."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(percent / 100 * len(values)) - 1, 0)]


def expected_weight(answer_tokens: float, concurrency: int, prompt_tokens: float = 0.0) -> float:
    """Time of requests that run `concurrency` at once, in steps of one request: a rough estimate."""
    step = 1 + (concurrency - 1) / ROWS_PER_STEP
    return answer_tokens * step / concurrency + prompt_tokens / ROWS_PER_STEP


def seconds_per_token(answer: Callable[[], int]) -> float:
    """Seconds of a token of `answer`, which returns its number of tokens; a first call warms up."""
    answer()
    started = time.perf_counter()
    num_tokens = answer()
    return (time.perf_counter() - started) / max(num_tokens, 1)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A geometric mean with its 95 % interval; one round has no interval."""

    value: float
    low: float | None = None
    high: float | None = None

    def as_dict(self) -> dict[str, float]:
        bounds = {} if self.low is None or self.high is None else {"low": self.low, "high": self.high}
        return {"ratio": self.value, **bounds}


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


def speed_ratio(plain_s: Sequence[float], other_s: Sequence[float]) -> dict[str, float]:
    """Speed relative to plain over rounds measured next to each other; {} of no rounds."""
    ratio = geometric_mean_ratio([plain / other for plain, other in zip(plain_s, other_s, strict=True)])
    return {} if ratio is None else ratio.as_dict()


def verdict(ratio: Mapping[str, float]) -> str:
    """ "faster" or "slower" where the 95 % interval excludes 1, else "unclear"."""
    if "low" not in ratio or ratio["low"] <= 1 <= ratio["high"]:
        return "unclear"
    return "faster" if ratio["low"] > 1 else "slower"


def ratio_text(figures: Mapping[str, Any] | None) -> str:
    """ "1.08 [1.02, 1.15]"."""
    if figures is None:
        return ""
    bounds = f" [{ratio_number(figures['low'])}, {ratio_number(figures['high'])}]" if "low" in figures else ""
    return f"{ratio_number(figures['ratio'])}{bounds}"


def ratio_number(value: float) -> str:
    """Two rounds may leave a huge interval, whose digits would widen the column."""
    return f"{value:.2f}" if value < 99 else ">99"


def ratio_legend(rounds: int) -> tuple[str, ...]:
    """Lines for the columns of speed and its verdict."""
    return (
        f"speed: tokens/s over off in the same round, with the 95 % interval of {rounds_text(rounds)}; "
        "above 1 is faster.",
        "result: faster or slower where the interval excludes 1, else unclear; more --rounds narrow it.",
        f"{NO_DRAFTS}: none was verified, so that the ratio is chance.",
    )


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], legend: Sequence[str] = ()
) -> None:
    """A table as wide as the terminal at most, and lines that explain it.

    Where it does not fit, columns are left out from the right and named; a line that begins with the name
    of one ("name: ...") is left out too.
    """
    console = importlib.import_module("rich.console").Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    cells = [columns, *rows]
    widths = [max(len(row[index]) for row in cells if index < len(row)) for index in range(len(columns))]
    shown = len(columns)
    while shown > 2 and sum(min(width, MAX_CELL_WIDTH) + 3 for width in widths[:shown]) + 1 > console.width:
        shown -= 1
    table = importlib.import_module("rich.table").Table()
    for index, column in enumerate(columns[:shown]):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row[:shown])
    console.print(f"\n{title}", style="bold")
    console.print(table)
    if shown < len(columns):
        console.print(f"left out for width (the JSON has them): {', '.join(columns[shown:])}")
    left_out = {column.partition(" [")[0] for column in columns[shown:]}
    for line in legend:
        if line.partition(":")[0] in left_out:
            continue
        console.print(line)


def time_call(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
