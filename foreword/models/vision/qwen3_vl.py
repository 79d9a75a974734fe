"""Qwen3-VL (arXiv 2511.21631): learned positions in addition to RoPE, and DeepStack features.

Features of inner blocks are added to the hidden states after the decoder's first layers.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from foreword.kernels.ops import Ops
from foreword.layers.norm import EncoderLayerNorm
from foreword.layers.weights import Weights
from foreword.models.decoder_config import DecoderConfig
from foreword.models.interfaces import Precision
from foreword.models.qwen3 import Qwen3
from foreword.models.vision.qwen_config import (
    make_qwen_model,
    read_block_indexes,
    read_hidden_size,
    read_qwen3_decoder,
    read_qwen_tower_config,
    read_vision_config,
)
from foreword.models.vision.qwen_tower import PatchGrid, PatchMerger, QwenTower, QwenTowerConfig, VisionBlock
from foreword.models.vision.vision_model import VisionModel
from foreword.weights.config_reader import ConfigReader

MAX_POSITIONS_PER_SIDE = 1 << 10  # learned positions


class Qwen3VLTower(QwenTower):
    """LayerNorm, and MLPs without a gate."""

    PATCH_BIAS = True

    def __init__(
        self, config: QwenTowerConfig, ops: Ops, precision: Precision, weights: Weights, device: str
    ) -> None:
        super().__init__(config, ops, precision, weights, device)
        shape = config.positions_per_side**2, config.hidden_size
        self._pos_embed = weights.tensor("visual.pos_embed.weight", *shape)

    def build_block(self, weights: Weights) -> VisionBlock:
        return self.build_layer_norm_block(weights, "linear_fc1", "linear_fc2")

    def build_merger(self, weights: Weights) -> PatchMerger:
        return self._load_merger(weights, norm_by_patch=True)

    def build_deepstack(self, weights: Weights) -> list[tuple[int, PatchMerger]]:
        mergers = []
        for number, block in enumerate(self.config.deepstack_blocks):
            merger_weights = weights.prefixed(f"deepstack_merger_list.{number}.")
            mergers.append((block, self._load_merger(merger_weights, norm_by_patch=False)))
        return mergers

    def embed(self, patches: Tensor, grid: PatchGrid) -> Tensor:
        positions = interpolate_pos_embed(self._pos_embed, self.config.positions_per_side, grid)
        return patches + positions.to(patches.dtype)

    def _load_merger(self, weights: Weights, norm_by_patch: bool) -> PatchMerger:
        config = self.config
        norm = EncoderLayerNorm(
            weights, "norm", config.hidden_size if norm_by_patch else config.merged_size, self.EPS
        )
        mlp = self.build_merger_mlp(weights, "linear_fc1", "linear_fc2")
        return PatchMerger(config, norm, mlp, norm_by_patch)


def interpolate_pos_embed(pos_embed: Tensor, side: int, grid: PatchGrid) -> Tensor:
    """Learned positions [side * side, H] -> [N, H], bilinear with aligned corners."""
    _, rows, columns = grid.patch_positions().to(pos_embed.device).unbind(1)
    row_weights = _interpolation_weights(rows, grid.rows * grid.merge_size, side)
    column_weights = _interpolation_weights(columns, grid.columns * grid.merge_size, side)
    result = pos_embed.new_zeros(grid.num_patches, pos_embed.shape[1])
    for row, row_weight in row_weights:
        for column, column_weight in column_weights:
            result += pos_embed[row * side + column] * (row_weight * column_weight)[:, None]
    return result


def _interpolation_weights(positions: Tensor, size: int, side: int) -> list[tuple[Tensor, Tensor]]:
    """(index, weight) of the learned positions before and after each of `size` positions."""
    exact = positions.to(torch.float32) * (side - 1) / max(size - 1, 1)
    lower = exact.floor()
    upper = (lower + 1).clamp(max=side - 1)
    return [(lower.long(), 1 - (exact - lower)), (upper.long(), exact - lower)]


def read_qwen3_vl(config: ConfigReader, path: Path) -> VisionModel:
    """model_type `qwen3_vl`"""
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
    tower = _with_deepstack(vision, tower, decoder)
    return make_qwen_model(config, vision, Qwen3, decoder, partial(Qwen3VLTower, tower))


def _with_deepstack(
    vision: ConfigReader, tower: QwenTowerConfig, decoder_config: DecoderConfig
) -> QwenTowerConfig:
    positions = vision.get_int("num_position_embeddings", 2304, high=MAX_POSITIONS_PER_SIDE**2)
    side = math.isqrt(positions)
    if side**2 != positions:
        raise vision.error("num_position_embeddings", f"must be a square number, got {positions}")
    blocks = read_block_indexes(vision, "deepstack_visual_indexes", (8, 16, 24), tower.depth)
    if len(blocks) > len(decoder_config.layer_types):
        reason = f"has {len(blocks)} blocks, but the decoder has {len(decoder_config.layer_types)} layers"
        raise vision.error("deepstack_visual_indexes", reason)
    return replace(tower, positions_per_side=side, deepstack_blocks=blocks)
