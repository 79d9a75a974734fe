"""Config of a decoder-only model, and the reader of the options that all architectures share.

RoPE options come in the layouts of transformers 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from foreword.core.batch import CacheShape, KVShape, kv_shape_of, state_shape_of
from foreword.core.states import StateShape
from foreword.kernels.ops import ExpertsConfig, MRopeSections
from foreword.layers.latent_attention import LatentShape
from foreword.layers.rope import ROPE_TYPES, RopeConfig
from foreword.layers.states import Mamba2Config
from foreword.models.expert_weights import ExpertNames, MoEConfig
from foreword.weights.config_reader import MAX_INT, ConfigReader, read_vocab_size
from foreword.weights.renamed_weights import RowScale

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}
MAX_LAYERS = 1024
MAX_HIDDEN_SIZE = 1 << 17  # values of a vector between or within layers
EXPERT_COUNT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
MAX_EXPERTS = 1 << 16  # sum over all layers
LAYER_TYPES = ("full_attention", "sliding_attention")
OLDER_LAYER_TYPES = {"attention": "full_attention", "mamba": "linear_attention"}

MROPE_KEYS = ("mrope_section", "mrope_interleaved")
ROPE_TYPE_NAMES = {name: name for name in ROPE_TYPES} | {"su": "longrope", "mrope": "default"}


@dataclass(frozen=True, slots=True)
class LayerType:
    """Attention window and RoPE of a layer."""

    window: int | None  # tokens; None: full attention
    rope: RopeConfig
    k_eq_v: bool = False  # values are keys before their norm and RoPE, without a projection of their own
    causal: bool = True  # as in Ops.attention

    @property
    def uses_mrope(self) -> bool:
        """Whether batches need mrope_positions."""
        return self.rope.mrope_sections is not None


@dataclass(frozen=True, slots=True)
class QKNorm:
    """RMS norms of queries and keys, or layer norms with weights for each head."""

    names: tuple[str, str] = ("q_norm", "k_norm")  # in the checkpoint
    all_heads: bool = False  # over all heads together, not over each
    by_head: bool = False  # layer norms
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
    context_length: int  # positions the model was trained for
    eps: float
    activation: str
    layer_types: tuple[LayerType, ...]  # one per layer
    cache_shapes: tuple[CacheShape, ...]  # one per layer
    tie_word_embeddings: bool
    attn_scale: float
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QKNorm | None = None
    interleaved_rope: bool = False  # RoPE turns pairs of neighbours, not the two halves of a head
    norm_type: str = "rms"  # or "layer"; norms of q and k: see QKNorm
    norm_bias: bool = False  # layer norms have biases
    norm_offset: float = 0.0  # added to norm weights
    embedding_scale: float = (
        1.0  # scale of token embeddings, rounded to the activations' type (as Gemma was trained)
    )
    input_scale: float = 1.0  # scale of token embeddings and image features
    logit_scale: float = 1.0
    act_alphas: tuple[tuple[float, float], ...] = ()  # one pair a layer, see Ops.act; (): none, or tensors
    attn_softcap: float | None = None
    logit_softcap: float | None = None
    attn_sinks: bool = False  # a score of each head without a value, see Ops.attention
    v_norm: bool = False  # values have an RMS norm without a weight
    double_wide_mlp: bool = False  # MLPs of layers that read K and V of earlier ones have twice the size
    per_layer_size: int = 0  # values of per-layer embeddings; 0: none
    attn_gate: bool = False  # outputs of attention are gated, by rows of q_proj beside each head's
    head_bias: bool = False
    num_mtp_layers: int = 0  # layers of an MTP head, after the others in the files: they are not loaded
    conv_bias: bool = False  # short convolutions and their projections have biases
    mamba: Mamba2Config | None = None
    row_scales: Mapping[str, RowScale] = field(default_factory=dict)  # by tensor: ScaledWeights
    takes_lora: bool = True  # False where the files have scaled weights, without the scales
    moe: MoEConfig | None = None
    latent: LatentShape | None = None  # latent attention in all layers

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """KV shapes of layers with attention."""
        return tuple(shape for shape in map(kv_shape_of, self.cache_shapes) if shape is not None)

    @property
    def layers_without_kv(self) -> tuple[int, ...]:
        """Layers that read K and V of an earlier one."""
        shapes = enumerate(map(kv_shape_of, self.cache_shapes))
        return tuple(i for i, shape in shapes if shape is not None and shape.source is not None)

    @property
    def unread_prefixes(self) -> tuple[str, ...]:
        """Prefixes of tensors that files may have and no layer reads."""
        names = ("k_proj", "v_proj", "k_norm")
        return tuple(
            f"model.layers.{index}.self_attn.{name}." for index in self.layers_without_kv for name in names
        )

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """State shapes of layers with state."""
        return tuple(shape for shape in map(state_shape_of, self.cache_shapes) if shape is not None)

    def with_states(self, shapes: Sequence[StateShape | None]) -> DecoderConfig:
        """shapes  of layers with state instead of attention, None of the others"""
        caches = zip(shapes, self.cache_shapes, strict=True)
        return replace(self, cache_shapes=tuple(state or shape for state, shape in caches))


def read_decoder_config(
    config: ConfigReader,
    architecture: str,
    *,
    windows: Sequence[int | None] | None = None,
    layer_types: Sequence[LayerType] | None = None,
    head_dim: int | None = None,
    bias_key: str | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: QKNorm | None = None,
    eps: float = 1e-6,
    theta: float = 10000.0,
    partial_rotary_factor: float = 1.0,
    eps_key: str = "rms_norm_eps",
    activation_key: str = "hidden_act",
    activation: str | None = None,
    intermediate_size: int | None = None,
    tie_word_embeddings: bool = False,
) -> DecoderConfig:
    """Read the shape of a Llama-like decoder. Raises CheckpointError.

    windows      one per layer, if any layer has a sliding window; or else
    layer_types  one per layer, if they differ in RoPE too
    bias_key     option of biases of q, k, v and the output, if there is one for all
    head_dim, eps, theta, partial_rotary_factor, tie_word_embeddings  defaults
    activation, intermediate_size  instead of those in the config
    """
    hidden, heads = config.get_int("hidden_size", high=MAX_HIDDEN_SIZE), config.get_int("num_attention_heads")
    kv_heads = config.get_int("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads {heads}")
    head_dim = read_head_dim(config, head_dim)
    if heads * head_dim > MAX_HIDDEN_SIZE:
        limit = f"{heads} times head_dim {head_dim} must be at most {MAX_HIDDEN_SIZE} here"
        raise config.error("num_attention_heads", limit)
    if bias_key is not None:
        qkv_bias = out_bias = config.get_bool(bias_key, False)
    positions = config.get_int("max_position_embeddings")
    if layer_types is None:
        rope = read_rope(config, head_dim, positions, theta, partial_rotary_factor=partial_rotary_factor)
        layer_types = [LayerType(window, rope) for window in windows or (None,) * read_num_layers(config)]
    return DecoderConfig(
        architecture=architecture,
        dtype=config.get_dtype(),
        vocab_size=read_vocab_size(config),
        hidden_size=hidden,
        intermediate_size=intermediate_size or config.get_int("intermediate_size", high=MAX_HIDDEN_SIZE),
        num_heads=heads,
        context_length=min(scaled_context_length(layer_type.rope, positions) for layer_type in layer_types),
        eps=config.get_float(eps_key, eps),
        activation=activation or config.get_choice(activation_key, ACTIVATIONS),
        layer_types=tuple(layer_types),
        cache_shapes=(KVShape(kv_heads, head_dim),) * len(layer_types),
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
    top_k_key: str = "num_experts_per_tok",
    has_experts: Sequence[bool] | None = None,
    shared_intermediate_size: int = 0,
    is_gpt_oss: bool = False,
    scoring: str = "softmax",
    score_bias: str | None = None,
    expert_scales: str | None = None,
    scale: float | None = None,
    groups: tuple[int, int] | None = None,
) -> MoEConfig:
    """Read the experts of a decoder, by default in all layers. Raises CheckpointError.

    scoring, score_bias, expert_scales  as in ExpertsConfig and MoEConfig
    scale                default of `routed_scaling_factor`; None: the family has no such option
    groups               defaults of `n_group` and `topk_group`, likewise
    """
    num_layers = read_num_layers(config)
    key = next((key for key in EXPERT_COUNT_KEYS if key in config), EXPERT_COUNT_KEYS[0])
    num_experts = config.get_uniform_int(key, num_layers, high=MAX_EXPERTS // num_layers)
    for other in EXPERT_COUNT_KEYS:
        config.require_value(other, config.get(key))
    top_k = config.get_uniform_int(top_k_key, num_layers)
    if top_k > num_experts:
        raise config.error(top_k_key, f"must be at most `{key}`, {num_experts}, got {top_k}")
    unused = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise", "input_jitter_noise")
    for training_key in unused:
        config.get(training_key, None)
    return MoEConfig(
        ExpertsConfig(
            num_experts,
            top_k,
            renormalize,
            activation or config.get_choice("hidden_act", ACTIVATIONS),
            scoring,
            1.0 if scale is None else config.get_float("routed_scaling_factor", scale),
            *_read_expert_groups(config, num_experts, top_k, scoring, groups),
        ),
        config.get_int(size_key, high=MAX_HIDDEN_SIZE),
        tuple(has_experts or (True,) * num_layers),
        names,
        shared_intermediate_size,
        bias=is_gpt_oss,
        is_gpt_oss=is_gpt_oss,
        score_bias=score_bias,
        expert_scales=expert_scales,
    )


def _read_expert_groups(
    config: ConfigReader, num_experts: int, top_k: int, scoring: str, default: tuple[int, int] | None
) -> tuple[int, int]:
    """num_groups and topk_groups of ExpertsConfig."""
    if default is None:
        return 1, 1
    num_groups = config.get_optional_int("n_group", default[0]) or 1
    topk_groups = config.get_optional_int("topk_group", default[1]) or 1
    size = num_experts // num_groups
    if num_experts % num_groups or (num_groups > 1 and size < 2 and scoring == "sigmoid"):
        raise config.error("n_group", f"{num_groups} does not divide {num_experts} experts into groups")
    if topk_groups > num_groups or top_k > topk_groups * size:
        problem = f"{topk_groups} of {num_groups} groups do not have num_experts_per_tok {top_k} experts"
        raise config.error("topk_group", problem)
    return num_groups, topk_groups


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


def read_attention_layers(
    config: ConfigReader, state_type: str, has_attention: Callable[[int], bool]
) -> tuple[bool, ...]:
    """Whether each layer has attention, not state: from `layer_types`, or else where has_attention(index)."""
    num_layers, names = read_num_layers(config), (state_type, "full_attention")
    default = tuple(names[has_attention(index)] for index in range(num_layers))
    types = config.get_strs("layer_types", num_layers) or default
    types = tuple(OLDER_LAYER_TYPES.get(layer_type, layer_type) for layer_type in types)
    unknown = next((layer_type for layer_type in types if layer_type not in names), None)
    if unknown is not None:
        raise config.error("layer_types", f"has {unknown!r}; known: {', '.join(names)}")
    if names[1] not in types:
        raise config.error("layer_types", "has no full_attention")
    return tuple(layer_type == names[1] for layer_type in types)


def read_window(config: ConfigReader, default: int | None = None) -> int | None:
    """`sliding_window`. 0 is none: transformers 5 writes it where windows are off, such as for Qwen2-MoE."""
    return config.get_optional_int("sliding_window", default, low=0) or None


def read_num_layers(config: ConfigReader) -> int:
    return config.get_int("num_hidden_layers", high=MAX_LAYERS)


def read_rope(
    config: ConfigReader,
    head_dim: int,
    context_length: int,
    default_theta: float = 10000.0,
    mrope_sections: MRopeSections | None = None,
    partial_rotary_factor: float = 1.0,
    ignores_mrope: bool = False,
) -> RopeConfig:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling`; mrope_sections is M-RoPE's default.

    ignores_mrope  the text of a multimodal model alone: positions are equal on all axes
    """
    theta = config.get_float("rope_theta", default_theta)
    share = config.get_float("partial_rotary_factor", partial_rotary_factor)
    original = config.get_optional_int("original_max_position_embeddings")
    options = config.get_section("rope_parameters")
    older = config.get_section("rope_scaling")
    section = options or older or ConfigReader({}, config.source)
    plain = section.without(MROPE_KEYS) if mrope_sections is not None or ignores_mrope else section
    rope = read_rope_section(plain, head_dim, context_length, theta, share, original)
    if mrope_sections is not None:
        mrope_sections = read_mrope_sections(section, rope.rotary_dim, mrope_sections)
    return replace(rope, mrope_sections=mrope_sections)


