"""Verification of drafts in one launch: `foreword.executor.decode_slots` as a kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["count_accepted"]


@triton.jit
def _count_accepted_kernel(
    sampled, sampled_stride, draft_ids, draft_stride, num_draft_tokens, out, WIDTH: tl.constexpr
):
    lane = tl.program_id(0).to(tl.int64)
    length = tl.load(num_draft_tokens + lane)
    place = tl.arange(0, WIDTH)
    drafted = place < length
    guesses = tl.load(draft_ids + lane * draft_stride + place, mask=drafted, other=-1)
    samples = tl.load(sampled + lane * sampled_stride + place, mask=drafted, other=-1)
    tl.store(out + lane, tl.min(tl.where(guesses == samples, length, place)))


def count_accepted(sampled: Tensor, draft_ids: Tensor, num_draft_tokens: Tensor) -> Tensor:
    """How many leading drafted tokens equal the samples.

    sampled    int64 [L, 1 + D], column j follows drafts[:, :j]
    drafts     int64 [L, D]; what lies beyond num_draft does not count
    num_draft  int64 [L], at most D
    Returns int64 [L].
    """
    out = torch.empty_like(num_draft_tokens)
    width = triton.next_power_of_2(max(1, draft_ids.shape[1]))
    _count_accepted_kernel[out.shape](
        sampled,
        sampled.stride(0),
        draft_ids,
        draft_ids.stride(0),
        num_draft_tokens,
        out,
        WIDTH=width,
        num_warps=1,
    )
    return out
