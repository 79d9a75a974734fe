"""The blocks of the towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: attention over a picture, or over windows of it."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foreword.kernels.ops import MRopeSections, Ops
from foreword.layers.weights import Weights
from foreword.models.vision.base import Normalization
from foreword.models.vision.layers import ATTENTION_COST_FACTOR, build_linear

__all__ = ["ImageContext", "PatchMerger", "QwenTowerConfig", "RowwiseModule", "VisionBlock"]

LINEAR_CHUNK_ROWS = 512  # patches that go through linear layers as one piece
MERGE_CHUNK_CELLS = 128  # and cells, as they become tokens
ATTN_CHUNK_PAIRS = 1 << 20  # of patches where one sees the other, in one piece


class RowwiseModule(Protocol):
    """[N, K] -> [N, H], each row by itself."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class QwenTowerConfig:
    """Shape of a tower.

    hidden   values of a patch between two blocks
    out      of a feature: H of the decoder
    patch    pixels of a patch's side
    frames   equal pictures that a patch is made of: the tower sees a picture as a film that stands still
    merge    patches of the side of a cell, which becomes one token
    theta    of the positions
    """

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    rope_theta: float
    activation: str
    normalization: Normalization

    @property
    def head_dim(self) -> int:
        """D"""
        return self.hidden_size // self.num_heads

    @property
    def merged_size(self) -> int:
        """Values of a cell."""
        return self.hidden_size * self.merge_size**2


@dataclass(frozen=True, slots=True)
class ImageContext:
    """Of one picture, what all blocks share: positions and table as in Ops.rope, and which patches see each other.

    starts   of sections whose patches see each other, and their end: one section for the whole picture
    windows  the same, where a block looks through windows
    order    of the cells, int64; None: as they are read
    """

    positions: Tensor
    cos_sin: Tensor
    mrope_sections: MRopeSections
    cu_seqlens: Sequence[int]
    window_cu_seqlens: Sequence[int]
    cell_order: Tensor | None


class AttnChunk(NamedTuple):
    """Queries, and the keys that they see; where sections begin among them, as in Ops.attend_sections."""

    queries: slice
    keys: slice
    cu_seqlens_q: Sequence[int]
    cu_seqlens_k: Sequence[int]


def attention_chunks(cu_seqlens: Sequence[int]) -> Iterator[AttnChunk]:
    """Attention of one block: small windows at once, the whole picture so many queries at a time that PAIRS is not exceeded."""
    size = cu_seqlens[-1]
    everything = slice(0, size)
    if len(cu_seqlens) > 2:
        yield AttnChunk(everything, everything, cu_seqlens, cu_seqlens)
        return
    step = max(1, ATTN_CHUNK_PAIRS // size)
    for begin in range(0, size, step):
        end = min(begin + step, size)
        yield AttnChunk(slice(begin, end), everything, (0, end - begin), cu_seqlens)


class VisionBlock:
    """Norm, attention, norm, feed-forward; each branch is added to what it read.

    products  multiply-adds of the feed-forward layer for one patch
    """

    def __init__(
        self,
        ops: Ops,
        config: QwenTowerConfig,
        weight_format: str,
        weights: Weights,
        norms: tuple[RowwiseModule, RowwiseModule],
        mlp: RowwiseModule,
        mlp_multiply_adds: int,
    ) -> None:
        hidden, attention = config.hidden_size, weights.prefixed("attn.")
        self._ops = ops
        self._config = config
        self._attention_norm, self._mlp_norm = norms
        self._qkv = build_linear(ops, attention, weight_format, hidden, {"qkv": 3 * hidden})
        self._out = build_linear(ops, attention, weight_format, hidden, {"proj": hidden})
        self._mlp = mlp
        self._row_multiply_adds = hidden**2 + mlp_multiply_adds

    def forward(
        self, x: Tensor, context: ImageContext, cu_seqlens: Sequence[int]
    ) -> Generator[int, None, Tensor]:
        """x [N, H] -> [N, H], a piece at a time."""
        seen = yield from self._attend((yield from self._project_qkv(x)), context, cu_seqlens)
        return (yield from self._apply_mlp(x, seen))

    def _project_qkv(self, x: Tensor) -> Generator[int, None, Tensor]:
        """[N, H] -> [N, 3 * heads, D]"""
        parts = []
        for rows in torch.split(x, LINEAR_CHUNK_ROWS):
            parts.append(self._qkv(self._attention_norm(rows)))
            yield 3 * rows.numel() * self._config.hidden_size
        return torch.cat(parts).view(len(x), -1, self._config.head_dim)

    def _attend(
        self, qkv: Tensor, context: ImageContext, cu_seqlens: Sequence[int]
    ) -> Generator[int, None, Tensor]:
        """-> [N, H]"""
        heads, config = self._config.num_heads, self._config
        q, k = (
            self._ops.rope(one, context.cos_sin, context.positions, context.mrope_sections)
            for one in (qkv[:, :heads], qkv[:, heads : 2 * heads])
        )
        v = qkv[:, 2 * heads :].contiguous()
        del qkv  # of a large picture it is the largest tensor
        parts = []
        for queries, keys, q_starts, kv_starts in attention_chunks(cu_seqlens):
            parts.append(
                self._ops.varlen_attention(
                    q[queries], k[keys], v[keys], q_starts, kv_starts, config.head_dim**-0.5
                )
            )
            yield ATTENTION_COST_FACTOR * 2 * config.hidden_size * _count_pairs(q_starts, kv_starts)
        return torch.cat(parts).flatten(1)

    def _apply_mlp(self, x: Tensor, attn_output: Tensor) -> Generator[int, None, Tensor]:
        """x and what the attention saw [N, H] -> [N, H]"""
        parts = []
        for rows, found in zip(
            torch.split(x, LINEAR_CHUNK_ROWS), torch.split(attn_output, LINEAR_CHUNK_ROWS), strict=True
        ):
            between = rows + self._out(found)
            parts.append(between + self._mlp(self._mlp_norm(between)))
            yield len(rows) * self._row_multiply_adds
        return torch.cat(parts)


def _count_pairs(cu_seqlens_q: Sequence[int], cu_seqlens_k: Sequence[int]) -> int:
    """How often a patch sees another one."""
    sections = zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True)
    return sum((q_end - q_start) * (kv_end - kv_start) for (q_start, q_end), (kv_start, kv_end) in sections)


class PatchMerger:
    """Makes one token of the patches of a cell.

    by_patch  the norm sees patches, else whole cells
    """

    def __init__(
        self, config: QwenTowerConfig, norm: RowwiseModule, mlp: RowwiseModule, norm_by_patch: bool = True
    ) -> None:
        self._config = config
        self._norm = norm
        self._mlp = mlp
        self._norm_by_patch = norm_by_patch

    def merge(self, x: Tensor) -> Generator[int, None, Tensor]:
        """[N, H] -> [cells, out], a piece at a time."""
        parts = []
        for cells in torch.split(x.view(-1, self._config.merged_size), MERGE_CHUNK_CELLS):
            rows = cells.view(-1, self._config.hidden_size) if self._norm_by_patch else cells
            parts.append(self._mlp(self._norm(rows).view(cells.shape)))
            yield cells.numel() * (self._config.merged_size + self._config.out_hidden_size)
        return torch.cat(parts)
