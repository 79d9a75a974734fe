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
from foreword.models.base import Precision, VisionEncoder
from foreword.models.config import ConfigReader
from foreword.models.decoder import DecoderConfig
from foreword.models.qwen3 import Qwen3
from foreword.models.vision.base import VisionModel
from foreword.models.vision.layers import VisionLayerNorm, VisionMLP, build_linear
from foreword.models.vision.qwen_block import PatchMerger, QwenTowerConfig, VisionBlock
from foreword.models.vision.qwen_config import (
    QWEN_WEIGHT_PREFIXES,
    read_block_indexes,
    read_hidden_size,
    read_qwen_image_token_id,
    read_qwen_tower_config,
    read_vision_config,
)
from foreword.models.vision.qwen_decoder import read_qwen3_decoder
from foreword.models.vision.qwen_grid import PatchGrid
from foreword.models.vision.qwen_tower import QwenTower

__all__ = ["DeepStackConfig", "Qwen3VL", "Qwen3VLTower"]

EPS = 1e-6
MAX_POSITIONS_PER_SIDE = 1 << 10  # learned positions of a side


@dataclass(frozen=True, slots=True)
class DeepStackConfig:
    """side   learned positions of a side: they are interpolated to the size of the picture
    blocks  behind which features are taken that go deeper than the decoder's embedding
    """

    positions_per_side: int
    block_indexes: tuple[int, ...]


class Qwen3VLTower(QwenTower):
    """LayerNorm, and feed-forward layers that are not gated."""

    PATCH_BIAS = True

    def __init__(
        self,
        config: QwenTowerConfig,
        deepstack: DeepStackConfig,
        ops: Ops,
        precision: Precision,
        weights: Weights,
        device: str,
    ) -> None:
        self._deepstack = deepstack
        super().__init__(config, ops, precision, weights, device)
        self._pos_embed = weights.tensor(
            "pos_embed.weight", deepstack.positions_per_side**2, config.hidden_size
        )

    def build_block(self, weights: Weights) -> VisionBlock:
        config, mlp = self.config, weights.prefixed("mlp.")
        norms = (
            VisionLayerNorm(weights, "norm1", config.hidden_size, EPS),
            VisionLayerNorm(weights, "norm2", config.hidden_size, EPS),
        )
        up = build_linear(
            self.ops, mlp, self.weight_format, config.hidden_size, {"linear_fc1": config.intermediate_size}
        )
        down = build_linear(
            self.ops, mlp, self.weight_format, config.intermediate_size, {"linear_fc2": config.hidden_size}
        )
        feed_forward = VisionMLP(up, down, config.activation)
        return VisionBlock(
            self.ops,
            config,
            self.weight_format,
            weights,
            norms,
            feed_forward,
            2 * config.hidden_size * config.intermediate_size,
        )

    def build_merger(self, weights: Weights) -> PatchMerger:
        return self._load_merger(weights, norm_by_patch=True)

    def build_deepstack(self, weights: Weights) -> list[tuple[int, PatchMerger]]:
        mergers = (
            weights.prefixed(f"deepstack_merger_list.{number}.")
            for number in range(len(self._deepstack.block_indexes))
        )
        return [
            (block, self._load_merger(inner, norm_by_patch=False))
            for block, inner in zip(self._deepstack.block_indexes, mergers, strict=True)
        ]

    def embed(self, patches: Tensor, grid: PatchGrid) -> Tensor:
        return patches + interpolate_pos_embed(self._pos_embed, self._deepstack.positions_per_side, grid).to(
            patches.dtype
        )

    def _load_merger(self, weights: Weights, norm_by_patch: bool) -> PatchMerger:
        config = self.config
        norm = VisionLayerNorm(
            weights, "norm", config.hidden_size if norm_by_patch else config.merged_size, EPS
        )
        up = build_linear(
            self.ops, weights, self.weight_format, config.merged_size, {"linear_fc1": config.merged_size}
        )
        down = build_linear(
            self.ops, weights, self.weight_format, config.merged_size, {"linear_fc2": config.out_hidden_size}
        )
        return PatchMerger(config, norm, VisionMLP(up, down, "gelu"), norm_by_patch)


