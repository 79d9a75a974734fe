"""Granite: Llama's layers with multipliers of embedding, scores, branches and logits."""

from __future__ import annotations

from dataclasses import replace

from foreword.layers.rope import NO_ROPE
from foreword.models.decoder_config import (
    DecoderConfig,
    LayerType,
    read_decoder_config,
    read_layer_windows,
    read_window,
)
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader

WINDOW = 128
WINDOW_PERIOD = 4  # every n-th layer, from the first on, has full attention


class Granite(Llama):
    """The residual stream is kept divided by `residual_multiplier`, so branches are added as they are.

    Each branch and the head begin with a norm, which ignores the scale of its input, but for its epsilon.
    """

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `granite`"""
        mlp_bias = config.get_bool("mlp_bias", False)
        base = read_decoder_config(config, "granite", bias_key="attention_bias", mlp_bias=mlp_bias)
        residual_multiplier = config.get_float("residual_multiplier", 1.0)
        return replace(
            base,
            attn_scale=config.get_float("attention_multiplier", 1.0),
            input_scale=config.get_float("embedding_multiplier", 1.0) / residual_multiplier,
            eps=base.eps / residual_multiplier**2,
            logit_scale=1 / config.get_float("logits_scaling", 1.0),
        )


class GraniteSwa(Granite):
    """Windows in three of four layers, sinks, and a rope_theta for each layer; 0: no RoPE."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `granite_swa`"""
        base = super().read_config(config)
        window = read_window(config, WINDOW)
        windows = read_layer_windows(
            config, window, lambda index: window is not None and index % WINDOW_PERIOD != 0
        )
        rope = base.layer_types[0].rope
        thetas = config.get("layer_rope_theta", [rope.theta] * len(windows))
        is_list = isinstance(thetas, list) and len(thetas) == len(windows)
        if not is_list or not all(
            type(theta) in (int, float) and (theta == 0 or theta > 1) for theta in thetas
        ):
            raise config.error("layer_rope_theta", f"must be a list of {len(windows)} numbers, 0 or above 1")
        ropes = [replace(rope, theta=float(theta)) if theta else NO_ROPE for theta in thetas]
        layer_types = tuple(map(LayerType, windows, ropes))
        return replace(base, architecture="granite_swa", layer_types=layer_types, attn_sinks=True)
