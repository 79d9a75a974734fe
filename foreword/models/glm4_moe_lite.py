"""GLM-4.7-Flash: DeepSeek-V3's layers with other sizes."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import DecoderConfig, read_num_layers
from foreword.models.deepseek_v2 import (
    DeepseekV2,
    read_first_dense,
    read_latent_decoder,
    read_latent_shape,
    read_shared_moe,
)
from foreword.weights.config_reader import ConfigReader

MLP_TYPES = ("dense", "sparse")


class Glm4MoeLite(DeepseekV2):
    """`mlp_layer_types` names the layers with experts; by default all but the first."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `glm4_moe_lite`"""
        shape = read_latent_shape(config, q_lora_rank=768, nope_dim=192, value_dim=256)
        base = read_latent_decoder(config, "glm4_moe_lite", shape, eps=1e-5)
        for key, value in (("scoring_func", "sigmoid"), ("topk_method", "noaux_tc")):
            config.require_value(key, value)
        has_experts = read_first_dense(config, 1)
        types = config.get_strs("mlp_layer_types", read_num_layers(config))
        if types:
            unknown = next((name for name in types if name not in MLP_TYPES), None)
            if unknown is not None:
                raise config.error("mlp_layer_types", f"has {unknown!r}; known: {', '.join(MLP_TYPES)}")
            has_experts = [name == "sparse" for name in types]
        moe = read_shared_moe(
            config,
            has_experts,
            renormalize=config.get_bool("norm_topk_prob", True),
            scale=1.8,
            groups=(1, 1),
            is_sigmoid=True,
        )
        return replace(
            base,
            interleaved_rope=config.get_bool("rope_interleave", True),
            moe=moe,
            num_mtp_layers=config.get_int("num_nextn_predict_layers", 1, low=0),
        )
