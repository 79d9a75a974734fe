"""Reductions and rankings of rows of logits without a sort: log_sum_exp, top ids, top-k, top-p, typical-p.

A row is shared by programs of BLOCK ids. Each writes its result to an array [R, blocks of a row], and the
programs of the next launch reduce a row's blocks. Maxima and sums of integers do not depend on their order.

The filters find where the kept prefix ends digit by digit (radix select). An id has 32 ordered bits and an
integer weight: 1 for top-k, its probability mass otherwise. One launch per digit sums the weights of ids that
share the digits found so far, by their next digit; integer atomics give the same bits in any order.

Per-row parameters may lie at any address, such as a line of a table: that must not recompile a kernel.

PDL of each kernel: see launches_dependents().
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foreword.kernels.triton.portable_math import FIXED_POINT_UNIT, exp_fixed_point, log, round_to_int
from foreword.kernels.triton.variants import launches_dependents

MASKED_BITS: tl.constexpr = tl.constexpr(0x007FFFFF)  # ordered bits of -inf
INFINITY_BITS: tl.constexpr = tl.constexpr(0xFF800000)  # ordered bits of +inf
SIGN_BIT: tl.constexpr = tl.constexpr(2**31)
MAX_ID: tl.constexpr = tl.constexpr(2**31 - 1)
NO_KEY: tl.constexpr = tl.constexpr(-1)

# Filters; a row with the neutral parameter of a filter costs nothing.
NO_FILTER: tl.constexpr = tl.constexpr(0)
TOP_K: tl.constexpr = tl.constexpr(1)
TOP_P: tl.constexpr = tl.constexpr(2)
TYPICAL_P: tl.constexpr = tl.constexpr(3)
MIN_P: tl.constexpr = tl.constexpr(4)
XTC: tl.constexpr = tl.constexpr(5)
FIRST_ZERO_NEUTRAL: tl.constexpr = MIN_P  # from here on 0 is neutral; before, 1 or the whole vocabulary

DIGIT_BITS: tl.constexpr = tl.constexpr(4)
RADIX: tl.constexpr = tl.constexpr(16)
NUM_DIGITS: tl.constexpr = tl.constexpr(8)  # digits of the ordered bits


@triton.jit
def wait_for_launch_before(PDL: tl.constexpr):
    """The first statement of a kernel."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def ordered_bits(values):
    """float32 -> int64 in [0, 2^32) of the same order; both zeros are equal, NaN is largest."""
    return _signed_bits(values).to(tl.int64) + SIGN_BIT


@triton.jit
def max_ordered_bits(values):
    """Maximum of ordered_bits(), reduced in int32."""
    return tl.max(_signed_bits(values)).to(tl.int64) + SIGN_BIT


@triton.jit
def _signed_bits(values):
    """ordered_bits() - 2^31 as int32."""
    raw = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    ordered = raw ^ ((raw >> 31) & 0x7FFFFFFF)
    return tl.where(values != values, 0x7FFFFFFF, ordered)


@triton.jit
def from_ordered_bits(bits):
    """Inverse of ordered_bits()."""
    ordered = (bits - SIGN_BIT).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def is_finite_row(row_max):
    """Whether a row with this maximum (ordered bits) holds a finite value and neither NaN nor +inf."""
    return (row_max > MASKED_BITS) & (row_max < INFINITY_BITS)


@triton.jit
def sort_keys(bits, ids):
    """int64 keys of ordered bits and ids; larger keys come first by (value descending, id ascending)."""
    return (bits << 31) | (MAX_ID - ids)


@triton.jit
def key_to_id(key):
    return MAX_ID - (key & MAX_ID)


@triton.jit
def is_enabled(bounds, row, V, FILTER: tl.constexpr):
    """Whether a row's parameter is not neutral."""
    if FILTER == NO_FILTER:
        enabled = True
    elif FILTER == TOP_K:
        enabled = tl.load(bounds + row) < V
    elif FILTER >= FIRST_ZERO_NEUTRAL:
        enabled = tl.load(bounds + row) > 0
    else:
        enabled = tl.load(bounds + row) < 1
    return enabled