def read_local_and_global_rope(
    config: ConfigReader, head_dim: int, local_theta: float, global_theta: float
) -> tuple[RopeConfig, RopeConfig]:
    """RoPE of layers with a window and of the others, in either layout: `rope_scaling` is for the latter."""
    context_length = config.get_int("max_position_embeddings")
    nested, scaling = config.get_section("rope_parameters"), config.get_section("rope_scaling")
    empty = ConfigReader({}, config.source)
    local_options = (nested and nested.get_section("sliding_attention")) or empty
    global_options = (nested and nested.get_section("full_attention")) or scaling or empty
    if nested is not None:
        nested.check_all_read()
    return (
        read_rope_section(local_options, head_dim, context_length, local_theta),
        read_rope_section(global_options, head_dim, context_length, global_theta),
    )


def read_query_scaled_rope(
    config: ConfigReader, head_dim: int, context_length: int, rotary_dim: int | None = None
) -> RopeConfig:
    """YaRN with `llama_4_scaling_beta`, the growth of queries with their position.

    rotary_dim  rotated values of a head; None: all
    """
    rotary_dim = rotary_dim or head_dim
    options = config.get_section("rope_parameters") or config.get_section("rope_scaling")
    if options is None:
        raise config.error("rope_parameters", "is missing")
    options.require_value("max_position_embeddings", context_length)
    beta = options.get_float("llama_4_scaling_beta")
    theta = config.get_float("rope_theta", 10000.0)
    rope = read_rope_section(options, head_dim, context_length, theta, rotary_dim / head_dim)
    if rope.rope_type != "yarn" or rope.rotary_dim != rotary_dim:
        problem = f"must be yarn here, with {rotary_dim} of the {head_dim} values of a head rotated"
        raise options.error("rope_type", problem)
    return replace(rope, query_beta=beta)


