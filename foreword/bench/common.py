"""What the benchmarks share: prompts, modes, medians, and the way results are shown.

What the machine allows, measured beside whatever is held against it: reading memory, and products.

Both by torch, which has no part in Foreword's own kernels.
"""

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
from torch import Tensor

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
        lines = [
            json.loads(line)
            for line in Path(args.prompts).read_text(encoding="utf-8").splitlines()
            if line.strip()
        ]
        found = tuple(PromptExample(str(line.get("kind", "all")), str(line["prompt"])) for line in lines)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"--prompts {args.prompts}: not JSON lines with a prompt ({type(error).__name__}: {error})"
        ) from None
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
    return SamplingParams(
        temperature=temperature, max_tokens=max_tokens, seed=seed, speculation=Speculation(mode)
    )


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


# What oneDNN may use (ONEDNN_MAX_CPU_ISA), so that it is measured with the same instructions.
ONEDNN_ISA: Mapping[str, str] = MappingProxyType(
    {"avx512": "AVX512_CORE_BF16", "avx2": "AVX2", "portable": "SSE41"}
)


def time_call(call: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class MemoryReader:
    """A run of memory larger than the caches, over huge pages where the system has them."""

    def __init__(self, num_bytes: int) -> None:
        self._values = HugePages().allocate(num_bytes).view(torch.float64).fill_(1.0)

    def read_bandwidth(self) -> float:
        """Bytes a second of adding it all up, on torch's threads."""
        return self._values.nbytes / time_call(self._values.sum)


def _bfloat16(size: int) -> Callable[[], Tensor]:
    left = torch.randn(size, size).bfloat16()
    return lambda: left @ left


def _float32(size: int) -> Callable[[], Tensor]:
    left = torch.randn(size, size)
    return lambda: left @ left


def _int8(size: int) -> Callable[[], Tensor]:
    left = torch.randint(-127, 128, (size, size), dtype=torch.int8)
    return lambda: torch._int_mm(left, left)


MATMUL_MAKERS: Mapping[str, Callable[[int], Callable[[], Tensor]]] = MappingProxyType(
    {"bfloat16": _bfloat16, "int8": _int8, "float32": _float32}
)


def matmul_rate(dtype: str, size: int, rounds: int) -> float:
    """Operations a second (a multiply-add is two) of torch's product of square matrices, the best of the rounds."""
    product = MATMUL_MAKERS[dtype](size)
    product()
    return 2 * size**3 / min(time_call(product) for _ in range(rounds))
