"""ERNIE 4.5: Llama's layers with interleaved RoPE, dense or with experts."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import (
    DecoderConfig,
    read_decoder_config,
    read_head_dim,
    read_moe_config,
    read_num_layers,
)
from foreword.models.deepseek_v2 import NAMES
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader

HEAD_DIM = 128
EPS = 1e-5
THETA = 500_000.0
SCORE_BIAS = "moe_statics.e_score_correction_bias"


class Ernie45(Llama):
    """All linear layers have biases or none."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `ernie4_5`"""
        return cls._read_dense(config, HEAD_DIM)

    @classmethod
    def _read_dense(cls, config: ConfigReader, head_dim: int | None) -> DecoderConfig:
        """head_dim  default; None: hidden_size / heads"""
        bias = config.get_bool("use_bias", False)
        base = read_decoder_config(
            config,
            "ernie4_5",
            head_dim=head_dim,
            eps=EPS,
            theta=THETA,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            tie_word_embeddings=True,
        )
        if any(
            layer_type.rope.rotary_dim != read_head_dim(config, head_dim) for layer_type in base.layer_types
        ):
            raise config.error("partial_rotary_factor", "must be 1 here")
        return replace(base, interleaved_rope=True)


class Ernie45Moe(Ernie45):
    """Experts chosen by the softmax plus a bias, beside shared ones, in a range of layers."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `ernie4_5_moe`"""
        for key, value in (("moe_gate", "topk"), ("moe_use_aux_free", True), ("use_rmsnorm", True)):
            config.require_value(key, value)
        config.require_value("moe_norm_min", 1e-12)
        for key in ("moe_capacity", "num_nextn_predict_layers"):  # for training and unloaded layers
            config.get(key, None)
        num_layers, first = read_num_layers(config), config.get_int("moe_layer_start_index", 1, low=0)
        last, interval = (
            config.get_int("moe_layer_end_index", -1, low=-1),
            config.get_int("moe_layer_interval", 1),
        )
        last = num_layers - 1 if last < 0 else last
        has_experts = [first <= i <= last and (i + 1) % interval == 0 for i in range(num_layers)]
        size, shared = (
            config.get_int("moe_intermediate_size"),
            config.get_int("moe_num_shared_experts", 2, low=0),
        )
        moe = read_moe_config(
            config,
            NAMES,
            renormalize=True,
            size_key="moe_intermediate_size",
            top_k_key="moe_k",
            has_experts=has_experts,
            shared_intermediate_size=shared * size,
            score_bias=SCORE_BIAS,
        )
        base = cls._read_dense(config, None)
        return replace(base, architecture="ernie4_5_moe", moe=replace(moe, score_bias_is_row=True))
