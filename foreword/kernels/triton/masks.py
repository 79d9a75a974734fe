"""keep_allowed() of `Ops`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.triton.ranks import LAUNCH_OPTIONS, load_values, num_blocks

__all__ = ["apply_mask"]

WORD_BITS: tl.constexpr = tl.constexpr(32)


@triton.jit
def _apply_mask_kernel(logits, stride, V, masks, mask_stride, num_words, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids, values = load_values(logits, stride, V, row, part, BLOCK)
    place = ids // WORD_BITS
    words = tl.load(masks + row * mask_stride + place, mask=(ids < V) & (place < num_words), other=0)
    allowed = ((words >> (ids % WORD_BITS)) & 1) != 0
    tl.store(logits + row * stride + ids, -float("inf"), mask=(ids < V) & (values < float("inf")) & ~allowed)


def apply_mask(logits: Tensor, masks: Tensor, block: int) -> None:
    """As `Ops.keep_allowed`."""
    _apply_mask_kernel[(logits.shape[0], num_blocks(logits, block))](
        logits, logits.stride(0), logits.shape[1], masks, masks.stride(0), masks.shape[1], BLOCK=block, **LAUNCH_OPTIONS
    )
