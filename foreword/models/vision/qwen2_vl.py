"""Qwen2-VL (arXiv 2409.12191): full attention over images of any size."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from foreword.layers.norm import EncoderLayerNorm
from foreword.layers.weights import Weights
from foreword.models.qwen2 import Qwen2
from foreword.models.vision.qwen_config import (
    make_qwen_model,
    read_hidden_size,
    read_qwen2_decoder,
    read_qwen_tower_config,
    read_vision_config,
)
from foreword.models.vision.qwen_tower import PatchMerger, QwenTower, VisionBlock
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


def read_qwen2_vl(config: ConfigReader, path: Path) -> VisionModel:
    """model_type `qwen2_vl`"""
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
    return make_qwen_model(config, vision, Qwen2, decoder, partial(Qwen2VLTower, tower))
