"""keep_allowed() of `Ops`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.triton.ranks import EXACT, load_values, num_parts

__all__ = ["keep_allowed"]

WORD_BITS: tl.constexpr = tl.constexpr(32)


@triton.jit
def _keep_allowed(logits, stride, V, masks, mask_stride, num_words, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ids, values = load_values(logits, stride, V, row, part, BLOCK)
    place = ids // WORD_BITS
    words = tl.load(masks + row * mask_stride + place, mask=(ids < V) & (place < num_words), other=0)
    allowed = ((words >> (ids % WORD_BITS)) & 1) != 0
    tl.store(logits + row * stride + ids, -float("inf"), mask=(ids < V) & (values < float("inf")) & ~allowed)


def keep_allowed(logits: Tensor, masks: Tensor, block: int) -> None:
    """As `Ops.keep_allowed`."""
    _keep_allowed[(logits.shape[0], num_parts(logits, block))](
        logits, logits.stride(0), logits.shape[1], masks, masks.stride(0), masks.shape[1], BLOCK=block, **EXACT
    )
