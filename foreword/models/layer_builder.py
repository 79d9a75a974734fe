"""Builds the parts of a decoder's layers from tensors."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from foreword.core.batch import CacheShape, KVShape, kv_shape_of, state_shape_of
from foreword.core.states import StateShape
from foreword.errors import CheckpointError
from foreword.kernels.ops import (
    NO_ALPHAS,
    GroupedInts,
    Matrix,
    Ops,
    PackedHeads,
    PackedLinear,
    QuantizedBlocks,
)
from foreword.kernels.quantization import dequantize, slice_rows
from foreword.layers.attention import Attention, AttentionConfig, ForwardContext, SplitProjection
from foreword.layers.latent_attention import LatentAttention, LatentShape
from foreword.layers.linear import Linear, load_linear
from foreword.layers.lora import LoraLayers, deinterleaved_order, split_order
from foreword.layers.mlp import MLP, MoE, SharedExpert, UngatedMLP
from foreword.layers.norm import LayerNorm, Norm, RMSNorm
from foreword.layers.per_layer_embedding import PerLayerInput
from foreword.layers.states import GatedDeltaNet, Mamba2, ShortConv
from foreword.layers.weights import Weights
from foreword.models.decoder_config import DecoderConfig
from foreword.models.expert_weights import MoEConfig, load_experts
from foreword.models.interfaces import Precision
from foreword.weights.renamed_weights import ReorderedWeights, ScaledWeights, rows_of_scale

# Tensors of latent attention's keys and values
LATENT_JOINED = "kv_b_proj.weight"  # rows of keys, then of values, of one head after the other
LATENT_KEYS, LATENT_VALUES = "k_b_proj.weight", "v_b_proj.weight"  # names in GGUF files: keys are transposed
LATENT_NORM_EPS = 1e-6  # norms within latent attention, whatever that of the others


class DecoderLayer(Protocol):
    """One layer of a model."""

    def __call__(self, x: Tensor, context: ForwardContext, cache: Any) -> Tensor:
        """x [T, H] -> [T, H]; cache is the layer's LayerCache"""


