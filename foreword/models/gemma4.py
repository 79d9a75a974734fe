"""Gemma 4 (text): two head sizes, values that are keys, shared K and V, per-layer embeddings, experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from foreword.core.batch import KVLayer, KVShape
from foreword.layers.attention import ForwardContext
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import (
    MAX_HIDDEN_SIZE,
    DecoderConfig,
    LayerType,
    QKNorm,
    read_decoder_config,
    read_head_dim,
    read_layer_windows,
    read_moe_config,
    read_rope_section,
    read_window,
)
from foreword.models.expert_weights import ExpertNames, MoEConfig
from foreword.models.gemma2 import Gemma2Layer
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.weights.config_reader import ConfigReader

HEAD_DIM, GLOBAL_HEAD_DIM = 256, 512
PER_LAYER_SIZE = 256
WINDOW_PERIOD = 6  # every n-th layer is global
ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_theta": 10_000.0},
    "full_attention": {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
        "rope_theta": 1_000_000.0,
    },
}
EXPERT_KEYS = ("num_experts", "top_k_experts", "moe_intermediate_size")
NAMES = ExpertNames(module="", router="router.proj")


class Gemma4Layer(Gemma2Layer):
    """Gemma 2's layer with experts beside the MLP, an input of its own, and a scale of its output."""

    def __init__(self, builder: LayerBuilder) -> None:
        super().__init__(builder)
        self._scale = builder.scalar("layer_scalar")
        self._per_layer_input = builder.per_layer_input(self._scale)
        self._moe = builder.moe()
        if self._moe is not None:
            self._router_norm = builder.norm("router.scale", "", builder.hidden_size**-0.5)
            self._pre_moe_norm = builder.norm("pre_feedforward_layernorm_2")
            self._mlp_norm = builder.norm("post_feedforward_layernorm_1")
            self._moe_norm = builder.norm("post_feedforward_layernorm_2")

    def __call__(self, x: Tensor, context: ForwardContext, cache: KVLayer) -> Tensor:
        """x [T, H] -> [T, H]"""
        x = self._attend(x, context, cache)
        y = self._mlp(self._pre_mlp_norm(x))
        if self._moe is not None:
            experts = self._moe(self._pre_moe_norm(x), router_x=self._router_norm(x))
            y = self._add(self._mlp_norm(y), self._moe_norm(experts))
        y = self._post_mlp_norm(y)
        if self._per_layer_input is None:
            return self._add(x, y, self._scale)
        assert context.per_layer_inputs is not None
        return self._per_layer_input(self._add(x, y), context.per_layer_inputs)


