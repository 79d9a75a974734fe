"""Common part of the vision encoders of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: images at their own resolution.

A cell is a square of patches (2 x 2) that becomes one token. Rows are ordered by cell, then line by line.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from foreword.core.images import PromptImage
from foreword.kernels.ops import MRopeSections, Ops
from foreword.layers.linear import Linear
from foreword.layers.norm import EncoderLayerNorm
from foreword.layers.rope import Rope, RopeConfig
from foreword.layers.weights import Weights
from foreword.models.interfaces import Precision
from foreword.models.vision.vision_layers import (
    ATTENTION_COST_FACTOR,
    VisionMLP,
    build_linear,
    unquantized_format,
)
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
    window_side: int = 0  # cells of the side of an attention window; 0: no windows
    full_attention_blocks: frozenset[int] = frozenset()  # without windows
    positions_per_side: int = 0  # learned positions, interpolated to the image's size; 0: none
    deepstack_blocks: tuple[int, ...] = ()  # whose outputs become DeepStack features

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


@dataclass(frozen=True, slots=True)
class PatchGrid:
    """Grid of an image's cells."""

    rows: int
    columns: int
    merge_size: int  # patches of a cell's side

    @property
    def num_patches(self) -> int:
        """N"""
        return self.rows * self.columns * self.merge_size**2

    def patch_positions(self) -> Tensor:
        """int64 [N, 3]: 0, row and column of each patch."""
        merge = self.merge_size
        rows = torch.arange(self.rows * merge).view(self.rows, 1, merge, 1)
        columns = torch.arange(self.columns * merge).view(1, self.columns, 1, merge)
        shape = (self.rows, self.columns, merge, merge)
        return torch.stack([x.expand(shape).flatten() for x in (torch.zeros_like(rows), rows, columns)], 1)


def extract_patches(pixels: Tensor, patch_size: int, grid: PatchGrid) -> Tensor:
    """[3, height, width] -> [N, 3 * patch_size * patch_size]"""
    merge = grid.merge_size
    patches = pixels.view(3, grid.rows, merge, patch_size, grid.columns, merge, patch_size)
    return patches.permute(1, 4, 2, 5, 0, 3, 6).reshape(grid.num_patches, -1)


def partition_windows(grid: PatchGrid, side_cells: int) -> tuple[Tensor, Sequence[int]]:
    """Split the grid into windows of side_cells x side_cells cells, smaller at the right and bottom edges.

    Returns cell indexes ordered by window, int64 [rows * columns], and the windows' boundaries in patches.
    """
    numbers = torch.arange(grid.rows * grid.columns).view(grid.rows, grid.columns)
    windows = [
        window.flatten()
        for band in torch.split(numbers, side_cells)
        for window in torch.split(band, side_cells, 1)
    ]
    starts = accumulate((len(window) * grid.merge_size**2 for window in windows), initial=0)
    return torch.cat(windows), tuple(starts)


