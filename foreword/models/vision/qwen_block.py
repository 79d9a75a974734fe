"""The blocks of the towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: attention over a picture, or over windows of it."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from foreword.kernels.ops import Axes, Ops
from foreword.layers.weights import Weights
from foreword.models.vision.base import Normalization
from foreword.models.vision.parts import ATTENTION_PACE, dense

__all__ = ["Block", "Layer", "Merger", "QwenTowerConfig", "View"]

ROWS = 512  # patches that go through linear layers as one piece
CELLS = 128  # and cells, as they become tokens
PAIRS = 1 << 20  # of patches where one sees the other, in one piece


class Layer(Protocol):
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
    hidden: int
    heads: int
    intermediate: int
    out: int
    patch: int
    frames: int
    merge: int
    theta: float
    activation: str
    normalization: Normalization

    @property
    def head_dim(self) -> int:
        """D"""
        return self.hidden // self.heads

    @property
    def merged(self) -> int:
        """Values of a cell."""
        return self.hidden * self.merge**2


@dataclass(frozen=True, slots=True)
class View:
    """Of one picture, what all blocks share: positions and table as in Ops.rope, and which patches see each other.

    starts   of sections whose patches see each other, and their end: one section for the whole picture
    windows  the same, where a block looks through windows
    order    of the cells, int64; None: as they are read
    """

    positions: Tensor
    table: Tensor
    axes: Axes
    starts: Sequence[int]
    windows: Sequence[int]
    order: Tensor | None


class Piece(NamedTuple):
    """Queries, and the keys that they see; where sections begin among them, as in Ops.attend_sections."""

    queries: slice
    keys: slice
    q_starts: Sequence[int]
    kv_starts: Sequence[int]


def pieces_of(starts: Sequence[int]) -> Iterator[Piece]:
    """Attention of one block: small windows at once, the whole picture so many queries at a time that PAIRS is not exceeded."""
    size = starts[-1]
    everything = slice(0, size)
    if len(starts) > 2:
        yield Piece(everything, everything, starts, starts)
        return
    step = max(1, PAIRS // size)
    for begin in range(0, size, step):
        end = min(begin + step, size)
        yield Piece(slice(begin, end), everything, (0, end - begin), starts)


class Block:
    """Norm, attention, norm, feed-forward; each branch is added to what it read.

    products  multiply-adds of the feed-forward layer for one patch
    """

    def __init__(
        self,
        ops: Ops,
        config: QwenTowerConfig,
        kind: str,
        weights: Weights,
        norms: tuple[Layer, Layer],
        mlp: Layer,
        products: int,
    ) -> None:
        hidden, attention = config.hidden, weights.within("attn.")
        self._ops = ops
        self._config = config
        self._attention_norm, self._mlp_norm = norms
        self._qkv = dense(ops, attention, kind, hidden, {"qkv": 3 * hidden})
        self._out = dense(ops, attention, kind, hidden, {"proj": hidden})
        self._mlp = mlp
        self._row_products = hidden**2 + products

    def see(self, x: Tensor, view: View, starts: Sequence[int]) -> Generator[int, None, Tensor]:
        """x [N, H] -> [N, H], a piece at a time."""
        seen = yield from self._attend((yield from self._project(x)), view, starts)
        return (yield from self._finish(x, seen))

    def _project(self, x: Tensor) -> Generator[int, None, Tensor]:
        """[N, H] -> [N, 3 * heads, D]"""
        parts = []
        for rows in torch.split(x, ROWS):
            parts.append(self._qkv(self._attention_norm(rows)))
            yield 3 * rows.numel() * self._config.hidden
        return torch.cat(parts).view(len(x), -1, self._config.head_dim)

    def _attend(self, qkv: Tensor, view: View, starts: Sequence[int]) -> Generator[int, None, Tensor]:
        """-> [N, H]"""
        heads, config = self._config.heads, self._config
        q, k = (self._ops.rope(one, view.table, view.positions, view.axes) for one in (qkv[:, :heads], qkv[:, heads : 2 * heads]))
        v = qkv[:, 2 * heads :].contiguous()
        del qkv  # of a large picture it is the largest tensor
        parts = []
        for queries, keys, q_starts, kv_starts in pieces_of(starts):
            parts.append(self._ops.attend_sections(q[queries], k[keys], v[keys], q_starts, kv_starts, config.head_dim**-0.5))
            yield ATTENTION_PACE * 2 * config.hidden * _pairs(q_starts, kv_starts)
        return torch.cat(parts).flatten(1)

    def _finish(self, x: Tensor, seen: Tensor) -> Generator[int, None, Tensor]:
        """x and what the attention saw [N, H] -> [N, H]"""
        parts = []
        for rows, found in zip(torch.split(x, ROWS), torch.split(seen, ROWS), strict=True):
            between = rows + self._out(found)
            parts.append(between + self._mlp(self._mlp_norm(between)))
            yield len(rows) * self._row_products
        return torch.cat(parts)


def _pairs(q_starts: Sequence[int], kv_starts: Sequence[int]) -> int:
    """How often a patch sees another one."""
    sections = zip(pairwise(q_starts), pairwise(kv_starts), strict=True)
    return sum((q_end - q_start) * (kv_end - kv_start) for (q_start, q_end), (kv_start, kv_end) in sections)


class Merger:
    """Makes one token of the patches of a cell.

    by_patch  the norm sees patches, else whole cells
    """

    def __init__(self, config: QwenTowerConfig, norm: Layer, mlp: Layer, by_patch: bool = True) -> None:
        self._config = config
        self._norm = norm
        self._mlp = mlp
        self._by_patch = by_patch

    def merge(self, x: Tensor) -> Generator[int, None, Tensor]:
        """[N, H] -> [cells, out], a piece at a time."""
        parts = []
        for cells in torch.split(x.view(-1, self._config.merged), CELLS):
            rows = cells.view(-1, self._config.hidden) if self._by_patch else cells
            parts.append(self._mlp(self._norm(rows).view(cells.shape)))
            yield cells.numel() * (self._config.merged + self._config.out)
        return torch.cat(parts)
