"""DeepSeek-V2 and V2-Lite: latent attention, and a mixture of experts in all but the first layers."""

from __future__ import annotations

import math
from dataclasses import replace

from foreword.core.batch import KVShape
from foreword.layers.latent_attention import LatentShape
from foreword.layers.rope import RopeConfig
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import (
    MAX_HIDDEN_SIZE,
    DecoderConfig,
    LayerType,
    read_decoder_config,
    read_moe_config,
    read_num_layers,
    read_rope,
)
from foreword.models.expert_weights import ExpertNames, MoEConfig
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.llama import LlamaLayer
from foreword.weights.config_reader import ConfigReader

NAMES = ExpertNames(shared="mlp.shared_experts")
LATENT_MULTIPLE = 16  # values of the latent vector: whole elements of every kernel
SCORE_BIAS = "gate.e_score_correction_bias"
MLP_TYPES = ("dense", "sparse")
TRAINING_KEYS = ("aux_loss_alpha", "ep_size", "seq_aux")
GROUP_LIMITED, GREEDY = "group_limited_greedy", "greedy"


class DeepseekV2(Decoder):
    """Experts have softmax weights; groups limit the choice in the larger model."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `deepseek_v2`"""
        base = read_latent_decoder(config, "deepseek_v2", read_latent_shape(config))
        method = config.get_choice("topk_method", (GREEDY, GROUP_LIMITED), GREEDY)
        for key in ("n_group", "topk_group"):
            config.get(key, None)  # without effect on a greedy choice
        moe = read_shared_moe(
            config,
            renormalize=False,
            groups=(1, 1) if method == GROUP_LIMITED else None,
            num_shared=2,
            is_sigmoid=False,
        )
        for key, value in (("scoring_func", "softmax"), ("norm_topk_prob", False)):
            config.require_value(key, value)
        return replace(base, mlp_bias=config.get_bool("mlp_bias", False), interleaved_rope=True, moe=moe)

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return LlamaLayer(builder, builder.latent_attention("self_attn"))


def read_latent_shape(
    config: ConfigReader,
    q_lora_rank: int = 1536,
    kv_lora_rank: int = 512,
    nope_dim: int = 128,
    value_dim: int = 128,
) -> LatentShape:
    """Sizes of latent attention, with these defaults."""
    shape = LatentShape(
        config.get_int("kv_lora_rank", kv_lora_rank, high=MAX_HIDDEN_SIZE),
        config.get_int("qk_rope_head_dim", 64, high=MAX_HIDDEN_SIZE),
        config.get_int("qk_nope_head_dim", nope_dim, high=MAX_HIDDEN_SIZE),
        config.get_int("v_head_dim", value_dim, high=MAX_HIDDEN_SIZE),
        config.get_optional_int("q_lora_rank", q_lora_rank),
    )
    if shape.kv_lora_rank % LATENT_MULTIPLE:
        raise config.error("kv_lora_rank", f"must be a multiple of {LATENT_MULTIPLE} here")
    if shape.qk_head_dim % 2 or shape.qk_rope_head_dim % 2:
        raise config.error("qk_rope_head_dim", "must be even here, like qk_nope_head_dim")
    config.require_value("qk_head_dim", shape.qk_head_dim)
    return shape


def read_latent_decoder(
    config: ConfigReader,
    architecture: str,
    shape: LatentShape,
    rope: RopeConfig | None = None,
    head_dim: int | None = None,
    eps: float = 1e-6,
) -> DecoderConfig:
    """All options but those of experts. RoPE and `head_dim` are by default of the rotated values."""
    heads, context_length = config.get_int("num_attention_heads"), config.get_int("max_position_embeddings")
    width = max(shape.cached_dim, shape.qk_head_dim, shape.v_head_dim)
    if heads * width > MAX_HIDDEN_SIZE or (shape.q_lora_rank or 0) > MAX_HIDDEN_SIZE:
        limit = f"{heads} times {width} values of latent attention must be at most {MAX_HIDDEN_SIZE} here"
        raise config.error("num_attention_heads", limit)
    for key in TRAINING_KEYS:
        config.get(key, None)
    config.require_value("num_key_value_heads", heads)
    config.require_value("head_dim", head_dim or shape.qk_rope_head_dim)
    rope = rope or read_rope(config, shape.qk_rope_head_dim, context_length)
    layers = read_num_layers(config)
    base = read_decoder_config(
        config,
        architecture,
        layer_types=[LayerType(None, rope)] * layers,
        head_dim=head_dim or shape.qk_rope_head_dim,
        bias_key="attention_bias",
        eps=eps,
    )
    scale = yarn_mscale(rope) ** 2 / math.sqrt(shape.qk_head_dim)
    cache = KVShape(1, shape.cached_dim, latent_dim=shape.kv_lora_rank)
    return replace(base, attn_scale=scale, latent=shape, cache_shapes=(cache,) * layers)


def yarn_mscale(rope: RopeConfig) -> float:
    """The factor of queries and of keys by YaRN's `mscale_all_dim`."""
    return 1.0 + 0.1 * rope.mscale_all_dim * math.log(rope.factor) if rope.factor > 1 else 1.0


def read_mlp_types(config: ConfigReader, num_dense: int = 0) -> list[bool]:
    """Whether each layer has experts: from `mlp_layer_types`, or else all but the first `num_dense`."""
    num_layers = read_num_layers(config)
    default = [MLP_TYPES[index >= num_dense] for index in range(num_layers)]
    types = config.get_strs("mlp_layer_types", num_layers) or default
    unknown = next((item for item in types if item not in MLP_TYPES), None)
    if unknown is not None:
        raise config.error("mlp_layer_types", f"has {unknown!r}; known: {', '.join(MLP_TYPES)}")
    return [item == "sparse" for item in types]


def read_shared_moe(
    config: ConfigReader,
    *,
    num_dense: int = 0,
    renormalize: bool = True,
    scale: float | None = 1.0,
    groups: tuple[int, int] | None = (1, 1),
    shared_key: str = "n_shared_experts",
    num_shared: int = 1,
    is_sigmoid: bool = True,
    score_bias: str | None = SCORE_BIAS,
    names_layers: bool = False,
) -> MoEConfig:
    """Experts in all but the first layers, and shared ones, which are one MLP without a gate.

    num_dense, renormalize, num_shared  defaults of first_k_dense_replace, norm_topk_prob and `shared_key`
    scale, groups                       as in read_moe_config()
    is_sigmoid  weights are sigmoids, and experts are chosen by these plus `score_bias`; else a softmax
    names_layers  `mlp_layer_types` may name the layers with experts
    """
    if is_sigmoid:
        for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            config.require_value(key, value)
    config.require_value("moe_layer_freq", 1)
    first = config.get_int("first_k_dense_replace", num_dense, low=0)
    if names_layers:
        has_experts = read_mlp_types(config, first)
    else:
        has_experts = [index >= first for index in range(read_num_layers(config))]
    num_shared = config.get_optional_int(shared_key, num_shared, low=0) or 0
    size = config.get_int("moe_intermediate_size", high=MAX_HIDDEN_SIZE)
    if num_shared * size > MAX_HIDDEN_SIZE:
        raise config.error(shared_key, f"makes an MLP of {num_shared * size} values")
    return read_moe_config(
        config,
        NAMES,
        renormalize=config.get_bool("norm_topk_prob", renormalize),
        size_key="moe_intermediate_size",
        has_experts=has_experts,
        shared_intermediate_size=num_shared * size,
        scoring="sigmoid" if is_sigmoid else "softmax",
        score_bias=score_bias if is_sigmoid else None,
        scale=scale,
        groups=groups,
    )
