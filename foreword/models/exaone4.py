"""EXAONE 4: OLMo 2's layers with QK norm of each head; RoPE only in the layers with a window, if any."""

from __future__ import annotations

from foreword.layers.rope import NO_ROPE
from foreword.models.decoder_config import (
    DecoderConfig,
    LayerType,
    QKNorm,
    read_decoder_config,
    read_head_dim,
    read_layer_windows,
    read_rope,
    read_window,
)
from foreword.models.olmo2 import EPS, Olmo2
from foreword.weights.config_reader import ConfigReader

WINDOW = 4096  # default; null means no window, and RoPE in all layers
WINDOW_PERIOD = 4  # every n-th layer has full attention


class Exaone4(Olmo2):
    """EXAONE 4.0, without the vision encoder of 4.5."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `exaone4`"""
        window = read_window(config, WINDOW)
        windows = _read_windows(config, window)
        context_length = config.get_int("max_position_embeddings")
        rope = read_rope(config, read_head_dim(config), context_length)
        return read_decoder_config(
            config,
            "exaone4",
            layer_types=[LayerType(item, rope if window is None or item else NO_ROPE) for item in windows],
            eps=EPS,
            qk_norm=QKNorm(),
        )


def _read_windows(config: ConfigReader, window: int | None) -> tuple[int | None, ...]:
    """The window of each layer; `sliding_window_pattern` matters only without `layer_types`."""
    if window is None or "layer_types" in config:
        config.get("sliding_window_pattern", None)
        return read_layer_windows(config, window, lambda index: False)
    period = config.get_int("sliding_window_pattern", WINDOW_PERIOD)
    return read_layer_windows(config, window, lambda index: (index + 1) % period != 0)
