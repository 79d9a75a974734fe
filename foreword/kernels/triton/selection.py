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
from foreword.kernels.triton.portable_math import exp_fixed_point, round_to_int
from foreword.kernels.triton.ranks import (
    LAUNCH_OPTIONS,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    is_enabled,
    is_finite_row,
    load_values,
    minus_max,
    reduce_block_max,
    reduce_block_sum,
)

__all__ = ["apply_top_k", "apply_top_p", "apply_typical_p"]

DIGIT_BITS: tl.constexpr = tl.constexpr(4)
RADIX: tl.constexpr = tl.constexpr(16)
NUM_DIGITS: tl.constexpr = tl.constexpr(8)  # digits of a rank


@triton.jit
def _mean_minus_max(block_expsums, block_entropies, row, count, WIDTH: tl.constexpr):
    """Of a row's distances from the top, each as often as it is likely; what normalizes probabilities cancels."""
    total = reduce_block_sum(block_entropies, row, count, WIDTH).to(tl.float64)
    return total / reduce_block_sum(block_expsums, row, count, WIDTH).to(tl.float64)


@triton.jit
def _rank_bits(
    values, row_max, block_expsums, block_entropies, row, count, FILTER: tl.constexpr, WIDTH: tl.constexpr
):
    """What ids are ranked by."""
    if FILTER == TYPICAL_P:
        distance = tl.abs(
            minus_max(values, row_max) - _mean_minus_max(block_expsums, block_entropies, row, count, WIDTH)
        )
        found = ranks.ordered_bits((-distance).to(tl.float32))
    else:
        found = ranks.ordered_bits(values)
    return found


@triton.jit
def _id_weights(values, row_max, FILTER: tl.constexpr):
    return (
        (values > -float("inf")).to(tl.int64)
        if FILTER == TOP_K
        else exp_fixed_point(minus_max(values, row_max))
    )


