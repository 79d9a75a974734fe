"""Options that all architectures here call by the same names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from foreword.models.config import ConfigReader
from foreword.models.decoder import DecoderConfig, Kind
from foreword.models.rope import read_rope, scaled_context

__all__ = ["ACTIVATIONS", "read_common", "read_head_dim", "read_windows"]

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 17  # values of a vector between two layers, or within one
LAYER_TYPES = ("full_attention", "sliding_attention")


def read_common(
    config: ConfigReader,
    architecture: str,
    *,
    windows: Sequence[int | None] | None = None,
    kinds: Sequence[Kind] | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    activation_key: str = "hidden_act",
    tied: bool = False,
) -> DecoderConfig:
    """The shape of a Llama-like checkpoint.

    windows           one per layer, if any looks back less than all the way; or else
    kinds             one per layer, if they also differ in their RoPE
    head_dim, tied    where the config does not say
    activation_key    name of the option that says which activation the MLP has
    """
    hidden, heads = config.whole("hidden_size", high=MAX_WIDTH), config.whole("num_attention_heads")
    kv_heads = config.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.refuse("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    head_dim = read_head_dim(config, head_dim)
    if heads * head_dim > MAX_WIDTH:
        raise config.refuse("num_attention_heads", f"{heads} times head_dim {head_dim} must be at most {MAX_WIDTH} here")
    positions = config.whole("max_position_embeddings")
    if kinds is None:
        rope = read_rope(config, head_dim, positions)
        kinds = [Kind(window, rope) for window in windows or (None,) * _read_num_layers(config)]
    return DecoderConfig(
        architecture=architecture,
        dtype=config.dtype(),
        vocab_size=config.whole("vocab_size"),
        hidden=hidden,
        intermediate=config.whole("intermediate_size", high=MAX_WIDTH),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=min(scaled_context(kind.rope, positions) for kind in kinds),
        eps=config.number("rms_norm_eps", 1e-6),
        activation=config.choice(activation_key, ACTIVATIONS),
        kinds=tuple(kinds),
        tied=config.flag("tie_word_embeddings", tied),
        scale=head_dim**-0.5,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
    )


def read_head_dim(config: ConfigReader, default: int | None = None) -> int:
    """Size of one head: `head_dim`, or else the default, or else an equal share of hidden_size."""
    share = default or config.whole("hidden_size") // config.whole("num_attention_heads")
    return config.whole("head_dim", share, high=MAX_WIDTH)


def read_windows(config: ConfigReader, window: int | None, is_sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer: as `layer_types` says, or else where `is_sliding(index)` holds."""
    num_layers = _read_num_layers(config)
    types = config.texts("layer_types", num_layers) or tuple(LAYER_TYPES[is_sliding(index)] for index in range(num_layers))
    for layer_type in types:
        if layer_type not in LAYER_TYPES:
            raise config.refuse("layer_types", f"holds {layer_type!r}; known: {', '.join(LAYER_TYPES)}")
        if layer_type == "sliding_attention" and window is None:
            raise config.refuse("layer_types", "holds sliding_attention, but there is no window")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in types)


def _read_num_layers(config: ConfigReader) -> int:
    return config.whole("num_hidden_layers", high=MAX_LAYERS)
