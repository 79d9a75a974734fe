"""Mistral: Llama's layers; a sliding window in all of them, or in none."""

from __future__ import annotations

from foreword.models.common import read_common, read_windows
from foreword.models.config import ConfigReader
from foreword.models.decoder import Decoder, DecoderConfig, Layer, Parts
from foreword.models.llama import LlamaLayer

__all__ = ["Mistral"]

WINDOW = 4096  # where the config does not say; null means none


class Mistral(Decoder):
    """A row sees itself and the `sliding_window - 1` positions before it."""

    @classmethod
    def read(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `mistral`"""
        window = config.optional_whole("sliding_window", absent=WINDOW)
        windows = read_windows(config, window, lambda index: window is not None)
        return read_common(config, "mistral", windows=windows)

    def layer(self, parts: Parts) -> Layer:
        """Build one layer."""
        return LlamaLayer(parts)
