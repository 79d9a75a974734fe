"""Activations as device functions: float32 in, float32 out."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["activate"]

SQRT_HALF = tl.constexpr(0.7071067811865476)
TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def activate(x, NAME: tl.constexpr):
    """NAME is "silu", "gelu" or "gelu_tanh" (of the reference: the error function, and what approximates it)."""
    if NAME == "silu":
        return x * _sigmoid(x)
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    else:
        tl.static_assert(NAME == "gelu_tanh")
        # (1 + tanh z) / 2 is the sigmoid of 2z.
        return x * _sigmoid((x + 0.044715 * x * x * x) * TWICE_SQRT_2_OVER_PI)


@triton.jit
def _sigmoid(x):
    """Without overflow on either side."""
    decay = tl.exp(-tl.abs(x))
    return tl.where(x < 0, decay, 1.0) / (1.0 + decay)
