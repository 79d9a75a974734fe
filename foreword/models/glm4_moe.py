"""GLM-4.5, 4.6 and 4.7: Llama's layers with experts as in DeepSeek-V3, in all but the first layers."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import (
    DecoderConfig,
    QKNorm,
    read_decoder_config,
    read_moe_config,
    read_num_layers,
)
from foreword.models.expert_weights import ExpertNames, MoEConfig
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader

NAMES = ExpertNames(shared="mlp.shared_experts")
SCORE_BIAS = "gate.e_score_correction_bias"


def read_routed_moe(
    config: ConfigReader,
    names: ExpertNames = NAMES,
    *,
    num_dense: int,
    renormalize: bool = True,
    scale: float = 1.0,
    score_bias: str | None = SCORE_BIAS,
    shared_key: str = "n_shared_experts",
    num_shared: int = 1,
) -> MoEConfig:
    """Experts chosen in groups by the sigmoid of a logit plus a bias, beside shared experts without a gate.

    num_dense, renormalize, scale, num_shared  defaults of first_k_dense_replace, norm_topk_prob,
                                               routed_scaling_factor and `shared_key`
    """
    num_dense = config.get_int("first_k_dense_replace", num_dense, low=0)
    for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc"), ("moe_layer_freq", 1)):
        config.require_value(key, value)
    shared = config.get_optional_int(shared_key, num_shared, low=0) or 0
    return read_moe_config(
        config,
        names,
        renormalize=config.get_bool("norm_topk_prob", renormalize),
        size_key="moe_intermediate_size",
        has_experts=[index >= num_dense for index in range(read_num_layers(config))],
        shared_intermediate_size=shared * config.get_int("moe_intermediate_size"),
        scoring="sigmoid",
        score_bias=score_bias,
        scale=scale,
        groups=(1, 1),
    )


class Glm4Moe(Llama):
    """RoPE on half of each head. The layers of the MTP head are not loaded."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `glm4_moe`"""
        base = read_decoder_config(
            config,
            "glm4_moe",
            qkv_bias=config.get_bool("attention_bias", False),
            qk_norm=QKNorm() if config.get_bool("use_qk_norm", False) else None,
            eps=1e-5,
            partial_rotary_factor=0.5,
        )
        num_mtp_layers = config.get_int("num_nextn_predict_layers", 1, low=0)
        return replace(base, moe=read_routed_moe(config, num_dense=1), num_mtp_layers=num_mtp_layers)


class SolarOpen(Llama):
    """Solar Open: experts in all layers, RoPE on whole heads."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `solar_open`"""
        for key, value in (("first_k_dense_replace", 0), ("use_qk_norm", False)):
            config.require_value(key, value)
        config.get("intermediate_size", None)  # of no layer
        base = read_decoder_config(
            config,
            "solar_open",
            head_dim=128,
            qkv_bias=config.get_bool("attention_bias", False),
            eps=1e-5,
            theta=1_000_000.0,
            intermediate_size=config.get_int("moe_intermediate_size"),
        )
        return replace(base, moe=read_routed_moe(config, num_dense=0))
