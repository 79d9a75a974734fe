"""add_at(), penalize() and divide() of `Ops`: single float32 operations, rounded to nearest."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from foreword.kernels.triton.ranks import EXACT, load_values, num_parts

__all__ = ["add_at", "divide", "penalize"]

IDS = 256  # of one program at a time
MAX_PROGRAMS = 8  # of one row; more ids are more turns


@triton.jit
def _add_at(logits, stride, V, starts, ids, amounts, IDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(starts + row + 1)
    for first in range(tl.load(starts + row) + tl.program_id(1) * IDS, end, tl.num_programs(1) * IDS):
        place = first + tl.arange(0, IDS)
        token_ids = tl.load(ids + place, mask=place < end, other=V)
        inside = token_ids < V
        values = tl.load(logits + row * stride + token_ids, mask=inside, other=0.0)
        added = values + tl.load(amounts + place, mask=inside, other=0.0)
        tl.store(logits + row * stride + token_ids, added, mask=inside)


@triton.jit
def _penalize(logits, stride, V, starts, ids, penalties, IDS: tl.constexpr):
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
def _divide(logits, stride, V, by, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    divisor = tl.load(by + row)
    if divisor != 1.0:
        ids, values = load_values(logits, stride, V, row, part, BLOCK)
        tl.store(logits + row * stride + ids, tl.div_rn(values, tl.zeros_like(values) + divisor), mask=ids < V)


def add_at(logits: Tensor, starts: Tensor, ids: Tensor, amounts: Tensor) -> None:
    """As `Ops.add_at`."""
    grid = logits.shape[0], _programs(ids)
    _add_at[grid](logits, logits.stride(0), logits.shape[1], starts, ids, amounts, IDS=IDS, enable_fp_fusion=False)


def penalize(logits: Tensor, starts: Tensor, ids: Tensor, penalties: Tensor) -> None:
    """As `Ops.penalize`."""
    grid = logits.shape[0], _programs(ids)
    _penalize[grid](logits, logits.stride(0), logits.shape[1], starts, ids, penalties, IDS=IDS, enable_fp_fusion=False)


def divide(logits: Tensor, by: Tensor, block: int) -> None:
    """As `Ops.divide`."""
    _divide[(logits.shape[0], num_parts(logits, block))](logits, logits.stride(0), logits.shape[1], by, BLOCK=block, **EXACT)


def _programs(ids: Tensor) -> int:
    return min(MAX_PROGRAMS, -(-ids.shape[0] // IDS))
