"""Ling and Ring 1, 1.5 and 2 (bailing_moe): fused q, k and v, experts in all but the first layers."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import DecoderConfig, QKNorm, read_decoder_config
from foreword.models.deepseek_v2 import read_shared_moe
from foreword.models.expert_weights import MoEConfig
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.llama import Llama, LlamaLayer
from foreword.weights.config_reader import ConfigReader

QK_NORM = QKNorm(("query_layernorm", "key_layernorm"))
UNUSED = ("router_dtype", "embedding_dropout", "output_dropout", "moe_router_topk_scaling_factor")
SUPPORTED_VALUES = (("norm_head", False), ("norm_softmax", False), ("use_rmsnorm", True))


class BailingMoe(Llama):
    """The second generation has QK norms and chooses by sigmoids plus biases; transformers has neither."""

    EMBEDDING = "word_embeddings"

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `bailing_moe` or `bailing_moe_v2`"""
        is_second = config.get("model_type") == "bailing_moe_v2" or "score_function" in config
        for key in UNUSED:
            config.get(key, None)
        for key, value in (*SUPPORTED_VALUES, ("use_qk_norm", is_second)):
            config.require_value(key, value)
        base = read_decoder_config(
            config,
            "bailing_moe_v2" if is_second else "bailing_moe",
            qkv_bias=config.get_bool("use_qkv_bias", False),
            out_bias=config.get_bool("use_bias", False),
            qk_norm=QK_NORM if is_second else None,
        )
        num_mtp_layers = config.get_int("num_nextn_predict_layers", 0, low=0)
        moe = _read_second_moe(config) if is_second else _read_first_moe(config)
        return replace(base, moe=moe, num_mtp_layers=num_mtp_layers)

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return LlamaLayer(builder, builder.attention("attention", "query_key_value", "dense"))


def _read_second_moe(config: ConfigReader) -> MoEConfig:
    config.require_value("score_function", "sigmoid")
    config.require_value("moe_shared_expert_intermediate_size", config.get_int("moe_intermediate_size"))
    config.require_value("moe_router_enable_shared_expert", True)
    has_bias = config.get_bool("moe_router_enable_expert_bias", True)
    return read_shared_moe(
        config,
        score_bias="gate.expert_bias" if has_bias else None,
        shared_key="num_shared_experts",
        num_shared=0,
    )


def _read_first_moe(config: ConfigReader) -> MoEConfig:
    return read_shared_moe(
        config,
        renormalize=False,
        scale=None,
        groups=None,
        shared_key="num_shared_experts",
        num_shared=0,
        is_sigmoid=False,
    )
