"""The machine's ceilings, measured by torch: memory bandwidth and product rates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from foreword.bench.common import time_call
from foreword.utils.hugepages import HugePages

__all__ = ["MATMUL_MAKERS", "ONEDNN_ISA", "MemoryReader", "matmul_rate"]

ONEDNN_ISA = MappingProxyType(  # values of ONEDNN_MAX_CPU_ISA by --isa
    {"avx512": "AVX512_CORE_BF16", "avx2": "AVX2", "portable": "SSE41"}
)


class MemoryReader:
    """A run of memory larger than the caches, over huge pages where the system has them."""

    def __init__(self, num_bytes: int) -> None:
        self._values = HugePages().allocate(num_bytes).view(torch.float64).fill_(1.0)

    def read_bandwidth(self) -> float:
        """Bytes/s of a sum over all of it, on torch's threads."""
        return self._values.nbytes / time_call(self._values.sum)


def _float_matmul(size: int, dtype: torch.dtype) -> Callable[[], object]:
    left = torch.randn(size, size).to(dtype)
    return lambda: left @ left


def _int8_matmul(size: int) -> Callable[[], object]:
    left = torch.randint(-127, 128, (size, size), dtype=torch.int8)
    return lambda: torch._int_mm(left, left)


MATMUL_MAKERS: Mapping[str, Callable[[int], Callable[[], object]]] = MappingProxyType(
    {
        "bfloat16": lambda size: _float_matmul(size, torch.bfloat16),
        "int8": _int8_matmul,
        "float32": lambda size: _float_matmul(size, torch.float32),
    }
)


def matmul_rate(dtype: str, size: int, rounds: int) -> float:
    """Operations/s (a multiply-add is two) of torch's square products, the best of the rounds."""
    product = MATMUL_MAKERS[dtype](size)
    product()
    return 2 * size**3 / min(time_call(product) for _ in range(rounds))
