"""Seed-OSS: Llama's layers with biases of q, k and v."""

from __future__ import annotations

from foreword.models.decoder_config import DecoderConfig, read_decoder_config
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader

HEAD_DIM = 128


class SeedOss(Llama):
    """The output projection has a bias of its own option."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `seed_oss`"""
        config.get("residual_dropout", None)  # for training only
        return read_decoder_config(
            config,
            "seed_oss",
            head_dim=HEAD_DIM,
            qkv_bias=config.get_bool("attention_bias", True),
            out_bias=config.get_bool("attention_out_bias", False),
            mlp_bias=config.get_bool("mlp_bias", False),
        )
