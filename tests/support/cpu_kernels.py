"""Native backends and random values for tests."""

from __future__ import annotations

import functools
import inspect
import os

import torch
from torch import Tensor

from foreword.config.options import Config
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.cpu.library import ISAS, supported_isas
from tests.support.budget import is_full

FORCED_ISA = os.environ.get("FOREWORD_CPU_ISA", "auto")  # servers read it too


def force_isa() -> None:
    """Make FORCED_ISA the default of every Config, so that engines in this process have it."""
    init = Config.__init__
    parameters = inspect.signature(init).parameters.values()
    defaults = [(field.name, field.default) for field in parameters if field.default is not field.empty]
    init.__defaults__ = tuple(FORCED_ISA if name == "cpu_isa" else value for name, value in defaults)


def isas_under_test() -> tuple[str, ...]:
    """The forced instruction set, or all of this machine with --full, else the best one."""
    if FORCED_ISA in ISAS:
        return (FORCED_ISA,)
    return supported_isas() if is_full() else supported_isas()[-1:]


@functools.cache
def cpu_ops_by_threads(isa: str) -> tuple[CpuOps, ...]:
    """Backends with one, two and three threads."""
    return tuple(CpuOps(isa, threads) for threads in (1, 2, 3))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def same_bits(left: Tensor, right: Tensor) -> bool:
    """Bit equality; all NaN are equal, 0.0 differs from -0.0."""
    return left.dtype == right.dtype and torch.equal(bits(left), bits(right))


def bits(values: Tensor) -> Tensor:
    """Bytes as integers; all NaN bits count as one value."""
    if values.is_floating_point():
        values = torch.where(values.isnan(), torch.full_like(values, torch.nan), values)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.contiguous().view(integers[values.itemsize])
