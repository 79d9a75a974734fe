"""log and exp with the same bits on every machine: correctly rounded float64 operations in one order.

The C library, numpy and GPUs each round log and exp differently; a token must not depend on that.
`csrc/common/portable_math.h` performs the same operations in the same order.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# ln 2 in two parts: the first ends in zeros, so its product with a small integer is exact.
LN2_HIGH = float.fromhex("0x1.62e42fee00000p-1")
LN2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
LOG2_E = float.fromhex("0x1.71547652b82fep+0")
SQRT_HALF = float.fromhex("0x1.6a09e667f3bcdp-1")
ATANH_SERIES = [1 / (2 * k + 1) for k in range(10)]
EXP_SERIES = [1 / math.factorial(k) for k in range(14)]

FRACTION_BITS = 42
EXP_MIN_INPUT = -64.0  # exp(-64) 2^42 rounds to 0


def log(x: Tensor) -> Tensor:
    """Natural logarithm of positive, normal float64 values, to about 2e-16 relative, also near 1.

    x = m 2^e with m in [sqrt 1/2, sqrt 2), s = (m - 1) / (m + 1): log x = e ln 2 + 2 atanh s.
    """
    mantissa, exponent = torch.frexp(x)
    low = mantissa < SQRT_HALF
    mantissa = torch.where(low, mantissa * 2, mantissa)
    e = (exponent - low.to(exponent.dtype)).double()
    s = (mantissa - 1) / (mantissa + 1)
    series = _eval_polynomial(ATANH_SERIES, s * s)
    return e * LN2_HIGH + (e * LN2_LOW + 2 * s * series)


def exp_fixed_point(x: Tensor) -> Tensor:
    """exp(x) in units of 2^-42 for float64 x <= 0, rounded to int64: sums of it do not depend on their order.

    A sum is exact for up to 2^20 values.
    """
    x = x.clamp(min=EXP_MIN_INPUT)
    n = torch.round(x * LOG2_E)
    r = (x - n * LN2_HIGH) - n * LN2_LOW
    scale = (n.long() + (1023 + FRACTION_BITS) << 52).view(torch.float64)
    return torch.round(_eval_polynomial(EXP_SERIES, r) * scale).long()


def _eval_polynomial(coefficients: list[float], x: Tensor) -> Tensor:
    result = torch.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        result = result * x + coefficient
    return result
