"""Operations and their inputs for the checks and the figures of kernels in `foreword bench gpu`."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence

import torch
from torch import Tensor

from foreword.bench.shapes import WEIGHT_FORMATS, ModelShape, WeightMatrix
from foreword.core.batch import Batch, Chunk, KVLayer, build_batch
from foreword.kernels.ops import Matrix, Ops, QuantizedBlocks
from foreword.kernels.registry import select_backend

__all__ = ["BLOCK_SIZE", "RandomInputs", "backend", "differing_rows", "same_bits"]

BLOCK_SIZE = 16
SCALE_OF_BLOCKS = 2.0**-10


def backend(device: str) -> Ops:
    """What computes on this device; in a rehearsal the same kernels in Triton's interpreter, where Triton is installed."""
    if device == "cuda" or importlib.util.find_spec("triton") is None:
        return select_backend(device)
    ops: Ops = importlib.import_module("foreword.kernels.triton.backend").TritonOps(eager=True)
    return ops


def same_bits(left: Tensor, right: Tensor) -> bool:
    """NaN equals NaN of the same bits, and 0.0 does not equal -0.0."""
    ints = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    right = right.to(left.device)
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(ints), right.contiguous().view(ints)
    )


def differing_rows(left: Tensor, right: Tensor) -> int:
    """Rows that differ in some bit."""
    return (
        sum(not same_bits(a, b) for a, b in zip(left, right, strict=True))
        if not same_bits(left, right)
        else 0
    )


class RandomInputs:
    """Random values of one data type on one device, the same in every run."""

    def __init__(self, device: str, dtype: str, seed: int = 0) -> None:
        self.device = device
        self.dtype: torch.dtype = getattr(torch, dtype)
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        values = torch.randn(shape, generator=self._generator, device=self.device, dtype=torch.float32)
        return values.mul_(scale).to(dtype or self.dtype)

    def whole(self, low: int, high: int, *shape: int) -> Tensor:
        """int64 from low to high - 1"""
        return torch.randint(low, high, shape, generator=self._generator, device=self.device)

    def weight(self, kind: str, n: int, k: int) -> Matrix:
        """[n, k] around 1 / sqrt(k), as a tensor or in the blocks of a file."""
        known = WEIGHT_FORMATS.get(kind)
        if known is None or not known.is_blocks:
            return self.normal(n, k, scale=k**-0.5)
        blocks = self.whole(0, 256, n, k // known.block_values, known.block_bytes).to(torch.uint8)
        for offset in known.scale_offsets:
            blocks[..., offset : offset + 2] = torch.tensor(
                [SCALE_OF_BLOCKS], dtype=torch.float16, device=self.device
            ).view(torch.uint8)
        return QuantizedBlocks(kind, blocks.view(n, -1), k)

    def matrix(self, matrix: WeightMatrix) -> Matrix:
        return self.weight("bfloat16", matrix.n, matrix.k)

    def cache(self, shape: ModelShape, slots: int, kind: str = "auto") -> KVLayer:
        """K and V of random values; `kind` as --kv-cache-dtype."""
        size = (slots, shape.kv_heads, shape.head_dim)
        if kind == "auto":
            return KVLayer(self.normal(*size), self.normal(*size))
        scales = [self.normal(*size[:2], dtype=torch.float32).abs_().add_(0.5).mul_(0.01) for _ in range(2)]
        if kind == "int8":
            k, v = (self.whole(-127, 128, *size).to(torch.int8) for _ in range(2))
        else:
            k, v = (
                self.normal(*size, scale=50.0, dtype=torch.float32).to(torch.float8_e4m3fn) for _ in range(2)
            )
        return KVLayer(k, v, *scales)

    def batch(self, ops: Ops, chunks: Sequence[tuple[int, int, Sequence[int]]]) -> Batch:
        """Of (first position, rows, blocks) each."""
        made = [Chunk([0] * rows, start, blocks, 1) for start, rows, blocks in chunks]
        return build_batch(
            made, BLOCK_SIZE, ops.row_tile, self.device, with_request_index=ops.supports_graphs
        )

    def blocks(self, tokens: int, first: int = 1) -> list[int]:
        """A block table for so many tokens, in disorder; block numbers from `first` on."""
        count = -(-tokens // BLOCK_SIZE)
        order = torch.randperm(count, generator=torch.Generator().manual_seed(tokens + first))
        return [first + int(number) for number in order]
