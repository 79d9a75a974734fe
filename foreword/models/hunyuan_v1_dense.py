"""Hunyuan (dense): Llama's layers with QK norm after RoPE, whose base is stretched by `alpha`."""

from __future__ import annotations

from foreword.layers.rope import RopeConfig
from foreword.models.decoder_config import (
    DecoderConfig,
    LayerType,
    QKNorm,
    read_decoder_config,
    read_head_dim,
    read_num_layers,
    read_rope,
)
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader

EPS = 1e-5
# Options that published checkpoints have with the only value that the architecture knows.
FIXED_OPTIONS = {"mlp_bias": False, "use_cla": False, "use_qk_norm": True}
# Options of a tokenizer, a classifier and other variants, and of YaRN beside `alpha`.
UNUSED_OPTIONS = (
    *("add_classification_head", "attention_head_dim", "cla_share_factor", "class_num", "dense_list"),
    *("eod_token_id", "im_end_id", "im_newline_id", "im_start_id", "mask_init_id", "norm_type"),
    *("org_vocab_size", "pad_id", "pool_type", "sep_token_id", "text_end_id", "text_start_id"),
)
UNUSED_ROPE_OPTIONS = ("beta_fast", "beta_slow", "factor", "mscale", "mscale_all_dim")


class HunyuanDense(Llama):
    """Hunyuan 0.5B to 7B and Hunyuan-MT."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `hunyuan_v1_dense`"""
        for key, value in FIXED_OPTIONS.items():
            config.require_value(key, value)
        for key in UNUSED_OPTIONS:
            config.get(key, None)
        return read_decoder_config(
            config,
            "hunyuan_v1_dense",
            layer_types=[LayerType(None, _read_rope(config))] * read_num_layers(config),
            eps=EPS,
            bias_key="attention_bias",
            qk_norm=QKNorm(("query_layernorm", "key_layernorm"), after_rope=True),
        )


def _read_rope(config: ConfigReader) -> RopeConfig:
    """RoPE of any type; `dynamic` with `alpha` does not depend on the length."""
    head_dim, context_length = read_head_dim(config), config.get_int("max_position_embeddings")
    options = config.get_section("rope_parameters") or config.get_section("rope_scaling")
    if options is None or "alpha" not in options:
        return read_rope(config, head_dim, context_length)
    for key in ("rope_type", "type"):
        options.require_value(key, "dynamic")
    for key in UNUSED_ROPE_OPTIONS:
        options.get(key, None)
    if head_dim < 4 or head_dim % 2:
        raise config.error("head_dim", f"must be even and at least 4 here, got {head_dim}")
    theta = options.get_float("rope_theta", config.get_float("rope_theta", 10000.0))
    stretched = theta * options.get_float("alpha") ** (head_dim / (head_dim - 2))
    if stretched <= 1:
        raise options.error("alpha", "makes a rope_theta of at most 1")
    options.check_all_read()
    return RopeConfig("default", stretched, head_dim)
