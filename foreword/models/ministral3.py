"""Ministral 3: Mistral with YaRN, and queries scaled by their position beyond the original context."""

from __future__ import annotations

from foreword.models.decoder_config import (
    DecoderConfig,
    LayerType,
    read_decoder_config,
    read_head_dim,
    read_layer_windows,
    read_query_scaled_rope,
    read_window,
)
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader

HEAD_DIM = 128
EPS = 1e-5


class Ministral3(Llama):
    """Text checkpoints; the scale of queries is `llama_4_scaling_beta`."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `ministral3`"""
        window = read_window(config)
        windows = read_layer_windows(config, window, lambda index: window is not None)
        context_length = config.get_int("max_position_embeddings")
        rope = read_query_scaled_rope(config, read_head_dim(config, HEAD_DIM), context_length)
        return read_decoder_config(
            config,
            "ministral3",
            layer_types=[LayerType(window, rope) for window in windows],
            head_dim=HEAD_DIM,
            eps=EPS,
        )
