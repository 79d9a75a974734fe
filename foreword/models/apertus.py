"""Apertus: Llama's layers with QK norm and an MLP of xIELU without a gate."""

from __future__ import annotations

import math

from foreword.errors import CheckpointError
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig, QKNorm, read_decoder_config
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.llama import LlamaLayer
from foreword.weights.config_reader import ConfigReader

THETA = 12_000_000.0
NORMS = ("attention_layernorm", "feedforward_layernorm")
XIELU_BETA = 0.5


class Apertus(Decoder):
    """xIELU's two slopes are trained in each layer; published files have RoPE of type llama3."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `apertus`"""
        bias = config.get_bool("attention_bias", False)
        for key, value in (("qk_norm", True), ("post_norm", False), ("mlp_bias", False)):
            config.require_value(key, value)
        if "rope_parameters" not in config and "rope_scaling" not in config:
            raise config.error("rope_scaling", "is missing")
        return read_decoder_config(
            config,
            "apertus",
            qkv_bias=bias,
            out_bias=bias,
            qk_norm=QKNorm(),
            eps=1e-5,
            theta=THETA,
            activation=config.get_choice("hidden_act", {"xielu": "xielu"}, "xielu"),
        )

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        mlp = builder.ungated_mlp(alphas=_read_alphas(builder))
        return LlamaLayer(builder, mlp=mlp, norms=NORMS)


def _read_alphas(builder: LayerBuilder) -> tuple[float, float]:
    """See Ops.act; stored before a softplus. Constants without values (headers, random weights) are zeros."""
    shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    values = {name: builder.scalar(f"mlp.act_fn.{name}", shape) for name, shape in shapes.items()}
    if (values["beta"] or values["eps"]) and values["beta"] != XIELU_BETA:
        problem = f"tensor `mlp.act_fn.beta` must be {XIELU_BETA} here, got {values['beta']:g}"
        raise CheckpointError(problem, "model")
    positive, negative = (math.log1p(math.exp(values[name])) for name in ("alpha_p", "alpha_n"))
    return positive, XIELU_BETA + negative
