"""Falcon-H1: attention and Mamba-2 side by side in every layer, and multipliers of their projections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor

from foreword.core.batch import HybridLayer, HybridShape
from foreword.core.states import StateShape
from foreword.layers.attention import ForwardContext
from foreword.layers.states import Mamba2Config
from foreword.models.decoder import Decoder
from foreword.models.decoder_config import DecoderConfig, read_decoder_config
from foreword.models.layer_builder import DecoderLayer, LayerBuilder
from foreword.models.mamba2 import Mamba2Keys, read_mamba2_shape, read_time_step_limits
from foreword.weights.config_reader import ConfigReader
from foreword.weights.renamed_weights import RowScale

THETA = 10000.0
UNUSED_KEYS = (  # without effect
    *("attn_layer_indices", "layer_types", "layers_block_type", "mamba_chunk_size", "mamba_use_mlp"),
    *("mlp_expansion_factor", "num_logits_to_keep", "time_step_floor", "time_step_max", "time_step_min"),
)


class FalconH1Layer:
    """Norm, attention and Mamba-2 of the same input, norm, gated MLP."""

    def __init__(self, builder: LayerBuilder) -> None:
        self._mixer_norm = builder.norm("input_layernorm")
        self._mamba = builder.mamba2("mamba")
        self._attention = builder.attention("self_attn")
        self._mlp_norm = builder.norm("pre_ff_layernorm")
        self._mlp = builder.mlp("feed_forward")

    def __call__(self, x: Tensor, context: ForwardContext, cache: HybridLayer) -> Tensor:
        """x [T, H] -> [T, H]"""
        assert cache.kv is not None and cache.state is not None
        inputs = self._mixer_norm(x)
        x = self._mamba(inputs, context, cache.state, x)
        x = self._attention(inputs, context, cache.kv, x)
        return self._mlp(self._mlp_norm(x), x)


class FalconH1(Decoder):
    """Projections are multiplied when they are loaded, as in GGUF files."""

    NORM: ClassVar[str] = "final_layernorm"

    @classmethod
    def read_config(cls, config: ConfigReader) -> DecoderConfig:
        """config.json of model_type `falcon_h1`"""
        for key in UNUSED_KEYS:
            config.get(key, None)
        base = read_decoder_config(
            config,
            "falcon_h1",
            bias_key="attention_bias",
            mlp_bias=config.get_bool("mlp_bias", False),
            eps=1e-5,
            theta=THETA,
        )
        if base.activation != "silu":
            raise config.error("hidden_act", "must be silu here")
        inner_size = config.get_int("mamba_expand", 2) * base.hidden_size
        inner_size = config.get_int("mamba_d_ssm", 1024 if "mamba_d_ssm" in config else inner_size)
        shape = read_mamba2_shape(config, Mamba2Keys(), inner_size, groups=1, state_dim=256)
        has_norm = config.get_bool("mamba_rms_norm", False)
        mamba = Mamba2Config(
            eps=base.eps,
            norm_groups=shape.key_heads if has_norm else 0,
            norms_first=config.get_bool("mamba_norm_before_gate", True),
            time_step_limits=read_time_step_limits(config),
            conv_bias=config.get_bool("mamba_conv_bias", True),
            bias=config.get_bool("mamba_proj_bias", False),
            out_bias=config.get_bool("projectors_bias", False),
        )
        return replace(
            base,
            cache_shapes=tuple(HybridShape(kv, shape) for kv in base.kv_shapes),
            mamba=mamba,
            input_scale=config.get_float("embedding_multiplier", 1.0),
            logit_scale=config.get_float("lm_head_multiplier", 1.0),
            row_scales=_read_row_scales(config, shape),
        )

    def build_layer(self, builder: LayerBuilder) -> DecoderLayer:
        """Build one layer."""
        return FalconH1Layer(builder)


def _read_row_scales(config: ConfigReader, shape: StateShape) -> dict[str, RowScale]:
    """Multipliers of the inputs and outputs of projections; biases have only the latter."""

    def read(name: str, default: Any = 1.0) -> float:
        return config.get_float(f"{name}_multiplier", default)

    def read_list(name: str, length: int) -> tuple[float, ...]:
        key = f"{name}_multipliers"
        return config.get_floats(key, length) if key in config else (1.0,) * length

    gate, down = read_list("mlp", 2)
    values, groups = shape.value_heads * shape.value_dim, shape.key_heads * shape.key_dim
    sizes = values, values, groups, groups, shape.value_heads  # the gate, x, B, C and time steps
    parts = tuple(zip(sizes, read_list("ssm", 5), strict=True))
    scales: dict[str, tuple[float, float]] = {
        "self_attn.q_proj": (read("attention_in"), 1.0),
        "self_attn.k_proj": (read("attention_in"), read("key")),
        "self_attn.v_proj": (read("attention_in"), 1.0),
        "self_attn.o_proj": (1.0, read("attention_out")),
        "mamba.out_proj": (1.0, read("ssm_out")),
        "feed_forward.gate_proj": (1.0, gate),
        "feed_forward.down_proj": (1.0, down),
    }
    ssm_in = read("ssm_in")
    result: dict[str, RowScale] = {}
    if any(scale != 1.0 for scale in (ssm_in, *(scale for _, scale in parts))):
        result["mamba.in_proj.bias"] = parts
        result["mamba.in_proj.weight"] = tuple((rows, ssm_in * scale) for rows, scale in parts)
    for name, (of_inputs, of_outputs) in scales.items():
        result |= {f"{name}.weight": of_inputs * of_outputs, f"{name}.bias": of_outputs}
    return {name: scale for name, scale in result.items() if scale != 1.0}