def read_rope_section(
    options: ConfigReader,
    head_dim: int,
    context_length: int,
    theta: float,
    partial_rotary_factor: float = 1.0,
    original_max_position: int | None = None,
) -> RopeConfig:
    """Read one section of RoPE options; theta and the parameters after it are defaults."""
    key = "rope_type" if "rope_type" in options else "type"
    rope_type = options.get_choice(key, ROPE_TYPE_NAMES, "default")
    if options.get_choice("type", ROPE_TYPE_NAMES, rope_type) != rope_type:
        raise options.error("type", f"must be equal to rope_type, {rope_type}")
    share = options.get_float("partial_rotary_factor", partial_rotary_factor)
    is_proportional = rope_type == "proportional"
    rotary_dim = _rotary_dim(options, head_dim, 1.0 if is_proportional else share)
    rope = RopeConfig(rope_type, _read_theta(options, theta), rotary_dim)
    if is_proportional:
        if share > 1:
            raise options.error("partial_rotary_factor", f"must be at most 1, got {share:g}")
        rope = replace(rope, factor=options.get_float("factor", 1.0), turned_share=share)
    if original_max_position is None:
        original_max_position = options.get_int("original_max_position_embeddings", context_length)
    else:  # beside the section; Phi-3.5-MoE has it in both places
        options.require_value("original_max_position_embeddings", original_max_position)
    if rope_type in ("linear", "dynamic", "llama3", "yarn"):
        original = context_length if rope_type == "dynamic" else original_max_position
        rope = replace(rope, factor=options.get_float("factor"), original_max_position=original)
    if rope_type == "llama3":
        low, high = options.get_float("low_freq_factor"), options.get_float("high_freq_factor")
        if low == high:
            raise options.error("high_freq_factor", f"must not be low_freq_factor, {low}")
        rope = replace(rope, low_freq_factor=low, high_freq_factor=high)
    if rope_type == "dynamic" and rope.rotary_dim < 4:
        raise options.error("rope_type", f"dynamic needs at least 4 rotated values, got {rope.rotary_dim}")
    if rope_type == "yarn":
        rope = _with_yarn(rope, options)
    if rope_type == "longrope":
        rope = _with_longrope(rope, options, context_length, original_max_position)
    options.check_all_read()
    return rope


