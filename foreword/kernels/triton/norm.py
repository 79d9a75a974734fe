"""Root mean square norm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["rms_norm"]

VALUES_PER_PROGRAM = 2048  # rows narrower than this share a program
VALUES_PER_WARP = 512
MAX_WARPS = 16


@triton.jit(do_not_specialize=["num_rows"])
def _rms_norm_kernel(
    x, weight, out, num_rows, eps, outer, inner,
    ROWS_INSIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row r of x lies at r // ROWS_INSIDE * outer + r % ROWS_INSIDE * inner."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    places = row // ROWS_INSIDE * outer + row % ROWS_INSIDE * inner
    values = tl.load(x + places[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=column < WIDTH, other=0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(values * values, 1) / WIDTH + eps)
    result = values * inverse[:, None] * scale[None, :]
    tl.store(out + row[:, None] * WIDTH + column[None, :], result.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T, ..., H], weight float32 [H] -> [T, ..., H].

    A program has as many rows as the width says, so the order in which a row is summed follows from the width alone.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.dim() > 3:
        x = x.reshape(x.shape[0], -1, x.shape[-1])
    width = x.shape[-1]
    assert x.stride(-1) == 1 and weight.is_contiguous()
    inside, inner = (x.shape[1], x.stride(1)) if x.dim() == 3 else (1, 0)
    num_rows = x.shape[0] * inside
    if not num_rows:
        return out
    block = triton.next_power_of_2(width)
    rows = max(VALUES_PER_PROGRAM // block, 1)
    _rms_norm_kernel[(triton.cdiv(num_rows, rows),)](
        x,
        weight,
        out,
        num_rows,
        eps,
        x.stride(0),
        inner,
        ROWS_INSIDE=inside,
        WIDTH=width,
        ROWS=rows,
        BLOCK=block,
        num_warps=min(max(rows * block // VALUES_PER_WARP, 1), MAX_WARPS),
        enable_fp_fusion=False,
    )
    return out
