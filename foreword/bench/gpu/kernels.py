"""Sections "checks" and "kernels" of `foreword bench gpu`: bits of products and attention, kernel speed.

Errors and the other kernels' bits are tests (tests/kernels/triton): run pytest on the machine with the GPU.
Timed cases are CUDA graphs over more weights or KV caches than the caches of the device hold.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foreword.bench.gpu.config import BenchConfig
from foreword.bench.gpu.device import roofline
from foreword.bench.gpu.report import Report
from foreword.bench.inputs import BLOCK_SIZE, RandomInputs, sampling_ops
from foreword.bench.shapes import WEIGHT_FORMATS, ModelShape, WeightMatrix
from foreword.kernels.gpu import triton_unavailable_reason
from foreword.kernels.ops import Ops, QuantizedBlocks
from foreword.kernels.registry import select_backend

__all__ = ["OpChecks", "checks", "kernel_ops", "kernels"]

Rows = Callable[[Tensor], Tensor]

CHECKED_FORMATS = ("int8", "int4", "fp8", "q8_0", "q4_k", "q6_k")
TIMED_FORMATS = ("int8", "fp8", "int4")
KV_KINDS = ("auto", "int8", "fp8")
FP8_BYTES = 1.0
MAX_CHECKED_VALUES = 1 << 28  # of one result
MAX_TIMED_VALUES = 1 << 30
NUM_DRAFTED = 4
WINDOW = 100  # tokens, in the check of sliding-window attention
MANY_ROWS = 256  # from here on the product takes longer than its weights: few copies are enough
MAX_COPIES, FEW_COPIES = 256, 2
NUM_CACHES = 4
BATCH_SIZE, BATCH_CONTEXT = 64, 1024  # of timed batched decoding


def kernel_ops(device: str) -> Ops:
    """Triton's kernels where Triton is installed, even if loading would decline them, else the backend."""
    if importlib.util.find_spec("triton") is None:
        return select_backend(device)
    ops: Ops = importlib.import_module("foreword.kernels.triton.backend").TritonOps(eager=True)
    return ops


def checks(config: BenchConfig, report: Report) -> None:
    """The section "checks": every mismatch of a row's bits between batches is listed."""
    if not config.is_dry_run:  # too large for Triton's interpreter
        report.measure("check at load", _check_load)
    check = OpChecks(config)
    with torch.inference_mode():
        for role in config.kernel_roles:
            for matrix in config.shape(role).matrices:
                report.measure(f"linear {role} {matrix.name}", partial(check.linear, config.dtype, matrix))
        shape = config.shape(config.kernel_roles[0])
        down = next(matrix for matrix in shape.matrices if matrix.name == "down")
        for name in CHECKED_FORMATS:
            if name not in WEIGHT_FORMATS or WEIGHT_FORMATS[name].fits(down):
                report.measure(f"linear {name}", partial(check.linear, name, down))
        report.measure("linear, negative control", partial(check.torch_linear, down))
        report.measure("linear repeated", partial(check.repeated_linear, down))
        for role in config.kernel_roles:
            shape = config.shape(role)
            report.measure(f"gated {role}", partial(check.gated, shape))
            for kind in KV_KINDS:
                report.measure(f"attention {role}, {kind} KV", partial(check.attention, shape, kind, None))
            report.measure(f"attention {role}, window", partial(check.attention, shape, "auto", WINDOW))


def _check_load() -> Mapping[str, Any]:
    """The row-invariance checks that decide at load whether Triton is used."""
    reason = triton_unavailable_reason()
    return {"ok": reason is None, "declined": reason}


