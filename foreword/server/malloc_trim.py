"""Memory that large bodies leave behind when they are gone."""

from __future__ import annotations

import asyncio
import ctypes
import gc

__all__ = ["MallocTrimmer", "freeze_gc"]

TRIM_THRESHOLD_BYTES = 32 << 20  # of bodies since the last time: giving back costs the others a moment


def freeze_gc() -> None:
    """What there is by now stays: the collector never looks through it again, which would hold up every stream for 50 ms."""
    gc.collect()
    gc.freeze()


class MallocTrimmer:
    """Gives memory back to the system, which the allocator would keep: between its large holes lie small things that stay."""

    def __init__(self) -> None:
        self._malloc_trim = getattr(
            ctypes.CDLL(None), "malloc_trim", None
        )  # glibc's; others do it by themselves
        self._freed_bytes = 0

    def add_freed(self, num_bytes: int) -> None:
        """So much was freed."""
        self._freed_bytes += num_bytes

    async def trim(self) -> None:
        """If it is worth while; away from the loop."""
        if self._malloc_trim is not None and self._freed_bytes > TRIM_THRESHOLD_BYTES:
            self._freed_bytes = 0
            await asyncio.to_thread(self._malloc_trim, 0)
