"""log and exp of `foreword.kernels.portable_math` in Triton: the same float64 operations in the same order.

Kernels that use them are launched with enable_fp_fusion=False: a fused multiply-add would round differently.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foreword.kernels import portable_math

LN2_HIGH: tl.constexpr = tl.constexpr(portable_math.LN2_HIGH)
LN2_LOW: tl.constexpr = tl.constexpr(portable_math.LN2_LOW)
LOG2_E: tl.constexpr = tl.constexpr(portable_math.LOG2_E)
SQRT_HALF: tl.constexpr = tl.constexpr(portable_math.SQRT_HALF)
EXP_MIN_INPUT: tl.constexpr = tl.constexpr(portable_math.EXP_MIN_INPUT)
FRACTION_BITS: tl.constexpr = tl.constexpr(portable_math.FRACTION_BITS)
FIXED_POINT_UNIT: tl.constexpr = tl.constexpr(2.0**-portable_math.FRACTION_BITS)
ROUND_MAGIC: tl.constexpr = tl.constexpr(1.5 * 2.0**52)  # x + this - this rounds |x| < 2^51 to even
ROUND_MAGIC_BITS: tl.constexpr = tl.constexpr(0x4338 << 48)
ATANH_SERIES: tl.constexpr = tl.constexpr(tuple(portable_math.ATANH_SERIES))
EXP_SERIES: tl.constexpr = tl.constexpr(tuple(portable_math.EXP_SERIES))
ATANH_DEGREE: tl.constexpr = tl.constexpr(len(portable_math.ATANH_SERIES) - 1)
EXP_DEGREE: tl.constexpr = tl.constexpr(len(portable_math.EXP_SERIES) - 1)
MANTISSA_MASK: tl.constexpr = tl.constexpr(2**52 - 1)
HALF_EXPONENT: tl.constexpr = tl.constexpr(1022 << 52)  # exponent of [1/2, 1)


@triton.jit
def log(x):
    """Natural logarithm of positive, normal float64 values."""
    raw = x.to(tl.int64, bitcast=True)
    mantissa = ((raw & MANTISSA_MASK) | HALF_EXPONENT).to(tl.float64, bitcast=True)
    low = mantissa < SQRT_HALF
    mantissa = tl.where(low, mantissa * 2.0, mantissa)
    e = ((raw >> 52) - 1022 - low.to(tl.int64)).to(tl.float64)
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square = s * s
    series = square * ATANH_SERIES[ATANH_DEGREE] + ATANH_SERIES[ATANH_DEGREE - 1]
    for k in tl.static_range(ATANH_DEGREE - 2, -1, -1):
        series = series * square + ATANH_SERIES[k]
    return e * LN2_HIGH + (e * LN2_LOW + 2.0 * s * series)


@triton.jit
def exp_fixed_point(x):
    """exp(x) in units of 2^-42 for float64 x <= 0, rounded to int64."""
    x = tl.where(x > EXP_MIN_INPUT, x, EXP_MIN_INPUT)
    n_bits = x * LOG2_E + ROUND_MAGIC  # its low bits are those of the integer: cheaper than a conversion
    n = n_bits - ROUND_MAGIC
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    exponent = n_bits.to(tl.int64, bitcast=True) + (1023 + FRACTION_BITS)
    scale = (exponent << 52).to(tl.float64, bitcast=True)
    series = r * EXP_SERIES[EXP_DEGREE] + EXP_SERIES[EXP_DEGREE - 1]
    for k in tl.static_range(EXP_DEGREE - 2, -1, -1):
        series = series * r + EXP_SERIES[k]
    return (series * scale + ROUND_MAGIC).to(tl.int64, bitcast=True) - ROUND_MAGIC_BITS


@triton.jit
def round_to_int(x):
    """float64 |x| < 2^51 to the nearest integer, ties to even."""
    return (x + ROUND_MAGIC) - ROUND_MAGIC
