"""The machine's ceilings: memory bandwidth, read by torch, and products, by native loops on registers."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import torch

from foreword.bench.statistics import time_call
from foreword.kernels.cpu.library import ISAS, load_library
from foreword.utils.mapped_memory import HugePages

PEAK_TYPES = ("float32", "bfloat16", "int8", "int4")  # enum PeakType in csrc/common/peak_flops.cpp
FIRST_ROUNDS, LOOP_S = 1 << 14, 0.01


class MemoryReader:
    """A run of memory larger than the caches, over huge pages where the system has them."""

    def __init__(self, num_bytes: int) -> None:
        self._values = HugePages().allocate(num_bytes).view(torch.float64).fill_(1.0)

    def read_bandwidth(self) -> float:
        """Bytes/s of a sum over all of it, on torch's threads."""
        return self._values.nbytes / time_call(self._values.sum)


def product_rate(isa: str, dtype: str, threads: int, rounds: int) -> float | None:
    """Operations/s (a multiply-add is two) of a loop on registers, on `threads` cores, the best of rounds.

    isa    of ISAS
    dtype  of PEAK_TYPES
    None where the library has no such loop, or there is no library.
    """
    library, _ = load_library()
    if library is None or isa not in ISAS:
        return None
    loop = library.foreword_peak
    loop.restype, loop.argtypes = ctypes.c_double, [ctypes.c_int32, ctypes.c_int32, ctypes.c_int64]
    which = ISAS.index(isa), PEAK_TYPES.index(dtype)
    if not loop(*which, 1):
        return None
    loop_s = min(time_call(lambda: loop(*which, FIRST_ROUNDS)) for _ in range(3))
    count = max(int(FIRST_ROUNDS * LOOP_S / loop_s), 1)
    with ThreadPoolExecutor(threads) as pool:

        def run() -> float:
            return sum(pool.map(lambda _: float(loop(*which, count)), range(threads)))

        products = run()
        return 2 * products / min(time_call(run) for _ in range(max(rounds, 3)))
