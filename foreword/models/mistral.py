"""Mistral and Ministral 8B: Llama's layers, with a sliding window in all, some or none of them."""

from __future__ import annotations

from foreword.models.decoder_config import DecoderConfig, read_decoder_config, read_layer_windows, read_window
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader

WINDOW = 4096  # default; null means no window


class Mistral(Llama):
    """A row attends to itself and the `sliding_window - 1` positions before it.

    Ministral 8B (model_type `ministral`) has windows in some layers, by `layer_types`.
    """

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `mistral` or `ministral`"""
        window = read_window(config, WINDOW)
        windows = read_layer_windows(config, window, lambda index: window is not None)
        return read_decoder_config(config, str(config.get("model_type", "mistral")), windows=windows)
