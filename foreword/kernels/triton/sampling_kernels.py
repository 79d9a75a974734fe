"""Sampling kernels: masks, penalties, temperature, filters whose bound is a value, and sample() of `Ops`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.reference import sampling as reference
from foreword.kernels.triton.philox import WORDS_PER_BLOCK, noise, random_words, uniform
from foreword.kernels.triton.portable_math import exp_fixed_point, log, round_to_int
from foreword.kernels.triton.topk import (
    LAUNCH_OPTIONS,
    MASKED_BITS,
    MIN_P,
    XTC,
    compute_block_expsums,
    compute_block_maxes,
    is_enabled,
    is_finite_row,
    key_to_id,
    load_values,
    minus_max,
    num_blocks,
    ordered_bits,
    reduce_block_max,
    reduce_block_sum,
    sort_keys,
)

__all__ = [
    "add_bias",
    "apply_mask",
    "apply_min_p",
    "apply_repetition_penalty",
    "apply_temperature",
    "apply_top_n_sigma",
    "apply_xtc",
    "sample",
]

IDS_PER_PROGRAM = 256  # ids of a program per iteration, in kernels over lists of ids
MAX_PROGRAMS = 8  # per row in kernels over lists of ids; more ids take more iterations

SIGMA_UNITS: tl.constexpr = tl.constexpr(reference.SIGMA_UNITS)
SIGMA_MAX_DISTANCE: tl.constexpr = tl.constexpr(reference.SIGMA_MAX_DISTANCE)
WORD_BITS: tl.constexpr = tl.constexpr(reference.WORD_BITS)
MAX_KEY: tl.constexpr = tl.constexpr(2**63 - 1)  # above every sort key
MIN_NORMAL: tl.constexpr = tl.constexpr(torch.finfo(torch.float64).tiny)


@triton.jit
def _apply_mask_kernel(logits, stride, V, masks, mask_stride, num_words, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids, values = load_values(logits, stride, V, row, part, BLOCK)
    place = ids // WORD_BITS
    words = tl.load(masks + row * mask_stride + place, mask=(ids < V) & (place < num_words), other=0)
    allowed = ((words >> (ids % WORD_BITS)) & 1) != 0
    tl.store(logits + row * stride + ids, -float("inf"), mask=(ids < V) & (values < float("inf")) & ~allowed)


@triton.jit
def _add_bias_kernel(logits, stride, V, starts, ids, biases, IDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(starts + row + 1)
    for first in range(tl.load(starts + row) + tl.program_id(1) * IDS, end, tl.num_programs(1) * IDS):
        place = first + tl.arange(0, IDS)
        token_ids = tl.load(ids + place, mask=place < end, other=V)
        inside = token_ids < V
        values = tl.load(logits + row * stride + token_ids, mask=inside, other=0.0)
        added = values + tl.load(biases + place, mask=inside, other=0.0)
        tl.store(logits + row * stride + token_ids, added, mask=inside)


@triton.jit
def _repetition_penalty_kernel(logits, stride, V, starts, ids, penalties, IDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    end, penalty = tl.load(starts + row + 1), tl.load(penalties + row)
    for first in range(tl.load(starts + row) + tl.program_id(1) * IDS, end, tl.num_programs(1) * IDS):
        place = first + tl.arange(0, IDS)
        token_ids = tl.load(ids + place, mask=place < end, other=V)
        inside = token_ids < V
        values = tl.load(logits + row * stride + token_ids, mask=inside, other=0.0)
        penalized = tl.where(values < 0, values * penalty, tl.div_rn(values, tl.zeros_like(values) + penalty))
        tl.store(logits + row * stride + token_ids, penalized, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def _temperature_kernel(logits, stride, V, temperatures, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    if temperature != 1.0:
        ids, values = load_values(logits, stride, V, row, part, BLOCK)
        scaled = tl.div_rn(values, tl.zeros_like(values) + temperature)
        tl.store(logits + row * stride + ids, scaled, mask=ids < V)


@triton.jit
def _mask_below(logits, stride, V, row, part, row_max, threshold, BLOCK: tl.constexpr):
    ids, values = load_values(logits, stride, V, row, part, BLOCK)
    if tl.max(values) > -float("inf"):
        kept = minus_max(values, row_max) >= threshold
        tl.store(logits + row * stride + ids, -float("inf"), mask=(values > -float("inf")) & ~kept)


@triton.jit(do_not_specialize_on_alignment=["p"])
def _min_p_kernel(logits, stride, V, p, block_maxes, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_enabled(p, row, V, MIN_P):
        row_max = reduce_block_max(block_maxes, row, tl.num_programs(1), WIDTH)
        if is_finite_row(row_max):
            share = tl.load(p + row)
            threshold = log(tl.where(share > MIN_NORMAL, share, MIN_NORMAL))
            _mask_below(logits, stride, V, row, part, row_max, threshold, BLOCK)


@triton.jit
def _moments_kernel(
    logits, stride, V, block_maxes, counts, sums, squares, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Count, sum and sum of squares of (value - maximum) over each block, in units of 1 / SIGMA_UNITS."""
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row_max = reduce_block_max(block_maxes, row, count, WIDTH)
    if is_finite_row(row_max):
        _, values = load_values(logits, stride, V, row, part, BLOCK)
        below = minus_max(values, row_max)
        below = tl.where(below > -SIGMA_MAX_DISTANCE, below, -SIGMA_MAX_DISTANCE)
        finite = (values > -float("inf")).to(tl.int64)
        steps = round_to_int(below * SIGMA_UNITS).to(tl.int64) * finite
        tl.store(counts + row * count + part, tl.sum(finite))
        tl.store(sums + row * count + part, tl.sum(steps))
        tl.store(squares + row * count + part, tl.sum(steps * steps))


