"""Philox 4x32-10 (Salmon et al. 2011) and Gumbel noise, with the bits of `reference.sampling`.

noise() is float64 arithmetic, slow on many GPUs, so sampling ranks ids by max_noise() first, a float32 upper
bound. Both are functions of one 32-bit word, and the bound was verified for each of the 2^32: its operations
round to nearest, without fused multiply-add, so every GPU computes the bits that were verified.
"""

from __future__ import annotations

import triton
import triton.language as tl

from foreword.kernels.reference import sampling as reference
from foreword.kernels.triton.portable_math import log

MULTIPLIER_0: tl.constexpr = tl.constexpr(reference.MULTIPLIERS[0])
MULTIPLIER_1: tl.constexpr = tl.constexpr(reference.MULTIPLIERS[1])
WEYL_0: tl.constexpr = tl.constexpr(reference.WEYL[0])
WEYL_1: tl.constexpr = tl.constexpr(reference.WEYL[1])
ROUNDS: tl.constexpr = tl.constexpr(reference.ROUNDS)
WORDS_PER_BLOCK: tl.constexpr = tl.constexpr(reference.WORDS_PER_BLOCK)
TOKEN_NOISE: tl.constexpr = tl.constexpr(reference.TOKEN_NOISE)
XTC_COIN: tl.constexpr = tl.constexpr(reference.XTC_COIN)
WORD_BITS: tl.constexpr = tl.constexpr(32)
MAX_WORD: tl.constexpr = tl.constexpr(2**32 - 1)
UNIT: tl.constexpr = tl.constexpr(2.0**-32)

MANTISSA_BITS: tl.constexpr = tl.constexpr(23)
MANTISSA_MASK: tl.constexpr = tl.constexpr(2**23 - 1)
SQRT_HALF_BITS: tl.constexpr = tl.constexpr(0x3F3504F3)  # float32 nearest to sqrt(1/2)
LN2: tl.constexpr = tl.constexpr(float.fromhex("0x1.62e43p-1"))
MAX_NOISE_ERROR: tl.constexpr = tl.constexpr(2.0**-16)  # error of max_noise() before it is added
# log(1 + r) / r for 1 + r in [sqrt 1/2, sqrt 2], relative error at most 7.4e-6: float32 coefficients
LOG_SERIES: tl.constexpr = tl.constexpr(
    (1.000004529953003, -0.4999021589756012, 0.3325802683830261, -0.2540329098701477, 0.22055883705615997,
     -0.14291900396347046)
)  # fmt: skip
LOG_DEGREE: tl.constexpr = tl.constexpr(len(LOG_SERIES.value) - 1)


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four words of each counter; all uint32 blocks of one shape."""
    for _ in tl.static_range(ROUNDS):
        high0 = tl.umulhi(c0, tl.full(c0.shape, MULTIPLIER_0, tl.uint32))
        low0 = c0 * tl.full(c0.shape, MULTIPLIER_0, tl.uint32)
        high1 = tl.umulhi(c2, tl.full(c2.shape, MULTIPLIER_1, tl.uint32))
        low1 = c2 * tl.full(c2.shape, MULTIPLIER_1, tl.uint32)
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + tl.full(k0.shape, WEYL_0, tl.uint32)
        k1 = k1 + tl.full(k1.shape, WEYL_1, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def philox_at(blocks, seed, position, purpose: tl.constexpr):
    """philox() of counters (block, position, purpose, 0); blocks uint32 [N], seed, position int64."""
    zero = tl.zeros_like(blocks)
    wide = zero.to(tl.int64)
    k0 = ((wide + seed) & 0xFFFFFFFF).to(tl.uint32)
    k1 = (((wide + seed) >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c1 = ((wide + position) & 0xFFFFFFFF).to(tl.uint32)
    return philox(blocks, c1, zero + purpose, zero, k0, k1)


@triton.jit
def random_words(first_block, seed, position, BLOCK: tl.constexpr):
    """uint32 [BLOCK]: words of ids from WORDS_PER_BLOCK * first_block on, four of each Philox block."""
    blocks = (tl.arange(0, BLOCK // WORDS_PER_BLOCK) + first_block).to(tl.uint32)
    w0, w1, w2, w3 = philox_at(blocks, seed, position, TOKEN_NOISE)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))


@triton.jit
def words_of_ids(ids, seed, position):
    """uint32 words of any ids, as in random_words()."""
    w0, w1, w2, w3 = philox_at((ids // WORDS_PER_BLOCK).to(tl.uint32), seed, position, TOKEN_NOISE)
    place = ids % WORDS_PER_BLOCK
    return tl.where(place < 2, tl.where(place == 0, w0, w1), tl.where(place == 2, w2, w3))


@triton.jit
def uniform(seed, position):
    """A float64 scalar in (0, 1), the coin of XTC."""
    word, _, _, _ = philox_at(tl.arange(0, 1).to(tl.uint32), seed, position, XTC_COIN)
    return (tl.max(word.to(tl.int64)).to(tl.float64) + 0.5) * UNIT


@triton.jit
def noise(words):
    """-log(-log u) of u = (x + 1/2) 2^-32: uint32 -> float32."""
    u = (words.to(tl.float64) + 0.5) * UNIT
    return (-log(-log(u))).to(tl.float32)


@triton.jit
def max_noise(words):
    """Upper bound of noise(), at most 2^-15 above it: uint32 -> float32."""
    exponent, r = _split(words.to(tl.float32) + 0.5)
    # Close to u = 1, the small distance 1 - u is exact while u is not.
    distance = ((words ^ tl.full(words.shape, MAX_WORD, tl.uint32)).to(tl.float32) + 0.5) * UNIT
    r = tl.where(exponent == WORD_BITS, -distance, r)
    log_u = (exponent - WORD_BITS) * LN2 + r * _log_series(r)
    exponent, r = _split(-log_u)
    return -((exponent * LN2 - MAX_NOISE_ERROR) + r * _log_series(r))


@triton.jit
def _split(x):
    """Exponent and r, with x = 2^exponent (1 + r), of positive, normal float32 values."""
    raw = x.to(tl.int32, bitcast=True) - SQRT_HALF_BITS
    mantissa = ((raw & MANTISSA_MASK) + SQRT_HALF_BITS).to(tl.float32, bitcast=True)
    return (raw >> MANTISSA_BITS).to(tl.float32), mantissa - 1.0


@triton.jit
def _log_series(r):
    series = r * LOG_SERIES[LOG_DEGREE] + LOG_SERIES[LOG_DEGREE - 1]
    for k in tl.static_range(LOG_DEGREE - 2, -1, -1):
        series = series * r + LOG_SERIES[k]
    return series
