"""Options that all architectures here call by the same names."""

from __future__ import annotations

from foreword.models.config import ConfigReader
from foreword.models.decoder import DecoderConfig, Kind
from foreword.models.rope import read_rope, scaled_context

__all__ = ["ACTIVATIONS", "read_common"]

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}


def read_common(
    config: ConfigReader,
    architecture: str,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    windows: tuple[int | None, ...] | None = None,
    head_dim: int | None = None,
) -> DecoderConfig:
    """The shape of a Llama-like checkpoint.

    windows   one per layer, if any looks back less than all the way
    head_dim  where the config does not say; by default hidden_size / num_attention_heads
    """
    hidden, heads = config.whole("hidden_size"), config.whole("num_attention_heads")
    kv_heads = config.whole("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.refuse("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    head_dim = config.whole("head_dim", head_dim or hidden // heads)
    positions = config.whole("max_position_embeddings")
    rope = read_rope(config, head_dim, positions)
    windows = windows or (None,) * config.whole("num_hidden_layers")
    return DecoderConfig(
        architecture=architecture,
        dtype=config.dtype(),
        vocab_size=config.whole("vocab_size"),
        hidden=hidden,
        intermediate=config.whole("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        context=scaled_context(rope, positions),
        eps=config.number("rms_norm_eps", 1e-6),
        activation=config.choice("hidden_act", ACTIVATIONS, "silu"),
        kinds=tuple(Kind(window, rope) for window in windows),
        tied=config.flag("tie_word_embeddings", False),
        scale=head_dim**-0.5,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
    )