class QwenTower(ABC):
    """Vision encoder. A subclass per architecture builds blocks and mergers."""

    PATCH_BIAS: ClassVar[bool] = False  # whether the patch embedding has a bias
    EPS: ClassVar[float] = 1e-6

    def __init__(
        self, config: QwenTowerConfig, ops: Ops, precision: Precision, weights: Weights, device: str
    ) -> None:
        weights = weights.prefixed("visual.")
        self.config = config
        self.ops = ops
        self.weight_format = unquantized_format(precision)
        self._dtype = precision.dtype
        self._device = device
        self._patch_embedding = self._load_patch_embedding(weights.prefixed("patch_embed."))
        self._blocks = [
            self.build_block(weights.prefixed(f"blocks.{index}.")) for index in range(config.depth)
        ]
        self._mergers = [(config.depth - 1, self.build_merger(weights.prefixed("merger.")))]
        self._mergers += self.build_deepstack(weights)
        self.feature_size = config.out_hidden_size * len(self._mergers)

    @abstractmethod
    def build_block(self, weights: Weights) -> VisionBlock:
        """Build one block."""

    @abstractmethod
    def build_merger(self, weights: Weights) -> PatchMerger:
        """Build the merger after the last block."""

    def build_deepstack(self, weights: Weights) -> list[tuple[int, PatchMerger]]:
        """(block index, merger) of features that are added after the decoder's first layers, in order."""
        return []

    def build_layer_norm_block(self, weights: Weights, up_name: str, down_name: str) -> VisionBlock:
        """Block of Qwen2-VL and Qwen3-VL: EncoderLayerNorm, and an MLP without a gate."""
        config = self.config
        hidden, size = config.hidden_size, config.intermediate_size
        norms = (
            EncoderLayerNorm(weights, "norm1", hidden, self.EPS),
            EncoderLayerNorm(weights, "norm2", hidden, self.EPS),
        )
        layers = {up_name: size, down_name: hidden}
        mlp_weights = weights.prefixed("mlp.")
        mlp = VisionMLP(self.ops, mlp_weights, self.weight_format, hidden, layers, config.activation)
        return VisionBlock(self.ops, config, self.weight_format, weights, norms, mlp, 2 * hidden * size)

    def build_merger_mlp(self, weights: Weights, up_name: str, down_name: str) -> VisionMLP:
        layers = {up_name: self.config.merged_size, down_name: self.config.out_hidden_size}
        return VisionMLP(self.ops, weights, self.weight_format, self.config.merged_size, layers, "gelu")

    def embed(self, patches: Tensor, grid: PatchGrid) -> Tensor:
        """Embedded patches [N, H] -> input of the first block."""
        return patches

    def build_context(self, grid: PatchGrid) -> ImageContext:
        """Full attention."""
        positions = grid.patch_positions().to(self._device)
        quarter = self.config.head_dim // 4
        sections = MRopeSections((0, quarter, quarter))  # half of the angles by row, half by column
        cu_seqlens = (0, grid.num_patches)
        return ImageContext(positions, self._cos_sin(grid), sections, cu_seqlens, cu_seqlens, None)

    def block_cu_seqlens(self, block_index: int, context: ImageContext) -> Sequence[int]:
        """Boundaries of the sections within which a block attends."""
        return context.cu_seqlens

    def encode(self, image: PromptImage) -> Generator[int, None, Tensor]:
        """Features [num_tokens, feature_size]"""
        grid = self._patch_grid(image)
        context = self.build_context(grid)
        (pixels,) = self.config.normalization.normalize(image, self._device)
        patches = extract_patches(pixels, self.config.patch_size, grid).to(self._dtype)
        x = self.embed(self._patch_embedding(patches), grid)
        x = reorder_cells(x, context.cell_order, grid.merge_size**2)
        yield x.numel() * 3 * self.config.patch_size**2
        features = yield from self._run_blocks(x, context)
        return features if context.cell_order is None else features[context.cell_order.argsort()]

    def make_max_image(self, max_tokens: int) -> PromptImage:
        """A square, or nearly one."""
        rows = math.isqrt(max_tokens)
        columns, side = max_tokens // rows, self.config.merge_size * self.config.patch_size
        shape, grid = (1, 3, rows * side, columns * side), (1, rows, columns)
        return PromptImage(bytes(16), rows * columns, grid, shape[2:], shape, bytes(math.prod(shape)))

    def _run_blocks(self, x: Tensor, context: ImageContext) -> Generator[int, None, Tensor]:
        """Embedded patches [N, H] -> features [cells, feature_size], in the order of the context."""
        merged = {}
        for index, block in enumerate(self._blocks):
            x = yield from block.forward(x, context, self.block_cu_seqlens(index, context))
            for number, (layer, merger) in enumerate(self._mergers):
                if layer == index:
                    merged[number] = yield from merger.merge(x)
        return torch.cat([merged[number] for number in range(len(self._mergers))], -1)

    def _patch_grid(self, image: PromptImage) -> PatchGrid:
        _, rows, columns = image.grid_thw
        side = self.config.merge_size * self.config.patch_size
        expected = (1, 3, rows * side, columns * side)
        assert image.shape == expected, "image preprocessed for another vision encoder"
        return PatchGrid(rows, columns, self.config.merge_size)

    def _load_patch_embedding(self, weights: Weights) -> Linear:
        """Sum the weights over frames: all frames of an image are equal."""
        config = self.config
        shape = (config.hidden_size, 3, config.temporal_patch_size, config.patch_size, config.patch_size)
        matrix = weights.tensor("proj.weight", *shape).sum(2).flatten(1)
        bias = weights.tensor("proj.bias", config.hidden_size) if self.PATCH_BIAS else None
        return Linear(self.ops, self.ops.pack_linear([matrix], self.weight_format, bias))

    def _cos_sin(self, grid: PatchGrid) -> Tensor:
        """float32 [patches of the longer side, D]: rows and columns have the same angles."""
        length = max(grid.rows, grid.columns) * grid.merge_size
        rope_config = RopeConfig("default", self.config.rope_theta, self.config.head_dim // 2)
        cosines, sines = Rope(rope_config, length, self._device).cos_sin.chunk(2, -1)
        return torch.cat((cosines, cosines, sines, sines), -1)


def reorder_cells(x: Tensor, order: Tensor | None, rows_per_cell: int) -> Tensor:
    """Rows [N, ...] reordered so that their cells follow `order`."""
    return x if order is None else x.view(-1, rows_per_cell, *x.shape[1:])[order].view(x.shape)
