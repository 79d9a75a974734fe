"""`foreword bench kernels`: every operation of a forward pass against the machine's ceilings.

Regime: random weights in the shapes of a known model (or one matrix NxK), bfloat16 activations (float32
for float32 and float16 weights). Experts are one layer of Qwen3-30B-A3B with its router. A case is one
compiled function that runs an operation over as many weights or KV caches as the model has layers, so that
they come from memory, or over fewer where that takes long. Cases of one format are timed in turn, round
after round; torch reads the memory right before each whose data does not fit into a cache. A time is the
median over rounds, a share or ratio the median over rounds of values measured next to each other. Bytes are
those of the format (q8_0: 34 for 32 values). The product rate is that of a loop on registers with the
instruction set's own multiply-adds, or the largest of the run where there is no such loop. A share above
105 % is an error, and so is a row that has other bits alone than among the rows of its case.
"""

from __future__ import annotations

import argparse
import functools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from foreword.bench.command import parse_names, parse_numbers
from foreword.bench.inputs import BLOCK_SIZE, VOCAB_SIZE, RandomInputs, sampling_ops
from foreword.bench.regime import VOID, RegimeError, checked_share, require, shared_cache_bytes
from foreword.bench.roofline import MemoryReader, product_rate
from foreword.bench.session import BenchSession, BenchStep
from foreword.bench.shapes import (
    EXPERTS_SHAPE,
    PARTS,
    WEIGHT_FORMATS,
    ExpertsShape,
    ModelShape,
    read_shape,
)
from foreword.bench.statistics import time_call
from foreword.bench.tables import print_table, rounds_text
from foreword.core.batch import Batch
from foreword.kernels.ops import ExpertsConfig, Ops, PackedLinear
from foreword.kernels.registry import select_backend

SETTLE_S = 0.03  # torch's threads spin this long after the read, on the cores that are measured next
MAX_CALL_S = 0.06  # longest call of a case: fewer copies where all of them take longer
MAX_HEAD_ROWS = 16  # rows of logits in one batch
MAX_VALUES = 1 << 26  # values of one result
REPEATS = 16  # calls of an operation that takes microseconds
MAX_POSITION = 1 << 12  # rows of RoPE's table
EXPERT_ROUTERS = 8
MEMORY_SHARE = 2  # data of this many times the cache comes from memory


@dataclass(frozen=True, slots=True)
class KernelBenchSizes:
    """Sizes that tests make smaller."""

    memory: int = 1 << 28  # bytes of the read that measures bandwidth, at least four times the cache
    working_set: int = 1 << 29  # bytes of copies of one matrix in bfloat16, and of KV caches
    contexts: tuple[int, ...] = (4096, 8192, 32768)
    prompts: tuple[int, ...] = (512, 2048)
    attention_rows: tuple[int, ...] = (1, 4, 8)
    row_counts: tuple[int, ...] = (1, 8, 512)
    sampler_rows: tuple[int, ...] = (1, 8)
    experts: ExpertsShape = EXPERTS_SHAPE
    expert_rows: tuple[int, ...] = (1, 16, 512)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """`call` is timed with the argument that `prepare` makes; it runs the operation `repeats` times."""

    op: str
    setting: str  # weight format, KV dtype, or vocabulary
    rows: int
    call: Callable[[Any], object]
    repeats: int
    num_bytes: float = 0.0  # read by one operation; 0: memory does not bound it
    num_ops: float = 0.0  # arithmetic of one operation; a multiply-add is two
    peak_format: str = ""  # product that bounds it, one of PEAK_TYPES
    prepare: Callable[[], Any] = lambda: None

    def time_op(self) -> float:
        """Seconds of one operation."""
        argument = self.prepare()
        return time_call(lambda: self.call(argument)) / self.repeats


CopiesForward = Callable[[int], Callable[[Batch], Tensor]]  # a compiled pass over so many weights or caches


