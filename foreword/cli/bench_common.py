"""What the benchmarks share: prompts, modes, medians, and the way results are shown."""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from foreword.config import Config
from foreword.core.params import SamplingParams, Speculation
from foreword.demo import EXAMPLES
from foreword.errors import ConfigError

__all__ = [
    "DEMO",
    "OFF",
    "PromptExample",
    "modes",
    "sampling_params",
    "percentile",
    "ratio",
    "read_examples",
    "rotate",
    "print_table",
    "print_json",
    "with_all_drafters",
]

Item = TypeVar("Item")

OFF = "off"
DEMO = "demo"
MAX_TABLE_WIDTH = 180  # columns of a table that nobody's window bounds


@dataclass(frozen=True, slots=True)
class PromptExample:
    """A user message, and what kind of work it is."""

    category: str
    prompt: str


def read_examples(args: argparse.Namespace) -> tuple[PromptExample, ...]:
    """Those of --prompts, else those that suit the bundled demo. Raises ConfigError."""
    if not args.prompts:
        return tuple(PromptExample(kind, prompt) for kind, prompt in EXAMPLES)
    try:
        lines = [json.loads(line) for line in Path(args.prompts).read_text(encoding="utf-8").splitlines() if line.strip()]
        found = tuple(PromptExample(str(line.get("kind", "all")), str(line["prompt"])) for line in lines)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(f"--prompts {args.prompts}: not JSON lines with a prompt ({type(error).__name__}: {error})") from None
    if not found:
        raise ConfigError(f"--prompts {args.prompts}: no prompts")
    return found


def with_all_drafters(config: Config) -> Config:
    """With `auto`, every drafter that can run here: the demo brings a draft model of its own."""
    if config.speculate != "auto" or config.draft_model is not None or config.model not in (None, DEMO):
        return config
    return replace(config, draft_model=DEMO)


def modes(drafters: Sequence[str]) -> tuple[str, ...]:
    """What is compared: no speculation, each drafter alone where there are several, and what runs by default.

    These prompts come without predictions and grammars, so there is nothing to see of the drafters that need them.
    """
    alone = [name for name in drafters if name not in ("prediction", "grammar")]
    return (OFF, *(alone if len(alone) > 1 else ()), *(("auto",) if drafters else ()))


def sampling_params(mode: str, max_tokens: int, temperature: float = 0.0, seed: int = 0) -> SamplingParams:
    return SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=seed, speculation=Speculation(mode))


def rotate(items: Sequence[Item], by: int) -> tuple[Item, ...]:
    """The same in another order each round, so that none always goes first."""
    by %= len(items)
    return (*items[by:], *items[:by])


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Nearest rank; None of nothing."""
    if not values:
        return None
    return sorted(values)[max(math.ceil(percent / 100 * len(values)) - 1, 0)]


def ratio(plain_s: Sequence[float], other_s: Sequence[float]) -> float:
    """How many times faster than plain: the median over pairs measured next to each other."""
    return statistics.median(plain / other for plain, other in zip(plain_s, other_s, strict=True))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout; one that goes into a file is as wide as it needs."""
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
    """The last line of a benchmark. A nan would be a bug of ours: it is not JSON."""
    print(json.dumps({"machine": platform.platform(), **result}, allow_nan=False))
