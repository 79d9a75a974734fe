"""Granite's mixtures of experts: Granite's multipliers and, in `granitemoeshared`, a shared expert."""

from __future__ import annotations

from dataclasses import replace

from foreword.models.decoder_config import DecoderConfig, read_moe_config
from foreword.models.expert_weights import ExpertNames
from foreword.models.granite import Granite
from foreword.weights.config_reader import ConfigReader

NAMES = ExpertNames(
    module="block_sparse_moe",
    router="router.layer",
    fused=("input_linear.weight", "output_linear.weight"),
    shared="shared_mlp",
    shared_fused=("input_linear", "output_linear"),
)


class GraniteMoe(Granite):
    """Granite 3.0 and 3.1: 1B-A400M, 3B-A800M."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `granitemoe`"""
        moe = read_moe_config(config, NAMES, renormalize=True)
        return replace(super().read_config(config), architecture="granitemoe", moe=moe)


class GraniteMoeShared(Granite):
    """A shared expert without a gate, unless its size is 0."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `granitemoeshared`"""
        size = config.get_int("shared_intermediate_size", 0, low=0)
        moe = read_moe_config(config, NAMES, renormalize=True, shared_intermediate_size=size)
        return replace(super().read_config(config), architecture="granitemoeshared", moe=moe)
