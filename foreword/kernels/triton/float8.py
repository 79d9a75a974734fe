"""float8_e4m3fn by arithmetic on bits: the same on every card, also where the hardware has no such type."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["from_float8", "to_float8"]

NAN_BITS = tl.constexpr(0x7F)
MIN_NORMAL_BITS = tl.constexpr(121 << 23)  # 2^-6 as float32
SUBNORMAL_BITS = tl.constexpr(141 << 23)  # 2^14: the last place of its float32 is worth 2^-9, the smallest subnormal


@triton.jit
def to_float8(x):
    """float32, magnitudes of at most 448 -> the bits uint8, rounded to nearest, ties to even."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    odd = (magnitude >> 20) & 1
    normal = (magnitude - (120 << 23) + 0x7FFFF + odd) >> 20
    subnormal = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - SUBNORMAL_BITS
    rounded = tl.where(magnitude < MIN_NORMAL_BITS, subnormal, normal)
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def from_float8(x, dtype: tl.constexpr):
    """The bits uint8 -> float16, bfloat16 or float32, exactly: shifted into place, then 2^(difference of the exponents' biases)
    times as large."""
    if dtype == tl.float16:
        wide = x.to(tl.int16)
        scaled = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
        value = scaled * tl.full([], 256.0, tl.float16)
    else:
        wide = x.to(tl.int32)
        value = (((wide & 0x80) << 24) | ((wide & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where((wide & 0x7F) == NAN_BITS, float("nan"), value).to(dtype)
