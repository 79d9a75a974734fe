"""Memory for what is large and stays: weights and the KV cache."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

__all__ = ["HugePages"]

HUGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 64 << 20
ALIGNMENT = 64


class HugePages:
    """Zeros that are given out piece by piece; a chunk is freed when its last piece goes.

    A processor remembers the addresses of few pages, so what is read all over should lie in large ones. One of them
    serves many small pieces; those that nobody touched take no memory.
    """

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], aligned to ALIGNMENT."""
        size = -(-num_bytes // ALIGNMENT) * ALIGNMENT
        if size > self._chunk.numel():
            self._chunk = _map_zeros(max(size, CHUNK_BYTES))
        piece, self._chunk = self._chunk[:num_bytes], self._chunk[size:]
        return piece


def _map_zeros(num_bytes: int) -> Tensor:
    """uint8 zeros, aligned to a huge page."""
    memory = mmap.mmap(
        -1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )  # shared memory has none
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return whole[-whole.data_ptr() % HUGE_PAGE_BYTES :][:num_bytes]