class LayerBuilder:
    """Builds the parts of one layer from tensors, by their names in the checkpoint."""

    def __init__(
        self,
        ops: Ops,
        config: DecoderConfig,
        precision: Precision,
        index: int,
        weights: Weights,
        lora: LoraLayers | None = None,
        head_inputs: int | None = None,
        first_position: int = 1,
    ) -> None:
        """weights of layer `index`

        lora            of models whose config takes adapters
        head_inputs     of a trained head: width of its attention's input; else None
        first_position  that it sees: by default none sees the first token, which no hidden state precedes
        """
        self.ops = ops
        self._lora = lora
        self._config = config
        self._precision = precision
        self._index = index
        self._head_inputs = head_inputs
        self._first_position = 0 if head_inputs is None else first_position
        self._weights = ScaledWeights(weights, config.row_scales) if config.row_scales else weights

    def has(self, name: str) -> bool:
        """Whether the files have this tensor of the layer."""
        return self._weights.has(name)

    def norm(self, name: str, suffix: str = ".weight", factor: float = 1.0) -> Norm:
        """`factor`: of the weight of an RMS norm, whose name ends with `suffix`."""
        if self._config.norm_type == "layer":
            return build_norm(self.ops, self._config, self._weights, name)
        return self._norm(self._weights, name, self._config.hidden_size, suffix, factor)

    def scalar(self, name: str, shape: tuple[int, ...] = (1,)) -> float:
        return float(self._weights.tensor(name, *shape).item())

    @property
    def act_alphas(self) -> tuple[float, float] | None:
        """Parameters of the activation, where the config has them."""
        return self._config.act_alphas[self._index] if self._config.act_alphas else None

    @property
    def cache_shape(self) -> CacheShape:
        return self._config.cache_shapes[self._index]

    @property
    def state_shape(self) -> StateShape | None:
        """The state of this layer; None: it has attention."""
        return state_shape_of(self.cache_shape)

    @property
    def hidden_size(self) -> int:
        return self._config.hidden_size

    @property
    def _kv_shape(self) -> KVShape:
        shape = kv_shape_of(self.cache_shape)
        assert shape is not None
        return shape

    def attention(self, name: str, fused: str | None = None, out: str = "o_proj") -> Attention:
        """`fused` names a projection with q, k and v; otherwise they are separate tensors."""
        config, size, head_inputs = self._config, self._kv_shape.head_dim, self._head_inputs
        q, kv = config.num_heads * size, self._kv_shape.heads * size
        orders: dict[str, Tensor] = {}
        if config.interleaved_rope:
            assert fused is None and (config.qk_norm is None or config.qk_norm.by_head)
            rotary_dim = config.layer_types[self._index].rope.rotary_dim
            orders = {
                name: deinterleaved_order(heads * size, heads, rotary_dim)
                for name, heads in self._qk_heads.items()
            }
        if config.attn_gate:
            orders["q_proj"] = split_order((size, size), config.num_heads)
        weights = ReorderedWeights(self._weights.prefixed(f"{name}."), orders)
        attention = self._attention_config()
        outputs = {"q_proj": q * (1 + config.attn_gate)}
        if attention.has_kv:
            outputs |= {"k_proj": kv} if attention.k_eq_v else {"k_proj": kv, "v_proj": kv}
        if fused:
            outputs = {fused: q + 2 * kv}
        size_in = head_inputs or config.hidden_size
        parts = [outputs] if head_inputs is None else [{"q_proj": outputs.pop("q_proj")}, outputs]
        linears = [self._linear(name, weights, size_in, part, config.qkv_bias, orders) for part in parts]
        q_norm: Norm | None = None
        k_norm: Norm | None = None
        v_norm: RMSNorm | None = None
        if config.qk_norm is not None and config.qk_norm.by_head:
            q_norm, k_norm = (
                self._norm_by_head(weights, name, heads, orders)
                for name, heads in zip(("q", "k"), self._qk_heads.values(), strict=True)
            )
        elif config.qk_norm is not None:
            names, sizes = config.qk_norm.names, (q, kv) if config.qk_norm.all_heads else (size, size)
            q_norm = self._norm(weights, names[0], sizes[0])
            k_norm = self._norm(weights, names[1], sizes[1]) if attention.has_kv else None
        if config.v_norm and isinstance(k_norm, RMSNorm):
            v_norm = k_norm.without_weight()
        return Attention(
            self.ops,
            attention,
            linears[0] if head_inputs is None else SplitProjection(self.ops, *linears),
            self._linear(name, weights, q, {out: config.hidden_size}, config.out_bias),
            q_norm,
            k_norm,
            v_norm,
            weights.tensor("sinks", config.num_heads) if config.attn_sinks else None,
        )

    def _attention_config(self) -> AttentionConfig:
        config, shape, layer_type = self._config, self._kv_shape, self._config.layer_types[self._index]
        return AttentionConfig(
            heads=config.num_heads,
            kv_heads=shape.heads,
            head_dim=shape.head_dim,
            scale=config.attn_scale,
            window=layer_type.window,
            softcap=config.attn_softcap,
            norms_all_heads=config.qk_norm is not None and config.qk_norm.all_heads,
            norms_after_rope=config.qk_norm is not None and config.qk_norm.after_rope,
            has_kv=shape.source is None,
            k_eq_v=layer_type.k_eq_v,
            has_gate=config.attn_gate,
            first=self._first_position,
            causal=layer_type.causal,
        )

    def latent_attention(self, name: str) -> LatentAttention:
        """Multi-head latent attention, with keys and values absorbed into queries and outputs by head."""
        ops, config, precision = self.ops, self._config, self._precision
        shape, heads, hidden, bias = config.latent, config.num_heads, config.hidden_size, config.qkv_bias
        assert shape is not None
        rank, latent = shape.q_lora_rank, "kv_a_proj_with_mqa"
        q_name = "q_proj" if rank is None else "q_b_proj"
        orders = {
            q_name: shape.query_order(heads, config.interleaved_rope),
            latent: shape.key_order(config.interleaved_rope),
        }
        weights = ReorderedWeights(self._weights.prefixed(f"{name}."), orders)
        linear = partial(self._linear, name, weights)

        def norm(name: str, size: int) -> RMSNorm:
            return RMSNorm(ops, weights.tensor(f"{name}.weight", size), LATENT_NORM_EPS)

        query_input = None
        if rank is not None:
            query_input = linear(hidden, {"q_a_proj": rank}, bias), norm("q_a_layernorm", rank)
        heads_k, heads_v = _load_latent_heads(ops, weights, precision.linear_format, shape, heads)
        return LatentAttention(
            ops,
            shape,
            heads,
            config.attn_scale,
            linear(rank or hidden, {q_name: heads * shape.qk_head_dim}, False, orders),
            linear(hidden, {latent: shape.cached_dim}, bias, orders),
            norm("kv_a_layernorm", shape.kv_lora_rank),
            heads_k,
            heads_v,
            linear(heads * shape.v_head_dim, {"o_proj": hidden}, config.out_bias),
            query_input,
            self._first_position,
        )

    def short_conv(self, name: str) -> ShortConv:
        """`in_proj` yields b, c and x; `conv.weight` is [H, 1, K]."""
        bias, hidden, shape = self._config.conv_bias, self._config.hidden_size, self.state_shape
        weights = self._weights.prefixed(f"{name}.")
        assert shape is not None and shape.channels == hidden
        return ShortConv(
            self.ops,
            self._linear(name, weights, hidden, {"in_proj": 3 * hidden}, bias),
            self._conv_weight(weights, "conv", shape),
            weights.tensor("conv.bias", hidden) if bias else None,
            self._linear(name, weights, hidden, {"out_proj": hidden}, bias),
        )

    def gated_delta_net(self, name: str, fused: bool = False) -> GatedDeltaNet:
        """`fused`: in_proj_qkvz and in_proj_ba join the rows of each key head, as in Qwen3-Next.

        GGUF files may have in_proj_qkv and in_proj_z instead of in_proj_qkvz, with rows as in our order.
        """
        hidden, shape = self._config.hidden_size, self.state_shape
        weights = self._weights.prefixed(f"{name}.")
        assert shape is not None
        heads, values = shape.value_heads, shape.value_heads * shape.value_dim
        outputs = {"in_proj_qkv": shape.channels, "in_proj_z": values, "in_proj_b": heads, "in_proj_a": heads}
        orders: dict[str, Tensor] = {}
        tensors: dict[str, int] | None = None
        if fused:
            if weights.has("in_proj_qkv.weight"):
                tensors = {"in_proj_qkv": shape.channels, "in_proj_z": values, "in_proj_ba": 2 * heads}
            outputs = {"in_proj_qkvz": shape.channels + values, "in_proj_ba": 2 * heads}
            group = heads // shape.key_heads
            sizes = (*(shape.key_dim,) * 2, *(group * shape.value_dim,) * 2)
            orders["in_proj_qkvz"] = split_order(sizes, shape.key_heads)
            orders["in_proj_ba"] = split_order((group, group), shape.key_heads)
        reordered = ReorderedWeights(weights, orders)
        # The norm of a Gated DeltaNet has no offset, whatever the others have
        norm = RMSNorm(self.ops, weights.tensor("norm.weight", shape.value_dim), self._config.eps)
        return GatedDeltaNet(
            self.ops,
            self._linear(name, reordered, hidden, outputs, False, orders, tensors),
            self._conv_weight(weights, "conv1d", shape),
            -weights.tensor("A", heads) if weights.has("A") else weights.tensor("A_log", heads).exp(),
            weights.tensor("dt_bias", heads),
            norm,
            self._linear(name, weights, values, {"out_proj": hidden}, False),
        )

    def mamba2(self, name: str) -> Mamba2:
        """`in_proj` yields the gate, x, B, C and time steps; the channels of `conv1d` are x, B and C.

        Ours are C, B and x, then the gate and the time steps.
        """
        hidden, shape, config = self._config.hidden_size, self.state_shape, self._config.mamba
        weights = self._weights.prefixed(f"{name}.")
        assert shape is not None and config is not None
        heads, values = shape.value_heads, shape.value_heads * shape.value_dim
        groups = shape.key_heads * shape.key_dim
        sizes, rows = [values, values, groups, groups, heads], torch.arange(values + shape.channels + heads)
        gate, x, b, c, steps = torch.split(rows, sizes)
        channels = torch.cat((c, b, x)) - values
        orders = {"in_proj": torch.cat((c, b, x, gate, steps)), "conv1d": channels}
        reordered = ReorderedWeights(weights, orders)
        norm = None
        if config.norm_groups:
            weight = weights.tensor("norm.weight", values).view(config.norm_groups, -1)
            norm = RMSNorm(self.ops, weight, config.eps)
        outputs = {"in_proj": len(orders["in_proj"])}
        return Mamba2(
            self.ops,
            self._linear(name, reordered, hidden, outputs, config.bias, orders),
            self._conv_weight(reordered, "conv1d", shape),
            reordered.tensor("conv1d.bias", shape.channels) if config.conv_bias else None,
            -weights.tensor("A", heads) if weights.has("A") else weights.tensor("A_log", heads).exp(),
            weights.tensor("dt_bias", heads),
            weights.tensor("D", heads),
            config,
            norm,
            self._linear(name, weights, values, {"out_proj": hidden}, config.out_bias),
        )

    def _conv_weight(self, weights: Weights, name: str, shape: StateShape) -> Tensor:
        """[K, C]"""
        weight = weights.tensor(f"{name}.weight", shape.channels, 1, shape.kernel_size)
        return weight.squeeze(1).t().contiguous()

    def per_layer_input(self, scale: float) -> PerLayerInput | None:
        """None without per-layer embeddings; `scale` of its results."""
        hidden, size, weights = self._config.hidden_size, self._config.per_layer_size, self._weights
        if not size:
            return None
        return PerLayerInput(
            self.ops,
            self._linear("", weights, hidden, {"per_layer_input_gate": size}, False),
            self._linear("", weights, size, {"per_layer_projection": hidden}, False),
            self.norm("post_per_layer_input_norm"),
            slice(self._index * size, (self._index + 1) * size),
            scale,
        )

    def feed_forward(
        self,
        name: str = "mlp",
        down_name: str = "down_proj",
        gate_up_names: tuple[str, str] = ("gate_proj", "up_proj"),
    ) -> MLP | MoE:
        """The mixture of experts of this layer, or else its MLP, which has these names."""
        return self.moe() or self.mlp(name, down_name=down_name, gate_up_names=gate_up_names)

    def mlp(
        self,
        name: str,
        fused: str | None = None,
        down_name: str = "down_proj",
        size: int | None = None,
        gate_up_names: tuple[str, str] = ("gate_proj", "up_proj"),
    ) -> MLP:
        """`fused` names a projection with gate and up; otherwise they are separate tensors."""
        config = self._config
        weights = self._weights.prefixed(f"{name}.")
        has_kv = self._index not in config.layers_without_kv
        size = size or config.intermediate_size * (2 if config.double_wide_mlp and not has_kv else 1)
        outputs = {fused: 2 * size} if fused else dict.fromkeys(gate_up_names, size)
        gate_up = self._linear(name, weights, config.hidden_size, outputs, config.mlp_bias)
        down = self._linear(name, weights, size, {down_name: config.hidden_size}, config.mlp_bias)
        return MLP(gate_up, down, config.activation)

    def moe(self) -> MoE | None:
        """The mixture of experts of this layer, if it has one."""
        moe = self._config.moe
        return self._moe(moe) if moe is not None and moe.has_experts[self._index] else None

    def ungated_mlp(
        self,
        name: str = "mlp",
        up_name: str = "up_proj",
        down_name: str = "down_proj",
        alphas: tuple[float, float] = NO_ALPHAS,
        size: int | None = None,
    ) -> UngatedMLP:
        """alphas: see Ops.act"""
        config, weights = self._config, self._weights.prefixed(f"{name}.")
        hidden, size = config.hidden_size, size or config.intermediate_size
        up = self._linear(name, weights, hidden, {up_name: size}, config.mlp_bias)
        down = self._linear(name, weights, size, {down_name: hidden}, config.mlp_bias)
        return UngatedMLP(self.ops, up, down, config.activation, alphas)

    def _moe(self, moe: MoEConfig) -> MoE:
        module = f"{moe.names.module}." if moe.names.module else ""
        router = self._router(f"{module}{moe.names.router}", moe.experts.num_experts, moe.bias)
        weights, weight_format = self._weights.prefixed(module), self._precision.linear_format
        experts = load_experts(self.ops, weights, weight_format, moe, self._config.hidden_size)
        return MoE(self.ops, moe.experts, router, experts, self._shared_expert(moe))

    def _shared_expert(self, moe: MoEConfig) -> SharedExpert | None:
        names = moe.names
        if not moe.shared_intermediate_size:
            return None
        fused, down = names.shared_fused or (None, "down_proj")
        if not self._weights.has(f"{names.shared}.{fused}.weight"):
            fused, down = None, "down_proj"
        size = moe.shared_intermediate_size
        if moe.experts.gated:
            mlp: MLP | UngatedMLP = self.mlp(names.shared, fused, down, size)
        else:
            mlp = self.ungated_mlp(names.shared, size=size)
        gate = None if names.shared_gate is None else self._router(names.shared_gate, 1)
        return SharedExpert(self.ops, mlp, gate)

    def _router(self, name: str, num_rows: int, bias: bool = False) -> Linear:
        """A layer [N, H] whose weight and results are float32, whatever the quantization."""
        weight = self._weights.tensor(f"{name}.weight", num_rows, self._config.hidden_size)
        if not weight.isfinite().all():
            problem = f"`model.layers.{self._index}.{name}.weight` of a router holds NaN or infinity"
            raise CheckpointError(f"tensor {problem}", "model")
        biases = self._weights.tensor(f"{name}.bias", num_rows) if bias else None
        return Linear(self.ops, self.ops.pack_linear([weight], "float32", biases), torch.float32)

    @property
    def _qk_heads(self) -> dict[str, int]:
        if kv_shape_of(self.cache_shape) is None:
            return {}
        return {"q_proj": self._config.num_heads, "k_proj": self._kv_shape.heads}

    def _linear(
        self,
        name: str,
        weights: Weights,
        inputs: int,
        outputs: Mapping[str, int],
        bias: bool,
        row_orders: Mapping[str, Tensor] = MappingProxyType({}),
        tensors: Mapping[str, int] | None = None,
    ) -> Linear:
        """`tensors`: names and rows in the files, if they are not those of `outputs`."""
        weight_format = self._precision.linear_format
        packed = load_linear(self.ops, weights, weight_format, inputs, tensors or outputs, bias)
        config = self._config
        if not config.takes_lora:
            return Linear(self.ops, packed)
        assert self._lora is not None
        prefix = f"layers.{self._index}.{name}{'.' if name else ''}"
        lora = self._lora.add_linear(
            self.ops,
            {prefix + output: size for output, size in outputs.items()},
            inputs,
            {prefix + output: heads for output, heads in self._qk_heads.items()},
            {prefix + output: order for output, order in row_orders.items()},
            {
                prefix + output: rows_of_scale(config.row_scales[f"{name}.{output}.weight"], size)
                for output, size in outputs.items()
                if f"{name}.{output}.weight" in config.row_scales
            },
        )
        return Linear(self.ops, packed, lora=lora)

    def _norm(
        self, weights: Weights, name: str, size: int, suffix: str = ".weight", factor: float = 1.0
    ) -> RMSNorm:
        weight = weights.tensor(f"{name}{suffix}", size) * factor
        return RMSNorm(self.ops, weight, self._config.eps, self._config.norm_offset)

    def _norm_by_head(
        self, weights: Weights, name: str, heads: int, orders: Mapping[str, Tensor]
    ) -> LayerNorm:
        """Weights of each head, [heads, D], in the order of the projection's rows."""
        weight = weights.tensor(f"{name}_norm.weight", heads, self._kv_shape.head_dim)
        order = orders.get(f"{name}_proj")
        if order is not None:
            weight = weight.flatten()[order].view(weight.shape)
        return LayerNorm(self.ops, weight, None, self._config.eps)


