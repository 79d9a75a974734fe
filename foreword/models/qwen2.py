"""Qwen2 and Qwen2.5: Llama's layers with biases on q, k and v."""

from __future__ import annotations

from foreword.models.common import read_common, read_windows
from foreword.models.config import ConfigReader
from foreword.models.decoder import Decoder, DecoderConfig, Layer, Parts
from foreword.models.llama import LlamaLayer

__all__ = ["Qwen2", "read_qwen_windows"]

WINDOW = 4096
FULL_LAYERS = 28


def read_qwen_windows(config: ConfigReader) -> tuple[int | None, ...]:
    """The first `max_window_layers` layers see everything; those above a window, if windows are in use at all."""
    window = config.optional_whole("sliding_window", absent=WINDOW)
    full_layers = config.whole("max_window_layers", FULL_LAYERS, low=0)
    if not config.flag("use_sliding_window", False):
        window = None
    return read_windows(config, window, lambda index: window is not None and index >= full_layers)


class Qwen2(Decoder):
    """The config does not mention the biases; they are always there."""

    @classmethod
    def read(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `qwen2`"""
        config.expect("use_mrope", False)
        return read_common(config, "qwen2", windows=read_qwen_windows(config), qkv_bias=True)

    def layer(self, parts: Parts) -> Layer:
        """Build one layer."""
        return LlamaLayer(parts)
