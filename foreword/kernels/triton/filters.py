"""Filters whose bound is a value: keep_top_n_sigma(), keep_min_p() and exclude_top() of `Ops`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels import reference_sampling as reference
from foreword.kernels.triton import ranks
from foreword.kernels.triton.philox import coin
from foreword.kernels.triton.portable_math import log, mass, to_whole
from foreword.kernels.triton.ranks import (
    EXACT,
    MIN_P,
    XTC,
    below_top,
    entries,
    is_asked,
    is_sound,
    load_values,
    part_max,
    part_sum,
)

__all__ = ["exclude_top", "keep_min_p", "keep_top_n_sigma"]

SIGMA_UNITS: tl.constexpr = tl.constexpr(reference.SIGMA_UNITS)
SIGMA_REACH: tl.constexpr = tl.constexpr(reference.SIGMA_REACH)
LOWEST: tl.constexpr = tl.constexpr(2**63 - 1)  # below every entry, as a depth
SMALLEST_NORMAL: tl.constexpr = tl.constexpr(torch.finfo(torch.float64).tiny)


@triton.jit
def _keep_above(logits, stride, V, row, part, peak, floor, BLOCK: tl.constexpr):
    ids, values = load_values(logits, stride, V, row, part, BLOCK)
    if tl.max(values) > -float("inf"):
        kept = below_top(values, peak) >= floor
        tl.store(logits + row * stride + ids, -float("inf"), mask=(values > -float("inf")) & ~kept)


@triton.jit(do_not_specialize_on_alignment=["p"])
def _keep_min_p(logits, stride, V, p, peaks, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_asked(p, row, V, MIN_P):
        peak = part_max(peaks, row, tl.num_programs(1), WIDTH)
        if is_sound(peak):
            share = tl.load(p + row)
            floor = log(tl.where(share > SMALLEST_NORMAL, share, SMALLEST_NORMAL))
            _keep_above(logits, stride, V, row, part, peak, floor, BLOCK)


@triton.jit
def _moments(logits, stride, V, peaks, counts, sums, squares, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Of each part's distances from the top, in units of 1 / SIGMA_UNITS."""
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    peak = part_max(peaks, row, count, WIDTH)
    if is_sound(peak):
        _, values = load_values(logits, stride, V, row, part, BLOCK)
        below = below_top(values, peak)
        steps = to_whole(tl.where(below > -SIGMA_REACH, below, -SIGMA_REACH) * SIGMA_UNITS).to(tl.int64)
        finite = (values > -float("inf")).to(tl.int64)
        steps = steps * finite
        tl.store(counts + row * count + part, tl.sum(finite))
        tl.store(sums + row * count + part, tl.sum(steps))
        tl.store(squares + row * count + part, tl.sum(steps * steps))


@triton.jit(do_not_specialize_on_alignment=["n"])
def _keep_top_n_sigma(logits, stride, V, n, peaks, counts, sums, squares, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    peak = part_max(peaks, row, parts, WIDTH)
    if is_sound(peak):
        count = part_sum(counts, row, parts, WIDTH).to(tl.float64)
        mean = part_sum(sums, row, parts, WIDTH).to(tl.float64) / count
        variance = part_sum(squares, row, parts, WIDTH).to(tl.float64) / count - mean * mean
        deviation = tl.sqrt(tl.where(variance > 0, variance, 0.0)) / SIGMA_UNITS
        _keep_above(logits, stride, V, row, part, peak, -(tl.load(n + row) * deviation), BLOCK)


@triton.jit
def _is_chosen(seeds, positions, chances, row, V):
    """Whether the coin of a row says that XTC happens."""
    chosen = False
    if is_asked(chances, row, V, XTC):
        chosen = coin(tl.load(seeds + row), tl.load(positions + row)) < tl.load(chances + row)
    return chosen


@triton.jit
def _reaching(values, peak, threshold, masses, row, count, WIDTH: tl.constexpr):
    """Ids whose probability reaches the threshold."""
    bound = threshold * part_sum(masses, row, count, WIDTH).to(tl.float64)
    return (mass(below_top(values, peak)).to(tl.float64) >= bound) & (values > -float("inf"))


@triton.jit(do_not_specialize_on_alignment=["seeds", "positions", "chances", "thresholds"])
def _last_reaching(
    logits, stride, V, seeds, positions, chances, thresholds, peaks, masses, last, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The last entry of each part that reaches the threshold, as a distance from the first possible one; 0 if none does."""
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if _is_chosen(seeds, positions, chances, row, V):
        peak = part_max(peaks, row, count, WIDTH)
        if is_sound(peak):
            ids, values = load_values(logits, stride, V, row, part, BLOCK)
            reaching = _reaching(values, peak, tl.load(thresholds + row), masses, row, count, WIDTH)
            depths = tl.where(reaching, LOWEST - entries(ranks.ranks(values), ids), 0)
            tl.store(last + row * count + part, tl.max(depths))


@triton.jit(do_not_specialize_on_alignment=["seeds", "positions", "chances", "thresholds"])
def _exclude_top(
    logits, stride, V, seeds, positions, chances, thresholds, peaks, masses, last, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if _is_chosen(seeds, positions, chances, row, V):
        peak = part_max(peaks, row, count, WIDTH)
        if is_sound(peak):
            ids, values = load_values(logits, stride, V, row, part, BLOCK)
            reaching = _reaching(values, peak, tl.load(thresholds + row), masses, row, count, WIDTH)
            kept = LOWEST - entries(ranks.ranks(values), ids) == part_max(last, row, count, WIDTH)
            tl.store(logits + row * stride + ids, -float("inf"), mask=reaching & ~kept)


def keep_min_p(logits: Tensor, p: Tensor, block: int) -> None:
    """As `Ops.keep_min_p`."""
    peaks = ranks.peaks(logits, block, p, MIN_P)
    width = triton.next_power_of_2(peaks.shape[1])
    _keep_min_p[peaks.shape](logits, logits.stride(0), logits.shape[1], p, peaks, WIDTH=width, BLOCK=block, **EXACT)


def keep_top_n_sigma(logits: Tensor, n: Tensor, block: int) -> None:
    """As `Ops.keep_top_n_sigma`."""
    row = logits, logits.stride(0), logits.shape[1]
    peaks = ranks.peaks(logits, block)
    moments = [torch.empty_like(peaks) for _ in range(3)]
    width = triton.next_power_of_2(peaks.shape[1])
    _moments[peaks.shape](*row, peaks, *moments, WIDTH=width, BLOCK=block, **EXACT)
    _keep_top_n_sigma[peaks.shape](*row, n, peaks, *moments, WIDTH=width, BLOCK=block, **EXACT)


def exclude_top(logits: Tensor, seeds: Tensor, positions: Tensor, chances: Tensor, thresholds: Tensor, block: int) -> None:
    """As `Ops.exclude_top`."""
    row = logits, logits.stride(0), logits.shape[1]
    peaks = ranks.peaks(logits, block, chances, XTC)
    masses = ranks.total_masses(logits, block, peaks, chances, XTC)
    last = torch.empty_like(peaks)
    width = triton.next_power_of_2(peaks.shape[1])
    for kernel in (_last_reaching, _exclude_top):
        kernel[peaks.shape](*row, seeds, positions, chances, thresholds, peaks, masses, last, WIDTH=width, BLOCK=block, **EXACT)
