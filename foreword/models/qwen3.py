"""Qwen3: Llama's layers with QK norm before RoPE."""

from __future__ import annotations

from foreword.models.decoder_config import DecoderConfig, QKNorm, read_decoder_config
from foreword.models.llama import Llama
from foreword.models.qwen2 import read_qwen_layer_windows
from foreword.weights.config_reader import ConfigReader

HEAD_DIM = 128


class Qwen3(Llama):
    """The default head size is 128 for any hidden_size."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `qwen3`"""
        windows = read_qwen_layer_windows(config)
        return read_decoder_config(
            config,
            "qwen3",
            windows=windows,
            head_dim=HEAD_DIM,
            bias_key="attention_bias",
            qk_norm=QKNorm(),
        )
