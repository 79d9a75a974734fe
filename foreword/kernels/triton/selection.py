"""Filters that keep the first ids of a ranking: keep_top_k(), keep_top_p() and keep_typical_p() of `Ops`, without a sort.

Each id has a rank of 32 bits and a weight, a whole number: one for top-k, its mass for the others. Kept is the shortest run
by (rank descending, id ascending) whose weights reach what is needed. The rank where it ends is found digit by digit: one
launch for each adds up weights by digit, of the ids whose rank begins with the digits found so far, and a program that has
none of them is done. Sums are of whole numbers, so atomic additions give the same bits in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.triton import ranks
from foreword.kernels.triton.portable_math import mass, to_whole
from foreword.kernels.triton.ranks import (
    EXACT,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    below_top,
    is_asked,
    is_sound,
    load_values,
    part_max,
    part_sum,
)

__all__ = ["keep_top_k", "keep_top_p", "keep_typical_p"]

DIGIT_BITS: tl.constexpr = tl.constexpr(4)
RADIX: tl.constexpr = tl.constexpr(16)
PASSES: tl.constexpr = tl.constexpr(8)  # digits of a rank


@triton.jit
def _mean_below(masses, shares, row, count, WIDTH: tl.constexpr):
    """Of a row's distances from the top, each as often as it is likely; what normalizes probabilities cancels."""
    total = part_sum(shares, row, count, WIDTH).to(tl.float64)
    return total / part_sum(masses, row, count, WIDTH).to(tl.float64)


@triton.jit
def _ranking(values, peak, masses, shares, row, count, FILTER: tl.constexpr, WIDTH: tl.constexpr):
    """What ids are ranked by."""
    if FILTER == TYPICAL_P:
        distance = tl.abs(below_top(values, peak) - _mean_below(masses, shares, row, count, WIDTH))
        found = ranks.ranks((-distance).to(tl.float32))
    else:
        found = ranks.ranks(values)
    return found


@triton.jit
def _weights(values, peak, FILTER: tl.constexpr):
    return (values > -float("inf")).to(tl.int64) if FILTER == TOP_K else mass(below_top(values, peak))


@triton.jit
def _found(sums, bounds, row, DIGITS: tl.constexpr, FILTER: tl.constexpr):
    """The first DIGITS digits of the rank where the run ends, and how much is needed of the ids that begin with them."""
    digits = tl.arange(0, RADIX)
    prefix = tl.sum(tl.zeros_like(digits).to(tl.int64))
    need = prefix
    for place in tl.static_range(DIGITS):
        by_digit = tl.load(sums + (row * PASSES + place) * RADIX + digits)
        if place == 0:
            if FILTER == TOP_K:
                need = tl.load(bounds + row)
            else:
                total = tl.sum(by_digit)
                need = tl.minimum(tl.ceil(total.to(tl.float64) * tl.load(bounds + row)).to(tl.int64), total)
        reached = tl.cumsum(by_digit, reverse=True)
        digit = tl.max(tl.where(reached >= need, digits, 0))
        need -= tl.sum(tl.where(digits > digit, by_digit, 0))
        prefix = prefix * RADIX + digit
    return prefix, need


