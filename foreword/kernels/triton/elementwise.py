"""Row-wise operations: activations, softcap, norms, and the embedding of a packed weight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foreword.kernels.ops import NO_ALPHAS
from foreword.kernels.triton.gemm_pack import (
    get_scale,
    get_zero,
    has_zeros,
    scale_words,
    unpack_word,
    values_per_word,
)
from foreword.kernels.triton.variants import launches_dependents

BLOCK = 1024  # values of a program of gated_act() and softcap()
NORM_VALUES_PER_PROGRAM = 2048  # narrower rows share a program
NORM_VALUES_PER_WARP = 512
NORM_MAX_WARPS = 16
LOG2_E = tl.constexpr(1.4426950408889634)

SQRT_HALF = tl.constexpr(0.7071067811865476)
TWICE_SQRT_2_OVER_PI = tl.constexpr(1.5957691216057308)
SWIGLU_LIMIT = tl.constexpr(7.0)
SWIGLU_ALPHA = tl.constexpr(1.702)


@triton.jit
def activate_gate(gate, up, NAME: tl.constexpr):
    """Activated gate times up, float32; NAME as in Ops.gated_act."""
    if NAME == "gpt_oss":
        # NaN stays: min and max would return the limit.
        gate = tl.where(gate > SWIGLU_LIMIT, SWIGLU_LIMIT, gate)
        up = tl.where(up > SWIGLU_LIMIT, SWIGLU_LIMIT, tl.where(up < -SWIGLU_LIMIT, -SWIGLU_LIMIT, up))
        return gate * sigmoid(gate * SWIGLU_ALPHA) * (up + 1.0)
    else:
        return _activate(gate, NAME) * up


@triton.jit
def _activate(x, NAME: tl.constexpr):
    """float32 -> float32; NAME is "silu", "gelu" (by the error function), "gelu_tanh" or "relu2"."""
    if NAME == "silu":
        return x * sigmoid(x)
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * SQRT_HALF))
    elif NAME == "relu2":
        above = tl.where(x < 0, 0.0, x)  # NaN stays
        return above * above
    else:
        tl.static_assert(NAME == "gelu_tanh")
        # (1 + tanh z) / 2 is the sigmoid of 2z.
        return x * sigmoid((x + 0.044715 * x * x * x) * TWICE_SQRT_2_OVER_PI)


@triton.jit
def sigmoid(x):
    """Sigmoid without overflow on either side."""
    decay = tl.exp(-tl.abs(x))
    return tl.where(x < 0, decay, 1.0) / (1.0 + decay)


@triton.jit
def _gated_act_kernel(
    gate_up, out, stride, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(gate_up + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    result = activate_gate(gate, up, ACTIVATION).to(out.dtype.element_ty)
    tl.store(out + row * WIDTH + column, result, mask=inside)


@triton.jit
def _act_kernel(
    x, out, stride, alpha, beta, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """alpha, beta: Ops.act's alphas."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "xielu":
        result = tl.where(values > 0, alpha * values * values, beta * _exp_tail(values)) + 0.5 * values
    else:
        result = _activate(values, ACTIVATION)
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _exp_tail(x):
    """e^x - 1 - x for x <= 0; near 0, where that would cancel, by its series."""
    series = 1.0 / 5040.0 + x * (1.0 / 40320.0 + x * (1.0 / 362880.0))
    series = 1.0 / 24.0 + x * (1.0 / 120.0 + x * (1.0 / 720.0 + x * series))
    series = x * x * (0.5 + x * (1.0 / 6.0 + x * series))
    return tl.where(x < -0.5, tl.exp(x) - 1.0 - x, series)


