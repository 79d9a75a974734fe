"""Prompts, modes, medians, output, and the machine's ceilings (by torch) for all benchmarks."""

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
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.table import Table

from foreword.config.options import Config
from foreword.core.params import SamplingParams, Speculation
from foreword.demo import EXAMPLES
from foreword.errors import ConfigError
from foreword.utils.hugepages import HugePages

__all__ = [
    "DEMO",
    "MATMUL_MAKERS",
    "OFF",
    "ONEDNN_ISA",
    "MemoryReader",
    "PromptExample",
    "matmul_rate",
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
ONEDNN_ISA = MappingProxyType(  # values of ONEDNN_MAX_CPU_ISA by --isa
    {"avx512": "AVX512_CORE_BF16", "avx2": "AVX2", "portable": "SSE41"}
)


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


class MemoryReader:
    """A run of memory larger than the caches, over huge pages where the system has them."""

    def __init__(self, num_bytes: int) -> None:
        self._values = HugePages().allocate(num_bytes).view(torch.float64).fill_(1.0)

    def read_bandwidth(self) -> float:
        """Bytes/s of a sum over all of it, on torch's threads."""
        return self._values.nbytes / time_call(self._values.sum)


def _float_matmul(size: int, dtype: torch.dtype) -> Callable[[], object]:
    left = torch.randn(size, size).to(dtype)
    return lambda: left @ left


def _int8_matmul(size: int) -> Callable[[], object]:
    left = torch.randint(-127, 128, (size, size), dtype=torch.int8)
    return lambda: torch._int_mm(left, left)


MATMUL_MAKERS: Mapping[str, Callable[[int], Callable[[], object]]] = MappingProxyType(
    {
        "bfloat16": lambda size: _float_matmul(size, torch.bfloat16),
        "int8": _int8_matmul,
        "float32": lambda size: _float_matmul(size, torch.float32),
    }
)


def matmul_rate(dtype: str, size: int, rounds: int) -> float:
    """Operations/s (a multiply-add is two) of torch's square products, the best of the rounds."""
    product = MATMUL_MAKERS[dtype](size)
    product()
    return 2 * size**3 / min(time_call(product) for _ in range(rounds))
