"""Memory that large bodies leave behind when they are gone."""

from __future__ import annotations

import asyncio
import ctypes
import gc

__all__ = ["Heap", "settle"]

LEFT_BYTES = 32 << 20  # of bodies since the last time: giving back costs the others a moment


def settle() -> None:
    """What there is by now stays: the collector never looks through it again, which would hold up every stream for 50 ms."""
    gc.collect()
    gc.freeze()


class Heap:
    """Gives memory back to the system, which the allocator would keep: between its large holes lie small things that stay."""

    def __init__(self) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's; others do it by themselves
        self._left = 0

    def left(self, num_bytes: int) -> None:
        """So much was freed."""
        self._left += num_bytes

    async def tidy(self) -> None:
        """If it is worth while; away from the loop."""
        if self._trim is not None and self._left > LEFT_BYTES:
            self._left = 0
            await asyncio.to_thread(self._trim, 0)
