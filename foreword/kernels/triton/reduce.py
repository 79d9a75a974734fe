"""log_sum_exp() and top_ids() of `Ops`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.triton import ranks
from foreword.kernels.triton.portable_math import FIXED_POINT_UNIT, log
from foreword.kernels.triton.ranks import (
    LAUNCH_OPTIONS,
    from_ordered_bits,
    is_finite_row,
    key_to_id,
    load_values,
    num_blocks,
    reduce_block_max,
    reduce_block_sum,
    sort_keys,
)

__all__ = ["log_sum_exp", "top_ids"]

NO_KEY: tl.constexpr = tl.constexpr(-1)


@triton.jit
def _log_sum_exp_kernel(block_maxes, block_expsums, out, count, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak = reduce_block_max(block_maxes, row, count, WIDTH)
    result = float("nan")
    if is_finite_row(peak):
        total = reduce_block_sum(block_expsums, row, count, WIDTH).to(tl.float64)
        result = (from_ordered_bits(peak).to(tl.float64) + log(total * FIXED_POINT_UNIT)).to(tl.float32)
    tl.store(out + row, result)


@triton.jit(do_not_specialize=["K"])
def _block_top_ids_kernel(logits, stride, V, block_keys, K, BLOCK: tl.constexpr):
    """found int64 [R, parts, K]: the first entries of each part, in order."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids, values = load_values(logits, stride, V, row, part, BLOCK)
    left = tl.where(ids < V, sort_keys(ranks.ordered_bits(values), ids), NO_KEY)
    for place in range(K):
        first = tl.max(left)
        tl.store(block_keys + (row * tl.num_programs(1) + part) * K + place, first)
        left = tl.where(left == first, NO_KEY, left)


@triton.jit(do_not_specialize=["count", "K"])
def _row_top_ids_kernel(block_keys, out, count, K, WIDTH: tl.constexpr):
    """out int64 [R, K], of found [R, count]."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    left = tl.load(block_keys + row * count + place, mask=place < count, other=NO_KEY)
    sound = is_finite_row(tl.max(left) >> 31)
    for i in range(K):
        first = tl.max(left)
        tl.store(out + row * K + i, tl.where(sound, key_to_id(first), i))
        left = tl.where(left == first, NO_KEY, left)


def log_sum_exp(logits: Tensor, block: int) -> Tensor:
    """As `Ops.log_sum_exp`."""
    peaks = ranks.compute_block_maxes(logits, block)
    masses = ranks.compute_block_expsums(logits, block, peaks)
    out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    width = triton.next_power_of_2(peaks.shape[1])
    _log_sum_exp_kernel[out.shape](
        peaks, masses, out, peaks.shape[1], WIDTH=width, num_warps=1, enable_fp_fusion=False
    )
    return out


def top_ids(logits: Tensor, k: int, max_k: int, block: int) -> Tensor:
    """As `Ops.top_ids`, for few ids, at most `most`: each is one more search of what is left. One kernel serves every k: requests
    choose it, and nobody waits for a compiler then."""
    shape = logits.shape[0], num_blocks(logits, block)
    found = torch.empty(*shape, k, dtype=torch.int64, device=logits.device)
    out = torch.empty(shape[0], k, dtype=torch.int64, device=logits.device)
    _block_top_ids_kernel[shape](
        logits, logits.stride(0), logits.shape[1], found, k, BLOCK=block, **LAUNCH_OPTIONS
    )
    width = triton.next_power_of_2(shape[1] * max_k)
    _row_top_ids_kernel[shape[:1]](found, out, shape[1] * k, k, WIDTH=width, **LAUNCH_OPTIONS)
    return out
