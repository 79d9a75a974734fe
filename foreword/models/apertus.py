"""Apertus: Llama's layers with QK norm and an MLP of xIELU without a gate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from foreword.errors import CheckpointError
from foreword.kernels.ops import XIELU_BETA
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig, QKNorm, read_decoder_config
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.llama import LlamaLayer
from foreword.weights.config_reader import ConfigReader

THETA = 12_000_000.0
NORMS = ("attention_layernorm", "feedforward_layernorm")
MIN_EPS = -1e-5
CONSTANTS = ("alpha_p", "alpha_n", "beta", "eps")


class Apertus(Decoder):
    """xIELU's two slopes are trained in each layer; published files have RoPE of type llama3."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `apertus`"""
        for key, value in (("qk_norm", True), ("post_norm", False), ("mlp_bias", False)):
            config.require_value(key, value)
        if "rope_parameters" not in config and "rope_scaling" not in config:
            raise config.error("rope_scaling", "is missing")
        base = read_decoder_config(
            config,
            "apertus",
            bias_key="attention_bias",
            qk_norm=QKNorm(),
            eps=1e-5,
            theta=THETA,
            activation=config.get_choice("hidden_act", ("xielu",), "xielu"),
        )
        constants = config.get_section("xielu")  # GGUF: constants by layer; otherwise they are tensors
        return base if constants is None else replace(base, act_alphas=_read_all_alphas(constants, base))

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        mlp = builder.ungated_mlp(alphas=builder.act_alphas or _read_alphas(builder))
        return LlamaLayer(builder, mlp=mlp, norms=NORMS)


def _read_all_alphas(constants: ConfigReader, base: DecoderConfig) -> tuple[tuple[float, float], ...]:
    count, columns = len(base.layer_types), []
    for name in CONSTANTS:
        values = constants.get(name)
        if not isinstance(values, list) or [*map(type, values)] != [float] * count:
            raise constants.error(name, f"must be a list of {count} numbers, got {values!r:.60}")
        columns.append(values)
    constants.check_all_read()
    return tuple(
        _compute_alphas(dict(zip(CONSTANTS, row, strict=True))) for row in zip(*columns, strict=True)
    )


def _read_alphas(builder: LayerBuilder) -> tuple[float, float]:
    """The constants of a checkpoint's layer."""
    shapes = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}
    return _compute_alphas(
        {name: builder.scalar(f"mlp.act_fn.{name}", shape) for name, shape in shapes.items()}
    )


def _compute_alphas(values: Mapping[str, float]) -> tuple[float, float]:
    """See Ops.act; constants are stored before a softplus."""
    if values["beta"] != XIELU_BETA:
        raise CheckpointError(f"xIELU's beta must be {XIELU_BETA} here, got {values['beta']:g}", "model")
    if not MIN_EPS <= values["eps"] <= 0:
        problem = f"must be between {MIN_EPS:g} and 0 here, got {values['eps']:g}"
        raise CheckpointError(f"xIELU's eps {problem}", "model")
    positive, negative = (
        max(value, 0.0) + math.log1p(math.exp(-abs(value)))
        for value in (values["alpha_p"], values["alpha_n"])
    )
    return positive, XIELU_BETA + negative
