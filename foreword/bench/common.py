"""Modes, medians, estimates and tables of all benchmarks. No torch: light commands import it."""

from __future__ import annotations

import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from foreword.config.options import Config
from foreword.core.params import SamplingParams, Speculation

__all__ = [
    "DEMO",
    "MODE_LEGEND",
    "OFF",
    "PROBE_TOKENS",
    "expected_weight",
    "modes",
    "percentile",
    "print_json",
    "print_table",
    "ratio",
    "rotate",
    "rounds_text",
    "sampling_params",
    "seconds_per_token",
    "time_call",
    "with_all_drafters",
]

Item = TypeVar("Item")

OFF = "off"
DEMO = "demo"
MODE_LEGEND = "off: no speculation; auto: all drafters, chosen step by step; other names: one drafter alone."
PROBE_TOKENS = 16  # of the answer that an estimate rests on
TABLE_WIDTH = 100  # columns of a table that is not printed to a terminal
MAX_CELL_WIDTH = 40  # a longer cell takes several lines where the table would be too wide
# Estimates: so many more rows double the time of a step, and so many prompt tokens cost one.
ROWS_PER_STEP = 16


def with_all_drafters(config: Config) -> Config:
    """Add the demo's draft model where `auto` serves the demo."""
    if config.speculate != "auto" or config.draft_model is not None or config.model not in (None, DEMO):
        return config
    return replace(config, draft_model=DEMO)


def modes(drafters: Sequence[str]) -> tuple[str, ...]:
    """`off`, each drafter alone where there are several, and `auto`.

    The prompts have no predictions or grammars: the drafters that need them are left out.
    """
    alone = [name for name in drafters if name not in ("prediction", "grammar")]
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


def ratio(plain_s: Sequence[float], other_s: Sequence[float]) -> float:
    """Speed relative to plain: the median over pairs measured next to each other."""
    return statistics.median(plain / other for plain, other in zip(plain_s, other_s, strict=True))


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], legend: Sequence[str] = ()
) -> None:
    """A table as wide as the terminal at most, and lines that explain it.

    Where it does not fit, columns are left out from the right and named.
    """
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = TABLE_WIDTH
    cells = [columns, *rows]
    widths = [max(len(row[index]) for row in cells if index < len(row)) for index in range(len(columns))]
    shown = len(columns)
    while shown > 2 and sum(min(width, MAX_CELL_WIDTH) + 3 for width in widths[:shown]) + 1 > console.width:
        shown -= 1
    table = Table()
    for index, column in enumerate(columns[:shown]):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row[:shown])
    console.print(f"\n{title}", style="bold")
    console.print(table)
    if shown < len(columns):
        console.print(f"left out for width (the JSON has them): {', '.join(columns[shown:])}")
    for line in legend:
        console.print(line)


def print_json(result: Mapping[str, Any]) -> None:
    """The last line of a benchmark. Raises ValueError for a nan, which is not JSON."""
    print(json.dumps({"machine": platform.platform(), **result}, allow_nan=False))


def time_call(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
