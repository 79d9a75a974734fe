"""`foreword bench kernels`: every operation of a forward pass against what the machine allows.

Regime: random weights of the matrices of a known model (or one matrix NxK), activations in bfloat16 (float32 for
float32 and float16 weights). Linear layers run over as many copies of each matrix as the model has layers, attention
over as many caches, so that weights come from memory. All cases of one kind are timed in turn, round after round;
the memory is read by torch right before each of them. A time is the median over rounds, a share or ratio the median
over rounds of what was measured next to each other. Bytes are those of the kind (q8_0: 34 for 32 values); a machine
whose caches hold a good part of the weights may show more than all of its bandwidth. The product rate is the largest
that was seen in the run, by torch on square matrices or by Foreword.

With --isa torch's own products are held to the same instruction set.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch

from foreword.bench.cases import KernelCase, KernelCases
from foreword.bench.common import ONEDNN_ISA, MemoryReader, matmul_rate, print_json, print_table
from foreword.bench.shapes import PARTS, WEIGHT_FORMATS, read_shape
from foreword.cli.terminal import track_progress
from foreword.errors import ConfigError
from foreword.kernels.registry import select_backend

__all__ = ["KernelBenchSizes", "run"]

SETTLE_S = 0.03  # torch's threads spin for that long after the read, on the cores that are measured next


@dataclass(frozen=True, slots=True)
class KernelBenchSizes:
    """How much is measured; tests measure little.

    memory   bytes of the read that bandwidth is taken from
    product  side of the square matrices that the product rate is taken from
    """

    memory: int = 1 << 30
    product: int = 2048
    contexts: tuple[int, ...] = (1024, 4096)
    prompts: tuple[int, ...] = (512, 2048)
    attention_rows: tuple[int, ...] = (1, 8)
    row_counts: tuple[int, ...] = (1, 8, 512)
    sampler_rows: tuple[int, ...] = (1, 8)


@dataclass(slots=True)
class CaseTimings:
    """A case and its rounds; `bandwidths` of the reads before them."""

    case: KernelCase
    seconds: list[float] = field(default_factory=list)
    bandwidths: list[float] = field(default_factory=list)

    @property
    def ops_per_s(self) -> float:
        """Operations a second, median."""
        return self.case.num_ops / statistics.median(self.seconds)

    @property
    def bandwidth_share(self) -> float:
        pairs = zip(self.seconds, self.bandwidths, strict=True)
        return statistics.median(self.case.num_bytes / span / bandwidth for span, bandwidth in pairs)

    def ratio(self, other: CaseTimings) -> float:
        """How many times as long as another, median over rounds."""
        return statistics.median(mine / its for mine, its in zip(self.seconds, other.seconds, strict=True))


def run(args: argparse.Namespace, sizes: KernelBenchSizes | None = None) -> int:
    sizes = sizes or KernelBenchSizes()
    kinds = _parse_names("kinds", args.kinds, WEIGHT_FORMATS)
    parts = _parse_names("parts", args.parts, PARTS)
    rows = _parse_counts(args.rows)
    shape = read_shape(args.shape, sizes.memory // 2)
    threads = args.threads or len(os.sched_getaffinity(0))
    if args.isa in ONEDNN_ISA:
        os.environ["ONEDNN_MAX_CPU_ISA"] = ONEDNN_ISA[args.isa]
    ops = select_backend("cpu", False, threads, args.isa)
    torch.set_num_threads(threads)
    with torch.inference_mode():
        memory = MemoryReader(sizes.memory)
        peaks = {kind: matmul_rate(kind, sizes.product, args.rounds) for kind in _peak_formats(kinds)}
        groups = _groups(KernelCases(ops, shape), kinds if "linear" in parts else (), parts, rows, sizes)
        measured = [done for cases in groups for done in _measure(cases, memory, args.rounds)]
    for done in measured:
        if done.case.peak_format in peaks:
            peaks[done.case.peak_format] = max(peaks[done.case.peak_format], done.ops_per_s)
    regime = {"shape": shape.name, "backend": ops.name, "threads": threads, "rounds": args.rounds}
    _show(regime, measured, peaks)
    return 0


def _parse_names(flag: str, text: str, known: Mapping[str, Any] | Sequence[str]) -> tuple[str, ...]:
    """Names joined by commas. Raises ConfigError for an unknown one."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in known:
            raise ConfigError(f"--{flag}: unknown {name!r}; known: {', '.join(known)}")
    return names


