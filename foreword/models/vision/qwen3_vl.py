"""Qwen3-VL (arXiv 2511.21631): learned positions besides those that turn, and features of several depths.

What the tower sees behind some of its blocks is added behind the first layers of the decoder (DeepStack).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

import torch
from torch import Tensor

from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.base import Precision, Tower
from foreword.models.config import ConfigReader
from foreword.models.decoder import DecoderConfig
from foreword.models.qwen3 import Qwen3
from foreword.models.vision.base import VisionModel
from foreword.models.vision.parts import FeedForward, LayerNorm, dense
from foreword.models.vision.qwen_block import Block, Merger, QwenTowerConfig
from foreword.models.vision.qwen_config import (
    QWEN_PREFIXES,
    read_blocks,
    read_qwen_tokens,
    read_qwen_tower,
    read_vision,
    read_width,
)
from foreword.models.vision.qwen_places import Cells
from foreword.models.vision.qwen_text import read_qwen3_text
from foreword.models.vision.qwen_tower import QwenTower

__all__ = ["Depths", "Qwen3VL", "Qwen3VLTower"]

EPS = 1e-6
MAX_SIDE = 1 << 10  # learned positions of a side


@dataclass(frozen=True, slots=True)
class Depths:
    """side   learned positions of a side: they are interpolated to the size of the picture
    blocks  behind which features are taken that go deeper than the decoder's embedding
    """

    side: int
    blocks: tuple[int, ...]


class Qwen3VLTower(QwenTower):
    """LayerNorm, and feed-forward layers that are not gated."""

    PATCH_BIAS = True

    def __init__(
        self, config: QwenTowerConfig, depths: Depths, ops: Ops, precision: Precision, weights: Weights, device: str
    ) -> None:
        self._depths = depths
        super().__init__(config, ops, precision, weights, device)
        self._learned = weights.take("pos_embed.weight", depths.side**2, config.hidden)

    def block(self, weights: Weights) -> Block:
        config, mlp = self.config, weights.within("mlp.")
        norms = LayerNorm(weights, "norm1", config.hidden, EPS), LayerNorm(weights, "norm2", config.hidden, EPS)
        up = dense(self.ops, mlp, self.kind, config.hidden, {"linear_fc1": config.intermediate})
        down = dense(self.ops, mlp, self.kind, config.intermediate, {"linear_fc2": config.hidden})
        feed_forward = FeedForward(up, down, config.activation)
        return Block(self.ops, config, self.kind, weights, norms, feed_forward, 2 * config.hidden * config.intermediate)

    def merger(self, weights: Weights) -> Merger:
        return self._merger(weights, by_patch=True)

    def deeper(self, weights: Weights) -> list[tuple[int, Merger]]:
        mergers = (weights.within(f"deepstack_merger_list.{number}.") for number in range(len(self._depths.blocks)))
        return [(block, self._merger(inner, by_patch=False)) for block, inner in zip(self._depths.blocks, mergers, strict=True)]

    def embed(self, patches: Tensor, cells: Cells) -> Tensor:
        return patches + interpolated(self._learned, self._depths.side, cells).to(patches.dtype)

    def _merger(self, weights: Weights, by_patch: bool) -> Merger:
        config = self.config
        norm = LayerNorm(weights, "norm", config.hidden if by_patch else config.merged, EPS)
        up = dense(self.ops, weights, self.kind, config.merged, {"linear_fc1": config.merged})
        down = dense(self.ops, weights, self.kind, config.merged, {"linear_fc2": config.out})
        return Merger(config, norm, FeedForward(up, down, "gelu"), by_patch)


def interpolated(learned: Tensor, side: int, cells: Cells) -> Tensor:
    """Learned positions [side * side, H], spread evenly over a picture with corner on corner -> [N, H]."""
    _, rows, columns = cells.places().to(learned.device).unbind(1)
    found = torch.zeros(cells.patches, learned.shape[1], dtype=learned.dtype, device=learned.device)
    for row, row_share in _between(rows, cells.rows * cells.merge, side):
        for column, column_share in _between(columns, cells.columns * cells.merge, side):
            found += learned[row * side + column] * (row_share * column_share)[:, None]
    return found


def _between(places: Tensor, size: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """The learned positions before and behind each place, and their shares."""
    exact = places.to(torch.float32) * (side - 1) / max(size - 1, 1)
    before = exact.floor()
    behind = (before + 1).clamp(max=side - 1)
    return [(before.long(), 1 - (exact - before)), (behind.long(), exact - before)]


class Qwen3VL(VisionModel):
    """model_type `qwen3_vl`"""

    PREFIXES: ClassVar = QWEN_PREFIXES

    def __init__(self, decoder: DecoderConfig, image_token_id: int, config: QwenTowerConfig, depths: Depths) -> None:
        super().__init__(Qwen3, decoder, image_token_id)
        self.config = config
        self.depths = depths

    @classmethod
    def read(cls, config: ConfigReader, path: Path) -> Self:
        """config.json, and preprocessor_config.json for the colours"""
        decoder, vision = read_qwen3_text(config), read_vision(config)
        tower = read_qwen_tower(
            vision,
            decoder,
            path,
            depth=27,
            hidden=read_width(vision, "hidden_size", 1152),
            intermediate=read_width(vision, "intermediate_size", 4304),
            out=read_width(vision, "out_hidden_size", 3584),
            patch=16,
            activation="gelu_pytorch_tanh",
        )
        depths = _read_depths(vision, tower, decoder)
        vision.finish()
        return cls(decoder, read_qwen_tokens(config, decoder), tower, depths)

    def tower(self, ops: Ops, precision: Precision, weights: Weights, device: str) -> Tower:
        """Build the tower."""
        return Qwen3VLTower(self.config, self.depths, ops, precision, weights.within("visual."), device)


def _read_depths(vision: ConfigReader, tower: QwenTowerConfig, decoder: DecoderConfig) -> Depths:
    positions = vision.whole("num_position_embeddings", 2304, high=MAX_SIDE**2)
    side = math.isqrt(positions)
    if side**2 != positions:
        raise vision.refuse("num_position_embeddings", f"must be a square number, got {positions}")
    blocks = read_blocks(vision, "deepstack_visual_indexes", (8, 16, 24), tower.depth)
    if len(blocks) > len(decoder.kinds):
        raise vision.refuse(
            "deepstack_visual_indexes", f"names {len(blocks)} blocks, the decoder has {len(decoder.kinds)} layers"
        )
    return Depths(side, blocks)
