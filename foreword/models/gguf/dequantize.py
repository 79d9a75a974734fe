"""Dequantizes GGUF blocks without kernels to float32, in numpy.

Each function takes uint8 [G, bytes of a block] and returns float32 [G, values of a block].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.models.gguf.header import TENSOR_TYPES

__all__ = ["DEQUANTIZERS", "dequantize"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# Values of the 16 codes of 4 bits.
IQ4_NL_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled
E8M0_MIN_EXPONENT = -128  # exponent of the smallest scale; one less, because FP4_VALUES are doubled


def dequantize(type_name: str, rows: Bytes) -> Floats:
    """uint8 [N, bytes of a row] -> float32 [N, K]"""
    size = next(known.block_bytes for known in TENSOR_TYPES.values() if known.name == type_name)
    return DEQUANTIZERS[type_name](rows.reshape(-1, size)).reshape(len(rows), -1)


def _read_float16(data: Bytes) -> Floats:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _unpack_bits(data: Bytes, bits: int, run_bytes: int) -> Bytes:
    """[G, n] -> [G, n * 8 / bits]: of each run of bytes first the lowest `bits`, then the next ones."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    runs = data.reshape(len(data), -1, 1, run_bytes)
    return (runs >> shifts & np.uint8((1 << bits) - 1)).reshape(len(data), -1)


def _fifth_bits(data: Bytes) -> Bytes:
    """[G, 4] -> [G, 32]: one bit per value, shifted left by 4."""
    return np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)


def _q4_1(data: Bytes) -> Floats:
    return _read_float16(data[:, :2]) * _unpack_bits(data[:, 4:], 4, 16) + _read_float16(data[:, 2:4])


def _q5_1(data: Bytes) -> Floats:
    values = _unpack_bits(data[:, 8:], 4, 16) | _fifth_bits(data[:, 4:8])
    result: Floats = _read_float16(data[:, :2]) * values + _read_float16(data[:, 2:4])
    return result


def _q8_k(data: Bytes) -> Floats:
    """The sums after the values serve dot products and are not read."""
    scale: Floats = np.ascontiguousarray(data[:, :4]).view(np.float32)
    return _scale_groups(scale, data[:, 4:260].view(np.int8))


def _q2_k(data: Bytes) -> Floats:
    """16 groups of 16 values; a byte of each holds the scale (low half) and the minimum."""
    small, values = data[:, :16], _unpack_bits(data[:, 16:80], 2, 32)
    scale = _read_float16(data[:, 80:82]) * (small & 15)
    minimum = _read_float16(data[:, 82:84]) * (small >> 4)
    result: Floats = _scale_groups(scale, values) - np.repeat(minimum, 16, axis=1)
    return result


def _q3_k(data: Bytes) -> Floats:
    """16 groups of 16 values; 4 is subtracted from values whose third bit is clear."""
    third = _unpack_bits(data[:, :32], 1, 32)
    values = (_unpack_bits(data[:, 32:96], 2, 32) | third << 2).astype(np.int8) - 4
    low, high = _unpack_bits(data[:, 96:104], 4, 8), _unpack_bits(data[:, 104:108], 2, 4)
    small = (low | high << 4).astype(np.int8) - 32
    return _scale_groups(_read_float16(data[:, 108:110]) * small, values)


def _iq4_nl(data: Bytes) -> Floats:
    codes = np.array(IQ4_NL_VALUES, np.float32)
    return _read_float16(data[:, :2]) * codes[_unpack_bits(data[:, 2:], 4, 16)]


def _iq4_xs(data: Bytes) -> Floats:
    """8 groups of 32 values; a scale has 6 bits: the upper two in a 16-bit word, four in a nibble."""
    codes = np.array(IQ4_NL_VALUES, np.float32)
    high = _unpack_bits(data[:, 2:4], 2, 1)
    small = (_unpack_bits(data[:, 4:8], 4, 1) | high << 4).astype(np.int8) - 32
    return _scale_groups(_read_float16(data[:, :2]) * small, codes[_unpack_bits(data[:, 8:], 4, 16)])


def _mxfp4(data: Bytes) -> Floats:
    codes = np.array(FP4_VALUES, np.float32)
    scale = np.ldexp(np.float32(1), data[:, :1].astype(np.int32) + E8M0_MIN_EXPONENT)
    return _scale_groups(scale, codes[_unpack_bits(data[:, 1:], 4, 16)])


def _scale_groups(scales: Floats, values: npt.NDArray[Any]) -> Floats:
    """scales [G, groups], values [G, n] -> [G, n]: each value times the scale of its group"""
    result: Floats = np.repeat(scales, values.shape[1] // scales.shape[1], axis=1) * values
    return result


DEQUANTIZERS: Mapping[str, Callable[[Bytes], Floats]] = MappingProxyType(
    {
        "q4_1": _q4_1,
        "q5_1": _q5_1,
        "q8_k": _q8_k,
        "q2_k": _q2_k,
        "q3_k": _q3_k,
        "iq4_nl": _iq4_nl,
        "iq4_xs": _iq4_xs,
        "mxfp4": _mxfp4,
    }
)
