"""Layers with state: gated short convolution (LFM2), and Gated DeltaNet (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

from torch import Tensor

from foreword.core.batch import StateLayer
from foreword.kernels.ops import Ops
from foreword.layers.attention import ForwardContext
from foreword.layers.linear import Linear
from foreword.layers.norm import RMSNorm


class ShortConv:
    """out(c * conv(b * x)), with b, c and x from one projection."""

    def __init__(self, ops: Ops, inputs: Linear, weight: Tensor, bias: Tensor | None, out: Linear) -> None:
        self._ops = ops
        self._inputs = inputs
        self._weight = weight  # float32 [K, H]
        self._bias = bias  # float32 [H]
        self._out = out

    def __call__(
        self, x: Tensor, context: ForwardContext, state: StateLayer, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, H] -> [T, H], plus `residual` [T, H]"""
        size = x.shape[1]
        bcx = self._inputs(x)
        b, c, inner = bcx[:, :size], bcx[:, size : 2 * size], bcx[:, 2 * size :]
        gated = self._ops.gate(inner, b, "none")
        y = self._ops.causal_conv(gated, self._weight, self._bias, "none", state, context.batch)
        return self._out(self._ops.gate(y, c, "none"), residual)


class GatedDeltaNet:
    """out(norm(gated_delta_rule(silu(conv(qkv)))) * silu(z)); source: arXiv 2412.06464."""

    def __init__(
        self,
        ops: Ops,
        inputs: Linear,
        conv_weight: Tensor,
        rates: Tensor,
        offsets: Tensor,
        norm: RMSNorm,
        out: Linear,
    ) -> None:
        """inputs yields q, k and v of all heads, then z, beta and alpha."""
        self._ops = ops
        self._inputs = inputs
        self._conv_weight = conv_weight  # float32 [K, C]
        self._rates = rates  # float32 [value heads]
        self._offsets = offsets  # float32 [value heads]
        self._norm = norm
        self._out = out

    def __call__(
        self, x: Tensor, context: ForwardContext, state: StateLayer, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, H] -> [T, H], plus `residual` [T, H]"""
        shape, inputs = state.shape, self._inputs(x)
        z_start, heads = shape.channels, shape.value_heads
        beta_start = z_start + heads * shape.value_dim
        batch, qkv = context.batch, inputs[:, :z_start]
        qkv = self._ops.causal_conv(qkv, self._conv_weight, None, "silu", state, batch)
        beta, alpha = inputs[:, beta_start : beta_start + heads], inputs[:, beta_start + heads :]
        rule = (qkv, alpha, beta, self._rates, self._offsets)
        y = self._norm(self._ops.gated_delta_rule(*rule, state, batch)).flatten(1)
        return self._out(self._ops.gate(y, inputs[:, z_start:beta_start], "silu"), residual)