@triton.jit(do_not_specialize_on_alignment=["p"])
def _add_shares(logits, stride, V, p, peaks, shares, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """shares int64 [R, parts]: mass times distance from the top, rounded for each id."""
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if is_asked(p, row, V, TYPICAL_P):
        peak = part_max(peaks, row, count, WIDTH)
        total = peak * 0
        if is_sound(peak):
            _, values = load_values(logits, stride, V, row, part, BLOCK)
            below = below_top(values, peak)
            weights = mass(below)
            below = tl.where(weights > 0, below, 0.0)
            total = tl.sum(to_whole(weights.to(tl.float64) * below).to(tl.int64))
        tl.store(shares + row * count + part, total)


@triton.jit(do_not_specialize_on_alignment=["bounds"])
def _add_by_digit(
    logits, stride, V, bounds, peaks, masses, shares, sums, last_sums,
    PLACE: tl.constexpr, FILTER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One digit more: sums int64 [R, PASSES, RADIX], and for the last digit last_sums int64 [R, parts, RADIX]."""
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if is_asked(bounds, row, V, FILTER):
        peak = part_max(peaks, row, count, WIDTH)
        if is_sound(peak):
            prefix, _ = _found(sums, bounds, row, PLACE, FILTER)
            _, values = load_values(logits, stride, V, row, part, BLOCK)
            found = _ranking(values, peak, masses, shares, row, count, FILTER, WIDTH) >> (DIGIT_BITS * (PASSES - 1 - PLACE))
            digits = tl.where((found >> DIGIT_BITS == prefix) & (values > -float("inf")), found & (RADIX - 1), -1)
            every = tl.arange(0, RADIX)
            by_digit = tl.zeros((RADIX,), tl.int64)
            if tl.max(digits) >= 0:
                weights = _weights(values, peak, FILTER)
                for digit in range(RADIX):
                    by_digit = tl.where(every == digit, tl.sum(tl.where(digits == digit, weights, 0)), by_digit)
                tl.atomic_add(sums + (row * PASSES + PLACE) * RADIX + every, by_digit, mask=by_digit > 0, sem="relaxed")
            if PLACE == PASSES - 1:
                tl.store(last_sums + (row * count + part) * RADIX + every, by_digit)


@triton.jit(do_not_specialize_on_alignment=["bounds"])
def _keep_run(
    logits, stride, V, bounds, peaks, masses, shares, sums, last_sums,
    FILTER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mask what is not in the run; of the ids of its last rank, those before it is long enough stay."""
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if is_asked(bounds, row, V, FILTER):
        peak = part_max(peaks, row, count, WIDTH)
        if is_sound(peak):
            last, need = _found(sums, bounds, row, PASSES, FILTER)
            ids, values = load_values(logits, stride, V, row, part, BLOCK)
            found = _ranking(values, peak, masses, shares, row, count, FILTER, WIDTH)
            kept = found > last
            if tl.max((found == last).to(tl.int32)) > 0:
                parts = tl.arange(0, WIDTH)
                tied = tl.load(last_sums + (row * count + parts) * RADIX + last % RADIX, mask=parts < part, other=0)
                weights = tl.where(found == last, _weights(values, peak, FILTER), 0)
                before = tl.cumsum(weights) - weights + tl.sum(tied)
                kept = kept | ((found == last) & (before < need))
            tl.store(logits + row * stride + ids, -float("inf"), mask=(values > -float("inf")) & ~kept)


def keep_top_k(logits: Tensor, k: Tensor, block: int) -> None:
    """As `Ops.keep_top_k`."""
    peaks = ranks.peaks(logits, block, k, TOP_K)
    _keep(logits, k, block, TOP_K, peaks, peaks, peaks)


def keep_top_p(logits: Tensor, p: Tensor, block: int) -> None:
    """As `Ops.keep_top_p`."""
    peaks = ranks.peaks(logits, block, p, TOP_P)
    _keep(logits, p, block, TOP_P, peaks, peaks, peaks)


def keep_typical_p(logits: Tensor, p: Tensor, block: int) -> None:
    """As `Ops.keep_typical_p`."""
    peaks = ranks.peaks(logits, block, p, TYPICAL_P)
    masses, shares = ranks.total_masses(logits, block, peaks, p, TYPICAL_P), torch.empty_like(peaks)
    width = triton.next_power_of_2(peaks.shape[1])
    _add_shares[peaks.shape](logits, logits.stride(0), logits.shape[1], p, peaks, shares, WIDTH=width, BLOCK=block, **EXACT)
    _keep(logits, p, block, TYPICAL_P, peaks, masses, shares)


def _keep(logits: Tensor, bounds: Tensor, block: int, kind: tl.constexpr, peaks: Tensor, masses: Tensor, shares: Tensor) -> None:
    """masses and shares, like peaks, are int64 [R, parts]; only typical-p reads them."""
    sums = torch.zeros(peaks.shape[0], PASSES.value, RADIX.value, dtype=torch.int64, device=logits.device)
    last_sums = torch.empty(*peaks.shape, RADIX.value, dtype=torch.int64, device=logits.device)
    operands = logits, logits.stride(0), logits.shape[1], bounds, peaks, masses, shares, sums, last_sums
    options = {"FILTER": kind.value, "WIDTH": triton.next_power_of_2(peaks.shape[1]), "BLOCK": block, **EXACT}
    for place in range(PASSES.value):
        _add_by_digit[peaks.shape](*operands, PLACE=place, **options)
    _keep_run[peaks.shape](*operands, **options)