def interpolate_pos_embed(pos_embed: Tensor, positions_per_side: int, grid: PatchGrid) -> Tensor:
    """Learned positions [side * side, H], spread evenly over a picture with corner on corner -> [N, H]."""
    _, rows, columns = grid.patch_positions().to(pos_embed.device).unbind(1)
    found = torch.zeros(grid.num_patches, pos_embed.shape[1], dtype=pos_embed.dtype, device=pos_embed.device)
    for row, row_share in _interpolation_weights(rows, grid.rows * grid.merge_size, positions_per_side):
        for column, column_share in _interpolation_weights(
            columns, grid.columns * grid.merge_size, positions_per_side
        ):
            found += pos_embed[row * positions_per_side + column] * (row_share * column_share)[:, None]
    return found


def _interpolation_weights(
    positions: Tensor, size: int, positions_per_side: int
) -> list[tuple[Tensor, Tensor]]:
    """The learned positions before and behind each place, and their shares."""
    exact = positions.to(torch.float32) * (positions_per_side - 1) / max(size - 1, 1)
    before = exact.floor()
    behind = (before + 1).clamp(max=positions_per_side - 1)
    return [(before.long(), 1 - (exact - before)), (behind.long(), exact - before)]


class Qwen3VL(VisionModel):
    """model_type `qwen3_vl`"""

    WEIGHT_PREFIXES: ClassVar = QWEN_WEIGHT_PREFIXES

    def __init__(
        self,
        decoder_config: DecoderConfig,
        image_token_id: int,
        config: QwenTowerConfig,
        deepstack: DeepStackConfig,
    ) -> None:
        super().__init__(Qwen3, decoder_config, image_token_id)
        self.config = config
        self.deepstack = deepstack

    @classmethod
    def from_config(cls, config: ConfigReader, path: Path) -> Self:
        """config.json, and preprocessor_config.json for the colours"""
        decoder, vision = read_qwen3_decoder(config), read_vision_config(config)
        tower = read_qwen_tower_config(
            vision,
            decoder,
            path,
            depth=27,
            hidden_size=read_hidden_size(vision, "hidden_size", 1152),
            intermediate_size=read_hidden_size(vision, "intermediate_size", 4304),
            out_hidden_size=read_hidden_size(vision, "out_hidden_size", 3584),
            patch_size=16,
            activation="gelu_pytorch_tanh",
        )
        depths = _read_deepstack(vision, tower, decoder)
        vision.check_all_read()
        return cls(decoder, read_qwen_image_token_id(config, decoder), tower, depths)

    def build_tower(self, ops: Ops, precision: Precision, weights: Weights, device: str) -> VisionEncoder:
        """Build the tower."""
        return Qwen3VLTower(self.config, self.deepstack, ops, precision, weights.prefixed("visual."), device)


def _read_deepstack(
    vision: ConfigReader, tower: QwenTowerConfig, decoder_config: DecoderConfig
) -> DeepStackConfig:
    positions = vision.get_int("num_position_embeddings", 2304, high=MAX_POSITIONS_PER_SIDE**2)
    side = math.isqrt(positions)
    if side**2 != positions:
        raise vision.error("num_position_embeddings", f"must be a square number, got {positions}")
    blocks = read_block_indexes(vision, "deepstack_visual_indexes", (8, 16, 24), tower.depth)
    if len(blocks) > len(decoder_config.layer_types):
        raise vision.error(
            "deepstack_visual_indexes",
            f"names {len(blocks)} blocks, the decoder has {len(decoder_config.layer_types)} layers",
        )
    return DeepStackConfig(side, blocks)
