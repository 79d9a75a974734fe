"""What the machine allows, measured beside whatever is held against it: reading memory, and products.

Both by torch, which has no part in Foreword's own kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from foreword.core.memory import HugePages

__all__ = ["ONEDNN_ISA", "MATMUL_MAKERS", "MemoryReader", "matmul_rate", "time_call"]

# What oneDNN may use (ONEDNN_MAX_CPU_ISA), so that it is measured with the same instructions.
ONEDNN_ISA: Mapping[str, str] = MappingProxyType({"avx512": "AVX512_CORE_BF16", "avx2": "AVX2", "portable": "SSE41"})


def time_call(call: Callable[[], object]) -> float:
    """How long one call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class MemoryReader:
    """A run of memory larger than the caches, over huge pages where the system has them."""

    def __init__(self, num_bytes: int) -> None:
        self._values = HugePages().allocate(num_bytes).view(torch.float64).fill_(1.0)

    def read_bandwidth(self) -> float:
        """Bytes a second of adding it all up, on torch's threads."""
        return self._values.nbytes / time_call(self._values.sum)


def _bfloat16(size: int) -> Callable[[], Tensor]:
    left = torch.randn(size, size).bfloat16()
    return lambda: left @ left


def _float32(size: int) -> Callable[[], Tensor]:
    left = torch.randn(size, size)
    return lambda: left @ left


def _int8(size: int) -> Callable[[], Tensor]:
    left = torch.randint(-127, 128, (size, size), dtype=torch.int8)
    return lambda: torch._int_mm(left, left)


MATMUL_MAKERS: Mapping[str, Callable[[int], Callable[[], Tensor]]] = MappingProxyType(
    {"bfloat16": _bfloat16, "int8": _int8, "float32": _float32}
)


def matmul_rate(dtype: str, size: int, rounds: int) -> float:
    """Operations a second (a multiply-add is two) of torch's product of square matrices, the best of the rounds."""
    product = MATMUL_MAKERS[dtype](size)
    product()
    return 2 * size**3 / min(time_call(product) for _ in range(rounds))
