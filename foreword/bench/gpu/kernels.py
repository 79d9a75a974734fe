"""Speed of every kernel under `foreword bench gpu`, as shares of what the device allows.

Each case is a graph: the host has no part in it. Linear layers run over more copies of each weight than any cache holds,
attention over several caches. Bytes are weights (or K and V) as they are held, and what is read and written beside.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from foreword.bench.gpu.config import BenchConfig
from foreword.bench.gpu.device import BenchDevice
from foreword.bench.gpu.ops import BLOCK_SIZE, RandomInputs, backend
from foreword.bench.gpu.report import Measurement
from foreword.bench.gpu.roofline import Roofline
from foreword.bench.shapes import WEIGHT_FORMATS, ModelShape, WeightMatrix
from foreword.kernels.ops import Ops

__all__ = ["KernelTimings"]

QUANTIZED = ("int8", "fp8", "int4")
FP8_BYTES = 1.0
MANY_ROWS = 256  # from here on few copies will do: the product takes longer than the weights
MOST_COPIES, FEW_COPIES = 256, 2
MOST_VALUES = 1 << 30  # of one result
CACHES = 4
CROWD, CROWD_CONTEXT = 64, 1024


class KernelTimings:
    def __init__(self, scale: BenchConfig, device: BenchDevice, ceilings: Roofline) -> None:
        self.scale = scale
        self.device = device
        self.ceilings = ceilings
        self.ops: Ops = backend(scale.device)
        self.inputs = RandomInputs(scale.device, scale.dtype)

    def parts(self) -> Iterator[Measurement]:
        for role in self.scale.kernel_roles:
            for matrix in self.scale.shape(role).matrices:
                yield self._part(
                    f"linear {role} {matrix.name}",
                    self._linear,
                    matrix,
                    self.scale.dtype,
                    self.scale.kernel_rows,
                )
        for role in self.scale.kernel_roles:
            yield self._part(f"attention {role}", self._attention, self.scale.shape(role))
        yield self._part("sampler", self._sampler, self.scale.small.vocab)
        for role in self.scale.kernel_roles:
            yield self._part(f"rows {role}", self._rows, self.scale.shape(role))
        first = self.scale.shape(self.scale.kernel_roles[0])
        gate_up = next(matrix for matrix in first.matrices if matrix.name == "gate_up")
        for kind in QUANTIZED:
            yield self._part(f"linear {kind}", self._linear, gate_up, kind, self.scale.kernel_rows[:3])

    def _part(self, name: str, measure: Callable[..., Mapping[str, Any]], *given: Any) -> Measurement:
        def run() -> Mapping[str, Any]:
            with torch.inference_mode():
                try:
                    return measure(*given)
                finally:
                    self.device.free()

        return Measurement(name, run)

    def _linear(self, matrix: WeightMatrix, kind: str, row_counts: Sequence[int]) -> Mapping[str, Any]:
        """One weight after the other; gate_up with its activation, as models call it."""
        value_bytes = (
            WEIGHT_FORMATS[kind].block_bytes / WEIGHT_FORMATS[kind].block_values
            if kind in WEIGHT_FORMATS
            else FP8_BYTES
        )
        size = value_bytes * matrix.n * matrix.k
        copies = max(FEW_COPIES, min(MOST_COPIES, int(self.scale.working_set / size) + 1))
        source = self.inputs.normal(matrix.n, matrix.k, scale=matrix.k**-0.5)
        packed = [self.ops.pack_linear([source], kind) for _ in range(copies)]
        runs: dict[str, Callable[[], object]] = {}
        used: dict[str, int] = {}
        for rows in row_counts:
            if rows * matrix.n > MOST_VALUES:
                continue
            x = self.inputs.normal(rows, matrix.k)
            some = packed if rows < MANY_ROWS else packed[:FEW_COPIES]
            used[str(rows)] = len(some)
            runs[str(rows)] = self.device.graph(partial(self._multiply, matrix, x, some))
        seconds = self._medians(runs)
        found: dict[str, Any] = {}
        for name, span in seconds.items():
            rows, one = int(name), span / used[name]
            moved = size + rows * (matrix.n + matrix.k) * self.inputs.dtype.itemsize
            found[f"{name} us"] = one * 1e6
            found[f"{name} of bandwidth"] = moved / one / self.ceilings.bandwidth
            found[f"{name} of product"] = 2.0 * rows * matrix.n * matrix.k / one / self.ceilings.product
        return found

    def _multiply(self, matrix: WeightMatrix, x: Tensor, weights: Sequence[Any]) -> None:
        dtype = torch.float32 if matrix.name == "head" else None
        for weight in weights:
            if matrix.name == "gate_up":
                self.ops.linear_gated_act(x, weight, "silu")
            else:
                self.ops.linear(x, weight, dtype)

    def _attention(self, shape: ModelShape) -> Mapping[str, Any]:
        """One row at the end of a context; many requests; a verification of five rows; a whole prompt."""
        longest = max(self.scale.contexts)
        blocks = self.inputs.blocks(longest)
        crowd_context = min(CROWD_CONTEXT, longest)
        crowd = max(1, min(CROWD, longest * CACHES // crowd_context))
        each = -(-crowd_context // BLOCK_SIZE)
        slots = (1 + max(len(blocks), crowd * each)) * BLOCK_SIZE
        caches = [self.inputs.cache(shape, slots) for _ in range(CACHES)]
        size = 2.0 * shape.kv_heads * shape.head_dim * self.inputs.dtype.itemsize  # of one token's K and V
        cases: dict[str, tuple[list[tuple[int, int, list[int]]], float, float]] = {}
        for context in self.scale.contexts:
            cases[f"decode at {context}"] = ([(context - 1, 1, blocks)], context * size, 0.0)
            cases[f"verify 5 at {context}"] = ([(context - 5, 5, blocks)], context * size, 0.0)
        tables = [self.inputs.blocks(crowd_context, 1 + number * each) for number in range(crowd)]
        name = f"{crowd} decodes at {crowd_context}"
        cases[name] = ([(crowd_context - 1, 1, table) for table in tables], crowd * crowd_context * size, 0.0)
        prompt = min(self.scale.long_prompt, longest)
        products = 2.0 * shape.heads * shape.head_dim * prompt * (prompt + 1)
        cases[f"prompt {prompt}"] = ([(0, prompt, blocks)], 0.0, products)
        runs = {name: self._attend(shape, caches, chunks) for name, (chunks, _, _) in cases.items()}
        found: dict[str, Any] = {}
        for name, span in self._medians(runs).items():
            one, (_, moved, operations) = span / CACHES, cases[name]
            found[f"{name} us"] = one * 1e6
            if moved:
                found[f"{name} of bandwidth"] = moved / one / self.ceilings.bandwidth
            else:
                found[f"{name} of product"] = operations / one / self.ceilings.product
        return found

    def _attend(
        self, shape: ModelShape, caches: Sequence[Any], chunks: Sequence[tuple[int, int, Sequence[int]]]
    ) -> Callable[[], object]:
        ops, batch = self.ops, self.inputs.batch(self.ops, chunks)
        q = self.inputs.normal(len(batch.positions), shape.heads, shape.head_dim)
        plan = ops.build_attention_metadata(batch)
        scale = shape.head_dim**-0.5
        return self.device.graph(
            lambda: [ops.attention(q, cache, batch, scale, metadata=plan) for cache in caches]
        )

    def _sampler(self, vocab: int) -> Mapping[str, Any]:
        """With the copy that each of them needs, since filters change logits in place."""
        found: dict[str, Any] = {}
        for rows in self.scale.sampled_rows:
            logits = self.inputs.normal(rows, vocab, scale=4.0, dtype=torch.float32)
            numbers = torch.arange(rows, device=self.device.name)
            runs = {
                name: self.device.graph(partial(_on_a_copy, step, logits))
                for name, step in self._steps(numbers).items()
            }
            found |= {f"{rows} rows, {name} us": span * 1e6 for name, span in self._medians(runs).items()}
        return found

    def _steps(self, numbers: Tensor) -> dict[str, Callable[[Tensor], object]]:
        ops, rows = self.ops, len(numbers)
        hot, cold = torch.zeros_like(numbers, dtype=torch.bool), torch.ones_like(numbers, dtype=torch.bool)
        k, p = (
            torch.full_like(numbers, 40),
            torch.full((rows,), 0.95, dtype=torch.float64, device=numbers.device),
        )
        return {
            "copy": lambda logits: logits,
            "greedy": lambda logits: ops.sample(logits, numbers, numbers, cold),
            "sampled": lambda logits: ops.sample(logits, numbers, numbers, hot),
            "top-k 40": lambda logits: ops.apply_top_k(logits, k),
            "top-p 0.95": lambda logits: ops.apply_top_p(logits, p),
            "min-p 0.05": lambda logits: ops.apply_min_p(logits, 1 - p),
            "log-sum-exp": ops.log_sum_exp,
            "top 20": lambda logits: ops.top_ids(logits, 20),
        }

    def _rows(self, shape: ModelShape) -> Mapping[str, Any]:
        """What stands between the products of a layer."""
        ops, inputs = self.ops, self.inputs
        weight = inputs.normal(shape.hidden, dtype=torch.float32)
        most = max(self.scale.kernel_rows)
        table = inputs.normal(most, shape.head_dim, dtype=torch.float32)
        cache = inputs.cache(shape, most)
        found: dict[str, Any] = {}
        for rows in self.scale.kernel_rows:
            x, wide = inputs.normal(rows, shape.hidden), inputs.normal(rows, 2 * shape.intermediate)
            q, k, v = (
                inputs.normal(rows, heads, shape.head_dim)
                for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
            )
            at = torch.arange(rows, device=self.device.name)
            runs = {
                "norm": self.device.graph(partial(ops.rms_norm, x, weight, 1e-6)),
                "gated": self.device.graph(partial(ops.gated_act, wide, "silu")),
                "rope and cache": self.device.graph(
                    partial(ops.rope_and_cache, q, k, v, table, at, None, cache, at)
                ),
            }
            found |= {f"{rows} {name} us": span * 1e6 for name, span in self._medians(runs).items()}
        return found

    def _medians(self, runs: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        return {
            name: statistics.median(spans)
            for name, spans in self.device.in_turn(runs, self.scale.rounds).items()
        }


def _on_a_copy(step: Callable[[Tensor], object], logits: Tensor) -> None:
    step(logits.clone())
