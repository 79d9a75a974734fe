"""MiniMax M2: norms over all heads of q and of k, RoPE on a part of each head, experts in all layers."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import (
    DecoderConfig,
    QKNorm,
    read_decoder_config,
    read_head_dim,
    read_moe_config,
    read_num_layers,
)
from foreword.models.expert_weights import ExpertNames
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader

HEAD_DIM = 128
THETA = 5_000_000.0
NAMES = ExpertNames(module="block_sparse_moe", projections=("w1", "w3", "w2"))
SUPPORTED_VALUES = (
    ("use_qk_norm", True),
    ("qk_norm_type", "per_layer"),
    ("scoring_func", "sigmoid"),
    ("use_routing_bias", True),
    ("shared_intermediate_size", 0),
    ("attention_bias", False),
)


class MiniMaxM2(Llama):
    """Experts are chosen by the sigmoid of their logit plus a bias; published files hold no MTP layers."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `minimax_m2`"""
        for key, value in (*SUPPORTED_VALUES, ("attn_type_list", [1] * read_num_layers(config))):
            config.require_value(key, value)
        for key in ("use_mtp", "num_mtp_modules", "mtp_transformer_layers"):
            config.get(key, None)
        head_dim = read_head_dim(config, HEAD_DIM)
        rotary_dim = config.get_int("rotary_dim", head_dim, high=head_dim)
        base = read_decoder_config(
            config,
            "minimax_m2",
            head_dim=HEAD_DIM,
            qk_norm=QKNorm(all_heads=True),
            theta=THETA,
            partial_rotary_factor=(rotary_dim + 0.5) / head_dim,  # the reader multiplies and rounds down
        )
        moe = read_moe_config(
            config, NAMES, renormalize=True, scoring="sigmoid", score_bias="e_score_correction_bias"
        )
        return replace(base, moe=moe)
