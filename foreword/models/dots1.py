"""dots.llm1: Qwen3's attention, and experts as in DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import (
    DecoderConfig,
    QKNorm,
    read_decoder_config,
    read_layer_windows,
    read_window,
)
from foreword.models.deepseek_v2 import read_shared_moe
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader

WINDOW = 4096
MAX_WINDOW_LAYERS = 62


class Dots1(Llama):
    """The first `max_window_layers` layers have full attention, the others a window if there is one."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `dots1`"""
        window = read_window(config, WINDOW)
        full_layers = config.get_int("max_window_layers", MAX_WINDOW_LAYERS, low=0)
        base = read_decoder_config(
            config,
            "dots1",
            windows=read_layer_windows(
                config, window, lambda index: window is not None and index >= full_layers
            ),
            bias_key="attention_bias",
            qk_norm=QKNorm(),
        )
        moe = read_shared_moe(config, renormalize=False, num_shared=0)
        return replace(base, moe=moe)
