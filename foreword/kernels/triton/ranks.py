"""Values as whole numbers of the same order, and the likeliest of each row.

A row of logits is shared by programs of BLOCK ids each. What one of them finds goes into *parts* [R, parts of a row]; the
programs of the next launch put a row's parts together again. Maxima and sums of whole numbers are the same in any order.

What there is one of for each row may lie anywhere, as a line of a table of requests: kernels are not compiled anew for that.
"""

from __future__ import annotations

from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.triton.portable_math import mass

__all__ = [
    "ANY_ROW",
    "EXACT",
    "MASKED_RANK",
    "MIN_P",
    "TOP_K",
    "TOP_P",
    "TYPICAL_P",
    "XTC",
    "below_top",
    "entries",
    "entry_id",
    "is_asked",
    "is_sound",
    "load_values",
    "num_parts",
    "part_max",
    "part_sum",
    "peaks",
    "ranks",
    "total_masses",
    "value_of",
]

EXACT = MappingProxyType({"num_warps": 8, "enable_fp_fusion": False})  # how all kernels of sampling are launched

MASKED_RANK: tl.constexpr = tl.constexpr(0x007FFFFF)  # of -inf
INFINITE_RANK: tl.constexpr = tl.constexpr(0xFF800000)  # of +inf
SIGN: tl.constexpr = tl.constexpr(2**31)
LAST_ID: tl.constexpr = tl.constexpr(2**31 - 1)

# Whose bound it is; each has a neutral one, which costs nothing.
ANY_ROW: tl.constexpr = tl.constexpr(0)
TOP_K: tl.constexpr = tl.constexpr(1)
TOP_P: tl.constexpr = tl.constexpr(2)
TYPICAL_P: tl.constexpr = tl.constexpr(3)
MIN_P: tl.constexpr = tl.constexpr(4)
XTC: tl.constexpr = tl.constexpr(5)
FIRST_FROM_ZERO: tl.constexpr = MIN_P  # from here on a bound of 0 is neutral; before it one of 1, or the whole vocabulary


@triton.jit
def ranks(values):
    """float32 -> int64 in [0, 2^32) of the same order; both zeros are one, NaN is above all."""
    raw = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = raw ^ ((raw >> 31) & 0x7FFFFFFF)
    ordered = tl.where(values != values, 0x7FFFFFFF, ordered)
    return ordered.to(tl.int64) + SIGN


@triton.jit
def value_of(rank):
    """The float32 of a rank."""
    ordered = (rank - SIGN).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_sound(peak):
    """Whether a row with this highest rank holds a finite value and neither NaN nor +inf."""
    return (peak > MASKED_RANK) & (peak < INFINITE_RANK)


@triton.jit
def entries(rank, ids):
    """Rank and id as one int64, which is higher the sooner it comes by (value descending, id ascending)."""
    return (rank << 31) | (LAST_ID - ids)


@triton.jit
def entry_id(entry):
    return LAST_ID - (entry & LAST_ID)


@triton.jit
def is_asked(bounds, row, V, FILTER: tl.constexpr):
    """Whether the bound of a row can change anything."""
    if FILTER == ANY_ROW:
        asked = True
    elif FILTER == TOP_K:
        asked = tl.load(bounds + row) < V
    elif FILTER >= FIRST_FROM_ZERO:
        asked = tl.load(bounds + row) > 0
    else:
        asked = tl.load(bounds + row) < 1
    return asked


@triton.jit
def load_values(logits, stride, V, row, part, BLOCK: tl.constexpr):
    """Ids and float32 values of a program, -inf beyond the row."""
    ids = part * BLOCK + tl.arange(0, BLOCK)
    return ids, tl.load(logits + row * stride + ids, mask=ids < V, other=-float("inf"))


@triton.jit
def part_max(parts, row, count, WIDTH: tl.constexpr):
    """The highest of a row's parts, which are not negative; WIDTH is count up to a power of two."""
    place = tl.arange(0, WIDTH)
    return tl.max(tl.load(parts + row * count + place, mask=place < count, other=0))


@triton.jit
def part_sum(parts, row, count, WIDTH: tl.constexpr):
    place = tl.arange(0, WIDTH)
    return tl.sum(tl.load(parts + row * count + place, mask=place < count, other=0))


@triton.jit
def below_top(values, peak):
    """float64 distances from the likeliest, whose rank is `peak`; none is positive."""
    return values.to(tl.float64) - value_of(peak).to(tl.float64)


@triton.jit(do_not_specialize_on_alignment=["bounds"])
def _peaks(logits, stride, V, bounds, peaks, FILTER: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_asked(bounds, row, V, FILTER):
        _, values = load_values(logits, stride, V, row, part, BLOCK)
        tl.store(peaks + row * tl.num_programs(1) + part, tl.max(ranks(values)))


@triton.jit(do_not_specialize_on_alignment=["bounds"])
def _masses(logits, stride, V, bounds, peaks, masses, FILTER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if is_asked(bounds, row, V, FILTER):
        peak = part_max(peaks, row, count, WIDTH)
        _, values = load_values(logits, stride, V, row, part, BLOCK)
        total = peak * 0
        if is_sound(peak) & (tl.max(values) > -float("inf")):
            total = tl.sum(mass(below_top(values, peak)))
        tl.store(masses + row * count + part, total)


def num_parts(logits: Tensor, block: int) -> int:
    """Programs that share a row."""
    return -(-logits.shape[1] // block)


def peaks(logits: Tensor, block: int, bounds: Tensor | None = None, kind: tl.constexpr = ANY_ROW) -> Tensor:
    """int64 [R, parts], of rows whose bound [R] can change anything: the highest rank of each part of [R, V]."""
    found = torch.empty(logits.shape[0], num_parts(logits, block), dtype=torch.int64, device=logits.device)
    bounds = logits if bounds is None else bounds
    _peaks[found.shape](logits, logits.stride(0), logits.shape[1], bounds, found, FILTER=kind.value, BLOCK=block, **EXACT)
    return found


def total_masses(logits: Tensor, block: int, found: Tensor, bounds: Tensor | None = None, kind: tl.constexpr = ANY_ROW) -> Tensor:
    """int64 [R, parts]: exp(value - top), in units of 2^-42, summed over each part; found is peaks()."""
    masses = torch.empty_like(found)
    operands = logits, logits.stride(0), logits.shape[1], logits if bounds is None else bounds, found, masses
    _masses[found.shape](*operands, FILTER=kind.value, WIDTH=triton.next_power_of_2(found.shape[1]), BLOCK=block, **EXACT)
    return masses
