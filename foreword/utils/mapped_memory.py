"""Mapped files by address: their reader releases pages, which count as memory of the process."""

from __future__ import annotations

import ctypes
import mmap
import weakref

_mappings: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()  # by address


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
