"""The kernel of the embedding: rows out of a packed weight."""

from __future__ import annotations

import triton
import triton.language as tl

from foreword.kernels.triton.words import fp16_from_bits, values_per_word, unpack_word

__all__ = ["embed_kernel"]


@triton.jit
def embed_kernel(
    token_ids,
    w,
    scales,
    out,
    K,
    BLOCKS,
    scale,
    FORMAT: tl.constexpr,
    FLOAT8: tl.constexpr,
    BK: tl.constexpr,
    BLOCKS_PER_PROGRAM: tl.constexpr,
):
    """out[t, :K] = row ids[t] of w, times its scales and `factor` in float32. Programs: [T, BLOCKS / TOGETHER]."""
    values: tl.constexpr = values_per_word(FORMAT)
    width: tl.constexpr = BK // values
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(token_ids + t)
    blocks = tl.program_id(1) * BLOCKS_PER_PROGRAM + tl.arange(0, BLOCKS_PER_PROGRAM)
    inside = (blocks < BLOCKS)[:, None]
    place = row // 64 * BLOCKS + blocks  # int64
    k = tl.arange(0, width)
    words = tl.load(w + (place * (64 * width) + row % 64 * width)[:, None] + k[None, :], mask=inside, other=0)
    for j in tl.static_range(values):
        value = unpack_word(words, j, FORMAT, FLOAT8, tl.float32).to(tl.float32)
        if FORMAT == "int4" or FORMAT == "q8_0":
            pair = tl.load(scales + place * (32 * values) + 64 * (j // 2) + row % 64, mask=blocks < BLOCKS, other=0)
            value *= fp16_from_bits(pair, j % 2)[:, None]
        elif FORMAT != "dense":
            value *= tl.load(scales + row)
        columns = (blocks * BK + width * j)[:, None] + k[None, :]
        tl.store(out + t * K + columns, (value * scale).to(out.dtype.element_ty), mask=columns < K)
