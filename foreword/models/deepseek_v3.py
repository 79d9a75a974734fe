"""DeepSeek-V3 and R1, and Kimi K2 of the same form: DeepSeek-V2 with experts chosen by sigmoids in groups."""

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


class DeepseekV3(DeepseekV2):
    """Layers of MTP heads come after the others, and are not loaded."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `deepseek_v3`"""
        base = read_latent_decoder(config, "deepseek_v3", read_latent_shape(config))
        return replace(
            base,
            interleaved_rope=config.get_bool("rope_interleave", True),
            moe=read_shared_moe(config, num_dense=3, scale=2.5, groups=(8, 4)),
            num_mtp_layers=config.get_int("num_nextn_predict_layers", 1, low=0),
        )