class OpChecks:
    """Checks of bits; each returns `ok` and the list of mismatches."""

    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.ops = kernel_ops(config.device)
        self.inputs = RandomInputs(config.device, config.dtype)

    def linear(self, kind: str, matrix: WeightMatrix) -> dict[str, Any]:
        weight = self.inputs.weight(kind, matrix.n, matrix.k)
        stored = self.config.dtype if isinstance(weight, QuantizedBlocks) else kind
        packed = self.ops.pack_linear([weight], stored)
        x = self._input(matrix)
        if matrix.name == "head":
            return self._compare(x, lambda rows: self.ops.linear(rows, packed, torch.float32))
        residual = self.inputs.normal(len(x), matrix.n)
        plain = self._compare(x, lambda rows: self.ops.linear(rows, packed, None))
        added = self._compare(
            x, lambda rows: self.ops.linear(rows, packed, None, residual[: len(rows)]), False
        )
        return {**plain, "ok": plain["ok"] and added["ok"], "differ_added": added["differ"]}

    def torch_linear(self, matrix: WeightMatrix) -> dict[str, Any]:
        """Torch's own product must be caught, or these checks see nothing."""
        weight = self.inputs.normal(matrix.n, matrix.k, scale=matrix.k**-0.5)
        return {"caught": not self._compare(self._input(matrix), lambda rows: rows @ weight.T)["ok"]}

    def repeated_linear(self, matrix: WeightMatrix) -> dict[str, Any]:
        """One product again and again, with another kernel in between: a race would change its bits."""
        weight = self.inputs.normal(matrix.n, matrix.k, scale=matrix.k**-0.5)
        packed = self.ops.pack_linear([weight], self.config.dtype)
        norm = torch.ones(matrix.k, device=self.config.device)
        differ = []
        for rows in (1, max(count for count in self.config.row_counts if count <= MANY_ROWS)):
            x = self.inputs.normal(rows, matrix.k)
            expected = self.ops.linear(x, packed, None)
            for number in range(self.config.repeats):
                self.ops.rms_norm(x, norm, 1e-6)
                if not _same_bits(self.ops.linear(x, packed, None), expected):
                    differ.append(f"{rows} rows, call {number}")
        return {"ok": not differ, "calls": 2 * self.config.repeats, "differ": differ}

    def gated(self, shape: ModelShape) -> dict[str, Any]:
        matrix = WeightMatrix("gate_up", 2 * shape.intermediate, shape.hidden, 1)
        weight = self.inputs.normal(matrix.n, matrix.k, scale=matrix.k**-0.5)
        packed = self.ops.pack_linear([weight], self.config.dtype)
        return self._compare(self._input(matrix), lambda x: self.ops.linear_gated_act(x, packed, "silu"))

    def attention(self, shape: ModelShape, kind: str, window: int | None) -> dict[str, Any]:
        """One context as a whole prompt, in chunks, row by row, verified, and beside other requests."""
        tokens, ops, inputs = self.config.check_context, self.ops, self.inputs
        blocks = inputs.block_table(tokens)
        other = inputs.block_table(tokens, 1 + len(blocks))
        cache = inputs.kv_cache(shape, (1 + len(blocks) + len(other)) * BLOCK_SIZE, kind)
        q = inputs.normal(tokens, shape.heads, shape.head_dim)

        def attend(*chunks: tuple[int, int, Sequence[int]]) -> Tensor:
            """Outputs of the first chunk."""
            batch = inputs.batch(ops, chunks)
            queries = torch.cat([q[start : start + count] for start, count, _ in chunks])
            padding = q.new_zeros(len(batch.positions) - len(queries), *q.shape[1:])
            y = ops.attention(torch.cat([queries, padding]), cache, batch, shape.head_dim**-0.5, window)
            return y[: chunks[0][1]]

        whole = attend((0, tokens, blocks))
        middle, last = tokens // 3 + 1, tokens - NUM_DRAFTED - 2
        cases: list[tuple[str, int, int, list[tuple[int, int, list[int]]]]] = [
            ("chunk", 0, middle, []),
            ("chunk", middle, tokens - middle, []),
        ]
        decodes = [(tokens - 1 - number % 3, 1, other) for number in range(7)]
        for row in (last,) if self.config.is_dry_run else (0, middle, last, tokens - 1):
            count = min(1 + NUM_DRAFTED, tokens - row)
            cases += [
                ("alone", row, 1, []),
                ("with decodes", row, 1, decodes),
                ("with a prompt", row, 1, [(0, tokens // 2, other)]),
                ("verified", row, count, []),
                ("verified with others", row, count, [(tokens - count, count, other)] * 3),
            ]
        differ = [
            f"{name} at {start}"
            for name, start, count, neighbours in cases
            if not _same_bits(attend((start, count, blocks), *neighbours), whole[start : start + count])
        ]
        return {"ok": not differ, "cases": len(cases), "differ": differ}

    def _input(self, matrix: WeightMatrix) -> Tensor:
        rows = max(count for count in self.config.row_counts if count * matrix.n <= MAX_CHECKED_VALUES)
        return self.inputs.normal(rows, matrix.k)

    def _compare(self, x: Tensor, run: Rows, with_offset: bool = True) -> dict[str, Any]:
        """`run` on the first rows, and on rows from the middle, against `run` on all rows of x."""
        whole, differ = run(x), []
        for count in (count for count in self.config.row_counts if count < len(x)):
            for start in (0, min(3 + count // 2, len(x) - count))[: 1 + with_offset]:
                rows = slice(start, start + count)
                if not _same_bits(run(x[rows].contiguous()), whole[rows]):
                    differ.append(f"{count} rows from {start}")
        return {"ok": not differ, "rows": len(x), "differ": differ}


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Unlike torch.equal, 0.0 and -0.0 differ and a NaN equals itself."""
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return torch.equal(left.contiguous().view(ints), right.contiguous().view(ints))


def kernels(config: BenchConfig, report: Report) -> None:
    """The section "kernels": microseconds and shares of the ceilings."""
    timings = KernelTimings(config)

    def measure(part: str, run: Callable[..., Mapping[str, Any]], *args: Any) -> None:
        report.measure(part, partial(run, *args))
        timings.device.free()

    with torch.inference_mode():
        for role in config.kernel_roles:
            for matrix in config.shape(role).matrices:
                name = f"linear {role} {matrix.name}"
                measure(name, timings.linear, matrix, config.dtype, config.kernel_rows)
        for role in config.kernel_roles:
            measure(f"attention {role}", timings.attention, config.shape(role))
        measure("sampler", timings.sampler, config.small.vocab)
        for role in config.kernel_roles:
            measure(f"rows {role}", timings.elementwise, config.shape(role))
        shape = config.shape(config.kernel_roles[0])
        gate_up = next(matrix for matrix in shape.matrices if matrix.name == "gate_up")
        for fmt in TIMED_FORMATS:
            measure(f"linear {fmt}", timings.linear, gate_up, fmt, config.kernel_rows[:3])


@dataclass(frozen=True, slots=True)
class Case:
    """`run` does the operation `repeats` times."""

    run: Callable[[], object]
    repeats: int = 1
    num_bytes: float = 0.0  # moved by one operation; 0: memory does not bound it
    num_ops: float = 0.0  # of one operation; 0: the product rate does not bound it


class KernelTimings:
    def __init__(self, config: BenchConfig) -> None:
        self.config = config
        self.limits = roofline(config)
        self.device = self.limits.device
        self.ops = kernel_ops(config.device)
        self.inputs = RandomInputs(config.device, config.dtype)

    def linear(self, matrix: WeightMatrix, fmt: str, row_counts: Sequence[int]) -> Mapping[str, Any]:
        """Copies of one weight in turn; gate_up with its activation, as models call it."""
        known = WEIGHT_FORMATS.get(fmt)
        size = known.num_bytes(matrix) if known else FP8_BYTES * matrix.n * matrix.k
        copies = max(FEW_COPIES, min(MAX_COPIES, int(self.config.working_set / size) + 1))
        source = self.inputs.normal(matrix.n, matrix.k, scale=matrix.k**-0.5)
        packed = [self.ops.pack_linear([source], fmt) for _ in range(copies)]
        cases = {}
        for rows in row_counts:
            if rows * matrix.n <= MAX_TIMED_VALUES:
                x = self.inputs.normal(rows, matrix.k)
                weights = packed if rows < MANY_ROWS else packed[:FEW_COPIES]
                moved = size + rows * (matrix.n + matrix.k) * self.inputs.dtype.itemsize
                num_ops = 2.0 * rows * matrix.n * matrix.k
                run = partial(self._multiply, matrix, x, weights)
                cases[str(rows)] = Case(run, len(weights), moved, num_ops)
        return self._time(cases)

    def _multiply(self, matrix: WeightMatrix, x: Tensor, weights: Sequence[Any]) -> None:
        dtype = torch.float32 if matrix.name == "head" else None
        for weight in weights:
            if matrix.name == "gate_up":
                self.ops.linear_gated_act(x, weight, "silu")
            else:
                self.ops.linear(x, weight, dtype)

    def attention(self, shape: ModelShape) -> Mapping[str, Any]:
        """Decoding and verification at the end of a context, batched decoding, and a whole prompt."""
        longest = max(self.config.contexts)
        blocks = self.inputs.block_table(longest)
        context = min(BATCH_CONTEXT, longest)
        size = max(1, min(BATCH_SIZE, longest * NUM_CACHES // context))
        blocks_each = -(-context // BLOCK_SIZE)
        slots = (1 + max(len(blocks), size * blocks_each)) * BLOCK_SIZE
        caches = [self.inputs.kv_cache(shape, slots) for _ in range(NUM_CACHES)]
        token_bytes = 2.0 * shape.kv_heads * shape.head_dim * self.inputs.dtype.itemsize
        cases = {}
        for tokens in self.config.contexts:
            for name, rows in (("decode", 1), ("verify 5", 5)):
                run = self._attend(shape, caches, [(tokens - rows, rows, blocks)])
                cases[f"{name} at {tokens}"] = Case(run, NUM_CACHES, tokens * token_bytes)
        tables = [self.inputs.block_table(context, 1 + number * blocks_each) for number in range(size)]
        run = self._attend(shape, caches, [(context - 1, 1, table) for table in tables])
        cases[f"{size} decodes at {context}"] = Case(run, NUM_CACHES, size * context * token_bytes)
        prompt = min(self.config.long_prompt, longest)
        num_ops = 2.0 * shape.heads * shape.head_dim * prompt * (prompt + 1)
        run = self._attend(shape, caches, [(0, prompt, blocks)])
        cases[f"prompt {prompt}"] = Case(run, NUM_CACHES, num_ops=num_ops)
        return self._time(cases)

    def _attend(
        self, shape: ModelShape, caches: Sequence[Any], chunks: Sequence[tuple[int, int, Sequence[int]]]
    ) -> Callable[[], object]:
        ops, batch, scale = self.ops, self.inputs.batch(self.ops, chunks), shape.head_dim**-0.5
        q = self.inputs.normal(len(batch.positions), shape.heads, shape.head_dim)
        metadata = ops.build_attention_metadata(batch)
        return lambda: [ops.attention(q, cache, batch, scale, metadata=metadata) for cache in caches]

    def sampler(self, vocab: int) -> Mapping[str, Any]:
        """With a copy of the logits in each, since filters change them in place; "copy" is that alone."""
        cases = {}
        for rows in self.config.sampled_rows:
            logits = self.inputs.normal(rows, vocab, scale=4.0, dtype=torch.float32)
            cases[f"{rows} rows, copy"] = Case(logits.clone)
            for name, op in sampling_ops(self.ops, rows, self.device.name).items():
                cases[f"{rows} rows, {name}"] = Case(partial(_run_on_copy, op, logits))
        return self._time(cases)

    def elementwise(self, shape: ModelShape) -> Mapping[str, Any]:
        """Kernels between the products of a layer."""
        ops, inputs, max_rows = self.ops, self.inputs, max(self.config.kernel_rows)
        weight = inputs.normal(shape.hidden, dtype=torch.float32)
        table = inputs.normal(max_rows, shape.head_dim, dtype=torch.float32)
        cache = inputs.kv_cache(shape, max_rows)
        cases = {}
        for rows in self.config.kernel_rows:
            x, gate_up = inputs.normal(rows, shape.hidden), inputs.normal(rows, 2 * shape.intermediate)
            q = inputs.normal(rows, shape.heads, shape.head_dim)
            k, v = (inputs.normal(rows, shape.kv_heads, shape.head_dim) for _ in range(2))
            at = torch.arange(rows, device=self.device.name)
            cases[f"{rows} norm"] = Case(partial(ops.rms_norm, x, weight, 1e-6))
            cases[f"{rows} gated"] = Case(partial(ops.gated_act, gate_up, "silu"))
            rope = partial(ops.rope_and_cache, q, k, v, table, at, None, cache, at)
            cases[f"{rows} rope and cache"] = Case(rope)
        return self._time(cases)

    def _time(self, cases: Mapping[str, Case]) -> dict[str, Any]:
        """Microseconds by case, and shares of the ceilings that bound it."""
        figures: dict[str, Any] = {}
        graphs = {name: self.device.graph(case.run) for name, case in cases.items()}
        for name, seconds in self.device.medians(graphs, self.config.rounds).items():
            case, op_s = cases[name], seconds / cases[name].repeats
            figures[f"{name} us"] = op_s * 1e6
            if case.num_bytes:
                figures[f"{name} of bandwidth"] = case.num_bytes / op_s / self.limits.bandwidth
            if case.num_ops:
                figures[f"{name} of product"] = case.num_ops / op_s / self.limits.product
        return figures


def _run_on_copy(op: Callable[[Tensor], object], logits: Tensor) -> None:
    op(logits.clone())