def _parse_counts(text: str) -> tuple[int, ...]:
    try:
        counts = tuple(int(word) for word in text.split(","))
    except ValueError:
        counts = (0,)
    if min(counts) < 1:
        raise ConfigError(f"--rows must be whole numbers above 0, joined by commas, got {text!r}")
    return counts


def _peak_formats(weight_formats: Sequence[str]) -> list[str]:
    return sorted({"bfloat16", *(WEIGHT_FORMATS[kind].peak_format for kind in weight_formats)})


def _groups(
    cases: KernelCases,
    weight_formats: Sequence[str],
    parts: Sequence[str],
    rows: Sequence[int],
    sizes: KernelBenchSizes,
) -> Iterator[list[KernelCase]]:
    """Cases that are timed in turn; those of one group are in memory together."""
    for kind in weight_formats:
        yield list(cases.linear(kind, rows))
    if "attention" in parts and cases.shape.layers:
        for kv_dtype in (torch.bfloat16, torch.int8):
            yield list(cases.attention(kv_dtype, sizes.contexts, sizes.prompts, sizes.attention_rows))
    if "rows" in parts and cases.shape.layers:
        yield list(cases.elementwise(sizes.row_counts))
    if "sampler" in parts and cases.shape.vocab:
        yield list(cases.sampler(cases.shape.vocab, sizes.sampler_rows))


def _measure(cases: Sequence[KernelCase], memory: MemoryReader, rounds: int) -> list[CaseTimings]:
    """Every case once a round; what a first call allocates is not counted."""
    measured = [CaseTimings(case) for case in cases]
    for case in cases:
        case.time_op()
    for done in track_progress(measured * rounds, cases[0].setting if cases else "", len(cases) * rounds):
        if done.case.num_bytes:
            done.bandwidths.append(memory.read_bandwidth())
            time.sleep(SETTLE_S)
        done.seconds.append(done.case.time_op())
    return measured


def _show(regime: dict[str, Any], measured: Sequence[CaseTimings], peaks: Mapping[str, float]) -> None:
    bandwidths = [bandwidth for done in measured for bandwidth in done.bandwidths]
    read = (
        {"median": statistics.median(bandwidths) / 1e9, "best": max(bandwidths) / 1e9} if bandwidths else {}
    )
    firsts = {(done.case.op, done.case.setting): done for done in reversed(measured) if done.case.rows == 1}
    figures = [_figures(done, firsts.get((done.case.op, done.case.setting)), peaks) for done in measured]
    print(", ".join(f"{name} {value}" for name, value in regime.items()))
    columns = ("operation", "rows", "µs", "of 1 row", "GB/s", "of read", "Gop/s", "of peak")
    for setting, group in groupby(figures, lambda figure: figure["of"]):
        print_table(setting, columns, [_cells(figure) for figure in group])
    limits = [(f"read, {name}", f"{rate:.1f} GB/s") for name, rate in read.items()]
    limits += [(f"peak, {name}", f"{rate / 1e9:.0f} Gop/s") for name, rate in peaks.items()]
    print_table("limits in this run", ("limit", "rate"), limits)
    gop_s = {name: rate / 1e9 for name, rate in peaks.items()}
    print_json({"bench": "kernels", **regime, "read_gb_s": read, "peak_gop_s": gop_s, "cases": figures})


def _figures(done: CaseTimings, first: CaseTimings | None, peaks: Mapping[str, float]) -> dict[str, Any]:
    """Of one case; what does not apply is absent."""
    case, span = done.case, statistics.median(done.seconds)
    figures: dict[str, Any] = {"op": case.op, "of": case.setting, "rows": case.rows, "us": span * 1e6}
    if first is not None:
        figures["ratio"] = done.ratio(first)
    if case.num_bytes:
        figures |= {"gb_s": case.num_bytes / span / 1e9, "of_read": done.bandwidth_share}
    if case.peak_format:
        figures |= {"gop_s": done.ops_per_s / 1e9, "of_peak": done.ops_per_s / peaks[case.peak_format]}
    return figures


def _cells(figures: dict[str, Any]) -> tuple[str, ...]:
    formats = {
        "us": "{:.1f}",
        "ratio": "{:.2f}x",
        "gb_s": "{:.1f}",
        "of_read": "{:.0%}",
        "gop_s": "{:.0f}",
        "of_peak": "{:.0%}",
    }
    numbers = (text.format(figures[name]) if name in figures else "" for name, text in formats.items())
    return figures["op"], str(figures["rows"]), *numbers
