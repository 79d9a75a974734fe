"""Transformer block of the vision encoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foreword.kernels.ops import MRopeSections, Ops
from foreword.layers.weights import Weights
from foreword.models.vision.vision_layers import ATTENTION_COST_FACTOR, build_linear
from foreword.models.vision.vision_model import Normalization

LINEAR_CHUNK_ROWS = 512  # patches per piece in linear layers
MERGE_CHUNK_CELLS = 128  # cells per piece in a merger
ATTN_CHUNK_PAIRS = 1 << 20  # (query, key) pairs per piece in attention


class RowwiseModule(Protocol):
    """[N, K] -> [N, H], each row by itself."""

    def __call__(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class QwenTowerConfig:
    """Shape of a vision encoder."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int  # size of a feature: H of the decoder
    patch_size: int  # pixels of a patch's side
    temporal_patch_size: int  # equal frames of a patch: an image is a still video
    merge_size: int  # patches of the side of a cell, which becomes one token
    rope_theta: float
    activation: str
    normalization: Normalization

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def merged_size(self) -> int:
        """Values of one cell."""
        return self.hidden_size * self.merge_size**2


@dataclass(frozen=True, slots=True)
class ImageContext:
    """Inputs of one image that all blocks share. Attention is within sections, given by their boundaries."""

    positions: Tensor  # positions, table and sections as in Ops.rope
    cos_sin: Tensor
    mrope_sections: MRopeSections
    cu_seqlens: Sequence[int]  # one section: the whole image
    window_cu_seqlens: Sequence[int]  # one section per window
    cell_order: Tensor | None  # int64 order of the cells; None: row by row


class AttnChunk(NamedTuple):
    """Rows of one attention call, and their section boundaries as in Ops.varlen_attention."""

    queries: slice
    keys: slice
    cu_seqlens_q: Sequence[int]
    cu_seqlens_k: Sequence[int]


def attention_chunks(cu_seqlens: Sequence[int]) -> Iterator[AttnChunk]:
    """Pieces of a block's attention: all windows at once, or at most ATTN_CHUNK_PAIRS of the image."""
    size = cu_seqlens[-1]
    all_rows = slice(0, size)
    if len(cu_seqlens) > 2:
        yield AttnChunk(all_rows, all_rows, cu_seqlens, cu_seqlens)
        return
    step = max(1, ATTN_CHUNK_PAIRS // size)
    for begin in range(0, size, step):
        end = min(begin + step, size)
        yield AttnChunk(slice(begin, end), all_rows, (0, end - begin), cu_seqlens)


class VisionBlock:
    """Norm, attention, norm, MLP, with residuals. `mlp_multiply_adds` is the cost per patch."""

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
        attn_output = yield from self._attend((yield from self._project_qkv(x)), context, cu_seqlens)
        return (yield from self._apply_mlp(x, attn_output))

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
        """qkv [N, 3 * heads, D] -> [N, H]"""
        heads, config = self._config.num_heads, self._config
        q, k = (
            self._ops.rope(x, context.cos_sin, context.positions, context.mrope_sections)
            for x in (qkv[:, :heads], qkv[:, heads : 2 * heads])
        )
        v = qkv[:, 2 * heads :].contiguous()
        del qkv  # the largest tensor of a large image
        scale = config.head_dim**-0.5
        parts = []
        for queries, keys, cu_q, cu_k in attention_chunks(cu_seqlens):
            parts.append(self._ops.varlen_attention(q[queries], k[keys], v[keys], cu_q, cu_k, scale))
            yield ATTENTION_COST_FACTOR * 2 * config.hidden_size * _count_pairs(cu_q, cu_k)
        return torch.cat(parts).flatten(1)

    def _apply_mlp(self, x: Tensor, attn_output: Tensor) -> Generator[int, None, Tensor]:
        """x and attn_output [N, H] -> [N, H]"""
        parts = []
        chunks = (torch.split(tensor, LINEAR_CHUNK_ROWS) for tensor in (x, attn_output))
        for residual, attended in zip(*chunks, strict=True):
            rows = residual + self._out(attended)
            parts.append(rows + self._mlp(self._mlp_norm(rows)))
            yield len(rows) * self._row_multiply_adds
        return torch.cat(parts)


def _count_pairs(cu_seqlens_q: Sequence[int], cu_seqlens_k: Sequence[int]) -> int:
    """(query, key) pairs of all sections."""
    sections = zip(pairwise(cu_seqlens_q), pairwise(cu_seqlens_k), strict=True)
    return sum((q_end - q_start) * (k_end - k_start) for (q_start, q_end), (k_start, k_end) in sections)


class PatchMerger:
    """Merges the patches of a cell into one token. The norm is over patches, or else over whole cells."""

    def __init__(
        self, config: QwenTowerConfig, norm: RowwiseModule, mlp: RowwiseModule, norm_by_patch: bool = True
    ) -> None:
        self._config = config
        self._norm = norm
        self._mlp = mlp
        self._norm_by_patch = norm_by_patch

    def merge(self, x: Tensor) -> Generator[int, None, Tensor]:
        """[N, H] -> [cells, out_hidden_size], a piece at a time."""
        parts = []
        for cells in torch.split(x.view(-1, self._config.merged_size), MERGE_CHUNK_CELLS):
            rows = cells.view(-1, self._config.hidden_size) if self._norm_by_patch else cells
            parts.append(self._mlp(self._norm(rows).view(cells.shape)))
            yield cells.numel() * (self._config.merged_size + self._config.out_hidden_size)
        return torch.cat(parts)
