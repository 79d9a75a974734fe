"""Layers with state: gated short convolution (LFM2), Gated DeltaNet (Qwen3-Next, Qwen3.5) and Mamba-2."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from foreword.core.batch import StateLayer
from foreword.kernels.ops import Ops
from foreword.layers.attention import ForwardContext
from foreword.layers.linear import Linear
from foreword.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """Options of Mamba-2 layers beside the shape of their state."""

    eps: float  # the norm's
    norm_groups: int = 1  # the norm's groups of values; 0: no norm
    norms_first: bool = False  # the norm comes before the gate
    time_step_limits: tuple[float, float] = (0.0, math.inf)
    conv_bias: bool = True
    bias: bool = False  # the input projection's
    out_bias: bool = False


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


class Mamba2:
    """out(norm(ssm_scan(silu(conv(cbx))) * silu(z))), or the norm first or none; source: arXiv 2405.21060."""

    def __init__(
        self,
        ops: Ops,
        inputs: Linear,
        conv_weight: Tensor,
        conv_bias: Tensor | None,
        rates: Tensor,
        offsets: Tensor,
        skips: Tensor,
        config: Mamba2Config,
        norm: RMSNorm | None,
        out: Linear,
    ) -> None:
        """inputs yields C and B of all groups, x of all heads, z and time steps."""
        self._ops = ops
        self._inputs = inputs
        self._conv = (conv_weight, conv_bias)  # float32 [K, C], [C]
        self._scan = (rates, offsets, skips, config.time_step_limits)  # vectors float32 [value heads]
        self._config = config
        self._norm = norm  # weight [G, inner / G] for G groups
        self._out = out

    def __call__(
        self, x: Tensor, context: ForwardContext, state: StateLayer, residual: Tensor | None = None
    ) -> Tensor:
        """x [T, H] -> [T, H], plus `residual` [T, H]"""
        shape, batch, inputs = state.shape, context.batch, self._inputs(x)
        z_start = shape.channels
        steps_start = z_start + shape.value_heads * shape.value_dim
        cbx = self._ops.causal_conv(inputs[:, :z_start], *self._conv, "silu", state, batch)
        y = self._ops.ssm_scan(cbx, inputs[:, steps_start:], *self._scan, state, batch).flatten(1)
        z = inputs[:, z_start:steps_start]
        if self._config.norms_first:
            y = self._ops.gate(self._normalize(y), z, "silu")
        else:
            y = self._normalize(self._ops.gate(y, z, "silu"))
        return self._out(y, residual)

    def _normalize(self, y: Tensor) -> Tensor:
        """[T, inner] -> [T, inner]"""
        if self._norm is None:
            return y
        return self._norm(y.view(y.shape[0], self._config.norm_groups, -1)).flatten(1)