def read_mrope_sections(options: ConfigReader, rotary_dim: int, default: MRopeSections) -> MRopeSections:
    """`mrope_section`. The architecture fixes whether axes are interleaved; the file can only repeat it."""
    options.require_value("mrope_interleaved", default.interleaved)
    sections = options.get("mrope_section", list(default.sections))
    is_list = isinstance(sections, list) and len(sections) == 3
    if not is_list or not all(type(size) is int and size >= 0 for size in sections):
        raise options.error("mrope_section", f"must be a list of 3 whole numbers, got {sections!r:.60}")
    time, row, column = sections
    if time + row + column != rotary_dim // 2:
        reason = f"has {time + row + column} angles, and a head has {rotary_dim // 2}"
        raise options.error("mrope_section", reason)
    return MRopeSections((time, row, column), default.interleaved)


def _read_theta(options: ConfigReader, default: float) -> float:
    theta = options.get_float("rope_theta", default)
    if theta <= 1:
        raise options.error("rope_theta", f"must be above 1, got {theta:g}")
    return theta


def _rotary_dim(options: ConfigReader, head_dim: int, partial_rotary_factor: float) -> int:
    rotary_dim = int(head_dim * partial_rotary_factor)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise options.error("partial_rotary_factor", f"makes {rotary_dim} of {head_dim} values rotate")
    return rotary_dim


