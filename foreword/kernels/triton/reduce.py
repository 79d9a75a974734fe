"""log_sum_exp() and top_ids() of `Ops`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.triton import ranks
from foreword.kernels.triton.portable_math import FRACTION, log
from foreword.kernels.triton.ranks import EXACT, entries, entry_id, is_sound, load_values, num_parts, part_max, part_sum, value_of

__all__ = ["log_sum_exp", "top_ids"]

NO_ENTRY: tl.constexpr = tl.constexpr(-1)


@triton.jit
def _log_sum(peaks, masses, out, count, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    peak = part_max(peaks, row, count, WIDTH)
    result = float("nan")
    if is_sound(peak):
        total = part_sum(masses, row, count, WIDTH).to(tl.float64)
        result = (value_of(peak).to(tl.float64) + log(total * FRACTION)).to(tl.float32)
    tl.store(out + row, result)


@triton.jit(do_not_specialize=["K"])
def _first_of_parts(logits, stride, V, found, K, BLOCK: tl.constexpr):
    """found int64 [R, parts, K]: the first entries of each part, in order."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids, values = load_values(logits, stride, V, row, part, BLOCK)
    left = tl.where(ids < V, entries(ranks.ranks(values), ids), NO_ENTRY)
    for place in range(K):
        first = tl.max(left)
        tl.store(found + (row * tl.num_programs(1) + part) * K + place, first)
        left = tl.where(left == first, NO_ENTRY, left)


@triton.jit(do_not_specialize=["count", "K"])
def _first_of_rows(found, out, count, K, WIDTH: tl.constexpr):
    """out int64 [R, K], of found [R, count]."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    left = tl.load(found + row * count + place, mask=place < count, other=NO_ENTRY)
    sound = is_sound(tl.max(left) >> 31)
    for i in range(K):
        first = tl.max(left)
        tl.store(out + row * K + i, tl.where(sound, entry_id(first), i))
        left = tl.where(left == first, NO_ENTRY, left)


def log_sum_exp(logits: Tensor, block: int) -> Tensor:
    """As `Ops.log_sum_exp`."""
    peaks = ranks.peaks(logits, block)
    masses = ranks.total_masses(logits, block, peaks)
    out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    width = triton.next_power_of_2(peaks.shape[1])
    _log_sum[out.shape](peaks, masses, out, peaks.shape[1], WIDTH=width, num_warps=1, enable_fp_fusion=False)
    return out


def top_ids(logits: Tensor, k: int, most: int, block: int) -> Tensor:
    """As `Ops.top_ids`, for few ids, at most `most`: each is one more search of what is left. One kernel serves every k: requests
    choose it, and nobody waits for a compiler then."""
    shape = logits.shape[0], num_parts(logits, block)
    found = torch.empty(*shape, k, dtype=torch.int64, device=logits.device)
    out = torch.empty(shape[0], k, dtype=torch.int64, device=logits.device)
    _first_of_parts[shape](logits, logits.stride(0), logits.shape[1], found, k, BLOCK=block, **EXACT)
    width = triton.next_power_of_2(shape[1] * most)
    _first_of_rows[shape[:1]](found, out, shape[1] * k, k, WIDTH=width, **EXACT)
    return out
