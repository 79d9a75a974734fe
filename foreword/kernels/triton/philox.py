"""Philox 4x32-10 (Salmon et al. 2011) and Gumbel noise, with the bits of `reference.sampling`."""

from __future__ import annotations

import triton
import triton.language as tl

from foreword.kernels.reference import sampling as reference
from foreword.kernels.triton.portable_math import log

__all__ = ["noise", "philox", "random_words", "uniform"]

MULTIPLIER_0: tl.constexpr = tl.constexpr(reference.MULTIPLIERS[0])
MULTIPLIER_1: tl.constexpr = tl.constexpr(reference.MULTIPLIERS[1])
WEYL_0: tl.constexpr = tl.constexpr(reference.WEYL[0])
WEYL_1: tl.constexpr = tl.constexpr(reference.WEYL[1])
ROUNDS: tl.constexpr = tl.constexpr(reference.ROUNDS)
WORDS_PER_BLOCK: tl.constexpr = tl.constexpr(reference.WORDS_PER_BLOCK)
TOKEN_NOISE: tl.constexpr = tl.constexpr(reference.TOKEN_NOISE)
XTC_COIN: tl.constexpr = tl.constexpr(reference.XTC_COIN)
UNIT: tl.constexpr = tl.constexpr(2.0**-32)


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
    blocks = (first_block + tl.arange(0, BLOCK // WORDS_PER_BLOCK)).to(tl.uint32)
    w0, w1, w2, w3 = philox_at(blocks, seed, position, TOKEN_NOISE)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (BLOCK,))


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
