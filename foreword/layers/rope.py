"""Rotary position embedding.

Frequencies are fixed at load, from the checkpoint and the longest context served. The current length does not
enter, or a token's bits would depend on later tokens. So `dynamic` and `longrope` differ from transformers
beyond the original length.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from foreword.kernels.ops import MRopeSections


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The checkpoint's `rope_parameters`; fields that `rope_type` does not use keep their defaults."""

    rope_type: str
    theta: float
    rotary_dim: int  # rotated values of each head
    factor: float = 1.0
    original_max_position: int = 0  # original_max_position_embeddings: the context before any scaling
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    mscales: tuple[float, float] | None = None  # attention factors with short_factor and long_factor
    mrope_sections: MRopeSections | None = None  # axis of each angle, in models with M-RoPE
    turned_share: float = 1.0  # type "proportional": share of the angles that turn, the fastest ones
    # Queries at position p are scaled by 1 + query_beta * log(1 + floor(p / original_max_position)).
    query_beta: float = 0.0


# Layers without positional encoding turn two values of each head by no angle, which changes no bit.
NO_ROPE = RopeConfig("linear", theta=10000.0, rotary_dim=2, factor=math.inf)


class Rope:
    """cos_sin float32 [max_len, D_rot]: cosines of D_rot / 2 angles of each position, then their sines.

    query_cos_sin is that of queries: the same tensor, unless they are scaled by their position. query_scale
    float32 [max_len, 2] is then the scale and 0: the rotation of any two values that scales them. `digest` is
    that of all that max_len changes, besides the number of rows.
    """

    def __init__(self, config: RopeConfig, max_len: int, device: str) -> None:
        inverse, scale = rope_frequencies(config, max_len)
        self.digest = hashlib.blake2b(inverse.numpy().tobytes() + struct.pack("d", scale)).digest()
        positions = torch.arange(max_len, dtype=torch.float32)[:, None]
        angles = positions * inverse
        cos_sin = torch.cat((angles.cos() * scale, angles.sin() * scale), -1)
        self.cos_sin = self.query_cos_sin = cos_sin.to(device)
        self.query_scale: Tensor | None = None
        if config.query_beta and max_len > config.original_max_position:
            scale_by_position = (
                1 + config.query_beta * torch.floor(positions / config.original_max_position).log1p()
            )
            self.query_cos_sin = (cos_sin * scale_by_position).to(device)
            self.query_scale = torch.cat((scale_by_position, torch.zeros_like(positions)), -1).to(device)


def rope_frequencies(config: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """Radians per position, float32 [D_rot / 2], and the scale of cosine and sine."""
    return ROPE_TYPES[config.rope_type](config, max_len)


def _inverse_frequencies(theta: float, rotary_dim: int) -> Tensor:
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    return 1.0 / (theta**exponents)


def _default(config: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    return _inverse_frequencies(config.theta, config.rotary_dim), 1.0


def _linear(config: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    return _inverse_frequencies(config.theta, config.rotary_dim) / config.factor, 1.0


def _proportional(config: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """The angles of a whole head, of which the slowest ones do not turn (Gemma 4)."""
    inverse = _inverse_frequencies(config.theta, config.rotary_dim) / config.factor
    inverse[int(config.turned_share * config.rotary_dim // 2) :] = 0.0
    return inverse, 1.0


def _dynamic(config: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """NTK scaling for the longest context instead of the current one."""
    length = max(max_len, config.original_max_position)
    stretch = config.factor * length / config.original_max_position - (config.factor - 1)
    dim = config.rotary_dim
    return _inverse_frequencies(config.theta * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(config: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """Stretch long wavelengths, keep short ones, interpolate between (Llama 3.1)."""
    plain = _inverse_frequencies(config.theta, config.rotary_dim)
    wavelength = 2 * math.pi / plain
    smooth = (config.original_max_position / wavelength - config.low_freq_factor) / (
        config.high_freq_factor - config.low_freq_factor
    )
    between = (1 - smooth) * plain / config.factor + smooth * plain
    stretched = torch.where(
        wavelength > config.original_max_position / config.low_freq_factor, plain / config.factor, between
    )
    return torch.where(
        wavelength < config.original_max_position / config.high_freq_factor, plain, stretched
    ), 1.0


def _yarn(config: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """Interpolation for slow dimensions, extrapolation for fast ones, a ramp between (arXiv 2309.00071)."""
    plain = _inverse_frequencies(config.theta, config.rotary_dim)
    low, high = _yarn_range(config)
    ramp = ((torch.arange(config.rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / config.factor * ramp + plain * (1 - ramp), _yarn_scale(config)


def _yarn_range(config: RopeConfig) -> tuple[float, float]:
    """First and last dimension of the ramp."""

    def dimension(rotations: float) -> float:
        turns = config.original_max_position / (rotations * 2 * math.pi)
        return config.rotary_dim * math.log(turns) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.rotary_dim - 1)
    return low, high if high != low else high + 0.001


def _yarn_scale(config: RopeConfig) -> float:
    def scale(mscale: float) -> float:
        return 1.0 if config.factor <= 1 else 0.1 * mscale * math.log(config.factor) + 1.0

    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return scale(config.mscale) / scale(config.mscale_all_dim)
    return scale(1.0)


def _longrope(config: RopeConfig, max_len: int) -> tuple[Tensor, float]:
    """Long factors if the longest context exceeds the original one, else the short factors."""
    is_long = max_len > config.original_max_position
    factors = config.long_factor if is_long else config.short_factor
    plain = _inverse_frequencies(config.theta, config.rotary_dim) / torch.tensor(factors, dtype=torch.float32)
    if config.mscales is not None:
        return plain, config.mscales[is_long]
    if config.attention_factor is not None:
        return plain, config.attention_factor
    if config.factor <= 1:
        return plain, 1.0
    return plain, math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_position))


ROPE_TYPES = {
    "default": _default,
    "linear": _linear,
    "proportional": _proportional,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
