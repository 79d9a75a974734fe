"""Qwen2.5-VL (arXiv 2502.13923): windowed attention in most blocks, full attention in a few."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from foreword.layers.mlp import MLP
from foreword.layers.norm import RMSNorm
from foreword.layers.weights import Weights
from foreword.models.decoder_config import ACTIVATIONS as GATED_ACTIVATIONS
from foreword.models.qwen2 import Qwen2
from foreword.models.vision.qwen_config import (
    make_qwen_model,
    read_block_indexes,
    read_hidden_size,
    read_qwen2_decoder,
    read_qwen_tower_config,
    read_vision_config,
)
from foreword.models.vision.qwen_tower import (
    ImageContext,
    PatchGrid,
    PatchMerger,
    QwenTower,
    QwenTowerConfig,
    VisionBlock,
    partition_windows,
    reorder_cells,
)
from foreword.models.vision.vision_layers import build_linear
from foreword.models.vision.vision_model import VisionModel
from foreword.weights.config_reader import ConfigReader

MAX_WINDOW_PIXELS = 1 << 12  # pixels of a side


class Qwen25VLTower(QwenTower):
    """RMSNorm and gated MLPs with biases, as in a decoder. Patches are ordered by window in all blocks."""

    def build_block(self, weights: Weights) -> VisionBlock:
        config, mlp = self.config, weights.prefixed("mlp.")
        hidden, size = config.hidden_size, config.intermediate_size
        outputs = {"gate_proj": size, "up_proj": size}
        gate_up = build_linear(self.ops, mlp, self.weight_format, hidden, outputs)
        down = build_linear(self.ops, mlp, self.weight_format, size, {"down_proj": hidden})
        norms = self._load_norm(weights, "norm1"), self._load_norm(weights, "norm2")
        gated = MLP(gate_up, down, config.activation)
        return VisionBlock(self.ops, config, self.weight_format, weights, norms, gated, 3 * hidden * size)

    def build_merger(self, weights: Weights) -> PatchMerger:
        norm = self._load_norm(weights, "ln_q")
        return PatchMerger(self.config, norm, self.build_merger_mlp(weights, "mlp.0", "mlp.2"))

    def build_context(self, grid: PatchGrid) -> ImageContext:
        order, windows = partition_windows(grid, self.config.window_side)
        context = super().build_context(grid)
        order = order.to(context.positions.device)
        positions = reorder_cells(context.positions, order, grid.merge_size**2)
        return replace(context, positions=positions, window_cu_seqlens=windows, cell_order=order)

    def block_cu_seqlens(self, block_index: int, context: ImageContext) -> Sequence[int]:
        is_full = block_index in self.config.full_attention_blocks
        return context.cu_seqlens if is_full else context.window_cu_seqlens

    def _load_norm(self, weights: Weights, name: str) -> RMSNorm:
        return RMSNorm(self.ops, weights.tensor(f"{name}.weight", self.config.hidden_size), self.EPS)


def read_qwen2_5_vl(config: ConfigReader, path: Path) -> VisionModel:
    """model_type `qwen2_5_vl`"""
    decoder, vision = read_qwen2_decoder(config), read_vision_config(config)
    vision.get_choice("hidden_act", GATED_ACTIVATIONS, "silu")
    tower = read_qwen_tower_config(
        vision,
        decoder,
        path,
        hidden_size=read_hidden_size(vision, "hidden_size", 3584),
        intermediate_size=read_hidden_size(vision, "intermediate_size", 3420),
        out_hidden_size=read_hidden_size(vision, "out_hidden_size", 3584),
        activation="silu",
    )
    tower = _with_windows(vision, tower)
    return make_qwen_model(config, vision, Qwen2, decoder, partial(Qwen25VLTower, tower))


def _with_windows(vision: ConfigReader, tower: QwenTowerConfig) -> QwenTowerConfig:
    size = vision.get_int("window_size", 112, high=MAX_WINDOW_PIXELS)
    side = size // tower.merge_size // tower.patch_size
    if side < 1:
        cell = tower.merge_size * tower.patch_size
        raise vision.error("window_size", f"{size} is less than a cell of {cell} pixels")
    full = read_block_indexes(vision, "fullatt_block_indexes", (7, 15, 23, 31), tower.depth)
    return replace(tower, window_side=side, full_attention_blocks=frozenset(full))
