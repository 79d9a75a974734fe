"""Prompts, modes, medians and output of all benchmarks. No torch: light commands import it."""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from foreword.config.options import Config
from foreword.core.params import SamplingParams, Speculation
from foreword.demo import EXAMPLES
from foreword.errors import ConfigError

__all__ = [
    "DEMO",
    "OFF",
    "PromptExample",
    "modes",
    "percentile",
    "print_json",
    "print_table",
    "ratio",
    "read_examples",
    "rotate",
    "sampling_params",
    "time_call",
    "with_all_drafters",
]

Item = TypeVar("Item")

OFF = "off"
DEMO = "demo"
MAX_TABLE_WIDTH = 180  # columns of a table that is not printed to a terminal


@dataclass(frozen=True, slots=True)
class PromptExample:
    """A user message and its category."""

    category: str
    prompt: str


def read_examples(args: argparse.Namespace) -> tuple[PromptExample, ...]:
    """The prompts of --prompts, else those of the bundled demo. Raises ConfigError."""
    if not args.prompts:
        return tuple(PromptExample(category, prompt) for category, prompt in EXAMPLES)
    try:
        text = Path(args.prompts).read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines() if line.strip()]
        examples = tuple(PromptExample(str(line.get("kind", "all")), str(line["prompt"])) for line in lines)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"--prompts {args.prompts}: not JSON lines with a prompt ({type(error).__name__}: {error})"
        ) from None
    if not examples:
        raise ConfigError(f"--prompts {args.prompts}: no prompts")
    return examples


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


def ratio(plain_s: Sequence[float], other_s: Sequence[float]) -> float:
    """Speed relative to plain: the median over pairs measured next to each other."""
    return statistics.median(plain / other for plain, other in zip(plain_s, other_s, strict=True))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = max(console.width, MAX_TABLE_WIDTH)
    console.print(table)


def print_json(result: Mapping[str, Any]) -> None:
    """The last line of a benchmark. Raises ValueError for a nan, which is not JSON."""
    print(json.dumps({"machine": platform.platform(), **result}, allow_nan=False))


def time_call(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started