@triton.jit(do_not_specialize_on_alignment=["n"])
def _top_n_sigma_kernel(
    logits, stride, V, n, block_maxes, counts, sums, squares, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row_max = reduce_block_max(block_maxes, row, parts, WIDTH)
    if is_finite_row(row_max):
        count = reduce_block_sum(counts, row, parts, WIDTH).to(tl.float64)
        mean = reduce_block_sum(sums, row, parts, WIDTH).to(tl.float64) / count
        variance = reduce_block_sum(squares, row, parts, WIDTH).to(tl.float64) / count - mean * mean
        deviation = tl.sqrt(tl.where(variance > 0, variance, 0.0)) / SIGMA_UNITS
        _mask_below(logits, stride, V, row, part, row_max, -(tl.load(n + row) * deviation), BLOCK)


@triton.jit
def _xtc_applies(seeds, positions, probabilities, row, V):
    """Whether a row's coin selects XTC."""
    selected = False
    if is_enabled(probabilities, row, V, XTC):
        selected = uniform(tl.load(seeds + row), tl.load(positions + row)) < tl.load(probabilities + row)
    return selected


@triton.jit
def _above_threshold(values, row_max, threshold, block_expsums, row, count, WIDTH: tl.constexpr):
    """Ids whose probability reaches the threshold."""
    bound = threshold * reduce_block_sum(block_expsums, row, count, WIDTH).to(tl.float64)
    return (exp_fixed_point(minus_max(values, row_max)).to(tl.float64) >= bound) & (values > -float("inf"))


@triton.jit(do_not_specialize_on_alignment=["seeds", "positions", "probabilities", "thresholds"])
def _xtc_last_kernel(
    logits, stride, V, seeds, positions, probabilities, thresholds, block_maxes, block_expsums, last,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """MAX_KEY minus the smallest key of each block that reaches the threshold; 0 if there is none."""
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if _xtc_applies(seeds, positions, probabilities, row, V):
        row_max = reduce_block_max(block_maxes, row, count, WIDTH)
        if is_finite_row(row_max):
            ids, values = load_values(logits, stride, V, row, part, BLOCK)
            threshold = tl.load(thresholds + row)
            above = _above_threshold(values, row_max, threshold, block_expsums, row, count, WIDTH)
            depths = tl.where(above, MAX_KEY - sort_keys(ordered_bits(values), ids), 0)
            tl.store(last + row * count + part, tl.max(depths))


@triton.jit(do_not_specialize_on_alignment=["seeds", "positions", "probabilities", "thresholds"])
def _xtc_kernel(
    logits, stride, V, seeds, positions, probabilities, thresholds, block_maxes, block_expsums, last,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if _xtc_applies(seeds, positions, probabilities, row, V):
        row_max = reduce_block_max(block_maxes, row, count, WIDTH)
        if is_finite_row(row_max):
            ids, values = load_values(logits, stride, V, row, part, BLOCK)
            threshold = tl.load(thresholds + row)
            above = _above_threshold(values, row_max, threshold, block_expsums, row, count, WIDTH)
            depths = MAX_KEY - sort_keys(ordered_bits(values), ids)
            masked = above & (depths != reduce_block_max(last, row, count, WIDTH))
            tl.store(logits + row * stride + ids, -float("inf"), mask=masked)


@triton.jit(do_not_specialize_on_alignment=["seeds", "positions", "greedy"])
def _block_argmax_kernel(
    logits, stride, V, seeds, positions, greedy, block_maxes, best_keys, BLOCK: tl.constexpr
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids, values = load_values(logits, stride, V, row, part, BLOCK)
    scores = ordered_bits(values)
    block_max = tl.max(scores)
    tl.store(block_maxes + row * tl.num_programs(1) + part, block_max)
    if (block_max > MASKED_BITS) & (tl.load(greedy + row) == 0):
        first_block = part * (BLOCK // WORDS_PER_BLOCK)
        words = random_words(first_block, tl.load(seeds + row), tl.load(positions + row), BLOCK)
        scores = ordered_bits(values + noise(words))
    tl.store(best_keys + row * tl.num_programs(1) + part, tl.max(sort_keys(scores, ids)))


@triton.jit
def _row_argmax_kernel(block_maxes, best_keys, out, count, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best = key_to_id(reduce_block_max(best_keys, row, count, WIDTH))
    tl.store(out + row, tl.where(is_finite_row(reduce_block_max(block_maxes, row, count, WIDTH)), best, -1))


def apply_mask(logits: Tensor, masks: Tensor, block: int) -> None:
    row = logits, logits.stride(0), logits.shape[1]
    grid = logits.shape[0], num_blocks(logits, block)
    _apply_mask_kernel[grid](*row, masks, masks.stride(0), masks.shape[1], BLOCK=block, **LAUNCH_OPTIONS)


def add_bias(logits: Tensor, starts: Tensor, ids: Tensor, biases: Tensor) -> None:
    row, grid = (logits, logits.stride(0), logits.shape[1]), (logits.shape[0], _num_programs(ids))
    _add_bias_kernel[grid](*row, starts, ids, biases, IDS=IDS_PER_PROGRAM, enable_fp_fusion=False)


def apply_repetition_penalty(logits: Tensor, starts: Tensor, ids: Tensor, penalties: Tensor) -> None:
    row, grid = (logits, logits.stride(0), logits.shape[1]), (logits.shape[0], _num_programs(ids))
    _repetition_penalty_kernel[grid](
        *row, starts, ids, penalties, IDS=IDS_PER_PROGRAM, enable_fp_fusion=False
    )


def _num_programs(ids: Tensor) -> int:
    return min(MAX_PROGRAMS, -(-ids.shape[0] // IDS_PER_PROGRAM))


def apply_temperature(logits: Tensor, temperatures: Tensor, block: int) -> None:
    row = logits, logits.stride(0), logits.shape[1]
    grid = logits.shape[0], num_blocks(logits, block)
    _temperature_kernel[grid](*row, temperatures, BLOCK=block, **LAUNCH_OPTIONS)


def apply_min_p(logits: Tensor, p: Tensor, block: int) -> None:
    row = logits, logits.stride(0), logits.shape[1]
    maxes = compute_block_maxes(logits, block, p, MIN_P)
    width = triton.next_power_of_2(maxes.shape[1])
    _min_p_kernel[maxes.shape](*row, p, maxes, WIDTH=width, BLOCK=block, **LAUNCH_OPTIONS)


def apply_top_n_sigma(logits: Tensor, n: Tensor, block: int) -> None:
    row = logits, logits.stride(0), logits.shape[1]
    maxes = compute_block_maxes(logits, block)
    moments = [torch.empty_like(maxes) for _ in range(3)]
    width = triton.next_power_of_2(maxes.shape[1])
    _moments_kernel[maxes.shape](*row, maxes, *moments, WIDTH=width, BLOCK=block, **LAUNCH_OPTIONS)
    _top_n_sigma_kernel[maxes.shape](*row, n, maxes, *moments, WIDTH=width, BLOCK=block, **LAUNCH_OPTIONS)


def apply_xtc(
    logits: Tensor, seeds: Tensor, positions: Tensor, probabilities: Tensor, thresholds: Tensor, block: int
) -> None:
    row = logits, logits.stride(0), logits.shape[1]
    maxes = compute_block_maxes(logits, block, probabilities, XTC)
    expsums = compute_block_expsums(logits, block, maxes, probabilities, XTC)
    per_row, per_block = (
        (seeds, positions, probabilities, thresholds),
        (maxes, expsums, torch.empty_like(maxes)),
    )
    width = triton.next_power_of_2(maxes.shape[1])
    for kernel in (_xtc_last_kernel, _xtc_kernel):
        kernel[maxes.shape](*row, *per_row, *per_block, WIDTH=width, BLOCK=block, **LAUNCH_OPTIONS)


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor, block: int) -> Tensor:
    """Two launches: the best id of each block, then of each row."""
    row, per_row = (logits, logits.stride(0), logits.shape[1]), (seeds, positions, greedy.view(torch.uint8))
    maxes = torch.empty(logits.shape[0], num_blocks(logits, block), dtype=torch.int64, device=logits.device)
    best, out = torch.empty_like(maxes), torch.empty_like(seeds)
    _block_argmax_kernel[maxes.shape](*row, *per_row, maxes, best, BLOCK=block, **LAUNCH_OPTIONS)
    width = triton.next_power_of_2(maxes.shape[1])
    _row_argmax_kernel[(maxes.shape[0],)](maxes, best, out, maxes.shape[1], WIDTH=width, num_warps=1)
    return out
