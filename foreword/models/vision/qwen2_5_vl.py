"""Qwen2.5-VL (arXiv 2502.13923): most blocks look through windows, a few see the whole picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, Self

from foreword.kernels.ops import Ops
from foreword.layers.mlp import MLP
from foreword.layers.norm import RMSNorm
from foreword.layers.weights import Weights
from foreword.models.base import Precision, VisionEncoder
from foreword.models.common import ACTIVATIONS as GATED
from foreword.models.config import ConfigReader
from foreword.models.decoder import DecoderConfig
from foreword.models.qwen2 import Qwen2
from foreword.models.vision.base import VisionModel
from foreword.models.vision.layers import VisionMLP, build_linear
from foreword.models.vision.qwen_block import ImageContext, PatchMerger, QwenTowerConfig, VisionBlock
from foreword.models.vision.qwen_config import (
    QWEN_WEIGHT_PREFIXES,
    read_block_indexes,
    read_hidden_size,
    read_qwen_image_token_id,
    read_qwen_tower_config,
    read_vision_config,
)
from foreword.models.vision.qwen_decoder import read_qwen2_decoder
from foreword.models.vision.qwen_grid import PatchGrid, partition_windows
from foreword.models.vision.qwen_tower import QwenTower, reorder_cells

__all__ = ["Qwen25VL", "Qwen25VLTower", "WindowConfig"]

EPS = 1e-6
MAX_WINDOW_PIXELS = 1 << 12  # pixels of a side


@dataclass(frozen=True, slots=True)
class WindowConfig:
    """side  of a window, in cells
    whole  blocks that see the whole picture
    """

    side_cells: int
    full_attention_blocks: frozenset[int]


class Qwen25VLTower(QwenTower):
    """RMSNorm and gated feed-forward layers with biases, as in a decoder. Patches are ordered by windows throughout."""

    def __init__(
        self,
        config: QwenTowerConfig,
        window_config: WindowConfig,
        ops: Ops,
        precision: Precision,
        weights: Weights,
        device: str,
    ) -> None:
        self._window_config = window_config
        super().__init__(config, ops, precision, weights, device)

    def build_block(self, weights: Weights) -> VisionBlock:
        config, mlp = self.config, weights.prefixed("mlp.")
        hidden, size = config.hidden_size, config.intermediate_size
        gate_up = build_linear(
            self.ops, mlp, self.weight_format, hidden, {"gate_proj": size, "up_proj": size}
        )
        down = build_linear(self.ops, mlp, self.weight_format, size, {"down_proj": hidden})
        norms = self._load_norm(weights, "norm1"), self._load_norm(weights, "norm2")
        gated = MLP(self.ops, gate_up, down, config.activation)
        return VisionBlock(self.ops, config, self.weight_format, weights, norms, gated, 3 * hidden * size)

    def build_merger(self, weights: Weights) -> PatchMerger:
        config = self.config
        up = build_linear(
            self.ops, weights, self.weight_format, config.merged_size, {"mlp.0": config.merged_size}
        )
        down = build_linear(
            self.ops, weights, self.weight_format, config.merged_size, {"mlp.2": config.out_hidden_size}
        )
        return PatchMerger(config, self._load_norm(weights, "ln_q"), VisionMLP(up, down, "gelu"))

    def build_context(self, grid: PatchGrid) -> ImageContext:
        order, windows = partition_windows(grid, self._window_config.side_cells)
        view = super().build_context(grid)
        order = order.to(view.positions.device)
        return replace(
            view,
            positions=reorder_cells(view.positions, order, grid.merge_size**2),
            window_cu_seqlens=windows,
            cell_order=order,
        )

    def block_cu_seqlens(self, block_index: int, context: ImageContext) -> Sequence[int]:
        return (
            context.cu_seqlens
            if block_index in self._window_config.full_attention_blocks
            else context.window_cu_seqlens
        )

    def _load_norm(self, weights: Weights, name: str) -> RMSNorm:
        return RMSNorm(self.ops, weights.tensor(f"{name}.weight", self.config.hidden_size), EPS)


class Qwen25VL(VisionModel):
    """model_type `qwen2_5_vl`"""

    WEIGHT_PREFIXES: ClassVar = QWEN_WEIGHT_PREFIXES

    def __init__(
        self,
        decoder_config: DecoderConfig,
        image_token_id: int,
        config: QwenTowerConfig,
        window_config: WindowConfig,
    ) -> None:
        super().__init__(Qwen2, decoder_config, image_token_id)
        self.config = config
        self.window_config = window_config

    @classmethod
    def from_config(cls, config: ConfigReader, path: Path) -> Self:
        """config.json, and preprocessor_config.json for the colours"""
        decoder, vision = read_qwen2_decoder(config), read_vision_config(config)
        vision.get_choice("hidden_act", GATED, "silu")
        tower = read_qwen_tower_config(
            vision,
            decoder,
            path,
            hidden_size=read_hidden_size(vision, "hidden_size", 3584),
            intermediate_size=read_hidden_size(vision, "intermediate_size", 3420),
            out_hidden_size=read_hidden_size(vision, "out_hidden_size", 3584),
            activation="silu",
        )
        windows = _read_window_config(vision, tower)
        vision.check_all_read()
        return cls(decoder, read_qwen_image_token_id(config, decoder), tower, windows)

    def build_tower(self, ops: Ops, precision: Precision, weights: Weights, device: str) -> VisionEncoder:
        """Build the tower."""
        return Qwen25VLTower(
            self.config, self.window_config, ops, precision, weights.prefixed("visual."), device
        )


def _read_window_config(vision: ConfigReader, tower: QwenTowerConfig) -> WindowConfig:
    size = vision.get_int("window_size", 112, high=MAX_WINDOW_PIXELS)
    side = size // tower.merge_size // tower.patch_size
    if side < 1:
        raise vision.error(
            "window_size", f"{size} is less than a cell of {tower.merge_size * tower.patch_size} pixels"
        )
    whole = read_block_indexes(vision, "fullatt_block_indexes", (7, 15, 23, 31), tower.depth)
    return WindowConfig(side, frozenset(whole))