@triton.jit
def _find_prefix(sums, bounds, row, DIGITS: tl.constexpr, FILTER: tl.constexpr):
    """The first DIGITS digits of the rank where the run ends, and how much is needed of the ids that begin with them."""
    digits = tl.arange(0, RADIX)
    prefix = tl.sum(tl.zeros_like(digits).to(tl.int64))
    need = prefix
    for place in tl.static_range(DIGITS):
        by_digit = tl.load(sums + (row * NUM_DIGITS + place) * RADIX + digits)
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
def _entropy_kernel(
    logits, stride, V, p, block_maxes, block_entropies, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """shares int64 [R, parts]: mass times distance from the top, rounded for each id."""
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if is_enabled(p, row, V, TYPICAL_P):
        peak = reduce_block_max(block_maxes, row, count, WIDTH)
        total = peak * 0
        if is_finite_row(peak):
            _, values = load_values(logits, stride, V, row, part, BLOCK)
            below = minus_max(values, peak)
            weights = exp_fixed_point(below)
            below = tl.where(weights > 0, below, 0.0)
            total = tl.sum(round_to_int(weights.to(tl.float64) * below).to(tl.int64))
        tl.store(block_entropies + row * count + part, total)


@triton.jit(do_not_specialize_on_alignment=["bounds"])
def _digit_histogram_kernel(
    logits, stride, V, bounds, block_maxes, block_expsums, block_entropies, sums, last_sums,
    DIGIT_INDEX: tl.constexpr, FILTER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One digit more: sums int64 [R, PASSES, RADIX], and for the last digit last_sums int64 [R, parts, RADIX]."""
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if is_enabled(bounds, row, V, FILTER):
        peak = reduce_block_max(block_maxes, row, count, WIDTH)
        if is_finite_row(peak):
            prefix, _ = _find_prefix(sums, bounds, row, DIGIT_INDEX, FILTER)
            _, values = load_values(logits, stride, V, row, part, BLOCK)
            found = _rank_bits(values, peak, block_expsums, block_entropies, row, count, FILTER, WIDTH) >> (
                DIGIT_BITS * (NUM_DIGITS - 1 - DIGIT_INDEX)
            )
            digits = tl.where(
                (found >> DIGIT_BITS == prefix) & (values > -float("inf")), found & (RADIX - 1), -1
            )
            every = tl.arange(0, RADIX)
            by_digit = tl.zeros((RADIX,), tl.int64)
            if tl.max(digits) >= 0:
                weights = _id_weights(values, peak, FILTER)
                for digit in range(RADIX):
                    by_digit = tl.where(
                        every == digit, tl.sum(tl.where(digits == digit, weights, 0)), by_digit
                    )
                tl.atomic_add(
                    sums + (row * NUM_DIGITS + DIGIT_INDEX) * RADIX + every,
                    by_digit,
                    mask=by_digit > 0,
                    sem="relaxed",
                )
            if DIGIT_INDEX == NUM_DIGITS - 1:
                tl.store(last_sums + (row * count + part) * RADIX + every, by_digit)


@triton.jit(do_not_specialize_on_alignment=["bounds"])
def _mask_rest_kernel(
    logits, stride, V, bounds, block_maxes, block_expsums, block_entropies, sums, last_sums,
    FILTER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Mask what is not in the run; of the ids of its last rank, those before it is long enough stay."""
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if is_enabled(bounds, row, V, FILTER):
        peak = reduce_block_max(block_maxes, row, count, WIDTH)
        if is_finite_row(peak):
            last, need = _find_prefix(sums, bounds, row, NUM_DIGITS, FILTER)
            ids, values = load_values(logits, stride, V, row, part, BLOCK)
            found = _rank_bits(values, peak, block_expsums, block_entropies, row, count, FILTER, WIDTH)
            kept = found > last
            if tl.max((found == last).to(tl.int32)) > 0:
                parts = tl.arange(0, WIDTH)
                tied = tl.load(
                    last_sums + (row * count + parts) * RADIX + last % RADIX, mask=parts < part, other=0
                )
                weights = tl.where(found == last, _id_weights(values, peak, FILTER), 0)
                before = tl.cumsum(weights) - weights + tl.sum(tied)
                kept = kept | ((found == last) & (before < need))
            tl.store(logits + row * stride + ids, -float("inf"), mask=(values > -float("inf")) & ~kept)


def apply_top_k(logits: Tensor, k: Tensor, block: int) -> None:
    """As `Ops.keep_top_k`."""
    peaks = ranks.compute_block_maxes(logits, block, k, TOP_K)
    _mask_all_but(logits, k, block, TOP_K, peaks, peaks, peaks)


def apply_top_p(logits: Tensor, p: Tensor, block: int) -> None:
    """As `Ops.keep_top_p`."""
    peaks = ranks.compute_block_maxes(logits, block, p, TOP_P)
    _mask_all_but(logits, p, block, TOP_P, peaks, peaks, peaks)


def apply_typical_p(logits: Tensor, p: Tensor, block: int) -> None:
    """As `Ops.keep_typical_p`."""
    peaks = ranks.compute_block_maxes(logits, block, p, TYPICAL_P)
    masses, shares = ranks.compute_block_expsums(logits, block, peaks, p, TYPICAL_P), torch.empty_like(peaks)
    width = triton.next_power_of_2(peaks.shape[1])
    _entropy_kernel[peaks.shape](
        logits,
        logits.stride(0),
        logits.shape[1],
        p,
        peaks,
        shares,
        WIDTH=width,
        BLOCK=block,
        **LAUNCH_OPTIONS,
    )
    _mask_all_but(logits, p, block, TYPICAL_P, peaks, masses, shares)


def _mask_all_but(
    logits: Tensor,
    bounds: Tensor,
    block: int,
    filter_id: tl.constexpr,
    block_maxes: Tensor,
    block_expsums: Tensor,
    block_entropies: Tensor,
) -> None:
    """masses and shares, like peaks, are int64 [R, parts]; only typical-p reads them."""
    sums = torch.zeros(
        block_maxes.shape[0], NUM_DIGITS.value, RADIX.value, dtype=torch.int64, device=logits.device
    )
    last_sums = torch.empty(*block_maxes.shape, RADIX.value, dtype=torch.int64, device=logits.device)
    operands = (
        logits,
        logits.stride(0),
        logits.shape[1],
        bounds,
        block_maxes,
        block_expsums,
        block_entropies,
        sums,
        last_sums,
    )
    options = {
        "FILTER": filter_id.value,
        "WIDTH": triton.next_power_of_2(block_maxes.shape[1]),
        "BLOCK": block,
        **LAUNCH_OPTIONS,
    }
    for place in range(NUM_DIGITS.value):
        _digit_histogram_kernel[block_maxes.shape](*operands, DIGIT_INDEX=place, **options)
    _mask_rest_kernel[block_maxes.shape](*operands, **options)
