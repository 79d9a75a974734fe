"""LFM2-MoE: LFM2's layers with a mixture of experts in all but the first ones."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import (
    MAX_HIDDEN_SIZE,
    DecoderConfig,
    read_moe_config,
    read_num_layers,
)
from foreword.models.expert_weights import ExpertNames
from foreword.models.lfm2 import Lfm2, read_conv_decoder
from foreword.weights.config_reader import ConfigReader

NAMES = ExpertNames(module="feed_forward", projections=("w1", "w3", "w2"))


class Lfm2Moe(Lfm2):
    """Experts are chosen by the sigmoid of their logit plus a bias, and weighted by the sigmoid."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `lfm2_moe`"""
        size = config.get_int("intermediate_size", high=MAX_HIDDEN_SIZE)
        base = read_conv_decoder(config, "lfm2_moe", size)
        num_dense = config.get_int("num_dense_layers", 2, low=0)
        moe = read_moe_config(
            config,
            NAMES,
            renormalize=config.get_bool("norm_topk_prob", True),
            activation="silu",
            size_key="moe_intermediate_size",
            has_experts=[index >= num_dense for index in range(read_num_layers(config))],
            scoring="sigmoid",
            scale=1.0,
            score_bias="expert_bias" if config.get_bool("use_expert_bias", True) else None,
        )
        return replace(base, moe=moe)
