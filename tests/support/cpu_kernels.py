"""Native backends and random values for tests."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import supported_isas
from tests.support.budget import is_full

__all__ = ["cpu_ops_by_threads", "isas_under_test", "randn", "same_bits"]


def isas_under_test() -> tuple[str, ...]:
    """All instruction sets of this machine with --full, else the best one."""
    return supported_isas() if is_full() else supported_isas()[-1:]


@functools.cache
def cpu_ops_by_threads(isa: str) -> tuple[CpuOps, ...]:
    """Backends with one, two and three threads."""
    return tuple(CpuOps(isa, threads) for threads in (1, 2, 3))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Bit equality; all NaN are equal, 0.0 differs from -0.0."""
    ints = torch.int32 if left.dtype == torch.float32 else torch.int16
    left, right = (
        torch.where(values.isnan(), torch.full_like(values, torch.nan), values) for values in (left, right)
    )
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(ints), right.contiguous().view(ints)
    )
