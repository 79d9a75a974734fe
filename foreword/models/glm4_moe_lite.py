"""GLM-4.7-Flash: DeepSeek-V3's layers with other sizes."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import DecoderConfig
from foreword.models.deepseek_v2 import (
    DeepseekV2,
    read_latent_decoder,
    read_latent_shape,
    read_shared_moe,
)
from foreword.weights.config_reader import ConfigReader


class Glm4MoeLite(DeepseekV2):
    """`mlp_layer_types` names the layers with experts; by default all but the first."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `glm4_moe_lite`"""
        shape = read_latent_shape(config, q_lora_rank=768, nope_dim=192, value_dim=256)
        base = read_latent_decoder(config, "glm4_moe_lite", shape, eps=1e-5)
        return replace(
            base,
            interleaved_rope=config.get_bool("rope_interleave", True),
            moe=read_shared_moe(config, num_dense=1, scale=1.8, names_layers=True),
            num_mtp_layers=config.get_int("num_nextn_predict_layers", 1, low=0),
        )
