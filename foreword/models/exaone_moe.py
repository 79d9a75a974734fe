"""K-EXAONE: EXAONE 4's attention behind norms, and experts as in DeepSeek-V3."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import DecoderConfig
from foreword.models.deepseek_v2 import read_shared_moe
from foreword.models.exaone4 import Exaone4
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.llama import LlamaLayer
from foreword.weights.config_reader import ConfigReader

SCALE = 2.5


class ExaoneMoe(Exaone4):
    """The MTP head is not loaded."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `exaone_moe`"""
        for key in ("num_nextn_predict_layers", "is_moe_layer", "mtp_loss_weight"):
            config.get(key, None)
        base = super().read_config(config)
        moe = read_shared_moe(
            config, num_dense=1, scale=SCALE, shared_key="num_shared_experts", names_layers=True
        )
        return replace(base, architecture="exaone_moe", moe=moe)

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return LlamaLayer(builder)
