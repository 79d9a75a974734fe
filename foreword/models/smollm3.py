"""SmolLM3: Llama's layers, every fourth of them without positional encoding."""

from __future__ import annotations

from foreword.layers.rope import NO_ROPE
from foreword.models.decoder_config import (
    DecoderConfig,
    LayerType,
    read_decoder_config,
    read_head_dim,
    read_layer_windows,
    read_num_layers,
    read_rope,
    read_window,
)
from foreword.models.llama import Llama
from foreword.weights.config_reader import ConfigReader

NO_ROPE_INTERVAL = 4  # every n-th layer has no RoPE
THETA = 2_000_000.0


class SmolLM3(Llama):
    """Windows, if enabled, are in the layers without RoPE."""

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `smollm3`"""
        has_rope = _read_rope_layers(config)
        window = read_window(config)
        if not config.get_bool("use_sliding_window", False):
            window = None
        windows = read_layer_windows(config, window, lambda i: window is not None and not has_rope[i])
        context_length = config.get_int("max_position_embeddings")
        rope = read_rope(config, read_head_dim(config), context_length, THETA)
        config.get("max_window_layers", None)  # without effect in this architecture
        return read_decoder_config(
            config,
            "smollm3",
            layer_types=[
                LayerType(window, rope if rotates else NO_ROPE)
                for window, rotates in zip(windows, has_rope, strict=True)
            ],
            bias_key="attention_bias",
            mlp_bias=config.get_bool("mlp_bias", False),
            tie_word_embeddings=True,
        )


def _read_rope_layers(config: ConfigReader) -> tuple[bool, ...]:
    """Whether each layer has RoPE: 1 in `no_rope_layers`, despite its name, or else by the interval."""
    num_layers = read_num_layers(config)
    interval = config.get_int("no_rope_layer_interval", NO_ROPE_INTERVAL)
    flags = config.get("no_rope_layers", [int((i + 1) % interval != 0) for i in range(num_layers)])
    if not isinstance(flags, list) or len(flags) < num_layers or any(flag not in (0, 1) for flag in flags):
        raise config.error("no_rope_layers", f"must be a list of {num_layers} zeros and ones")
    return tuple(bool(flag) for flag in flags[:num_layers])
