"""Mixtral: Mistral's layers with a mixture of experts."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import (
    DecoderConfig,
    read_decoder_config,
    read_moe_config,
    read_num_layers,
    read_window,
)
from foreword.models.expert_weights import ExpertNames
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader

NAMES = ExpertNames(module="block_sparse_moe", projections=("w1", "w3", "w2"))


class Mixtral(Llama):
    """A window, if any, is in all layers."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `mixtral`"""
        window = read_window(config)
        base = read_decoder_config(
            config, "mixtral", windows=(window,) * read_num_layers(config), eps=1e-5, theta=1e6
        )
        return replace(base, moe=read_moe_config(config, NAMES, renormalize=True))
