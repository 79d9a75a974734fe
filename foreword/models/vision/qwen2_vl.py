"""Qwen2-VL (arXiv 2409.12191): full attention over images of any size."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Self

from foreword.kernels.ops import Ops
from foreword.layers.norm import EncoderLayerNorm
from foreword.layers.weights import Weights
from foreword.models.decoder_config import DecoderConfig
from foreword.models.interfaces import Precision, VisionEncoder
from foreword.models.qwen2 import Qwen2
from foreword.models.vision.qwen_config import (
    QWEN_WEIGHT_PREFIXES,
    read_hidden_size,
    read_qwen2_decoder,
    read_qwen_image_token_id,
    read_qwen_tower_config,
    read_vision_config,
)
from foreword.models.vision.qwen_tower import PatchMerger, QwenTower, QwenTowerConfig, VisionBlock
from foreword.models.vision.vision_model import VisionModel
from foreword.weights.config_reader import ConfigReader

MAX_MLP_RATIO = 64


class Qwen2VLTower(QwenTower):
    """LayerNorm, and MLPs without a gate."""

    def build_block(self, weights: Weights) -> VisionBlock:
        return self.build_layer_norm_block(weights, "fc1", "fc2")

    def build_merger(self, weights: Weights) -> PatchMerger:
        norm = EncoderLayerNorm(weights, "ln_q", self.config.hidden_size, self.EPS)
        return PatchMerger(self.config, norm, self.build_merger_mlp(weights, "mlp.0", "mlp.2"))


class Qwen2VL(VisionModel):
    """model_type `qwen2_vl`"""

    WEIGHT_PREFIXES: ClassVar = QWEN_WEIGHT_PREFIXES

    def __init__(self, decoder_config: DecoderConfig, image_token_id: int, config: QwenTowerConfig) -> None:
        super().__init__(Qwen2, decoder_config, image_token_id)
        self.config = config

    @classmethod
    def from_config(cls, config: ConfigReader, path: Path) -> Self:
        decoder, vision = read_qwen2_decoder(config), read_vision_config(config)
        hidden = read_hidden_size(vision, "embed_dim", 1280)
        intermediate = hidden * vision.get_int("mlp_ratio", 4, high=MAX_MLP_RATIO)
        out = read_hidden_size(vision, "hidden_size", 3584)
        tower = read_qwen_tower_config(
            vision,
            decoder,
            path,
            hidden_size=hidden,
            intermediate_size=intermediate,
            out_hidden_size=out,
            activation="quick_gelu",
        )
        vision.check_all_read()
        return cls(decoder, read_qwen_image_token_id(config, decoder), tower)

    def build_tower(self, ops: Ops, precision: Precision, weights: Weights, device: str) -> VisionEncoder:
        return Qwen2VLTower(self.config, ops, precision, weights.prefixed("visual."), device)
