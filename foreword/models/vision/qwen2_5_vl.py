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
from foreword.models.base import Precision, Tower
from foreword.models.common import ACTIVATIONS as GATED
from foreword.models.config import ConfigReader
from foreword.models.decoder import DecoderConfig
from foreword.models.qwen2 import Qwen2
from foreword.models.vision.base import VisionModel
from foreword.models.vision.parts import FeedForward, dense
from foreword.models.vision.qwen_block import Block, Merger, QwenTowerConfig, View
from foreword.models.vision.qwen_config import (
    QWEN_PREFIXES,
    read_blocks,
    read_qwen_tokens,
    read_qwen_tower,
    read_vision,
    read_width,
)
from foreword.models.vision.qwen_places import Cells, windows_of
from foreword.models.vision.qwen_text import read_qwen2_text
from foreword.models.vision.qwen_tower import QwenTower, ordered

__all__ = ["Qwen25VL", "Qwen25VLTower", "Windows"]

EPS = 1e-6
MAX_WINDOW = 1 << 12  # pixels of a side


@dataclass(frozen=True, slots=True)
class Windows:
    """side  of a window, in cells
    whole  blocks that see the whole picture
    """

    side: int
    whole: frozenset[int]


class Qwen25VLTower(QwenTower):
    """RMSNorm and gated feed-forward layers with biases, as in a decoder. Patches are ordered by windows throughout."""

    def __init__(
        self, config: QwenTowerConfig, windows: Windows, ops: Ops, precision: Precision, weights: Weights, device: str
    ) -> None:
        self._windows = windows
        super().__init__(config, ops, precision, weights, device)

    def block(self, weights: Weights) -> Block:
        config, mlp = self.config, weights.within("mlp.")
        hidden, size = config.hidden, config.intermediate
        gate_up = dense(self.ops, mlp, self.kind, hidden, {"gate_proj": size, "up_proj": size})
        down = dense(self.ops, mlp, self.kind, size, {"down_proj": hidden})
        norms = self._norm(weights, "norm1"), self._norm(weights, "norm2")
        gated = MLP(self.ops, gate_up, down, config.activation)
        return Block(self.ops, config, self.kind, weights, norms, gated, 3 * hidden * size)

    def merger(self, weights: Weights) -> Merger:
        config = self.config
        up = dense(self.ops, weights, self.kind, config.merged, {"mlp.0": config.merged})
        down = dense(self.ops, weights, self.kind, config.merged, {"mlp.2": config.out})
        return Merger(config, self._norm(weights, "ln_q"), FeedForward(up, down, "gelu"))

    def view(self, cells: Cells) -> View:
        order, windows = windows_of(cells, self._windows.side)
        view = super().view(cells)
        order = order.to(view.positions.device)
        return replace(view, positions=ordered(view.positions, order, cells.merge**2), windows=windows, order=order)

    def starts(self, block: int, view: View) -> Sequence[int]:
        return view.starts if block in self._windows.whole else view.windows

    def _norm(self, weights: Weights, name: str) -> RMSNorm:
        return RMSNorm(self.ops, weights.take(f"{name}.weight", self.config.hidden), EPS)


class Qwen25VL(VisionModel):
    """model_type `qwen2_5_vl`"""

    PREFIXES: ClassVar = QWEN_PREFIXES

    def __init__(self, decoder: DecoderConfig, image_token_id: int, config: QwenTowerConfig, windows: Windows) -> None:
        super().__init__(Qwen2, decoder, image_token_id)
        self.config = config
        self.windows = windows

    @classmethod
    def read(cls, config: ConfigReader, path: Path) -> Self:
        """config.json, and preprocessor_config.json for the colours"""
        decoder, vision = read_qwen2_text(config), read_vision(config)
        vision.choice("hidden_act", GATED, "silu")
        tower = read_qwen_tower(
            vision,
            decoder,
            path,
            hidden=read_width(vision, "hidden_size", 3584),
            intermediate=read_width(vision, "intermediate_size", 3420),
            out=read_width(vision, "out_hidden_size", 3584),
            activation="silu",
        )
        windows = _read_windows(vision, tower)
        vision.finish()
        return cls(decoder, read_qwen_tokens(config, decoder), tower, windows)

    def tower(self, ops: Ops, precision: Precision, weights: Weights, device: str) -> Tower:
        """Build the tower."""
        return Qwen25VLTower(self.config, self.windows, ops, precision, weights.within("visual."), device)


def _read_windows(vision: ConfigReader, tower: QwenTowerConfig) -> Windows:
    size = vision.whole("window_size", 112, high=MAX_WINDOW)
    side = size // tower.merge // tower.patch
    if side < 1:
        raise vision.refuse("window_size", f"{size} is less than a cell of {tower.merge * tower.patch} pixels")
    whole = read_blocks(vision, "fullatt_block_indexes", (7, 15, 23, 31), tower.depth)
    return Windows(side, frozenset(whole))