@dataclass(slots=True)
class CaseTimings:
    case: KernelCase
    seconds: list[float] = field(default_factory=list)  # one per round
    bandwidths: list[float] = field(default_factory=list)  # bytes/s of the read before each round

    @property
    def ops_per_s(self) -> float:
        return self.case.num_ops / statistics.median(self.seconds)

    @property
    def bandwidth_share(self) -> float:
        """Share of the bandwidth that was read before the same rounds."""
        pairs = zip(self.seconds, self.bandwidths, strict=True)
        return statistics.median(self.case.num_bytes / seconds / bandwidth for seconds, bandwidth in pairs)

    def limit_share(self, peak: float) -> float:
        """Share of the time that reading and products need at the least, whichever takes longer."""
        rates = self.bandwidths or [math.inf] * len(self.seconds)
        products_s = self.case.num_ops / peak
        return statistics.median(
            max(products_s, self.case.num_bytes / rate) / seconds
            for seconds, rate in zip(self.seconds, rates, strict=True)
        )

    def ratio(self, base: CaseTimings) -> float:
        """Time over that of `base`, median over rounds."""
        pairs = zip(self.seconds, base.seconds, strict=True)
        return statistics.median(seconds / base_s for seconds, base_s in pairs)


class KernelCases:
    """The cases of one shape on one backend."""

    def __init__(self, ops: Ops, shape: ModelShape) -> None:
        self.ops = ops
        self.shape = shape
        self.inputs = RandomInputs("cpu", "bfloat16")

    def linear(self, name: str, rows: Sequence[int]) -> Iterator[KernelCase]:
        """Every matrix of the shape in weight format `name`, by row count."""
        fmt = WEIGHT_FORMATS[name]
        dtype = torch.float32 if fmt.peak_format == "float32" else torch.bfloat16
        for matrix in self.shape.matrices:
            if not fmt.fits(matrix):
                continue
            source = self.inputs.weight(name, matrix.n, matrix.k)
            weights = [self.ops.pack_linear([source], name) for _ in range(matrix.copies)]
            forward = self._copies_forward(matrix.k, self.ops.linear, weights, dtype)
            for count in rows:
                if count <= (MAX_HEAD_ROWS if matrix.name == "head" else MAX_VALUES // matrix.n):
                    yield KernelCase(
                        f"linear {matrix.name}",
                        name,
                        count,
                        *self._timed_copies(forward, matrix.copies, count),
                        fmt.num_bytes(matrix),
                        2.0 * matrix.n * matrix.k * count,
                        fmt.peak_format,
                    )

    def experts(self, name: str, shape: ExpertsShape, rows: Sequence[int]) -> Iterator[KernelCase]:
        """A router and its experts. Copies have other routers, so that they read other experts."""
        ops, fmt = self.ops, WEIGHT_FORMATS[name]
        dtype = torch.float32 if fmt.peak_format == "float32" else torch.bfloat16
        matrices = []
        for matrix in shape.matrices:
            source = self.inputs.weight(name, matrix.n, matrix.k)
            matrices.append([ops.pack_linear([source], name) for _ in range(matrix.copies)])
        gate_up, down = matrices
        weights, config = (
            ops.pack_experts(gate_up, down),
            ExpertsConfig(shape.num_experts, shape.top_k, True, "silu"),
        )
        table = ops.pack_linear([self.inputs.normal(VOCAB_SIZE, shape.hidden)], "bfloat16")
        routers = [
            ops.pack_linear([self.inputs.normal(shape.num_experts, shape.hidden)], "float32")
            for _ in range(EXPERT_ROUTERS)
        ]

        def run_experts(x: Tensor, router: PackedLinear) -> Tensor:
            return ops.experts(x, ops.linear(x, router, torch.float32), weights, config)

        forward = self._copies_forward(shape.hidden, run_experts, routers, dtype, table)

        def count_chosen(router: PackedLinear, count: int) -> int:
            """Experts that the batch of RandomInputs reads."""
            x = ops.embedding(torch.arange(count) % VOCAB_SIZE, table, dtype)
            return len(set(ops.top_ids(ops.linear(x, router, torch.float32), shape.top_k).flatten().tolist()))

        for count in rows:
            call, copies = self._timed_copies(forward, EXPERT_ROUTERS, count)
            chosen = statistics.mean(count_chosen(router, count) for router in routers[:copies])
            yield KernelCase(
                f"experts {shape.top_k} of {shape.num_experts}",
                name,
                count,
                call,
                copies,
                chosen * sum(map(fmt.num_bytes, shape.matrices)) + 4 * shape.num_experts * shape.hidden,
                2.0 * count * shape.top_k * sum(matrix.n * matrix.k for matrix in shape.matrices),
                fmt.peak_format,
            )

    def attention(
        self,
        kind: str,
        contexts: Sequence[int],
        prompts: Sequence[int],
        rows: Sequence[int],
        working_set: int,
    ) -> Iterator[KernelCase]:
        """Rows at the end of a context, and whole prompts, over the KV caches of all layers, if they fit."""
        shape, tokens = self.shape, max((*contexts, *prompts), default=0)
        slots = (-(-tokens // BLOCK_SIZE) + 1) * BLOCK_SIZE
        layer_bytes = 4 * slots * shape.kv_heads * shape.head_dim
        layers = min(max(working_set // layer_bytes, 1), shape.layers)
        caches = [self.inputs.kv_cache(shape, slots, kind) for _ in range(layers)]
        dtype, width = caches[0].k.dtype, shape.heads * shape.head_dim

        @functools.cache
        def forward(copies: int) -> Callable[[Batch], Tensor]:
            def attend(x: Tensor, batch: Batch) -> Tensor:
                q = x.view(-1, shape.heads, shape.head_dim)
                metadata = self.ops.build_attention_metadata(batch)
                for cache in caches[:copies]:
                    y = self.ops.attention(q, cache, batch, shape.head_dim**-0.5, metadata=metadata)
                return y.view(-1, width)

            return self._forward(width, attend)

        setting = f"attention, {str(dtype).removeprefix('torch.')} KV"
        for context in contexts:
            scale_bytes = 4 if dtype == torch.int8 else 0
            size = 2.0 * context * shape.kv_heads * (shape.head_dim * dtype.itemsize + scale_bytes)
            products = 4.0 * shape.heads * shape.head_dim * context
            for count in rows:
                call, copies = self._timed_copies(forward, layers, count, context - count)
                case = (f"decode at {context}", setting, count, call, copies, size, count * products)
                yield KernelCase(*case, "bfloat16")
        for length in prompts:
            num_ops = 2.0 * shape.heads * shape.head_dim * length * (length + 1)
            call, copies = self._timed_copies(forward, layers, length)
            yield KernelCase("prompt", setting, length, call, copies, 0.0, num_ops, "bfloat16")

    def elementwise(self, counts: Sequence[int]) -> Iterator[KernelCase]:
        """Norm, RoPE and gated activation."""
        ops, shape = self.ops, self.shape
        weight, table = torch.ones(shape.hidden), torch.randn(MAX_POSITION, shape.head_dim)
        width = shape.heads * shape.head_dim

        def rope(x: Tensor, batch: Batch) -> Tensor:
            return ops.rope(x.view(-1, shape.heads, shape.head_dim), table, batch.positions).view(-1, width)

        forwards = {
            "norm": self._repeated(shape.hidden, lambda x, _: ops.rms_norm(x, weight, 1e-6)),
            "rope": self._repeated(width, rope),
            "gated silu": self._repeated(2 * shape.intermediate, lambda x, _: ops.gated_act(x, "silu")),
        }
        for op, forward in forwards.items():
            for count in counts:
                yield KernelCase(op, "bfloat16 rows", count, self._timed_call(forward, count), REPEATS)

    def sampler(self, vocab: int, counts: Sequence[int]) -> Iterator[KernelCase]:
        for count in counts:
            logits = torch.randn(count, vocab).mul_(4)
            for name, op in sampling_ops(self.ops, count, "cpu").items():
                yield KernelCase(name, f"sampler, V = {vocab}", count, op, 1, prepare=logits.clone)

    def _copies_forward(
        self,
        width: int,
        op: Callable[[Tensor, PackedLinear], Tensor],
        weights: Sequence[PackedLinear],
        dtype: torch.dtype,
        table: PackedLinear | None = None,
    ) -> CopiesForward:
        @functools.cache
        def forward(copies: int) -> Callable[[Batch], Tensor]:
            def run(x: Tensor, batch: Batch) -> Tensor:
                for weight in weights[:copies]:
                    y = op(x, weight)
                return y

            return self._forward(width, run, dtype, table)

        return forward

    def _repeated(self, width: int, op: Callable[[Tensor, Batch], Tensor]) -> Callable[[Batch], Tensor]:
        def repeat(x: Tensor, batch: Batch) -> Tensor:
            for _ in range(REPEATS):
                y = op(x, batch)
            return y

        return self._forward(width, repeat)

    def _forward(
        self,
        width: int,
        op: Callable[[Tensor, Batch], Tensor],
        dtype: torch.dtype = torch.bfloat16,
        table: PackedLinear | None = None,
    ) -> Callable[[Batch], Tensor]:
        """A compiled pass: random activations [T, width] (rows of `table`), then `op`."""
        ops = self.ops
        table = table or ops.pack_linear([self.inputs.normal(VOCAB_SIZE, width)], "bfloat16")
        return ops.compile(
            lambda batch: ops.index_rows(
                op(ops.embedding(batch.token_ids, table, dtype), batch), batch.sample_rows
            )
        )

    def _timed_copies(
        self, forward: CopiesForward, copies: int, rows: int, start: int = 0
    ) -> tuple[Callable[[Any], object], int]:
        """A timed call over as many copies as take MAX_CALL_S, and their number."""
        one = self._timed_call(forward(1), rows, start)
        count = min(copies, max(int(MAX_CALL_S / time_call(lambda: one(None))), 1))
        return self._timed_call(forward(count), rows, start), count

    def _timed_call(
        self, forward: Callable[[Batch], Tensor], rows: int, start: int = 0
    ) -> Callable[[Any], object]:
        """`forward` on one request of `rows` tokens after `start` cached ones; compiles it.

        Raises RegimeError if the last row has other bits than alone.
        """
        table = self.inputs.block_table(start + rows)
        batch = self.inputs.batch(self.ops, [(start, rows, table)])
        alone = self.inputs.batch(self.ops, [(start + rows - 1, 1, table)])
        is_equal = torch.equal(forward(batch).clone(), forward(alone))
        require(f"row {rows} has the same bits among {rows} rows as alone", is_equal, True)
        return lambda _: forward(batch)


def run(args: argparse.Namespace, sizes: KernelBenchSizes | None = None) -> int:
    sizes = sizes or KernelBenchSizes()
    formats = parse_names("kinds", args.kinds, WEIGHT_FORMATS)
    parts = parse_names("parts", args.parts, PARTS)
    rows = parse_numbers("rows", args.rows)
    shape = read_shape(args.shape, sizes.working_set)
    threads = args.threads or len(os.sched_getaffinity(0))
    ops = select_backend("cpu", False, threads, args.isa)
    torch.set_num_threads(threads)
    cache_bytes = shared_cache_bytes()
    with BenchSession(args) as session, torch.inference_mode():
        with session.waiting("measuring memory bandwidth and product rates"):
            memory = MemoryReader(max(sizes.memory, 4 * cache_bytes))
            types = sorted({"bfloat16", *(WEIGHT_FORMATS[name].peak_format for name in formats)})
            loops = functools.partial(_product_rates, types, getattr(ops, "isa", ""), threads, args.rounds)
            before = loops()
        groups = _groups(KernelCases(ops, shape), formats, parts, rows, sizes)
        expected_s = {group.name: group.num_cases * (MAX_CALL_S + SETTLE_S) for group in groups}
        steps = [
            step
            for group in groups
            for step in group.steps(memory, args.rounds, expected_s[group.name], cache_bytes)
        ]
        session.run(steps, f"{len(groups)} groups of operations, {rounds_text(args.rounds)} of each")
        measured = [timings for group in groups if group.is_complete for timings in group.timings]
        peaks = {
            name: max(before[name], rate) or _largest_rate(measured, name) for name, rate in loops().items()
        }
        regime = {"shape": shape.name, "backend": ops.name, "threads": threads, "rounds": args.rounds}
        result = _result(regime, measured, {name: rate for name, rate in peaks.items() if rate})
        for case in result["cases"]:
            if "error" in case:
                session.errors[f"{case['op']}, {case['of']}, {case['rows']} rows"] = case["error"]
        return session.finish(result, _show, finished=len(measured), passed=True)


def _product_rates(types: Sequence[str], isa: str, threads: int, rounds: int) -> dict[str, float]:
    """By type; 0 where there is no loop. They are read before and after the cases: a machine may be busy."""
    return {name: product_rate(isa, name, threads, rounds) or 0.0 for name in types}


def _largest_rate(measured: Sequence[CaseTimings], dtype: str) -> float:
    """The ceiling where no loop on registers gives it: operations/s of the run's fastest call; 0 of none."""
    fastest = (t.case.num_ops / min(t.seconds) for t in measured if t.case.peak_format == dtype)
    return max(fastest, default=0.0)


@dataclass(slots=True)
class CaseGroup:
    """Cases that are in memory together and timed in turn."""

    name: str
    make: Callable[[], Iterable[KernelCase]]
    num_cases: int = 0  # estimate for the time of a round
    timings: list[CaseTimings] = field(default_factory=list)
    is_complete: bool = False

    def steps(
        self, memory: MemoryReader, rounds: int, expected_s: float, cache_bytes: int
    ) -> list[BenchStep]:
        """Make the cases, then time every case once a round; the last round frees their memory."""
        steps = [BenchStep(self.name, f"{self.name}, random values", 2 * expected_s, self._build)]
        for number in range(1, rounds + 1):
            measure = functools.partial(self._measure, memory, cache_bytes, is_last=number == rounds)
            label = f"{self.name}, round {number} of {rounds}"
            steps.append(BenchStep(self.name, label, expected_s, measure))
        return steps

    def _build(self) -> None:
        """An uncounted first call of each case allocates."""
        self.timings = [CaseTimings(case) for case in self.make()]
        for timings in self.timings:
            timings.case.time_op()

    def _measure(self, memory: MemoryReader, cache_bytes: int, is_last: bool) -> None:
        for timings in self.timings:
            if timings.case.num_bytes * timings.case.repeats > MEMORY_SHARE * cache_bytes:
                timings.bandwidths.append(memory.read_bandwidth())
                time.sleep(SETTLE_S)
            timings.seconds.append(timings.case.time_op())
            if is_last:
                timings.case = replace(timings.case, call=lambda _: None, prepare=lambda: None)
        self.is_complete = is_last


def _groups(
    cases: KernelCases,
    formats: Sequence[str],
    parts: Sequence[str],
    rows: Sequence[int],
    sizes: KernelBenchSizes,
) -> list[CaseGroup]:
    partial, shape = functools.partial, cases.shape
    groups = [_linear_group(cases, name, rows) for name in formats] if "linear" in parts else []
    if "experts" in parts and shape.layers:
        fitting = [name for name in formats if all(map(WEIGHT_FORMATS[name].fits, sizes.experts.matrices))]
        for name in fitting:
            make = partial(cases.experts, name, sizes.experts, sizes.expert_rows)
            groups.append(CaseGroup(f"experts {name}", make, len(sizes.expert_rows)))
    if "attention" in parts and shape.layers:
        lengths = (sizes.contexts, sizes.prompts, sizes.attention_rows, sizes.working_set)
        count = len(sizes.contexts) * len(sizes.attention_rows) + len(sizes.prompts)
        for kind, name in (("auto", "attention"), ("int8", "attention, int8 KV")):
            groups.append(CaseGroup(name, partial(cases.attention, kind, *lengths), count))
    if "rows" in parts and shape.layers:
        groups.append(CaseGroup("norm, rope, activation", partial(cases.elementwise, sizes.row_counts)))
    if "sampler" in parts and shape.vocab:
        groups.append(CaseGroup("sampler", partial(cases.sampler, shape.vocab, sizes.sampler_rows), 1))
    return groups


def _linear_group(cases: KernelCases, name: str, rows: Sequence[int]) -> CaseGroup:
    matrices = [matrix for matrix in cases.shape.matrices if WEIGHT_FORMATS[name].fits(matrix)]
    make = functools.partial(cases.linear, name, rows)
    return CaseGroup(f"linear {name}", make, len(matrices) * len(rows))


def _result(
    regime: Mapping[str, Any], measured: Sequence[CaseTimings], peaks: Mapping[str, float]
) -> dict[str, Any]:
    bandwidths = [bandwidth for timings in measured for bandwidth in timings.bandwidths]
    read = {"median": statistics.median(bandwidths), "best": max(bandwidths)} if bandwidths else {}
    singles = {(t.case.op, t.case.setting): t for t in reversed(measured) if t.case.rows == 1}
    return {
        **regime,
        "read_gb_s": {name: rate / 1e9 for name, rate in read.items()},
        "peak_gop_s": {name: rate / 1e9 for name, rate in peaks.items()},
        "cases": [_figures(t, singles.get((t.case.op, t.case.setting)), peaks) for t in measured],
    }


def _show(result: Mapping[str, Any]) -> None:
    print(", ".join(f"{name} {result[name]}" for name in ("shape", "backend", "threads", "rounds")))
    columns = ("operation", "rows", "µs", "of 1 row", "GB/s", "of read", "Gop/s", "of peak", "of limit")
    for setting, group in groupby(result["cases"], lambda figure: figure["of"]):
        print_table(setting, columns, [_cells(figure) for figure in group])
    limits = [(f"read, {name}", f"{rate:.1f} GB/s") for name, rate in result["read_gb_s"].items()]
    limits += [(f"peak, {name}", f"{rate:.0f} Gop/s") for name, rate in result["peak_gop_s"].items()]
    legend = (
        "µs: of one operation, median over rounds; of 1 row: that time over the time for one row.",
        "of read: share of the memory bandwidth that torch read with right before; empty where the data fits "
        "into a cache. Few rows are bound by it.",
        "of peak: share of the product rate of a loop on registers. Many rows are bound by it.",
        "of limit: the longer of the times that reading and products need at these rates, over the time.",
    )
    print_table("limits in this run", ("limit", "rate"), limits, legend)


def _figures(timings: CaseTimings, single: CaseTimings | None, peaks: Mapping[str, float]) -> dict[str, Any]:
    """Figures of a case that apply to it; `single` is the same operation on one row."""
    case, seconds = timings.case, statistics.median(timings.seconds)
    figures: dict[str, Any] = {"op": case.op, "of": case.setting, "rows": case.rows, "us": seconds * 1e6}
    if single is not None:
        figures["ratio"] = timings.ratio(single)
    shares: dict[str, tuple[float, float]] = {}  # name: (rate, ceiling)
    if case.num_bytes:
        figures["gb_s"] = case.num_bytes / seconds / 1e9
    if timings.bandwidths:
        shares["of_read"] = timings.bandwidth_share, 1.0
    if case.peak_format:
        figures["gop_s"] = timings.ops_per_s / 1e9
        shares["of_peak"] = timings.ops_per_s, peaks[case.peak_format]
        shares["of_limit"] = timings.limit_share(peaks[case.peak_format]), 1.0
    for name, (rate, ceiling) in shares.items():
        try:
            figures[name] = checked_share(rate, ceiling)
        except RegimeError as error:
            figures |= {name: None, "error": str(error)}
    return figures


def _cells(figures: dict[str, Any]) -> tuple[str, ...]:
    formats = {
        "us": "{:.1f}",
        "ratio": "{:.2f}x",
        "gb_s": "{:.1f}",
        "of_read": "{:.0%}",
        "gop_s": "{:.0f}",
        "of_peak": "{:.0%}",
        "of_limit": "{:.0%}",
    }
    numbers = (
        "" if name not in figures else VOID if figures[name] is None else text.format(figures[name])
        for name, text in formats.items()
    )
    return figures["op"], str(figures["rows"]), *numbers
