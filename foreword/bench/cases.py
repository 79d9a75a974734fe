"""What `foreword bench kernels` times: operations as they run within a forward pass.

A case is one compiled function that runs an operation several times, over different weights or caches,
so that Python's share is small and no weight is still in a cache when its turn comes again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from foreword.bench.common import time_call
from foreword.bench.shapes import WEIGHT_FORMATS, ModelShape, WeightFormat, WeightMatrix
from foreword.core.batch import Batch, Chunk, KVLayer, build_batch
from foreword.kernels.ops import Matrix, Ops, PackedLinear, QuantizedBlocks

__all__ = ["KernelCase", "KernelCases"]

BLOCK_SIZE = 16
VOCAB_SIZE = 256  # rows of the table that activations come from
MAX_HEAD_ROWS = 16  # more logits than that are never asked for at once
MAX_VALUES = 1 << 26  # of one result
REPEATS = 16  # of what takes microseconds


@dataclass(frozen=True, slots=True)
class KernelCase:
    """`prepare` makes fresh arguments, `call` is timed; it does the operation `times` times.

    setting     what the operation is applied to
    num_bytes   read from memory by one operation, 0 if that is not what bounds it
    operations  of one operation; a multiply-add is two
    peak        the product that bounds it, as in bench_machine; "" if none does
    """

    op: str
    setting: str
    rows: int
    call: Callable[[Any], object]
    repeats: int
    num_bytes: float = 0.0
    num_ops: float = 0.0
    peak_format: str = ""
    prepare: Callable[[], Any] = lambda: None

    def time_op(self) -> float:
        """Of one operation."""
        argument = self.prepare()
        return time_call(lambda: self.call(argument)) / self.repeats


class KernelCases:
    """The cases of one shape on one backend."""

    def __init__(self, ops: Ops, shape: ModelShape) -> None:
        self.ops = ops
        self.shape = shape

    def linear(self, name: str, rows: Sequence[int]) -> Iterator[KernelCase]:
        """Every matrix of the shape as one of KINDS, times so many rows."""
        kind = WEIGHT_FORMATS[name]
        dtype = torch.float32 if kind.peak_format == "float32" else torch.bfloat16
        for matrix in self.shape.matrices:
            if not kind.fits(matrix):
                continue
            source = _random_weight(name, kind, matrix)
            weights = [self.ops.pack_linear([source], name) for _ in range(matrix.copies)]
            forward = self._linear_forward(matrix, weights, dtype)
            for count in rows:
                if count <= _max_rows(matrix):
                    call = self._timed_call(forward, self._batch(count))
                    size, operations = kind.num_bytes(matrix), 2.0 * matrix.n * matrix.k * count
                    yield KernelCase(
                        f"linear {matrix.name}",
                        name,
                        count,
                        call,
                        matrix.copies,
                        size,
                        operations,
                        kind.peak_format,
                    )

    def attention(
        self, kv_dtype: torch.dtype, contexts: Sequence[int], prompts: Sequence[int], rows: Sequence[int]
    ) -> Iterator[KernelCase]:
        """Rows at the end of a context, and whole prompts, over the caches of all layers."""
        shape, longest = self.shape, max((*contexts, *prompts), default=0)
        caches = [_random_kv_cache(shape, longest, kv_dtype) for _ in range(shape.layers)]
        forward = self._attention_forward(caches)
        setting = f"attention, {str(kv_dtype).removeprefix('torch.')} KV"
        for context in contexts:
            size = 2.0 * context * shape.kv_heads * shape.head_dim * kv_dtype.itemsize
            for count in rows:
                call = self._timed_call(forward, self._batch(count, context - count))
                yield KernelCase(f"decode at {context}", setting, count, call, shape.layers, size)
        for length in prompts:
            operations = 2.0 * shape.heads * shape.head_dim * length * (length + 1)
            call = self._timed_call(forward, self._batch(length))
            yield KernelCase("prompt", setting, length, call, shape.layers, 0.0, operations, "bfloat16")

    def elementwise(self, counts: Sequence[int]) -> Iterator[KernelCase]:
        """Norm, RoPE and gated activation."""
        forwards = {
            "norm": self._norm_forward(),
            "rope": self._rope_forward(),
            "gated silu": self._gated_forward(),
        }
        for op, forward in forwards.items():
            for count in counts:
                yield KernelCase(
                    op, "bfloat16 rows", count, self._timed_call(forward, self._batch(count)), REPEATS
                )

    def sampler(self, vocab: int, counts: Sequence[int]) -> Iterator[KernelCase]:
        """The steps of sampling over rows of logits."""
        for count in counts:
            logits = torch.randn(count, vocab).mul_(4)
            for name, step in self._sampling_ops(count).items():
                yield KernelCase(name, f"sampler, V = {vocab}", count, step, 1, prepare=logits.clone)

    def _sampling_ops(self, count: int) -> dict[str, Callable[[Tensor], object]]:
        """Operations on logits [count, V], by name."""
        ops, numbers = self.ops, torch.arange(count)
        hot, cold = torch.zeros(count, dtype=torch.bool), torch.ones(count, dtype=torch.bool)
        k, p = torch.full((count,), 40), torch.full((count,), 0.95, dtype=torch.float64)
        return {
            "greedy": lambda logits: ops.sample(logits, numbers, numbers, cold),
            "sampled": lambda logits: ops.sample(logits, numbers, numbers, hot),
            "top-k 40": lambda logits: ops.apply_top_k(logits, k),
            "top-p 0.95": lambda logits: ops.apply_top_p(logits, p),
            "min-p 0.05": lambda logits: ops.apply_min_p(logits, 1 - p),
            "logprobs": lambda logits: (ops.log_sum_exp(logits), ops.top_ids(logits, 20)),
        }

    # Forward passes of one operation

    def _linear_forward(
        self, matrix: WeightMatrix, weights: Sequence[PackedLinear], dtype: torch.dtype
    ) -> Callable[[Batch], Tensor]:
        ops, table = self.ops, self._embedding_table(matrix.k)

        def forward(batch: Batch) -> Tensor:
            x = ops.embedding(batch.token_ids, table, dtype)
            for weight in weights:
                y = ops.linear(x, weight)
            return ops.index_rows(y, batch.sample_rows)

        return ops.compile(forward)

    def _attention_forward(self, caches: Sequence[KVLayer]) -> Callable[[Batch], Tensor]:
        ops, shape = self.ops, self.shape
        width = shape.heads * shape.head_dim
        table = self._embedding_table(width)

        def forward(batch: Batch) -> Tensor:
            q = ops.embedding(batch.token_ids, table, torch.bfloat16).view(-1, shape.heads, shape.head_dim)
            plan = ops.build_attention_metadata(batch)
            for cache in caches:
                y = ops.attention(q, cache, batch, shape.head_dim**-0.5, metadata=plan)
            return ops.index_rows(y.view(-1, width), batch.sample_rows)

        return ops.compile(forward)

    def _norm_forward(self) -> Callable[[Batch], Tensor]:
        weight = torch.ones(self.shape.hidden)
        return self._repeat_op(self.shape.hidden, lambda x, _: self.ops.rms_norm(x, weight, 1e-6))

    def _rope_forward(self) -> Callable[[Batch], Tensor]:
        shape = self.shape
        table = torch.randn(1 << 12, shape.head_dim)

        def rope(x: Tensor, batch: Batch) -> Tensor:
            heads = x.view(-1, shape.heads, shape.head_dim)
            return self.ops.rope(heads, table, batch.positions).view(-1, shape.heads * shape.head_dim)

        return self._repeat_op(shape.heads * shape.head_dim, rope)

    def _gated_forward(self) -> Callable[[Batch], Tensor]:
        return self._repeat_op(2 * self.shape.intermediate, lambda x, _: self.ops.gated_act(x, "silu"))

    def _repeat_op(
        self, width: int, operation: Callable[[Tensor, Batch], Tensor]
    ) -> Callable[[Batch], Tensor]:
        ops, table = self.ops, self._embedding_table(width)

        def forward(batch: Batch) -> Tensor:
            x = ops.embedding(batch.token_ids, table, torch.bfloat16)
            for _ in range(REPEATS):
                y = operation(x, batch)
            return ops.index_rows(y, batch.sample_rows)

        return ops.compile(forward)

    def _embedding_table(self, width: int) -> PackedLinear:
        """What token ids below TOKENS become."""
        return self.ops.pack_linear([torch.randn(VOCAB_SIZE, width, dtype=torch.bfloat16)], "bfloat16")

    def _batch(self, rows: int, start: int = 0) -> Batch:
        """One request: `rows` tokens behind `start` others, whose blocks lie in disorder."""
        num_blocks = -(-(start + rows) // BLOCK_SIZE)
        blocks = (torch.randperm(num_blocks) + 1).tolist()
        chunk = Chunk([row % VOCAB_SIZE for row in range(rows)], start, blocks, 1)
        return build_batch([chunk], BLOCK_SIZE, self.ops.row_tile, "cpu")

    def _timed_call(self, forward: Callable[[Batch], Tensor], batch: Batch) -> Callable[[Any], object]:
        forward(batch)  # compiled with the first call
        return lambda _: forward(batch)


def _max_rows(matrix: WeightMatrix) -> int:
    return MAX_HEAD_ROWS if matrix.name == "head" else MAX_VALUES // matrix.n


def _random_kv_cache(shape: ModelShape, tokens: int, dtype: torch.dtype) -> KVLayer:
    """K and V of random values, and one scale a slot and head where they are int8."""
    slots = (-(-tokens // BLOCK_SIZE) + 1) * BLOCK_SIZE
    size = (slots, shape.kv_heads, shape.head_dim)
    if dtype == torch.int8:
        k, v = (torch.randint(-127, 128, size, dtype=dtype) for _ in range(2))
        return KVLayer(k, v, torch.full(size[:2], 0.01), torch.full(size[:2], 0.01))
    return KVLayer(torch.randn(size, dtype=dtype), torch.randn(size, dtype=dtype))


def _random_weight(name: str, weight_format: WeightFormat, matrix: WeightMatrix) -> Matrix:
    """Values around 1 / sqrt(k), as bfloat16 or in the blocks of a file."""
    scale = 1 / math.sqrt(matrix.k)
    if not weight_format.is_blocks:
        return torch.randn(matrix.n, matrix.k, dtype=torch.bfloat16).mul_(scale)
    blocks = torch.randint(
        0,
        256,
        (matrix.n, matrix.k // weight_format.block_values, weight_format.block_bytes),
        dtype=torch.uint8,
    )
    for offset in weight_format.scale_offsets:
        blocks[..., offset : offset + 2] = torch.tensor([scale / 64], dtype=torch.float16).view(torch.uint8)
    return QuantizedBlocks(name, blocks.view(matrix.n, -1), matrix.k)