@triton.jit
def _scale_by_sigmoid_kernel(x, gate, out, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    values = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    result = values * sigmoid(tl.load(gate + row).to(tl.float32))
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _gate_kernel(
    x, gate, out, x_stride, gate_stride, WIDTH: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    factor = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "sigmoid":
        factor = sigmoid(factor)
    elif ACTIVATION != "none":
        factor = _activate(factor, ACTIVATION)
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + column, (values * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["size"])
def _add_scaled_kernel(a, b, out, scale, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    total = tl.load(a + place, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(b + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, (total * scale).to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["size"])
def _softcap_kernel(x, out, cap, size, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    values = tl.load(x + place, mask=inside, other=0.0)
    tl.store(out + place, (cap * _tanh(values.to(tl.float32) / cap)).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _tanh(x):
    """tanh by exp(-2 |x|); near 0, where that would cancel, by its series."""
    magnitude = tl.abs(x)
    small = tl.where(magnitude < 0.25, x, 0.0)
    square = small * small
    series = square * (2.0 / 15.0 + square * (-17.0 / 315.0 + square * (62.0 / 2835.0)))
    series = small * (1.0 + square * (-1.0 / 3.0 + series))
    decay = tl.exp2(magnitude * (-2.0 * LOG2_E))
    by_exp = (1.0 - decay) / (1.0 + decay)
    return tl.where(magnitude < 0.25, series, tl.where(x < 0, -by_exp, by_exp))


def gated_act(gate_up: Tensor, activation: str) -> Tensor:
    """gate_up [T, 2I] -> [T, I]"""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        operands, options = (gate_up, out, gate_up.stride(0)), {"BLOCK": BLOCK, "enable_fp_fusion": False}
        grid = num_rows, triton.cdiv(width, BLOCK)
        _gated_act_kernel[grid](*operands, WIDTH=width, ACTIVATION=activation, **options)
    return out


def act(x: Tensor, activation: str, alphas: tuple[float, float] = NO_ALPHAS) -> Tensor:
    """Ops.act"""
    assert x.stride(1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, width = x.shape
    if num_rows:
        options = {"WIDTH": width, "ACTIVATION": activation, "BLOCK": BLOCK, "enable_fp_fusion": False}
        _act_kernel[num_rows, triton.cdiv(width, BLOCK)](x, out, x.stride(0), *alphas, **options)
    return out


def scale_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Ops.scale_by_sigmoid"""
    x, (num_rows, width) = x.contiguous(), x.shape
    out = torch.empty_like(x)
    if num_rows:
        grid = num_rows, triton.cdiv(width, BLOCK)
        operands = x, gate.contiguous(), out
        _scale_by_sigmoid_kernel[grid](*operands, WIDTH=width, BLOCK=BLOCK, enable_fp_fusion=False)
    return out


def gate(x: Tensor, gate: Tensor, activation: str) -> Tensor:
    """Ops.gate"""
    assert x.shape == gate.shape and x.stride(1) == gate.stride(1) == 1
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    num_rows, width = x.shape
    if num_rows:
        operands = x, gate, out, x.stride(0), gate.stride(0)
        options = {"WIDTH": width, "ACTIVATION": activation, "BLOCK": BLOCK, "enable_fp_fusion": False}
        _gate_kernel[num_rows, triton.cdiv(width, BLOCK)](*operands, **options)
    return out


def add_scaled(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Ops.add"""
    a, b = a.contiguous(), b.contiguous()
    out = torch.empty_like(a)
    if size := a.numel():
        grid = (triton.cdiv(size, BLOCK),)
        _add_scaled_kernel[grid](a, b, out, scale, size, BLOCK=BLOCK, enable_fp_fusion=False)
    return out


def softcap(x: Tensor, cap: float) -> Tensor:
    """x of any shape"""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        _softcap_kernel[(triton.cdiv(x.numel(), BLOCK),)](
            x, out, cap, x.numel(), BLOCK=BLOCK, enable_fp_fusion=False
        )
    return out


@triton.jit
def embed_kernel(
    token_ids, w, scales, out, K, BLOCKS, scale,
    FORMAT: tl.constexpr, BK: tl.constexpr, BLOCKS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """out[t, :K] = row token_ids[t] of w times its scales and `scale`, in float32; grid (T, block groups)."""
    values: tl.constexpr = values_per_word(FORMAT)
    width: tl.constexpr = BK // values
    t = tl.program_id(0).to(tl.int64)
    row = tl.load(token_ids + t)
    blocks = tl.program_id(1) * BLOCKS_PER_PROGRAM + tl.arange(0, BLOCKS_PER_PROGRAM)
    inside = (blocks < BLOCKS)[:, None]
    place = row // 64 * BLOCKS + blocks  # int64
    k = tl.arange(0, width)
    words = tl.load(w + (place * (64 * width) + row % 64 * width)[:, None] + k[None, :], mask=inside, other=0)
    block_scales = ()
    for i in tl.static_range(scale_words(FORMAT)):
        scale_places = place * (64 * scale_words(FORMAT)) + 64 * i + row % 64
        pair = tl.load(scales + scale_places, mask=blocks < BLOCKS, other=0)
        block_scales = block_scales + (pair,)  # noqa: RUF005 (Triton has no unpacking)
    for j in tl.static_range(values):
        if has_zeros(FORMAT):
            zero = get_zero(block_scales, j, FORMAT)[:, None]
            value = unpack_word(words, j, FORMAT, tl.float32, zero)
        else:
            value = unpack_word(words, j, FORMAT, tl.float32).to(tl.float32)
        if scale_words(FORMAT) > 0:
            value *= get_scale(block_scales, j, FORMAT)[:, None]
        elif FORMAT != "dense":
            value *= tl.load(scales + row)
        columns = (blocks * BK + width * j)[:, None] + k[None, :]
        tl.store(out + t * K + columns, (value * scale).to(out.dtype.element_ty), mask=columns < K)


@triton.jit(do_not_specialize=["num_rows"])
def _norm_kernel(
    x, weight, bias, out, num_rows, eps, outer, inner,
    ROWS_INSIDE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    CENTERS: tl.constexpr, HAS_BIAS: tl.constexpr, BY_HEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """RMS norm, or layer norm if it CENTERS. PDL: see launches_dependents().

    Row r of x is at r // ROWS_INSIDE * outer + r % ROWS_INSIDE * inner.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    places = row // ROWS_INSIDE * outer + row % ROWS_INSIDE * inner
    if BY_HEAD:
        weights = weight + (row % ROWS_INSIDE * WIDTH)[:, None] + column[None, :]
        scale = tl.load(weights, mask=inside, other=0.0)
    else:
        scale = tl.load(weight + column, mask=column < WIDTH, other=0.0)[None, :]
    if HAS_BIAS:
        shift = tl.load(bias + column, mask=column < WIDTH, other=0.0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    values = tl.load(x + places[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if CENTERS:
        values = tl.where(inside, values - (tl.sum(values, 1) / WIDTH)[:, None], 0.0)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(values * values, 1) / WIDTH + eps)
    result = values * inverse[:, None] * scale
    if HAS_BIAS:
        result += shift[None, :]
    tl.store(out + row[:, None] * WIDTH + column[None, :], result.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Ops.rms_norm"""
    return _norm(x, weight, None, eps, centers=False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Ops.layer_norm"""
    return _norm(x, weight, bias, eps, centers=True)


def _norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, centers: bool) -> Tensor:
    """Rows of a program depend on the width alone, so a row's order of summation does too."""
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
    rows = max(NORM_VALUES_PER_PROGRAM // block, 1)
    operands = x, weight, weight if bias is None else bias, out, num_rows, eps, x.stride(0), inner
    pdl = launches_dependents(x.device)
    shape = {"ROWS_INSIDE": inside, "WIDTH": width, "ROWS": rows, "BLOCK": block}
    options = {"CENTERS": centers, "HAS_BIAS": bias is not None, "BY_HEAD": weight.dim() == 2, "PDL": pdl}
    num_warps = min(max(rows * block // NORM_VALUES_PER_WARP, 1), NORM_MAX_WARPS)
    _norm_kernel[(triton.cdiv(num_rows, rows),)](
        *operands, **shape, **options, num_warps=num_warps, enable_fp_fusion=False, launch_pdl=pdl
    )
    return out
