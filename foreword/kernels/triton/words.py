"""Values out of the words that weights are packed in; see packing.py."""

from __future__ import annotations

import triton
import triton.language as tl

from foreword.kernels.triton.float8 import from_float8

__all__ = ["fp16_from_bits", "values_per_word", "unpack_word"]


@triton.constexpr_function
def values_per_word(weight_format: str) -> int:
    """How many values a word holds."""
    return {"dense": 1, "int4": 4}.get(weight_format, 2)


@triton.jit
def unpack_word(words, j, FORMAT: tl.constexpr, FLOAT8: tl.constexpr, DTYPE: tl.constexpr):
    """The values at place j of each word: as they are, int16, or of a type that holds float8 exactly."""
    if FORMAT == "dense":
        return words
    elif FORMAT == "int4":
        return ((words >> 4 * j) & 15) - 8
    elif FORMAT == "fp8":
        bits = ((words >> 8 * j) & 255).to(tl.uint8)
        return bits.to(tl.float8e4nv, bitcast=True) if FLOAT8 else from_float8(bits, DTYPE)
    else:
        return words << 8 * (1 - j) >> 8


@triton.jit
def fp16_from_bits(pair, j):
    """The float16 in the low (j = 0) or the high bits of int32, as float32."""
    return (pair >> 16 * j).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
