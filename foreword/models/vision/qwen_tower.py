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

from foreword.core.pictures import Picture
from foreword.kernels.ops import Axes, Ops
from foreword.layers.linear import Linear
from foreword.layers.rope import Rope, RopeConfig
from foreword.layers.weights import Weights
from foreword.models.base import Precision
from foreword.models.vision.parts import plain_kind
from foreword.models.vision.qwen_block import Block, Merger, QwenTowerConfig, View
from foreword.models.vision.qwen_places import Cells, patches_of

__all__ = ["QwenTower", "ordered"]


class QwenTower(ABC):
    """A subclass, one to an architecture, builds what differs; `weights` are those of the tower.

    PATCH_BIAS  the embedding of patches has a bias
    """

    PATCH_BIAS: ClassVar[bool] = False

    def __init__(self, config: QwenTowerConfig, ops: Ops, precision: Precision, weights: Weights, device: str) -> None:
        self.config = config
        self.ops = ops
        self.kind = plain_kind(precision)
        self._dtype = precision.dtype
        self._device = device
        self._patches = self._load_patches(weights.within("patch_embed."))
        self._blocks = [self.block(weights.within(f"blocks.{index}.")) for index in range(config.depth)]
        self._mergers = [(config.depth - 1, self.merger(weights.within("merger.")))]
        self._mergers += self.deeper(weights)
        self.width = config.out * len(self._mergers)

    @abstractmethod
    def block(self, weights: Weights) -> Block:
        """One block."""

    @abstractmethod
    def merger(self, weights: Weights) -> Merger:
        """What comes behind the last block."""

    def deeper(self, weights: Weights) -> list[tuple[int, Merger]]:
        """Blocks whose results are added behind the decoder's first layers, in order, and what makes tokens of them."""
        return []

    def embed(self, patches: Tensor, cells: Cells) -> Tensor:
        """What the first block reads, given the embedded patches [N, H]."""
        return patches

    def view(self, cells: Cells) -> View:
        """Everything sees everything."""
        whole = (0, cells.patches)
        return View(cells.places().to(self._device), self._table(cells), self._axes, whole, whole, None)

    def starts(self, block: int, view: View) -> Sequence[int]:
        """Which sections a block sees."""
        return view.starts

    def encode(self, picture: Picture) -> Generator[int, None, Tensor]:
        """Features [num_tokens, width]"""
        cells = self._cells(picture)
        view = self.view(cells)
        x = ordered(self._see_patches(picture, cells), view.order, cells.merge**2)
        yield x.numel() * 3 * self.config.patch**2
        features = yield from self._see(x, view)
        return features if view.order is None else features[view.order.argsort()]

    def largest(self, max_tokens: int) -> Picture:
        """A square, or nearly one."""
        rows = math.isqrt(max_tokens)
        columns, side = max_tokens // rows, self.config.merge * self.config.patch
        shape = (1, 3, rows * side, columns * side)
        return Picture(bytes(16), rows * columns, (1, rows, columns), shape[2:], shape, bytes(math.prod(shape)))

    def _see(self, x: Tensor, view: View) -> Generator[int, None, Tensor]:
        """Embedded patches [N, H] -> features [cells, width], both in the order of the view."""
        seen = {}
        for index, block in enumerate(self._blocks):
            x = yield from block.see(x, view, self.starts(index, view))
            for number, (layer, merger) in enumerate(self._mergers):
                if layer == index:
                    seen[number] = yield from merger.merge(x)
        return torch.cat([seen[number] for number in range(len(self._mergers))], -1)

    def _cells(self, picture: Picture) -> Cells:
        _, rows, columns = picture.grid
        side = self.config.merge * self.config.patch
        assert picture.shape == (1, 3, rows * side, columns * side), "a picture prepared for another tower"
        return Cells(rows, columns, self.config.merge)

    def _see_patches(self, picture: Picture, cells: Cells) -> Tensor:
        """[N, H]"""
        (pixels,) = self.config.normalization.tensor(picture, self._device)
        return self.embed(self._patches(patches_of(pixels, self.config.patch, cells).to(self._dtype)), cells)

    def _load_patches(self, weights: Weights) -> Linear:
        """All frames of a picture are equal: their weights are added up."""
        config = self.config
        matrix = weights.take("proj.weight", config.hidden, 3, config.frames, config.patch, config.patch).sum(2).flatten(1)
        bias = weights.take("proj.bias", config.hidden) if self.PATCH_BIAS else None
        return Linear(self.ops, self.ops.pack_linear([matrix], self.kind, bias))

    @property
    def _axes(self) -> Axes:
        """Half of the angles turn by the row, half by the column."""
        return Axes((0, self.config.head_dim // 4, self.config.head_dim // 4))

    def _table(self, cells: Cells) -> Tensor:
        """float32 [patches of the longer side, D]: the same angles for rows and columns."""
        length = max(cells.rows, cells.columns) * cells.merge
        rope = Rope(RopeConfig("default", self.config.theta, self.config.head_dim // 2), length, self._device)
        cosines, sines = rope.table.chunk(2, -1)
        return torch.cat((cosines, cosines, sines, sines), -1)


def ordered(x: Tensor, order: Tensor | None, size: int) -> Tensor:
    """Rows [N, ...] whose cells, of `size` rows each, come in this order."""
    return x if order is None else x.view(-1, size, *x.shape[1:])[order].view(x.shape)
