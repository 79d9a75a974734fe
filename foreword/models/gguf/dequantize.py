"""Blocks of GGUF that no kernel multiplies with, as float32, in numpy.

Each function takes uint8 [G, bytes of a block] and returns float32 [G, values of a block]. d is the scale of a block,
m its minimum, both float16; small scales within a block are stored in few bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from foreword.models.gguf.kinds import KINDS

__all__ = ["DEQUANTIZERS", "dequantize"]

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

# What the 16 codes of 4 bits stand for.
NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled
SMALLEST_POWER = -128  # of two, that a scale of 8 bits stands for; halved, since FP4 is doubled


def dequantize(kind: str, rows: Bytes) -> Floats:
    """uint8 [N, bytes of a row] -> float32 [N, K]"""
    size = next(known.block_bytes for known in KINDS.values() if known.name == kind)
    return DEQUANTIZERS[kind](rows.reshape(-1, size)).reshape(len(rows), -1)


def _halves(data: Bytes) -> Floats:
    return np.ascontiguousarray(data).view(np.float16).astype(np.float32)


def _planes(data: Bytes, width: int, run: int) -> Bytes:
    """[G, n] -> [G, n * 8 / width]: of each run of bytes first the lowest `width` bits, then the next ones, and so on."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    runs = data.reshape(len(data), -1, 1, run)
    return (runs >> shifts & np.uint8((1 << width) - 1)).reshape(len(data), -1)


def _fifth_bits(data: Bytes) -> Bytes:
    """[G, 4] -> [G, 32]: one bit for each value, as 16."""
    return np.unpackbits(data, axis=1, bitorder="little") << np.uint8(4)


def _q4_1(data: Bytes) -> Floats:
    return _halves(data[:, :2]) * _planes(data[:, 4:], 4, 16) + _halves(data[:, 2:4])


def _q5_1(data: Bytes) -> Floats:
    values = _planes(data[:, 8:], 4, 16) | _fifth_bits(data[:, 4:8])
    result: Floats = _halves(data[:, :2]) * values + _halves(data[:, 2:4])
    return result


def _q8_k(data: Bytes) -> Floats:
    """The sums that follow the values are for dot products."""
    scale: Floats = np.ascontiguousarray(data[:, :4]).view(np.float32)
    return _grouped(scale, data[:, 4:260].view(np.int8))


def _q2_k(data: Bytes) -> Floats:
    """16 groups of 16 values; a byte of each holds the scale (low half) and the minimum."""
    small, values = data[:, :16], _planes(data[:, 16:80], 2, 32)
    scale = _halves(data[:, 80:82]) * (small & 15)
    minimum = _halves(data[:, 82:84]) * (small >> 4)
    result: Floats = _grouped(scale, values) - np.repeat(minimum, 16, axis=1)
    return result


def _q3_k(data: Bytes) -> Floats:
    """16 groups of 16 values; a value's third bit is set where 4 must not be taken off."""
    third = _planes(data[:, :32], 1, 32)
    values = (_planes(data[:, 32:96], 2, 32) | third << 2).astype(np.int8) - 4
    low, high = _planes(data[:, 96:104], 4, 8), _planes(data[:, 104:108], 2, 4)
    small = (low | high << 4).astype(np.int8) - 32
    return _grouped(_halves(data[:, 108:110]) * small, values)


def _iq4_nl(data: Bytes) -> Floats:
    codes = np.array(NONLINEAR, np.float32)
    return _halves(data[:, :2]) * codes[_planes(data[:, 2:], 4, 16)]


def _iq4_xs(data: Bytes) -> Floats:
    """8 groups of 32 values; a group's scale has 6 bits: two in a 16-bit word, four in a byte's half."""
    codes = np.array(NONLINEAR, np.float32)
    high = _planes(data[:, 2:4], 2, 1)
    small = (_planes(data[:, 4:8], 4, 1) | high << 4).astype(np.int8) - 32
    return _grouped(_halves(data[:, :2]) * small, codes[_planes(data[:, 8:], 4, 16)])


def _mxfp4(data: Bytes) -> Floats:
    codes = np.array(FP4, np.float32)
    scale = np.ldexp(np.float32(1), data[:, :1].astype(np.int32) + SMALLEST_POWER)
    return _grouped(scale, codes[_planes(data[:, 1:], 4, 16)])


def _grouped(scales: Floats, values: npt.NDArray[Any]) -> Floats:
    """scales [G, groups], values [G, n] -> [G, n], each value times the scale of its group"""
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
