"""Hunyuan-A13B: Hunyuan's layers with a mixture of experts and a shared expert in each."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import DecoderConfig, read_moe_config
from foreword.models.expert_weights import ExpertNames
from foreword.models.hunyuan_v1_dense import HunyuanDense
from foreword.weights.config_reader import ConfigReader

NAMES = ExpertNames(router="gate.wg", shared="mlp.shared_mlp")
FIXED_OPTIONS = {"use_mixed_mlp_moe": True, "moe_layer_num_skipped": 0, "num_media_embeds": 0}


class HunyuanMoe(HunyuanDense):
    """Options of experts are numbers, or lists of equal numbers."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `hunyuan_v1_moe`"""
        for key, value in FIXED_OPTIONS.items():
            config.require_value(key, value)
        base = super().read_config(config)
        num_layers, size = len(base.layer_types), base.intermediate_size
        for key, value in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
            if config.get_uniform_int(key, num_layers, value) != value:
                raise config.error(key, f"must be {value} here")
        moe = read_moe_config(
            config,
            NAMES,
            renormalize=True,
            shared_intermediate_size=size,
            top_k_key="moe_topk" if "moe_topk" in config else "num_experts_per_tok",
        )
        return replace(base, architecture="hunyuan_v1_moe", moe=moe)
