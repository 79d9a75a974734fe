"""OLMo 3: OLMo 2's layers, three of four with a sliding window; RoPE scaling is for the others."""

from __future__ import annotations

from foreword.models.decoder_config import (
    DecoderConfig,
    LayerType,
    QKNorm,
    read_decoder_config,
    read_head_dim,
    read_layer_windows,
    read_local_and_global_rope,
    read_window,
)
from foreword.models.olmo2 import EPS, Olmo2
from foreword.weights.config_reader import ConfigReader

WINDOW = 4096
WINDOW_PERIOD = 4  # every n-th layer has full attention
THETA = 500_000.0


class Olmo3(Olmo2):
    """Both kinds of layers have their own RoPE, of the same frequencies before scaling."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `olmo3`"""
        window = read_window(config, WINDOW)
        windows = read_layer_windows(config, window, lambda index: (index + 1) % WINDOW_PERIOD != 0)
        theta = config.get_float("rope_theta", THETA)
        local_rope, global_rope = read_local_and_global_rope(config, read_head_dim(config), theta, theta)
        return read_decoder_config(
            config,
            "olmo3",
            layer_types=[LayerType(window, local_rope if window else global_rope) for window in windows],
            eps=EPS,
            bias_key="attention_bias",
            qk_norm=QKNorm(all_heads=True),
        )
