"""Qwen2-VL (arXiv 2409.12191): every patch sees the whole picture, whatever its size."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from foreword.kernels.ops import Ops
from foreword.layers.weights import Weights
from foreword.models.base import Precision, Tower
from foreword.models.config import ConfigReader
from foreword.models.decoder import DecoderConfig
from foreword.models.qwen2 import Qwen2
from foreword.models.vision.base import VisionModel
from foreword.models.vision.parts import FeedForward, LayerNorm, dense
from foreword.models.vision.qwen_block import Block, Merger, QwenTowerConfig
from foreword.models.vision.qwen_config import QWEN_PREFIXES, read_qwen_tokens, read_qwen_tower, read_vision, read_width
from foreword.models.vision.qwen_text import read_qwen2_text
from foreword.models.vision.qwen_tower import QwenTower

__all__ = ["Qwen2VL", "Qwen2VLTower"]

EPS = 1e-6
MAX_RATIO = 64


class Qwen2VLTower(QwenTower):
    """LayerNorm, and feed-forward layers that are not gated."""

    def block(self, weights: Weights) -> Block:
        config, mlp = self.config, weights.within("mlp.")
        norms = LayerNorm(weights, "norm1", config.hidden, EPS), LayerNorm(weights, "norm2", config.hidden, EPS)
        up = dense(self.ops, mlp, self.kind, config.hidden, {"fc1": config.intermediate})
        down = dense(self.ops, mlp, self.kind, config.intermediate, {"fc2": config.hidden})
        feed_forward = FeedForward(up, down, config.activation)
        return Block(self.ops, config, self.kind, weights, norms, feed_forward, 2 * config.hidden * config.intermediate)

    def merger(self, weights: Weights) -> Merger:
        config = self.config
        up = dense(self.ops, weights, self.kind, config.merged, {"mlp.0": config.merged})
        down = dense(self.ops, weights, self.kind, config.merged, {"mlp.2": config.out})
        return Merger(config, LayerNorm(weights, "ln_q", config.hidden, EPS), FeedForward(up, down, "gelu"))


class Qwen2VL(VisionModel):
    """model_type `qwen2_vl`"""

    PREFIXES: ClassVar = QWEN_PREFIXES

    def __init__(self, decoder: DecoderConfig, image_token_id: int, config: QwenTowerConfig) -> None:
        super().__init__(Qwen2, decoder, image_token_id)
        self.config = config

    @classmethod
    def read(cls, config: ConfigReader, path: Path) -> Self:
        """config.json, and preprocessor_config.json for the colours"""
        decoder, vision = read_qwen2_text(config), read_vision(config)
        hidden = read_width(vision, "embed_dim", 1280)
        intermediate = hidden * vision.whole("mlp_ratio", 4, high=MAX_RATIO)
        out = read_width(vision, "hidden_size", 3584)
        tower = read_qwen_tower(vision, decoder, path, hidden=hidden, intermediate=intermediate, out=out, activation="quick_gelu")
        vision.finish()
        return cls(decoder, read_qwen_tokens(config, decoder), tower)

    def tower(self, ops: Ops, precision: Precision, weights: Weights, device: str) -> Tower:
        """Build the tower."""
        return Qwen2VLTower(self.config, ops, precision, weights.within("visual."), device)
