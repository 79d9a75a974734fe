"""Qwen2 and Qwen2.5: Llama's layers with biases of q, k and v."""

from __future__ import annotations

from foreword.models.decoder_config import DecoderConfig, read_decoder_config, read_layer_windows, read_window
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader

WINDOW = 4096
MAX_WINDOW_LAYERS = 28


def read_qwen_layer_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """The first `max_window_layers` layers have full attention, the others a window if enabled."""
    window = read_window(config, WINDOW)
    full_layers = config.get_int("max_window_layers", MAX_WINDOW_LAYERS, low=0)
    if not config.get_bool("use_sliding_window", False):
        window = None
    return read_layer_windows(config, window, lambda index: window is not None and index >= full_layers)


class Qwen2(Llama):
    """Biases are not in the config: every checkpoint has them."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `qwen2`"""
        config.require_value("use_mrope", False)
        return read_decoder_config(config, "qwen2", windows=read_qwen_layer_windows(config), qkv_bias=True)
