"""sample() of `Ops`: two launches, the best of each part of a row and the best of those."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.triton.philox import LANES, noise, token_words
from foreword.kernels.triton.ranks import EXACT, MASKED_RANK, entries, entry_id, is_sound, load_values, num_parts, part_max, ranks

__all__ = ["sample"]


@triton.jit(do_not_specialize_on_alignment=["seeds", "positions", "greedy"])
def _best_of_parts(logits, stride, V, seeds, positions, greedy, peaks, best, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids, values = load_values(logits, stride, V, row, part, BLOCK)
    scores = ranks(values)
    peak = tl.max(scores)
    tl.store(peaks + row * tl.num_programs(1) + part, peak)
    if (peak > MASKED_RANK) & (tl.load(greedy + row) == 0):
        words = token_words(part * (BLOCK // LANES), tl.load(seeds + row), tl.load(positions + row), BLOCK)
        scores = ranks(values + noise(words))
    tl.store(best + row * tl.num_programs(1) + part, tl.max(entries(scores, ids)))


@triton.jit
def _best_of_rows(peaks, best, out, count, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    found = entry_id(part_max(best, row, count, WIDTH))
    tl.store(out + row, tl.where(is_sound(part_max(peaks, row, count, WIDTH)), found, -1))


def sample(logits: Tensor, seeds: Tensor, positions: Tensor, greedy: Tensor, block: int) -> Tensor:
    """As `Ops.sample`."""
    peaks = torch.empty(logits.shape[0], num_parts(logits, block), dtype=torch.int64, device=logits.device)
    best, out = torch.empty_like(peaks), torch.empty_like(seeds)
    _best_of_parts[peaks.shape](
        logits, logits.stride(0), logits.shape[1], seeds, positions, greedy.view(torch.uint8), peaks, best, BLOCK=block, **EXACT
    )
    width = triton.next_power_of_2(peaks.shape[1])
    _best_of_rows[(peaks.shape[0],)](peaks, best, out, peaks.shape[1], WIDTH=width, num_warps=1)
    return out
