"""Rows and comparisons for tests of Triton sampling."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from foreword.kernels.reference.sampling import ReferenceSampling
from foreword.kernels.triton.sampling import TritonSampling
from tests.support import kernel_rows as rows
from tests.support.cpu_kernels import same_bits
from tests.support.device import DEVICE
from tests.support.kernel_rows import NON_FINITE_KINDS, ROW_KINDS, make_row

BLOCK = 32
EXTREMES = (3.4e38, -3.4e38, 1e-45, -1e-45, 0.0, -0.0, 2.0**-126, 1.0, -1.0)
REFERENCE = ReferenceSampling()


class SmallBlockSampling(TritonSampling):
    """Several programs share rows of a few dozen ids."""

    sampling_block = BLOCK


OPS = SmallBlockSampling()


def mixed_rows(width: int) -> Tensor:
    """float32 [R, width]: a row of each kind, and one of extreme values."""
    extreme = torch.tensor([EXTREMES[i * 7 % len(EXTREMES)] for i in range(width)])
    return torch.stack([*(make_row(kind, width, width) for kind in ROW_KINDS + NON_FINITE_KINDS), extreme])


def random_few_rows() -> st.SearchStrategy[Tensor]:
    """float32 [1..2, 1..100]"""
    return rows.random_rows(ROW_KINDS + NON_FINITE_KINDS, max_width=100).map(
        lambda logits: logits[:2].contiguous()
    )


def repeat_to(values: tuple[float, ...], count: int, dtype: torch.dtype) -> Tensor:
    return torch.tensor([values[i % len(values)] for i in range(count)], dtype=dtype)


def assert_same(operation: str, logits: Tensor, *operands: Tensor | int, ops: TritonSampling = OPS) -> None:
    """The operation has the bits of the reference, in place or returned."""
    ours, theirs = logits.to(DEVICE, copy=True), logits.clone()
    on_device = [operand.to(DEVICE) if isinstance(operand, Tensor) else operand for operand in operands]
    result, expected = (
        getattr(ops, operation)(ours, *on_device),
        getattr(REFERENCE, operation)(theirs, *operands),
    )
    assert same_bits(ours.cpu(), theirs), operation
    assert (result is None) == (expected is None)
    if expected is not None:
        assert result.dtype == expected.dtype and same_bits(result.cpu(), expected), operation
