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

from foreword.kernels.triton.portable_math import exp_fixed_point

__all__ = [
    "LAUNCH_OPTIONS",
    "MASKED_BITS",
    "MIN_P",
    "NO_FILTER",
    "TOP_K",
    "TOP_P",
    "TYPICAL_P",
    "XTC",
    "compute_block_expsums",
    "compute_block_maxes",
    "from_ordered_bits",
    "is_enabled",
    "is_finite_row",
    "key_to_id",
    "load_values",
    "minus_max",
    "num_blocks",
    "ordered_bits",
    "reduce_block_max",
    "reduce_block_sum",
    "sort_keys",
]

LAUNCH_OPTIONS = MappingProxyType(
    {"num_warps": 8, "enable_fp_fusion": False}
)  # how all kernels of sampling are launched

MASKED_BITS: tl.constexpr = tl.constexpr(0x007FFFFF)  # of -inf
INFINITY_BITS: tl.constexpr = tl.constexpr(0xFF800000)  # of +inf
SIGN_BIT: tl.constexpr = tl.constexpr(2**31)
MAX_ID: tl.constexpr = tl.constexpr(2**31 - 1)

# Whose bound it is; each has a neutral one, which costs nothing.
NO_FILTER: tl.constexpr = tl.constexpr(0)
TOP_K: tl.constexpr = tl.constexpr(1)
TOP_P: tl.constexpr = tl.constexpr(2)
TYPICAL_P: tl.constexpr = tl.constexpr(3)
MIN_P: tl.constexpr = tl.constexpr(4)
XTC: tl.constexpr = tl.constexpr(5)
FIRST_ZERO_NEUTRAL: tl.constexpr = (
    MIN_P  # from here on a bound of 0 is neutral; before it one of 1, or the whole vocabulary
)


@triton.jit
def ordered_bits(values):
    """float32 -> int64 in [0, 2^32) of the same order; both zeros are one, NaN is above all."""
    raw = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = raw ^ ((raw >> 31) & 0x7FFFFFFF)
    ordered = tl.where(values != values, 0x7FFFFFFF, ordered)
    return ordered.to(tl.int64) + SIGN_BIT


@triton.jit
def from_ordered_bits(bits):
    """The float32 of a rank."""
    ordered = (bits - SIGN_BIT).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_finite_row(row_max):
    """Whether a row with this highest rank holds a finite value and neither NaN nor +inf."""
    return (row_max > MASKED_BITS) & (row_max < INFINITY_BITS)


@triton.jit
def sort_keys(bits, ids):
    """Rank and id as one int64, which is higher the sooner it comes by (value descending, id ascending)."""
    return (bits << 31) | (MAX_ID - ids)


@triton.jit
def key_to_id(key):
    return MAX_ID - (key & MAX_ID)


@triton.jit
def is_enabled(bounds, row, V, FILTER: tl.constexpr):
    """Whether the bound of a row can change anything."""
    if FILTER == NO_FILTER:
        asked = True
    elif FILTER == TOP_K:
        asked = tl.load(bounds + row) < V
    elif FILTER >= FIRST_ZERO_NEUTRAL:
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
def reduce_block_max(per_block, row, count, WIDTH: tl.constexpr):
    """The highest of a row's parts, which are not negative; WIDTH is count up to a power of two."""
    place = tl.arange(0, WIDTH)
    return tl.max(tl.load(per_block + row * count + place, mask=place < count, other=0))


@triton.jit
def reduce_block_sum(per_block, row, count, WIDTH: tl.constexpr):
    place = tl.arange(0, WIDTH)
    return tl.sum(tl.load(per_block + row * count + place, mask=place < count, other=0))


@triton.jit
def minus_max(values, row_max):
    """float64 distances from the likeliest, whose rank is `peak`; none is positive."""
    return values.to(tl.float64) - from_ordered_bits(row_max).to(tl.float64)


@triton.jit(do_not_specialize_on_alignment=["bounds"])
def _block_max_kernel(logits, stride, V, bounds, block_maxes, FILTER: tl.constexpr, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_enabled(bounds, row, V, FILTER):
        _, values = load_values(logits, stride, V, row, part, BLOCK)
        tl.store(block_maxes + row * tl.num_programs(1) + part, tl.max(ordered_bits(values)))


@triton.jit(do_not_specialize_on_alignment=["bounds"])
def _block_expsum_kernel(
    logits,
    stride,
    V,
    bounds,
    block_maxes,
    block_expsums,
    FILTER: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if is_enabled(bounds, row, V, FILTER):
        peak = reduce_block_max(block_maxes, row, count, WIDTH)
        _, values = load_values(logits, stride, V, row, part, BLOCK)
        total = peak * 0
        if is_finite_row(peak) & (tl.max(values) > -float("inf")):
            total = tl.sum(exp_fixed_point(minus_max(values, peak)))
        tl.store(block_expsums + row * count + part, total)


def num_blocks(logits: Tensor, block: int) -> int:
    """Programs that share a row."""
    return -(-logits.shape[1] // block)


def compute_block_maxes(
    logits: Tensor, block: int, bounds: Tensor | None = None, filter_id: tl.constexpr = NO_FILTER
) -> Tensor:
    """int64 [R, parts], of rows whose bound [R] can change anything: the highest rank of each part of [R, V]."""
    found = torch.empty(logits.shape[0], num_blocks(logits, block), dtype=torch.int64, device=logits.device)
    bounds = logits if bounds is None else bounds
    _block_max_kernel[found.shape](
        logits,
        logits.stride(0),
        logits.shape[1],
        bounds,
        found,
        FILTER=filter_id.value,
        BLOCK=block,
        **LAUNCH_OPTIONS,
    )
    return found


def compute_block_expsums(
    logits: Tensor,
    block: int,
    block_maxes: Tensor,
    bounds: Tensor | None = None,
    filter_id: tl.constexpr = NO_FILTER,
) -> Tensor:
    """int64 [R, parts]: exp(value - top), in units of 2^-42, summed over each part; found is peaks()."""
    masses = torch.empty_like(block_maxes)
    operands = (
        logits,
        logits.stride(0),
        logits.shape[1],
        logits if bounds is None else bounds,
        block_maxes,
        masses,
    )
    _block_expsum_kernel[block_maxes.shape](
        *operands,
        FILTER=filter_id.value,
        WIDTH=triton.next_power_of_2(block_maxes.shape[1]),
        BLOCK=block,
        **LAUNCH_OPTIONS,
    )
    return masses
