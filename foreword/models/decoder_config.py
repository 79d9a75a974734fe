"""Config of a decoder-only model, and the reader of the options that all architectures share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foreword.kernels.ops import ExpertsConfig
from foreword.layers.rope import RopeConfig
from foreword.models.expert_weights import ExpertNames, MoEConfig
from foreword.models.rope_options import read_rope, scaled_context_length
from foreword.weights.config_reader import ConfigReader, read_vocab_size

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
MAX_LAYERS = 1024
MAX_HIDDEN_SIZE = 1 << 17  # values of a vector between or within layers
EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts")
MAX_EXPERTS = 1 << 16  # sum over all layers
LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True)
class LayerType:
    """Attention window and RoPE of a layer."""

    window: int | None  # tokens; None: full attention
    rope: RopeConfig


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMS norms of queries and keys."""

    names: tuple[str, str] = ("q_norm", "k_norm")  # in the checkpoint
    all_heads: bool = False  # over all heads together, not over each
    after_rope: bool = False


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shape and options of a checkpoint."""

    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int  # positions the model was trained for
    eps: float
    activation: str
    layer_types: tuple[LayerType, ...]  # one per layer
    tie_word_embeddings: bool
    attn_scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm | None = None
    interleaved_rope: bool = False  # RoPE turns pairs of neighbours, not the two halves of a head
    norm_offset: float = 0.0  # added to norm weights
    embedding_scale: float = (
        1.0  # scale of token embeddings, rounded to the activations' type (as Gemma was trained)
    )
    input_scale: float = 1.0  # scale of token embeddings and image features
    logit_scale: float = 1.0
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    attn_sinks: bool = False  # a score of each head without a value, see Ops.attention
    moe: MoEConfig | None = None


def read_decoder_config(
    config: ConfigReader,
    architecture: str,
    *,
    windows: Sequence[int | None] | None = None,
    layer_types: Sequence[LayerType] | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: QKNorm | None = None,
    eps: float = 1e-6,
    theta: float = 10000.0,
    activation_key: str = "hidden_act",
    tie_word_embeddings: bool = False,
) -> DecoderConfig:
    """Read the shape of a Llama-like decoder. Raises CheckpointError.

    windows      one per layer, if any layer has a sliding window; or else
    layer_types  one per layer, if they differ in RoPE too
    head_dim, eps, theta, tie_word_embeddings  defaults
    """
    hidden, heads = config.get_int("hidden_size", high=MAX_HIDDEN_SIZE), config.get_int("num_attention_heads")
    kv_heads = config.get_int("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    head_dim = read_head_dim(config, head_dim)
    if heads * head_dim > MAX_HIDDEN_SIZE:
        limit = f"{heads} times head_dim {head_dim} must be at most {MAX_HIDDEN_SIZE} here"
        raise config.error("num_attention_heads", limit)
    positions = config.get_int("max_position_embeddings")
    if layer_types is None:
        rope = read_rope(config, head_dim, positions, theta)
        layer_types = [LayerType(window, rope) for window in windows or (None,) * read_num_layers(config)]
    return DecoderConfig(
        architecture=architecture,
        dtype=config.get_dtype(),
        vocab_size=read_vocab_size(config),
        hidden_size=hidden,
        intermediate_size=config.get_int("intermediate_size", high=MAX_HIDDEN_SIZE),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_length=min(scaled_context_length(layer_type.rope, positions) for layer_type in layer_types),
        eps=config.get_float("rms_norm_eps", eps),
        activation=config.get_choice(activation_key, ACTIVATIONS),
        layer_types=tuple(layer_types),
        tie_word_embeddings=config.get_bool("tie_word_embeddings", tie_word_embeddings),
        attn_scale=head_dim**-0.5,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
    )


def read_moe_config(
    config: ConfigReader,
    names: ExpertNames,
    *,
    renormalize: bool,
    activation: str | None = None,
    size_key: str = "intermediate_size",
    has_experts: Sequence[bool] | None = None,
    shared_intermediate_size: int = 0,
    is_gpt_oss: bool = False,
) -> MoEConfig:
    """Read the experts of a decoder, by default in all layers. Raises CheckpointError."""
    num_layers = read_num_layers(config)
    key = next((key for key in EXPERT_COUNT_KEYS if key in config), EXPERT_COUNT_KEYS[0])
    num_experts = config.get_int(key, high=MAX_EXPERTS // num_layers)
    for other in EXPERT_COUNT_KEYS:
        config.require_value(other, num_experts)
    top_k = config.get_int("num_experts_per_tok")
    if top_k > num_experts:
        raise config.error("num_experts_per_tok", f"must be at most `{key}`, {num_experts}, got {top_k}")
    for training_key in ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"):
        config.get(training_key, None)
    return MoEConfig(
        ExpertsConfig(
            num_experts, top_k, renormalize, activation or config.get_choice("hidden_act", ACTIVATIONS)
        ),
        config.get_int(size_key, high=MAX_HIDDEN_SIZE),
        tuple(has_experts or (True,) * num_layers),
        names,
        shared_intermediate_size,
        bias=is_gpt_oss,
        is_gpt_oss=is_gpt_oss,
    )


def read_head_dim(config: ConfigReader, default: int | None = None) -> int:
    """`head_dim`, or else the default, or else hidden_size / heads."""
    share = default or config.get_int("hidden_size") // config.get_int("num_attention_heads")
    return config.get_int("head_dim", share, high=MAX_HIDDEN_SIZE)


def read_layer_windows(
    config: ConfigReader, window: int | None, is_sliding: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """The window of each layer: from `layer_types`, or else where `is_sliding(index)` holds."""
    num_layers = read_num_layers(config)
    default = tuple(LAYER_TYPES[is_sliding(index)] for index in range(num_layers))
    types = config.get_strs("layer_types", num_layers) or default
    for layer_type in types:
        if layer_type not in LAYER_TYPES:
            raise config.error("layer_types", f"has {layer_type!r}; known: {', '.join(LAYER_TYPES)}")
        if layer_type == "sliding_attention" and window is None:
            raise config.error("layer_types", "has sliding_attention, but there is no window")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in types)


def read_window(config: ConfigReader, default: int | None = None) -> int | None:
    """`sliding_window`. 0 is none: transformers 5 writes it where windows are off, such as for Qwen2-MoE."""
    return config.get_optional_int("sliding_window", default, low=0) or None


def read_num_layers(config: ConfigReader) -> int:
    return config.get_int("num_hidden_layers", high=MAX_LAYERS)
