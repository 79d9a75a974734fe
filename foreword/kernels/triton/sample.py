"""sample() of `Ops`: two launches, the best of each part of a row and the best of those."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.triton.philox import WORDS_PER_BLOCK, noise, random_words
from foreword.kernels.triton.ranks import LAUNCH_OPTIONS, MASKED_BITS, sort_keys, key_to_id, is_finite_row, load_values, num_blocks, reduce_block_max, ordered_bits

__all__ = ["sample"]


@triton.jit(do_not_specialize_on_alignment=["seeds", "positions", "greedy"])
def _block_argmax_kernel(logits, stride, V, seeds, positions, greedy, block_maxes, best_keys, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids, values = load_values(logits, stride, V, row, part, BLOCK)
    scores = ordered_bits(values)
    peak = tl.max(scores)
    tl.store(block_maxes + row * tl.num_programs(1) + part, peak)
    if (peak > MASKED_BITS) & (tl.load(greedy + row) == 0):
        words = random_words(part * (BLOCK // WORDS_PER_BLOCK), tl.load(seeds + row), tl.load(positions + row), BLOCK)
        scores = ordered_bits(values + noise(words))
    tl.store(best_keys + row * tl.num_programs(1) + part, tl.max(sort_keys(scores, ids)))


@triton.jit
def _row_argmax_kernel(block_maxes, best_keys, out, count, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    found = key_to_id(reduce_block_max(best_keys, row, count, WIDTH))
    tl.store(out + row, tl.where(is_finite_row(reduce_block_max(block_maxes, row, count, WIDTH)), found, -1))


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor, block: int) -> Tensor:
    """As `Ops.sample`."""
    peaks = torch.empty(logits.shape[0], num_blocks(logits, block), dtype=torch.int64, device=logits.device)
    best, out = torch.empty_like(peaks), torch.empty_like(seeds)
    _block_argmax_kernel[peaks.shape](
        logits, logits.stride(0), logits.shape[1], seeds, positions, greedy.view(torch.uint8), peaks, best, BLOCK=block, **LAUNCH_OPTIONS
    )
    width = triton.next_power_of_2(peaks.shape[1])
    _row_argmax_kernel[(peaks.shape[0],)](peaks, best, out, peaks.shape[1], WIDTH=width, num_warps=1)
    return out