def _with_yarn(rope: RopeConfig, options: ConfigReader) -> RopeConfig:
    return replace(
        rope,
        attention_factor=options.get_optional_float("attention_factor"),
        beta_fast=options.get_float("beta_fast", 32.0),
        beta_slow=options.get_float("beta_slow", 1.0),
        mscale=options.get_optional_float("mscale") or 0.0,
        mscale_all_dim=options.get_optional_float("mscale_all_dim") or 0.0,
        truncate=options.get_bool("truncate", True),
    )


def _with_longrope(
    rope: RopeConfig, options: ConfigReader, context_length: int, original_max_position: int
) -> RopeConfig:
    length = rope.rotary_dim // 2
    attention_factor = options.get_optional_float("attention_factor")
    if attention_factor is None and original_max_position < 2:
        raise options.error("original_max_position_embeddings", "must be at least 2 for longrope, got 1")
    scales = [options.get_optional_float(f"{name}_mscale") for name in ("short", "long")]
    if (scales[0] is None) != (scales[1] is None):
        raise options.error("short_mscale", "needs long_mscale, which is missing, or the other way")
    return replace(
        rope,
        mscales=None if scales[0] is None or scales[1] is None else (scales[0], scales[1]),
        original_max_position=original_max_position,
        factor=options.get_float("factor", context_length / original_max_position),
        attention_factor=attention_factor,
        short_factor=options.get_floats("short_factor", length),
        long_factor=options.get_floats("long_factor", length),
    )


def scaled_context_length(rope: RopeConfig, context_length: int) -> int:
    """Context length of the model: dynamic and yarn extend max_position_embeddings."""
    if rope.rope_type == "dynamic":
        return min(math.floor(context_length * rope.factor), MAX_INT)
    if rope.rope_type == "yarn":
        return min(max(context_length, math.floor(rope.original_max_position * rope.factor)), MAX_INT)
    return context_length
