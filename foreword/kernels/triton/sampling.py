"""Sampling on the GPU: the bits of `reference.sampling`, without a sort or a synchronization.

Launches depend on shapes alone. Filters take a parameter for each row; programs of a neutral one (k =
vocabulary size, p = 1, min_p = 0, temperature 1) end at once. Filters whose bound is no value are in topk.py.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.reference import sampling as reference
from foreword.kernels.reference.sampling import ReferenceSampling
from foreword.kernels.triton.philox import (
    WORDS_PER_BLOCK,
    max_noise,
    noise,
    random_words,
    uniform,
    words_of_ids,
)
from foreword.kernels.triton.portable_math import exp_fixed_point, log, round_to_int
from foreword.kernels.triton.topk import (
    MASKED_BITS,
    MIN_P,
    TOP_K,
    TOP_P,
    TYPICAL_P,
    XTC,
    compute_block_expsums,
    compute_block_maxes,
    from_ordered_bits,
    is_enabled,
    is_finite_row,
    key_to_id,
    launch_options,
    load_values,
    log_sum_exp,
    mask_all_but_prefix,
    max_ordered_bits,
    minus_max,
    num_blocks,
    ordered_bits,
    reduce_block_max,
    reduce_block_sum,
    sort_keys,
    top_ids,
    wait_for_launch_before,
)

IDS_PER_PROGRAM = 256  # ids of a program per iteration, in kernels over lists of ids or whole blocks
MAX_TOP_IDS = 64  # ids found by repeated search; more are sorted
MAX_PROGRAMS = 8  # per row in kernels over lists of ids; more ids take more iterations

SIGMA_UNITS: tl.constexpr = tl.constexpr(reference.SIGMA_UNITS)
SIGMA_MAX_DISTANCE: tl.constexpr = tl.constexpr(reference.SIGMA_MAX_DISTANCE)
WORD_BITS: tl.constexpr = tl.constexpr(reference.WORD_BITS)
MAX_KEY: tl.constexpr = tl.constexpr(2**63 - 1)  # above every sort key
MIN_NORMAL: tl.constexpr = tl.constexpr(torch.finfo(torch.float64).tiny)


@triton.jit
def _apply_mask_kernel(
    logits, stride, V, masks, mask_stride, num_words, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_launch_before(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids, values = load_values(logits, stride, V, row, part, BLOCK)
    place = ids // WORD_BITS
    words = tl.load(masks + row * mask_stride + place, mask=(ids < V) & (place < num_words), other=0)
    allowed = ((words >> (ids % WORD_BITS)) & 1) != 0
    tl.store(logits + row * stride + ids, -float("inf"), mask=(ids < V) & (values < float("inf")) & ~allowed)


@triton.jit
def _add_bias_kernel(logits, stride, V, starts, ids, biases, IDS: tl.constexpr, PDL: tl.constexpr):
    wait_for_launch_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(starts + row + 1)
    for first in range(tl.load(starts + row) + tl.program_id(1) * IDS, end, tl.num_programs(1) * IDS):
        place = first + tl.arange(0, IDS)
        token_ids = tl.load(ids + place, mask=place < end, other=V)
        inside = (token_ids >= 0) & (token_ids < V)
        values = tl.load(logits + row * stride + token_ids, mask=inside, other=0.0)
        added = values + tl.load(biases + place, mask=inside, other=0.0)
        tl.store(logits + row * stride + token_ids, added, mask=inside)


@triton.jit
def _repetition_penalty_kernel(
    logits, stride, V, starts, ids, penalties, IDS: tl.constexpr, PDL: tl.constexpr
):
    wait_for_launch_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    end, penalty = tl.load(starts + row + 1), tl.load(penalties + row)
    for first in range(tl.load(starts + row) + tl.program_id(1) * IDS, end, tl.num_programs(1) * IDS):
        place = first + tl.arange(0, IDS)
        token_ids = tl.load(ids + place, mask=place < end, other=V)
        inside = (token_ids >= 0) & (token_ids < V)
        values = tl.load(logits + row * stride + token_ids, mask=inside, other=0.0)
        penalized = tl.where(values < 0, values * penalty, tl.div_rn(values, tl.zeros_like(values) + penalty))
        tl.store(logits + row * stride + token_ids, penalized, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["temperatures"])
def _temperature_kernel(logits, stride, V, temperatures, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_launch_before(PDL)
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
def _min_p_kernel(
    logits, stride, V, p, block_maxes, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    wait_for_launch_before(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if is_enabled(p, row, V, MIN_P):
        row_max = reduce_block_max(block_maxes, row, tl.num_programs(1), WIDTH)
        if is_finite_row(row_max):
            share = tl.load(p + row)
            threshold = log(tl.where(share > MIN_NORMAL, share, MIN_NORMAL))
            _mask_below(logits, stride, V, row, part, row_max, threshold, BLOCK)


@triton.jit
def _moments_kernel(
    logits, stride, V, block_maxes, counts, sums, squares,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Count, sum and sum of squares of (value - maximum) over each block, in units of 1 / SIGMA_UNITS."""
    wait_for_launch_before(PDL)
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
    logits, stride, V, n, block_maxes, counts, sums, squares,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_launch_before(PDL)
    row, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row_max = reduce_block_max(block_maxes, row, parts, WIDTH)
    if is_finite_row(row_max):
        # Both means by one division: the compiler of Triton 3.6 spills a register around a second one.
        is_first = tl.arange(0, 2) == 0
        sum_1 = reduce_block_sum(sums, row, parts, WIDTH)
        sum_2 = reduce_block_sum(squares, row, parts, WIDTH)
        count = reduce_block_sum(counts, row, parts, WIDTH).to(tl.float64)
        means = tl.where(is_first, sum_1, sum_2).to(tl.float64) / count
        mean = tl.sum(tl.where(is_first, means, 0.0))
        variance = tl.sum(tl.where(is_first, 0.0, means)) - mean * mean
        deviation = tl.sqrt(tl.where(variance > 0, variance, 0.0)) * (1 / SIGMA_UNITS)
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
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """MAX_KEY minus the smallest key of each block that reaches the threshold; 0 if there is none."""
    wait_for_launch_before(PDL)
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
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_launch_before(PDL)
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
def _block_best_kernel(
    logits, stride, V, seeds, positions, greedy, block_maxes, best_ids, rivals,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The id of each block with the largest upper bound of its score, and the largest bound of its others."""
    wait_for_launch_before(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids, values = load_values(logits, stride, V, row, part, BLOCK)
    block_max = max_ordered_bits(values)
    place = row * tl.num_programs(1) + part
    tl.store(block_maxes + place, block_max)
    bounds = values
    noisy = tl.load(greedy + row) == 0
    if (block_max > MASKED_BITS) & noisy:
        first_block = part * (BLOCK // WORDS_PER_BLOCK)
        words = random_words(first_block, tl.load(seeds + row), tl.load(positions + row), BLOCK)
        bounds = values + max_noise(words)
    _, index = tl.max(bounds, 0, return_indices=True)
    best = part * BLOCK + index
    tl.store(best_ids + place, best)
    rival = -float("inf")  # a greedy row's bounds are its scores
    if noisy:
        rival = tl.max(tl.where(ids == best, -float("inf"), bounds))
    tl.store(rivals + place, rival)


@triton.jit(do_not_specialize_on_alignment=["seeds", "positions", "greedy"])
def _row_argmax_kernel(
    logits, stride, V, seeds, positions, greedy, block_maxes, best_ids, rivals, out, count,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, IDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Best score of each row. A score is no larger than its bound: rounding a sum is monotonic.

    So an id that is not the best of its block can win only if the block's rival bound reaches the best score
    found; only then are all scores of the block computed.
    """
    wait_for_launch_before(PDL)
    row = tl.program_id(0).to(tl.int64)
    token = tl.full((), -1, tl.int64)
    if is_finite_row(reduce_block_max(block_maxes, row, count, WIDTH)):
        seed, position, noisy = tl.load(seeds + row), tl.load(positions + row), tl.load(greedy + row) == 0
        blocks = tl.arange(0, WIDTH)
        ids = tl.load(best_ids + row * count + blocks, mask=blocks < count, other=V)
        scores = tl.load(logits + row * stride + ids, mask=ids < V, other=-float("inf"))
        if noisy:
            scores = scores + noise(words_of_ids(ids, seed, position))
        best = tl.max(sort_keys(ordered_bits(scores), ids))
        bounds = tl.load(rivals + row * count + blocks, mask=blocks < count, other=-float("inf"))
        if tl.max(bounds) >= from_ordered_bits(best >> 31):
            for part in range(count):
                if tl.load(rivals + row * count + part) >= from_ordered_bits(best >> 31):
                    for first in range(part * BLOCK, (part + 1) * BLOCK, IDS):
                        all_ids, values = load_values(logits, stride, V, row, first // IDS, IDS)
                        words = random_words(first // WORDS_PER_BLOCK, seed, position, IDS)
                        keys = sort_keys(ordered_bits(values + noise(words)), all_ids)
                        best = tl.maximum(best, tl.max(keys))
        token = key_to_id(best)
    tl.store(out + row, token)


class TritonSampling(ReferenceSampling):
    """Mixin of TritonOps: operations on logits float32 [R, V] with contiguous rows."""

    sampling_block = 2048  # ids of one program, a power of two; no result depends on it

    def log_sum_exp(self, logits: Tensor) -> Tensor:
        _check_logits(logits)
        return log_sum_exp(logits, self.sampling_block)

    def top_ids(self, logits: Tensor, k: int) -> Tensor:
        _check_logits(logits)
        assert 0 <= k <= logits.shape[1]
        if not 0 < k <= MAX_TOP_IDS:
            return super().top_ids(logits, k)
        return top_ids(logits, k, MAX_TOP_IDS, self.sampling_block)

    def apply_mask(self, logits: Tensor, masks: Tensor) -> None:
        assert masks.dtype == torch.int32 and masks.dim() == 2 and masks.shape[0] == logits.shape[0]
        masks = masks if masks.stride(1) == 1 else masks.contiguous()
        self._launch(_apply_mask_kernel, logits, masks, masks.stride(0), masks.shape[1])

    def add_bias(self, logits: Tensor, starts: Tensor, ids: Tensor, biases: Tensor) -> None:
        assert biases.dtype == torch.float32 and biases.shape == ids.shape
        _launch_over_ids(_add_bias_kernel, logits, starts, ids, biases.contiguous())

    def apply_repetition_penalty(
        self, logits: Tensor, starts: Tensor, ids: Tensor, penalties: Tensor
    ) -> None:
        penalties = _per_row(penalties, logits, torch.float32)
        _launch_over_ids(_repetition_penalty_kernel, logits, starts, ids, penalties)

    def apply_temperature(self, logits: Tensor, temperatures: Tensor) -> None:
        self._launch(_temperature_kernel, logits, _per_row(temperatures, logits, torch.float32))

    def apply_top_n_sigma(self, logits: Tensor, n: Tensor) -> None:
        n = _per_row(n, logits, torch.float64)
        maxes = compute_block_maxes(logits, self.sampling_block)
        moments = [torch.empty_like(maxes) for _ in range(3)]
        width = triton.next_power_of_2(maxes.shape[1])
        self._launch(_moments_kernel, logits, maxes, *moments, WIDTH=width)
        self._launch(_top_n_sigma_kernel, logits, n, maxes, *moments, WIDTH=width)

    def apply_top_k(self, logits: Tensor, k: Tensor) -> None:
        _check_logits(logits)
        mask_all_but_prefix(logits, _per_row(k, logits, torch.int64), self.sampling_block, TOP_K)

    def apply_top_p(self, logits: Tensor, p: Tensor) -> None:
        _check_logits(logits)
        mask_all_but_prefix(logits, _per_row(p, logits, torch.float64), self.sampling_block, TOP_P)

    def apply_typical_p(self, logits: Tensor, p: Tensor) -> None:
        _check_logits(logits)
        mask_all_but_prefix(logits, _per_row(p, logits, torch.float64), self.sampling_block, TYPICAL_P)

    def apply_min_p(self, logits: Tensor, p: Tensor) -> None:
        p = _per_row(p, logits, torch.float64)
        maxes = compute_block_maxes(logits, self.sampling_block, p, MIN_P)
        self._launch(_min_p_kernel, logits, p, maxes, WIDTH=triton.next_power_of_2(maxes.shape[1]))

    def apply_xtc(
        self, logits: Tensor, seeds: Tensor, positions: Tensor, probabilities: Tensor, thresholds: Tensor
    ) -> None:
        keys = [_per_row(values, logits, torch.int64) for values in (seeds, positions)]
        bounds = [_per_row(values, logits, torch.float64) for values in (probabilities, thresholds)]
        maxes = compute_block_maxes(logits, self.sampling_block, bounds[0], XTC)
        expsums = compute_block_expsums(logits, self.sampling_block, maxes, bounds[0], XTC)
        per_block, width = (maxes, expsums, torch.empty_like(maxes)), triton.next_power_of_2(maxes.shape[1])
        for kernel in (_xtc_last_kernel, _xtc_kernel):
            self._launch(kernel, logits, *keys, *bounds, *per_block, WIDTH=width)

    def sample(self, logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor) -> Tensor:
        """Two launches: float32 bounds over blocks, then float64 noise of the best id of each block."""
        seeds, positions = (_per_row(values, logits, torch.int64) for values in (seeds, positions))
        per_row = seeds, positions, _per_row(greedy, logits, torch.bool).view(torch.uint8)
        block, count = self.sampling_block, num_blocks(logits, self.sampling_block)
        maxes, best_ids, rivals = (
            torch.empty(len(logits), count, dtype=dtype, device=logits.device)
            for dtype in (torch.int64, torch.int32, torch.float32)
        )
        self._launch(_block_best_kernel, logits, *per_row, maxes, best_ids, rivals)
        out = torch.empty_like(seeds)
        sizes = {"WIDTH": triton.next_power_of_2(count), "BLOCK": block, "IDS": min(block, IDS_PER_PROGRAM)}
        _row_argmax_kernel[out.shape](
            *(logits, logits.stride(0), logits.shape[1], *per_row, maxes, best_ids, rivals, out, count),
            **sizes,
            **launch_options(logits, num_warps=4),
        )
        return out

    def _launch(self, kernel: Any, logits: Tensor, *operands: Tensor | int, **sizes: int) -> None:
        """Launch a kernel with a program for each block of each row."""
        _check_logits(logits)
        kernel[len(logits), num_blocks(logits, self.sampling_block)](
            *(logits, logits.stride(0), logits.shape[1], *operands),
            BLOCK=self.sampling_block,
            **sizes,
            **launch_options(logits),
        )


def _launch_over_ids(kernel: Any, logits: Tensor, starts: Tensor, ids: Tensor, values: Tensor) -> None:
    """Launch a kernel over the ids of each row."""
    _check_logits(logits)
    assert starts.dtype == ids.dtype == torch.int64
    assert starts.shape == (logits.shape[0] + 1,) and ids.dim() == 1
    kernel[len(logits), min(MAX_PROGRAMS, -(-len(ids) // IDS_PER_PROGRAM))](
        *(logits, logits.stride(0), logits.shape[1], starts.contiguous(), ids.contiguous(), values),
        IDS=IDS_PER_PROGRAM,
        **launch_options(logits, num_warps=4),
    )


def _check_logits(logits: Tensor) -> None:
    """Check the dtype and layout that the kernels assume."""
    assert logits.dtype == torch.float32 and logits.dim() == 2
    assert logits.stride(1) == 1 or logits.shape[1] == 1


def _per_row(values: Tensor, logits: Tensor, dtype: torch.dtype) -> Tensor:
    assert values.dtype == dtype and values.shape == logits.shape[:1], f"wanted {dtype} [{logits.shape[0]}]"
    return values.contiguous()
