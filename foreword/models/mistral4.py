"""Mistral 4 (Small 4): DeepSeek-V2's layers, and queries scaled by their position as in Ministral 3."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import DecoderConfig, read_query_scaled_rope
from foreword.models.deepseek_v2 import (
    DeepseekV2,
    read_latent_decoder,
    read_latent_shape,
    read_shared_moe,
)
from foreword.weights.config_reader import ConfigReader


class Mistral4(DeepseekV2):
    """`head_dim` is that of queries, of which RoPE turns a share."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `mistral4`"""
        shape = read_latent_shape(config, q_lora_rank=1024, kv_lora_rank=256, nope_dim=64)
        context_length = config.get_int("max_position_embeddings")
        rope = read_query_scaled_rope(config, shape.qk_head_dim, context_length, shape.qk_rope_head_dim)
        base = read_latent_decoder(config, "mistral4", shape, rope, shape.qk_head_dim)
        for key in ("n_group", "topk_group"):
            config.require_value(key, 1)
        moe = read_shared_moe(config, groups=None, is_sigmoid=False)
        return replace(base, interleaved_rope=config.get_bool("rope_interleave", True), moe=moe)
