"""Values that are computed each for itself.

Activations as device functions: float32 in, float32 out.

The kernel of the embedding: rows out of a packed weight.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.triton.gemm_pack import fp16_from_bits, unpack_word, values_per_word

__all__ = ["activate", "embed_kernel", "gated_act", "softcap"]

SQRT_HALF = tl.constexpr(0.7071067811865476)
TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)


@triton.jit
def activate(x, NAME: tl.constexpr):
    """NAME is "silu", "gelu" or "gelu_tanh" (of the reference: the error function, and what approximates it)."""
    if NAME == "silu":
        return x * _sigmoid(x)
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    else:
        tl.static_assert(NAME == "gelu_tanh")
        # (1 + tanh z) / 2 is the sigmoid of 2z.
        return x * _sigmoid((x + 0.044715 * x * x * x) * TWICE_SQRT_2_OVER_PI)


@triton.jit
def _sigmoid(x):
    """Without overflow on either side."""
    decay = tl.exp(-tl.abs(x))
    return tl.where(x < 0, decay, 1.0) / (1.0 + decay)


BLOCK = 1024
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _gated_act_kernel(
    gate_up, out, stride, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out + row * WIDTH + column, (activate(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask=inside
    )


@triton.jit(do_not_specialize=["size"])
def _softcap_kernel(x, out, cap, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    values = tl.load(x + place, mask=inside, other=0.0)
    tl.store(out + place, (cap * _tanh(values.to(tl.float32) / cap)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tanh(x):
    """By exp(-2 |x|), and by its series near 0, where that would cancel."""
    magnitude = tl.abs(x)
    small = tl.where(magnitude < 0.25, x, 0.0)
    square = small * small
    series = small * (
        1.0
        + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0))))
    )
    decay = tl.exp2(magnitude * (-2.0 * LOG2_E))
    by_exp = (1.0 - decay) / (1.0 + decay)
    return tl.where(magnitude < 0.25, series, tl.where(x < 0, -by_exp, by_exp))


def gated_act(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [T, 2I] -> [T, I]"""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        _gated_act_kernel[num_rows, triton.cdiv(width, BLOCK)](
            gate_up,
            out,
            gate_up.stride(0),
            WIDTH=width,
            ACTIVATION=activation,
            BLOCK=BLOCK,
            enable_fp_fusion=False,
        )
    return out


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), of any shape"""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _softcap_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            x, out, cap, x.numel(), BLOCK=BLOCK, enable_fp_fusion=False
        )
    return out


@triton.jit
def embed_kernel(
    token_ids,
    w,
    scales,
    out,
    K,
    BLOCKS,
    scale,
    FORMAT: tl.constexpr,
    FLOAT8: tl.constexpr,
    BK: tl.constexpr,
    BLOCKS_PER_PROGRAM: tl.constexpr,
):
    """out[t, :K] = row ids[t] of w, times its scales and `factor` in float32. Programs: [T, BLOCKS / TOGETHER]."""
    values: tl.constexpr = values_per_word(FORMAT)
    width: tl.constexpr = BK // values
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(token_ids + t)
    blocks = tl.program_id(1) * BLOCKS_PER_PROGRAM + tl.arange(0, BLOCKS_PER_PROGRAM)
    inside = (blocks < BLOCKS)[:, None]
    place = row // 64 * BLOCKS + blocks  # int64
    k = tl.arange(0, width)
    words = tl.load(w + (place * (64 * width) + row % 64 * width)[:, None] + k[None, :], mask=inside, other=0)
    for j in tl.static_range(values):
        value = unpack_word(words, j, FORMAT, FLOAT8, tl.float32).to(tl.float32)
        if FORMAT == "int4" or FORMAT == "q8_0":
            pair = tl.load(
                scales + place * (32 * values) + 64 * (j // 2) + row % 64, mask=blocks < BLOCKS, other=0
            )
            value *= fp16_from_bits(pair, j % 2)[:, None]
        elif FORMAT != "dense":
            value *= tl.load(scales + row)
        columns = (blocks * BK + width * j)[:, None] + k[None, :]
        tl.store(out + t * K + columns, (value * scale).to(out.dtype.element_ty), mask=columns < K)
