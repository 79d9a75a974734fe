"""How many bytes the pictures of open requests may take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from foreword.errors import Overloaded, PayloadTooLarge
from foreword.serve.admission import DrainRateEstimator

__all__ = ["ImageReservation", "ImageMemory"]

MIB = 1 << 20


class ImageMemory:
    """Counts the pixels of requests that are open, and of pictures that are being read. Used from one thread.

    held        bytes
    on_refusal  is told why: one of the catalog's REJECTIONS
    """

    __slots__ = ("_clock", "_limit_bytes", "_on_refusal", "_drain_rate", "held_bytes")

    def __init__(self, limit_bytes: int, on_refusal: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_bytes = limit_bytes
        self._on_refusal = on_refusal
        self._clock = clock
        self._drain_rate = DrainRateEstimator(clock())
        self.held_bytes = 0

    def start_reservation(self) -> ImageReservation:
        """Nothing so far, of one request; the caller releases it, whatever happens."""
        return ImageReservation(self)

    def room(self, own_bytes: int) -> int:
        """Bytes that a request which holds `own` could have more if it were alone."""
        return self._limit_bytes - own_bytes

    def _allocate(self, num_bytes: int, own_bytes: int) -> None:
        if own_bytes + num_bytes > self._limit_bytes:
            raise PayloadTooLarge(
                f"the pictures of this request take {_format_mib(own_bytes + num_bytes)} once they are decoded; this server has "
                f"{_format_mib(self._limit_bytes)} for those of all requests (--image-memory)",
                "messages",
            )
        if self.held_bytes + num_bytes > self._limit_bytes:
            self._advance()
            wait_s = self._drain_rate.retry_after_s(num_bytes, self._clock())
            self._on_refusal("image_memory")
            raise Overloaded(
                f"the pictures of open requests take {_format_mib(self.held_bytes)} of at most {_format_mib(self._limit_bytes)}; "
                f"try again in {math.ceil(wait_s)} s",
                None,
                wait_s,
            )
        self._advance()
        self.held_bytes += num_bytes

    def _release(self, num_bytes: int) -> None:
        self._advance()
        self._drain_rate.record_freed(num_bytes)
        self.held_bytes -= num_bytes
        assert self.held_bytes >= 0, "memory was given back twice"

    def _advance(self) -> None:
        self._drain_rate.advance(self._clock(), self.held_bytes > 0)


class ImageReservation:
    """What the pictures of one request take, until it is released."""

    __slots__ = ("_memory", "num_bytes")

    def __init__(self, memory: ImageMemory) -> None:
        self._memory = memory
        self.num_bytes = 0

    def reserve(self, max_bytes: int) -> int:
        """For a picture that is about to be read, whose size is not known: as much as it can take. Returns how much that is.

        Raises Overloaded if others hold too much, PayloadTooLarge if this request does alone.
        """
        room = self._memory.room(self.num_bytes)
        reserved = min(max_bytes, max(room, 1))
        self._allocate(reserved)
        return reserved

    def commit(self, reserved: int, num_bytes: int) -> None:
        """It was read, and takes so much. Raises as reserve()."""
        if num_bytes > reserved:
            self._allocate(num_bytes - reserved)
        else:
            self._memory._release(reserved - num_bytes)
            self.num_bytes -= reserved - num_bytes

    def _allocate(self, num_bytes: int) -> None:
        self._memory._allocate(num_bytes, self.num_bytes)
        self.num_bytes += num_bytes

    def release(self) -> None:
        """Give all of it back; doing so twice is allowed."""
        self._memory._release(self.num_bytes)
        self.num_bytes = 0


def _format_mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
