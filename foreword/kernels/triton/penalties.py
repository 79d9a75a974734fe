"""add_at(), penalize() and divide() of `Ops`: single float32 operations, rounded to nearest."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.triton.ranks import LAUNCH_OPTIONS, load_values, num_blocks

__all__ = ["add_bias", "apply_temperature", "apply_repetition_penalty"]

IDS_PER_PROGRAM = 256  # of one program at a time
MAX_PROGRAMS = 8  # of one row; more ids are more turns


@triton.jit
def _add_bias_kernel(logits, stride, V, starts, ids, biases, IDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(starts + row + 1)
    for first in range(tl.load(starts + row) + tl.program_id(1) * IDS, end, tl.num_programs(1) * IDS):
        place = first + tl.arange(0, IDS)
        token_ids = tl.load(ids + place, mask=place < end, other=V)
        inside = token_ids < V
        values = tl.load(logits + row * stride + token_ids, mask=inside, other=0.0)
        added = values + tl.load(biases + place, mask=inside, other=0.0)
        tl.store(logits + row * stride + token_ids, added, mask=inside)


@triton.jit
def _repetition_penalty_kernel(logits, stride, V, starts, ids, penalties, IDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    end, penalty = tl.load(starts + row + 1), tl.load(penalties + row)
    for first in range(tl.load(starts + row) + tl.program_id(1) * IDS, end, tl.num_programs(1) * IDS):
        place = first + tl.arange(0, IDS)
        token_ids = tl.load(ids + place, mask=place < end, other=V)
        inside = token_ids < V
        values = tl.load(logits + row * stride + token_ids, mask=inside, other=0.0)
        penalized = tl.where(values < 0, values * penalty, tl.div_rn(values, tl.zeros_like(values) + penalty))
        tl.store(logits + row * stride + token_ids, penalized, mask=inside)


@triton.jit(do_not_specialize_on_alignment=["by"])
def _temperature_kernel(logits, stride, V, temperatures, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    divisor = tl.load(temperatures + row)
    if divisor != 1.0:
        ids, values = load_values(logits, stride, V, row, part, BLOCK)
        tl.store(logits + row * stride + ids, tl.div_rn(values, tl.zeros_like(values) + divisor), mask=ids < V)


def add_bias(logits: Tensor, starts: Tensor, ids: Tensor, biases: Tensor) -> None:
    """As `Ops.add_at`."""
    grid = logits.shape[0], _num_programs(ids)
    _add_bias_kernel[grid](logits, logits.stride(0), logits.shape[1], starts, ids, biases, IDS=IDS_PER_PROGRAM, enable_fp_fusion=False)


def apply_repetition_penalty(logits: Tensor, starts: Tensor, ids: Tensor, penalties: Tensor) -> None:
    """As `Ops.penalize`."""
    grid = logits.shape[0], _num_programs(ids)
    _repetition_penalty_kernel[grid](logits, logits.stride(0), logits.shape[1], starts, ids, penalties, IDS=IDS_PER_PROGRAM, enable_fp_fusion=False)


def apply_temperature(logits: Tensor, temperatures: Tensor, block: int) -> None:
    """As `Ops.divide`."""
    _temperature_kernel[(logits.shape[0], num_blocks(logits, block))](logits, logits.stride(0), logits.shape[1], temperatures, BLOCK=block, **LAUNCH_OPTIONS)


def _num_programs(ids: Tensor) -> int:
    return min(MAX_PROGRAMS, -(-ids.shape[0] // IDS_PER_PROGRAM))
