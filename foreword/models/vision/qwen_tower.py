"""The tower that Qwen2-VL, Qwen2.5-VL and Qwen3-VL have in common: it sees a picture at about its own size.

What differs between them, norms, feed-forward layers and which patches see each other, is for each to say.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from foreword.core.images import PromptImage
from foreword.kernels.ops import MRopeSections, Ops
from foreword.layers.linear import Linear
from foreword.layers.rope import Rope, RopeConfig
from foreword.layers.weights import Weights
from foreword.models.base import Precision
from foreword.models.vision.layers import unquantized_format
from foreword.models.vision.qwen_block import ImageContext, PatchMerger, QwenTowerConfig, VisionBlock
from foreword.models.vision.qwen_grid import PatchGrid, extract_patches

__all__ = ["QwenTower", "reorder_cells"]


class QwenTower(ABC):
    """A subclass, one to an architecture, builds what differs; `weights` are those of the tower.

    PATCH_BIAS  the embedding of patches has a bias
    """

    PATCH_BIAS: ClassVar[bool] = False

    def __init__(
        self, config: QwenTowerConfig, ops: Ops, precision: Precision, weights: Weights, device: str
    ) -> None:
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
        """One block."""

    @abstractmethod
    def build_merger(self, weights: Weights) -> PatchMerger:
        """What comes behind the last block."""

    def build_deepstack(self, weights: Weights) -> list[tuple[int, PatchMerger]]:
        """Blocks whose results are added behind the decoder's first layers, in order, and what makes tokens of them."""
        return []

    def embed(self, patches: Tensor, grid: PatchGrid) -> Tensor:
        """What the first block reads, given the embedded patches [N, H]."""
        return patches

    def build_context(self, grid: PatchGrid) -> ImageContext:
        """Everything sees everything."""
        whole = (0, grid.num_patches)
        return ImageContext(
            grid.patch_positions().to(self._device),
            self._cos_sin(grid),
            self._mrope_sections,
            whole,
            whole,
            None,
        )

    def block_cu_seqlens(self, block_index: int, context: ImageContext) -> Sequence[int]:
        """Which sections a block sees."""
        return context.cu_seqlens

    def encode(self, image: PromptImage) -> Generator[int, None, Tensor]:
        """Features [num_tokens, width]"""
        cells = self._patch_grid(image)
        view = self.build_context(cells)
        x = reorder_cells(self._embed_patches(image, cells), view.cell_order, cells.merge_size**2)
        yield x.numel() * 3 * self.config.patch_size**2
        features = yield from self._run_blocks(x, view)
        return features if view.cell_order is None else features[view.cell_order.argsort()]

    def make_max_image(self, max_tokens: int) -> PromptImage:
        """A square, or nearly one."""
        rows = math.isqrt(max_tokens)
        columns, side = max_tokens // rows, self.config.merge_size * self.config.patch_size
        shape = (1, 3, rows * side, columns * side)
        return PromptImage(
            bytes(16), rows * columns, (1, rows, columns), shape[2:], shape, bytes(math.prod(shape))
        )

    def _run_blocks(self, x: Tensor, context: ImageContext) -> Generator[int, None, Tensor]:
        """Embedded patches [N, H] -> features [cells, width], both in the order of the view."""
        seen = {}
        for index, block in enumerate(self._blocks):
            x = yield from block.forward(x, context, self.block_cu_seqlens(index, context))
            for number, (layer, merger) in enumerate(self._mergers):
                if layer == index:
                    seen[number] = yield from merger.merge(x)
        return torch.cat([seen[number] for number in range(len(self._mergers))], -1)

    def _patch_grid(self, image: PromptImage) -> PatchGrid:
        _, rows, columns = image.grid_thw
        side = self.config.merge_size * self.config.patch_size
        assert image.shape == (1, 3, rows * side, columns * side), "a picture prepared for another tower"
        return PatchGrid(rows, columns, self.config.merge_size)

    def _embed_patches(self, image: PromptImage, grid: PatchGrid) -> Tensor:
        """[N, H]"""
        (pixels,) = self.config.normalization.normalize(image, self._device)
        return self.embed(
            self._patch_embedding(extract_patches(pixels, self.config.patch_size, grid).to(self._dtype)), grid
        )

    def _load_patch_embedding(self, weights: Weights) -> Linear:
        """All frames of a picture are equal: their weights are added up."""
        config = self.config
        matrix = (
            weights.tensor(
                "proj.weight",
                config.hidden_size,
                3,
                config.temporal_patch_size,
                config.patch_size,
                config.patch_size,
            )
            .sum(2)
            .flatten(1)
        )
        bias = weights.tensor("proj.bias", config.hidden_size) if self.PATCH_BIAS else None
        return Linear(self.ops, self.ops.pack_linear([matrix], self.weight_format, bias))

    @property
    def _mrope_sections(self) -> MRopeSections:
        """Half of the angles turn by the row, half by the column."""
        return MRopeSections((0, self.config.head_dim // 4, self.config.head_dim // 4))

    def _cos_sin(self, grid: PatchGrid) -> Tensor:
        """float32 [patches of the longer side, D]: the same angles for rows and columns."""
        length = max(grid.rows, grid.columns) * grid.merge_size
        rope = Rope(
            RopeConfig("default", self.config.rope_theta, self.config.head_dim // 2), length, self._device
        )
        cosines, sines = rope.cos_sin.chunk(2, -1)
        return torch.cat((cosines, cosines, sines, sines), -1)


def reorder_cells(x: Tensor, order: Tensor | None, rows_per_cell: int) -> Tensor:
    """Rows [N, ...] whose cells, of `size` rows each, come in this order."""
    return x if order is None else x.view(-1, rows_per_cell, *x.shape[1:])[order].view(x.shape)
