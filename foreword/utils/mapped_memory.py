"""Mapped memory: files by address, whose pages their reader releases, and huge pages for weights and cache.

Pages of a mapped file count as memory of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref

import torch
from torch import Tensor

_mappings: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by address
HUGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 64 << 20
ALIGNMENT = 64
OWNER_BYTES = 16


def register_mapping(mapping: mmap.mmap) -> None:
    """The mapping must be private, and nobody may write to it."""
    _mappings[ctypes.addressof(ctypes.c_char.from_buffer(mapping))] = mapping


def release_pages(address: int, num_bytes: int) -> None:
    """Release the pages of a mapped file with these bytes; a later read loads them again.

    Without effect on other memory, and beyond the end of the file.
    """
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    for begin, mapping in list(_mappings.items()):
        start = address - begin
        if 0 <= start < len(mapping):
            first = start // mmap.PAGESIZE * mmap.PAGESIZE
            mapping.madvise(mmap.MADV_DONTNEED, first, min(start + num_bytes, len(mapping)) - first)


class MemoryFile:
    """Allocates tensors from a file in memory. A later process that allocates the same finds their content.

    New memory is zeroed. The file lives as long as a descriptor or a mapping of it. Its first page names the
    owner of the content, at the same place whatever the owner allocates.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._end = 0
        self._owner = memoryview(self.allocate(OWNER_BYTES).numpy().data)
        self.last_owner = bytes(OWNER_BYTES)  # whose content it was before disown()

    def disown(self) -> None:
        """Erase the owner before the first write: whoever is killed before claim() leaves nothing."""
        self.last_owner = bytes(self._owner)
        self._owner[:] = bytes(OWNER_BYTES)

    def claim(self, owner: bytes) -> None:
        assert len(owner) == OWNER_BYTES and any(owner)
        self._owner[:] = owner

    def allocate(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes], aligned to a page. Raises OSError."""
        start, size = self._end, -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._end += size
        if os.fstat(self._fd).st_size < self._end:
            os.ftruncate(self._fd, self._end)
        memory = mmap.mmap(self._fd, size, offset=start)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # not for shared memory, unless shmem_enabled allows it
                memory.madvise(mmap.MADV_HUGEPAGE)
        return torch.frombuffer(memory, dtype=torch.uint8)[:num_bytes]


class HugePages:
    """Allocates zeroed tensors from chunks of huge pages, which spare TLB misses.

    A chunk is freed with its last tensor; untouched pages take no memory.
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
    # Private, since shared memory has no transparent huge pages.
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(memory, dtype=torch.uint8)
    return data[-data.data_ptr() % HUGE_PAGE_BYTES :][:num_bytes]


def pin_memory(memory: Tensor) -> None:
    """Pin host memory for a GPU's copies, as long as this tensor lives. Raises RuntimeError.

    Torch's own pinned tensors take up to twice their size: it rounds up to a power of two.
    """
    cuda = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.data_ptr()
    if error := int(cuda.cudaHostRegister(address, memory.nbytes, 0)):
        raise RuntimeError(f"{memory.nbytes} bytes of host memory cannot be pinned (CUDA error {error})")
    weakref.finalize(memory, cuda.cudaHostUnregister, address).atexit = False
