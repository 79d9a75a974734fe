"""OLMoE: Llama's layers with a mixture of experts and norms of all heads of q and of k together."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import DecoderConfig, QKNorm, read_decoder_config, read_moe_config
from foreword.models.expert_weights import ExpertNames
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader


class Olmoe(Llama):
    """Checkpoints that clip q, k and v are refused."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `olmoe`"""
        qk_norm = QKNorm(all_heads=True)
        base = read_decoder_config(config, "olmoe", eps=1e-5, bias_key="attention_bias", qk_norm=qk_norm)
        renormalize = config.get_bool("norm_topk_prob", False)
        return replace(base, moe=read_moe_config(config, ExpertNames(), renormalize=renormalize))
