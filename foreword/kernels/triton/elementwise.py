"""Values that are computed each for itself."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.triton.activation import activate

__all__ = ["gated_act", "softcap"]

BLOCK = 1024
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _gated_act_kernel(gate_up, out, stride, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (activate(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask=inside)


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
    series = small * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0)))))
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
            gate_up, out, gate_up.stride(0), WIDTH=width, ACTIVATION=activation, BLOCK=BLOCK, enable_fp_fusion=False
        )
    return out


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap), of any shape"""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _softcap_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, cap, x.numel(), BLOCK=BLOCK, enable_fp_fusion=False)
    return out
