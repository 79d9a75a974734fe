"""Quantizes to K-quants and IQ4, which the `gguf` package can only read, with simple rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType as Kind

Array = npt.NDArray[Any]


def _ratio(a: Array, b: Array) -> Array:
    """a / b, or 0 where b is 0."""
    return np.divide(a, b, out=np.zeros(np.broadcast(a, b).shape, np.float32), where=b != 0)


def _half(values: Array) -> tuple[Array, Array]:
    """float16 as bytes, and their values as float32."""
    halves = values.astype(np.float16)
    return halves.view(np.uint8), halves.astype(np.float32)


def _with_minimum(value: Array, levels: int) -> tuple[Array, Array]:
    """d, dmin and packed scales as bytes [G, 16]; values 0..levels as [G, 8, 32]"""
    groups = value.reshape(-1, 8, 32).astype(np.float32)
    minimum = np.maximum(-groups.min(2), 0)
    scale = (groups.max(2) + minimum) / levels
    d_bytes, d = _half(scale.max(1, keepdims=True) / 63)
    m_bytes, dmin = _half(minimum.max(1, keepdims=True) / 63)
    scales, minima = np.rint(_ratio(scale, d)).clip(0, 63), np.rint(_ratio(minimum, dmin)).clip(0, 63)
    shifted = groups + (dmin * minima)[..., None]
    codes = np.rint(_ratio(shifted, (d * scales)[..., None])).clip(0, levels).astype(np.uint8)
    packed = _six_bits(scales.astype(np.uint8), minima.astype(np.uint8))
    return np.concatenate((d_bytes, m_bytes, packed), 1), codes


def _six_bits(scales: Array, minima: Array) -> Array:
    """Eight scales and eight minima of six bits in twelve bytes."""
    low = scales[:, :4] | scales[:, 4:] >> 4 << 6
    middle = minima[:, :4] | minima[:, 4:] >> 4 << 6
    return np.concatenate((low, middle, scales[:, 4:] & 15 | minima[:, 4:] << 4), 1)


def _nibbles(codes: Array) -> Array:
    """[G, 8, 32] -> [G, 128]: the low halves of bytes hold one group, the high halves the next."""
    return (codes[:, ::2] & 15 | codes[:, 1::2] << 4).reshape(len(codes), -1)


def _q4_k(value: Array) -> Array:
    head, codes = _with_minimum(value, 15)
    return np.concatenate((head, _nibbles(codes)), 1)


def _q5_k(value: Array) -> Array:
    head, codes = _with_minimum(value, 31)
    fifth = np.bitwise_or.reduce(codes >> 4 << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return np.concatenate((head, fifth, _nibbles(codes)), 1)


def _q6_k(value: Array) -> Array:
    groups = value.reshape(-1, 16, 16).astype(np.float32)
    scale = np.abs(groups).max(2) / 31
    d_bytes, d = _half(scale.max(1, keepdims=True) / 127)
    scales = np.rint(_ratio(scale, d)).clip(0, 127)
    codes = np.rint(_ratio(groups, (d * scales)[..., None])).clip(-32, 31).astype(np.int8) + 32
    quarters = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    low = quarters[:, :, :2] & 15 | quarters[:, :, 2:] << 4
    high = np.bitwise_or.reduce(quarters >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2)
    pieces = (
        low.reshape(len(codes), -1),
        high.reshape(len(codes), -1),
        scales.astype(np.int8).view(np.uint8),
        d_bytes,
    )
    return np.concatenate(pieces, 1)


def _two_bits(codes: Array) -> Array:
    """[G, 256] of 0..3 -> [G, 64]: byte i of 32 holds values i, i + 32, i + 64, i + 96 of a half."""
    quarters = codes.reshape(-1, 2, 4, 32) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    return np.bitwise_or.reduce(quarters, axis=2).reshape(len(codes), -1)


def _q2_k(value: Array) -> Array:
    groups = value.reshape(-1, 16, 16).astype(np.float32)
    minimum = np.maximum(-groups.min(2), 0)
    scale = (groups.max(2) + minimum) / 3
    d_bytes, d = _half(scale.max(1, keepdims=True) / 15)
    m_bytes, dmin = _half(minimum.max(1, keepdims=True) / 15)
    scales, minima = np.rint(_ratio(scale, d)).clip(0, 15), np.rint(_ratio(minimum, dmin)).clip(0, 15)
    shifted = groups + (dmin * minima)[..., None]
    codes = np.rint(_ratio(shifted, (d * scales)[..., None])).clip(0, 3).astype(np.uint8)
    packed = scales.astype(np.uint8) | minima.astype(np.uint8) << 4
    return np.concatenate((packed, _two_bits(codes.reshape(-1, 256)), d_bytes, m_bytes), 1)


def _signed_scales(scale: Array) -> tuple[Array, Array, Array]:
    """d as bytes, six-bit scales 0..63, and their values d * (scale - 32)"""
    d_bytes, d = _half(scale.max(1, keepdims=True) / 31)
    scales = np.rint(_ratio(scale, d)).clip(-32, 31)
    return d_bytes, (scales + 32).astype(np.uint8), d * scales


def _q3_k(value: Array) -> Array:
    groups = value.reshape(-1, 16, 16).astype(np.float32)
    d_bytes, scales, steps = _signed_scales(np.abs(groups).max(2) / 4)
    codes = (np.rint(_ratio(groups, steps[..., None])).clip(-4, 3) + 4).astype(np.uint8).reshape(-1, 256)
    third = np.bitwise_or.reduce(
        codes.reshape(-1, 8, 32) >> 2 << np.arange(8, dtype=np.uint8)[:, None], axis=1
    )
    low = scales[:, :8] & 15 | (scales[:, 8:] & 15) << 4
    high = np.bitwise_or.reduce(
        scales.reshape(-1, 4, 4) >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=1
    )
    return np.concatenate((third, _two_bits(codes & 3), low, high, d_bytes), 1)


def _iq4_codes(groups: Array, steps: Array) -> Array:
    """Indices of the nearest values of the table, [G, n] for groups [G, n] and steps [G, 1]"""
    table = np.array(gguf.quants.IQ4_NL.kvalues, np.float32)
    return np.abs(_ratio(groups, steps)[..., None] - table).argmin(-1).astype(np.uint8)


def _half_nibbles(codes: Array) -> Array:
    """[G, 32] -> [G, 16]: value i in the low half, i + 16 in the high one."""
    return codes[:, :16] | codes[:, 16:] << 4


def _iq4_nl(value: Array) -> Array:
    groups = value.reshape(-1, 32).astype(np.float32)
    d_bytes, d = _half(np.abs(groups).max(1, keepdims=True) / 113)
    return np.concatenate((d_bytes, _half_nibbles(_iq4_codes(groups, d))), 1)


def _iq4_xs(value: Array) -> Array:
    groups = value.reshape(-1, 8, 32).astype(np.float32)
    d_bytes, scales, steps = _signed_scales(np.abs(groups).max(2) / 113)
    codes = _half_nibbles(_iq4_codes(groups.reshape(-1, 32), steps.reshape(-1, 1)))
    high = np.bitwise_or.reduce(
        (scales >> 4).astype(np.uint16) << np.arange(0, 16, 2, dtype=np.uint16), axis=1, keepdims=True
    )
    low = scales[:, ::2] & 15 | (scales[:, 1::2] & 15) << 4
    return np.concatenate((d_bytes, high.view(np.uint8), low, codes.reshape(len(scales), -1)), 1)


# float32 [N, K], K a multiple of the block's values -> uint8 [blocks, bytes of a block]
K_QUANTS: Mapping[Kind, Callable[[Array], Array]] = MappingProxyType(
    {
        Kind.Q4_K: _q4_k,
        Kind.Q5_K: _q5_k,
        Kind.Q6_K: _q6_k,
        Kind.Q2_K: _q2_k,
        Kind.Q3_K: _q3_k,
        Kind.IQ4_NL: _iq4_nl,
        Kind.IQ4_XS: _iq4_xs,
    }
)