class Gemma4(Decoder):
    """Local layers have a window; global ones have larger heads, and perhaps fewer of K, which is also V."""

    WINDOW: ClassVar[int] = 512
    IS_UNIFIED: ClassVar[bool] = False  # without experts and per-layer embeddings

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `gemma4_text` or `gemma4_unified_text`"""
        if config.get("use_bidirectional_attention", None) not in (None, "vision"):  # pictures alone
            raise config.error("use_bidirectional_attention", 'must be "vision" or null here')
        window = read_window(config, cls.WINDOW)
        windows = read_layer_windows(config, window, lambda index: (index + 1) % WINDOW_PERIOD != 0)
        if windows[-1] is not None:
            raise config.error("layer_types", "must end with full_attention")
        k_eq_v = config.get_bool("attention_k_eq_v", False)
        shapes = _share_kv(config, windows, _read_shapes(config, windows, k_eq_v))
        base = read_decoder_config(
            config,
            "gemma4",
            layer_types=_read_layer_types(config, windows, shapes, k_eq_v),
            head_dim=HEAD_DIM,
            bias_key="attention_bias",
            qk_norm=QKNorm(),
            activation_key="hidden_activation",
            tie_word_embeddings=True,
        )
        base = replace(
            base,
            cache_shapes=tuple(shapes),
            attn_scale=1.0,
            v_norm=True,
            embedding_scale=base.hidden_size**0.5,
            logit_softcap=config.get_optional_float("final_logit_softcapping"),
            double_wide_mlp=config.get_bool("use_double_wide_mlp", False),
        )
        if cls.IS_UNIFIED:
            return base
        moe = _read_moe(config, base)
        return replace(base, per_layer_size=_read_per_layer_size(config, base), moe=moe)

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return Gemma4Layer(builder)


class Gemma4Unified(Gemma4):
    """The text of checkpoints whose pictures and sounds have no encoder."""

    WINDOW: ClassVar[int] = 1024
    IS_UNIFIED: ClassVar[bool] = True


def _read_shapes(config: ConfigReader, windows: Sequence[int | None], k_eq_v: bool) -> list[KVShape]:
    """The older layout has options of global layers, that of transformers 5.24 `per_layer_config`."""
    heads = config.get_int("num_attention_heads")
    local = KVShape(config.get_int("num_key_value_heads", heads), read_head_dim(config, HEAD_DIM))
    kv_heads = config.get_int("num_global_key_value_heads", local.heads)
    size = config.get_int("global_head_dim", GLOBAL_HEAD_DIM, high=MAX_HIDDEN_SIZE)
    full = KVShape(kv_heads if k_eq_v else local.heads, size)
    layers = config.get_section("per_layer_config")
    shapes = [local if window or layers is not None else full for window in windows]
    for key in layers.keys if layers is not None else ():
        layer = layers.get_section(key) if layers is not None and key.isdecimal() else None
        if layer is None or int(key) >= len(shapes):
            raise config.error("per_layer_config", f"has {key!r:.40}, which is no layer")
        size = layer.get_int("head_dim", local.head_dim, high=MAX_HIDDEN_SIZE)
        shapes[int(key)] = KVShape(layer.get_int("num_key_value_heads", local.heads), size)
        layer.check_all_read()
    for shape in shapes:
        if heads % shape.heads or heads * shape.head_dim > MAX_HIDDEN_SIZE:
            found = f"{shape.heads} KV heads of size {shape.head_dim} do not fit {heads} heads"
            raise config.error("num_attention_heads", found)
    return shapes


def _share_kv(config: ConfigReader, windows: Sequence[int | None], shapes: list[KVShape]) -> list[KVShape]:
    """The last `num_kv_shared_layers` layers read K and V of the last layer of their type before them."""
    first = len(shapes) - config.get_int("num_kv_shared_layers", 0, low=0, high=len(shapes) - 1)
    result = shapes[:first]
    for window, shape in zip(windows[first:], shapes[first:], strict=True):
        source = next((i for i in reversed(range(first)) if windows[i] == window), None)
        if source is None or shapes[source] != shape:
            raise config.error("num_kv_shared_layers", "leaves a layer without one of its type and shape")
        result.append(shape._replace(source=source))
    return result


def _read_layer_types(
    config: ConfigReader, windows: Sequence[int | None], shapes: Sequence[KVShape], k_eq_v: bool
) -> list[LayerType]:
    options = config.get_section("rope_parameters") or ConfigReader(ROPES, config.source)
    context_length = config.get_int("max_position_embeddings")
    result: list[LayerType] = []
    for window, shape in zip(windows, shapes, strict=True):
        name = "sliding_attention" if window else "full_attention"
        section = options.get_section(name) or ConfigReader(ROPES[name], config.source)
        rope = read_rope_section(section, shape.head_dim, context_length, ROPES[name]["rope_theta"])
        result.append(LayerType(window, rope, k_eq_v=k_eq_v and not window))
    options.check_all_read()
    return result


def _read_per_layer_size(config: ConfigReader, base: DecoderConfig) -> int:
    size = config.get_int("hidden_size_per_layer_input", PER_LAYER_SIZE, low=0)
    if not size:
        config.get("vocab_size_per_layer_input", None)
        return 0
    config.require_value("vocab_size_per_layer_input", base.vocab_size)
    if base.activation != "gelu_tanh":
        raise config.error("hidden_activation", "must be gelu_pytorch_tanh with per-layer embeddings")
    if size * len(base.layer_types) > MAX_HIDDEN_SIZE:
        raise config.error("hidden_size_per_layer_input", f"must be at most {MAX_HIDDEN_SIZE} in all layers")
    return size


def _read_moe(config: ConfigReader, base: DecoderConfig) -> MoEConfig | None:
    if not config.get_bool("enable_moe_block", False):
        for key in EXPERT_KEYS:
            config.get(key, None)
        return None
    return read_moe_config(
        config,
        NAMES,
        renormalize=True,
        activation=base.activation,
        size_key="moe_intermediate_size",
        top_k_key="top_k_experts",
        expert_scales="router.per_expert_scale",
    )