def build_norm(ops: Ops, config: DecoderConfig, weights: Weights, name: str) -> Norm:
    """A norm of hidden states."""
    weight = weights.tensor(f"{name}.weight", config.hidden_size) + config.norm_offset
    if config.norm_type == "rms":
        return RMSNorm(ops, weight, config.eps)
    bias = weights.tensor(f"{name}.bias", config.hidden_size) if config.norm_bias else None
    return LayerNorm(ops, weight, bias, config.eps)


def _load_latent_heads(
    ops: Ops, weights: Weights, weight_format: str, shape: LatentShape, heads: int
) -> tuple[PackedHeads, PackedHeads]:
    """Weights [L, qk_nope_head_dim] that queries are multiplied by, and [v_head_dim, L] of outputs.

    Rows of quantized values stay quantized; transposed keys become floats, which get this format.
    """
    nope, rank, value_dim = shape.qk_nope_head_dim, shape.kv_lora_rank, shape.v_head_dim
    keys: list[PackedLinear] = []
    values: list[PackedLinear] = []
    if weights.has(LATENT_KEYS):
        for packed, name, size in (
            (keys, LATENT_KEYS, (rank, nope)),
            (values, LATENT_VALUES, (value_dim, rank)),
        ):
            for head in range(heads):
                with weights.stacked(name, head, heads, *size) as matrix:
                    packed.append(ops.pack_linear([matrix], weight_format))
    else:
        with weights.weights({LATENT_JOINED: heads * (nope + value_dim)}, rank) as (matrix,):
            for first in range(0, heads * (nope + value_dim), nope + value_dim):
                rows = slice_rows(matrix, slice(first, first + nope))
                keys.append(ops.pack_linear([_as_floats(rows).t().contiguous()], weight_format))
                rows = slice_rows(matrix, slice(first + nope, first + nope + value_dim))
                is_ordered = isinstance(rows, GroupedInts | QuantizedBlocks) and rows.input_order is not None
                values.append(ops.pack_linear([_as_floats(rows) if is_ordered else rows], weight_format))
    return ops.pack_heads(keys), ops.pack_heads(values)


def _as_floats(matrix: Matrix) -> Tensor:
    """[N, K]"""
    return matrix if isinstance(matrix, Tensor) else dequantize(matrix)