@triton.jit
def load_values(logits, stride, V, row, part, BLOCK: tl.constexpr):
    """Ids and float32 values of block `part` of a row, -inf from V on."""
    ids = part * BLOCK + tl.arange(0, BLOCK)
    return ids, tl.load(logits + row * stride + ids, mask=ids < V, other=-float("inf"))


@triton.jit
def reduce_block_max(per_block, row, count, WIDTH: tl.constexpr):
    """Maximum over a row's `count` blocks of values >= 0; WIDTH is the next power of two of count."""
    place = tl.arange(0, WIDTH)
    return tl.max(tl.load(per_block + row * count + place, mask=place < count, other=0))


@triton.jit
def reduce_block_sum(per_block, row, count, WIDTH: tl.constexpr):
    place = tl.arange(0, WIDTH)
    return tl.sum(tl.load(per_block + row * count + place, mask=place < count, other=0))


@triton.jit
def minus_max(values, row_max):
    """float64 values minus their row's maximum (ordered bits)."""
    return values.to(tl.float64) - from_ordered_bits(row_max).to(tl.float64)


@triton.jit(do_not_specialize_on_alignment=["bounds"])
def _block_max_kernel(
    logits, stride, V, bounds, block_maxes, sums, FILTER: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """Maximum of each block as ordered bits. Clears sums int64 [R, NUM_DIGITS, RADIX], if any."""
    wait_for_launch_before(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_enabled(bounds, row, V, FILTER):
        if sums is not None:
            places = tl.arange(0, NUM_DIGITS * RADIX)
            target = sums + row * (NUM_DIGITS * RADIX) + places
            num_cleared = tl.where(part == 0, NUM_DIGITS * RADIX, 0)
            tl.store(target, tl.zeros_like(places).to(tl.int64), mask=places < num_cleared)
        _, values = load_values(logits, stride, V, row, part, BLOCK)
        tl.store(block_maxes + row * tl.num_programs(1) + part, max_ordered_bits(values))


@triton.jit(do_not_specialize_on_alignment=["bounds"])
def _block_expsum_kernel(
    logits, stride, V, bounds, block_maxes, block_expsums,
    FILTER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_launch_before(PDL)
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if is_enabled(bounds, row, V, FILTER):
        row_max = reduce_block_max(block_maxes, row, count, WIDTH)
        _, values = load_values(logits, stride, V, row, part, BLOCK)
        total = row_max * 0
        if is_finite_row(row_max) & (tl.max(values) > -float("inf")):
            total = tl.sum(exp_fixed_point(minus_max(values, row_max)))
        tl.store(block_expsums + row * count + part, total)


@triton.jit
def _log_sum_exp_kernel(block_maxes, block_expsums, out, count, WIDTH: tl.constexpr, PDL: tl.constexpr):
    wait_for_launch_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    row_max = reduce_block_max(block_maxes, row, count, WIDTH)
    result = float("nan")
    if is_finite_row(row_max):
        total = reduce_block_sum(block_expsums, row, count, WIDTH).to(tl.float64)
        result = (from_ordered_bits(row_max).to(tl.float64) + log(total * FIXED_POINT_UNIT)).to(tl.float32)
    tl.store(out + row, result)


@triton.jit(do_not_specialize=["K"])
def _block_top_ids_kernel(logits, stride, V, block_keys, K, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """block_keys int64 [R, blocks, K]: the K largest keys of each block, in order."""
    wait_for_launch_before(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids, values = load_values(logits, stride, V, row, part, BLOCK)
    left = tl.where(ids < V, sort_keys(ordered_bits(values), ids), NO_KEY)
    for place in range(K):
        first = tl.max(left)
        tl.store(block_keys + (row * tl.num_programs(1) + part) * K + place, first)
        left = tl.where(left == first, NO_KEY, left)


@triton.jit(do_not_specialize=["count", "K"])
def _row_top_ids_kernel(block_keys, out, count, K, WIDTH: tl.constexpr, PDL: tl.constexpr):
    """out int64 [R, K] of block_keys [R, count]"""
    wait_for_launch_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, WIDTH)
    left = tl.load(block_keys + row * count + place, mask=place < count, other=NO_KEY)
    finite = is_finite_row(tl.max(left) >> 31)
    for i in range(K):
        first = tl.max(left)
        tl.store(out + row * K + i, tl.where(finite, key_to_id(first), i))
        left = tl.where(left == first, NO_KEY, left)


@triton.jit
def _rank_bits(
    values, row_max, block_expsums, block_entropies, row, count, FILTER: tl.constexpr, WIDTH: tl.constexpr
):
    """Ordered bits of the quantity that the filter ranks ids by."""
    if FILTER == TYPICAL_P:
        # Mean of (value - maximum), weighted by probability: normalization cancels.
        entropy = reduce_block_sum(block_entropies, row, count, WIDTH).to(tl.float64)
        mean = entropy / reduce_block_sum(block_expsums, row, count, WIDTH).to(tl.float64)
        bits = ordered_bits((-tl.abs(minus_max(values, row_max) - mean)).to(tl.float32))
    else:
        bits = ordered_bits(values)
    return bits


@triton.jit
def _id_weights(values, row_max, FILTER: tl.constexpr):
    if FILTER == TOP_K:
        weights = (values > -float("inf")).to(tl.int64)
    else:
        weights = exp_fixed_point(minus_max(values, row_max))
    return weights


@triton.jit
def _find_prefix(sums, prefixes, bounds, row, num_digits, FILTER: tl.constexpr):
    """First digits of the last kept rank, and the weight needed from ids with these digits.

    Of num_digits digits, the launch before has found all but the last one.
    """
    prefix, need = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if num_digits > 0:
        digits = tl.arange(0, RADIX)
        place = row * NUM_DIGITS + num_digits - 1
        by_digit = tl.load(sums + place * RADIX + digits)
        if num_digits > 1:
            prefix, need = tl.load(prefixes + 2 * place), tl.load(prefixes + 2 * place + 1)
        elif FILTER == TOP_K:
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
    logits, stride, V, p, block_maxes, block_entropies,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """block_entropies int64 [R, blocks]: probability mass times (value - maximum), rounded for each id."""
    wait_for_launch_before(PDL)
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if is_enabled(p, row, V, TYPICAL_P):
        row_max = reduce_block_max(block_maxes, row, count, WIDTH)
        total = row_max * 0
        if is_finite_row(row_max):
            _, values = load_values(logits, stride, V, row, part, BLOCK)
            below = minus_max(values, row_max)
            weights = exp_fixed_point(below)
            below = tl.where(weights > 0, below, 0.0)
            total = tl.sum(round_to_int(weights.to(tl.float64) * below).to(tl.int64))
        tl.store(block_entropies + row * count + part, total)


@triton.jit(do_not_specialize=["index"], do_not_specialize_on_alignment=["bounds", "index"])
def _digit_histogram_kernel(
    logits, stride, V, bounds, block_maxes, block_expsums, block_entropies, sums, prefixes, last_sums, index,
    FILTER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Weights by the next digit: sums int64 [R, NUM_DIGITS, RADIX]; last digit by block: last_sums.

    prefixes int64 [R, NUM_DIGITS, 2]: _find_prefix() for each number of digits.
    """
    wait_for_launch_before(PDL)
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if is_enabled(bounds, row, V, FILTER):
        row_max = reduce_block_max(block_maxes, row, count, WIDTH)
        if is_finite_row(row_max):
            prefix, need = _find_prefix(sums, prefixes, bounds, row, index, FILTER)
            if part == 0:
                known = prefixes + 2 * (row * NUM_DIGITS + index)
                tl.store(known, prefix)
                tl.store(known + 1, need)
            _, values = load_values(logits, stride, V, row, part, BLOCK)
            bits = _rank_bits(values, row_max, block_expsums, block_entropies, row, count, FILTER, WIDTH)
            bits = bits >> (DIGIT_BITS * (NUM_DIGITS - 1 - index))
            matches = (bits >> DIGIT_BITS == prefix) & (values > -float("inf"))
            digits = tl.where(matches, (bits & (RADIX - 1)).to(tl.int32), -1)
            every = tl.arange(0, RADIX)
            by_digit = tl.zeros((RADIX,), tl.int64)
            largest = tl.max(digits)
            if largest >= 0:
                weights = _id_weights(values, row_max, FILTER)
                for digit in range(tl.min(tl.where(matches, digits, RADIX)), largest + 1):
                    digit_sum = tl.sum(tl.where(digits == digit, weights, 0))
                    by_digit = tl.where(every == digit, digit_sum, by_digit)
                target = sums + (row * NUM_DIGITS + index) * RADIX + every
                tl.atomic_add(target, by_digit, mask=by_digit > 0, sem="relaxed")
            if index == NUM_DIGITS - 1:
                tl.store(last_sums + (row * count + part) * RADIX + every, by_digit)


@triton.jit(do_not_specialize_on_alignment=["bounds"])
def _mask_rest_kernel(
    logits, stride, V, bounds, block_maxes, block_expsums, block_entropies, sums, prefixes, last_sums,
    FILTER: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Mask ids after the kept prefix; ids tied at its last rank stay until the weight is reached."""
    wait_for_launch_before(PDL)
    row, part, count = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    if is_enabled(bounds, row, V, FILTER):
        row_max = reduce_block_max(block_maxes, row, count, WIDTH)
        if is_finite_row(row_max):
            last, need = _find_prefix(sums, prefixes, bounds, row, NUM_DIGITS, FILTER)
            ids, values = load_values(logits, stride, V, row, part, BLOCK)
            bits = _rank_bits(values, row_max, block_expsums, block_entropies, row, count, FILTER, WIDTH)
            kept = bits > last
            if tl.max((bits == last).to(tl.int32)) > 0:
                blocks = tl.arange(0, WIDTH)
                places = last_sums + (row * count + blocks) * RADIX + last % RADIX
                tied = tl.load(places, mask=blocks < part, other=0)
                weights = tl.where(bits == last, _id_weights(values, row_max, FILTER), 0)
                before = tl.cumsum(weights) - weights + tl.sum(tied)
                kept = kept | ((bits == last) & (before < need))
            tl.store(logits + row * stride + ids, -float("inf"), mask=(values > -float("inf")) & ~kept)


def launch_options(logits: Tensor, num_warps: int = 8) -> dict[str, bool | int]:
    """Options of all sampling kernels."""
    pdl = launches_dependents(logits.device)
    return {"num_warps": num_warps, "enable_fp_fusion": False, "PDL": pdl, "launch_pdl": pdl}


def num_blocks(logits: Tensor, block: int) -> int:
    """Programs that share a row."""
    return -(-logits.shape[1] // block)


def compute_block_maxes(
    logits: Tensor,
    block: int,
    bounds: Tensor | None = None,
    filter_id: tl.constexpr = NO_FILTER,
    sums: Tensor | None = None,
) -> Tensor:
    """int64 [R, blocks]: maximum of each block as ordered bits, in rows enabled by bounds [R].

    sums  int64 [R, NUM_DIGITS, RADIX], cleared in these rows
    """
    maxes = torch.empty(logits.shape[0], num_blocks(logits, block), dtype=torch.int64, device=logits.device)
    row = logits, logits.stride(0), logits.shape[1], logits if bounds is None else bounds
    _block_max_kernel[maxes.shape](
        *row, maxes, sums, FILTER=filter_id.value, BLOCK=block, **launch_options(logits)
    )
    return maxes


def compute_block_expsums(
    logits: Tensor,
    block: int,
    block_maxes: Tensor,
    bounds: Tensor | None = None,
    filter_id: tl.constexpr = NO_FILTER,
) -> Tensor:
    """int64 [R, blocks]: sum over each block of exp(value - row maximum) in units of 2^-42."""
    expsums = torch.empty_like(block_maxes)
    row = logits, logits.stride(0), logits.shape[1], logits if bounds is None else bounds
    width = triton.next_power_of_2(block_maxes.shape[1])
    _block_expsum_kernel[block_maxes.shape](
        *row, block_maxes, expsums, FILTER=filter_id.value, WIDTH=width, BLOCK=block, **launch_options(logits)
    )
    return expsums


def log_sum_exp(logits: Tensor, block: int) -> Tensor:
    maxes = compute_block_maxes(logits, block)
    expsums = compute_block_expsums(logits, block, maxes)
    out = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    width = triton.next_power_of_2(maxes.shape[1])
    _log_sum_exp_kernel[out.shape](
        maxes, expsums, out, maxes.shape[1], WIDTH=width, **launch_options(logits, num_warps=1)
    )
    return out


def top_ids(logits: Tensor, k: int, max_k: int, block: int) -> Tensor:
    """Ops.top_ids by k <= max_k searches. One kernel serves every k: no request waits for a compiler."""
    shape = logits.shape[0], num_blocks(logits, block)
    keys = torch.empty(*shape, k, dtype=torch.int64, device=logits.device)
    out = torch.empty(shape[0], k, dtype=torch.int64, device=logits.device)
    _block_top_ids_kernel[shape](
        logits, logits.stride(0), logits.shape[1], keys, k, BLOCK=block, **launch_options(logits)
    )
    width = triton.next_power_of_2(shape[1] * max_k)
    _row_top_ids_kernel[shape[:1]](keys, out, shape[1] * k, k, WIDTH=width, **launch_options(logits))
    return out


def mask_all_but_prefix(logits: Tensor, bounds: Tensor, block: int, filter_id: tl.constexpr) -> None:
    """Ops.apply_top_k, apply_top_p or apply_typical_p, for filters TOP_K, TOP_P and TYPICAL_P."""
    num_rows, device = logits.shape[0], logits.device
    sums = torch.empty(num_rows, NUM_DIGITS.value, RADIX.value, dtype=torch.int64, device=device)
    maxes = compute_block_maxes(logits, block, bounds, filter_id, sums)  # clears the rows that need it
    expsums = entropies = maxes  # not read
    grid, width = maxes.shape, triton.next_power_of_2(maxes.shape[1])
    row, options = (logits, logits.stride(0), logits.shape[1]), launch_options(logits)
    if filter_id == TYPICAL_P:
        expsums = compute_block_expsums(logits, block, maxes, bounds, filter_id)
        entropies = torch.empty_like(maxes)
        _entropy_kernel[grid](*row, bounds, maxes, entropies, WIDTH=width, BLOCK=block, **options)
    last_sums = torch.empty(*grid, RADIX.value, dtype=torch.int64, device=device)
    prefixes = torch.empty(num_rows, NUM_DIGITS.value, 2, dtype=torch.int64, device=device)
    operands = *row, bounds, maxes, expsums, entropies, sums, prefixes, last_sums
    sizes = {"FILTER": filter_id.value, "WIDTH": width, "BLOCK": block}
    for index in range(NUM_DIGITS.value):
        _digit_histogram_kernel[grid](*operands, index, **sizes, **options)
    _mask_rest_kernel[grid](*operands, **sizes, **options)
