"""How many bytes the pictures of open requests may take."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from foreword.errors import Overloaded, PayloadTooLarge
from foreword.serve.admission import Outflow

__all__ = ["Hold", "PictureMemory"]

MIB = 1 << 20


class PictureMemory:
    """Counts the pixels of requests that are open, and of pictures that are being read. Used from one thread.

    held        bytes
    on_refusal  is told why: one of the catalog's REJECTIONS
    """

    __slots__ = ("_clock", "_limit", "_on_refusal", "_outflow", "held")

    def __init__(self, limit: int, on_refusal: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._on_refusal = on_refusal
        self._clock = clock
        self._outflow = Outflow(clock())
        self.held = 0

    def hold(self) -> Hold:
        """Nothing so far, of one request; the caller releases it, whatever happens."""
        return Hold(self)

    def room_beside(self, own: int) -> int:
        """Bytes that a request which holds `own` could have more if it were alone."""
        return self._limit - own

    def _take(self, num_bytes: int, own: int) -> None:
        if own + num_bytes > self._limit:
            raise PayloadTooLarge(
                f"the pictures of this request take {_mib(own + num_bytes)} once they are decoded; this server has "
                f"{_mib(self._limit)} for those of all requests (--image-memory)",
                "messages",
            )
        if self.held + num_bytes > self._limit:
            self._pass_time()
            wait_s = self._outflow.promise(num_bytes, self._clock())
            self._on_refusal("image_memory")
            raise Overloaded(
                f"the pictures of open requests take {_mib(self.held)} of at most {_mib(self._limit)}; "
                f"try again in {math.ceil(wait_s)} s",
                None,
                wait_s,
            )
        self._pass_time()
        self.held += num_bytes

    def _free(self, num_bytes: int) -> None:
        self._pass_time()
        self._outflow.free(num_bytes)
        self.held -= num_bytes
        assert self.held >= 0, "memory was given back twice"

    def _pass_time(self) -> None:
        self._outflow.pass_time(self._clock(), self.held > 0)


class Hold:
    """What the pictures of one request take, until it is released."""

    __slots__ = ("_memory", "num_bytes")

    def __init__(self, memory: PictureMemory) -> None:
        self._memory = memory
        self.num_bytes = 0

    def reserve(self, largest: int) -> int:
        """For a picture that is about to be read, whose size is not known: as much as it can take. Returns how much that is.

        Raises Overloaded if others hold too much, PayloadTooLarge if this request does alone.
        """
        room = self._memory.room_beside(self.num_bytes)
        reserved = min(largest, max(room, 1))
        self._take(reserved)
        return reserved

    def settle(self, reserved: int, num_bytes: int) -> None:
        """It was read, and takes so much. Raises as reserve()."""
        if num_bytes > reserved:
            self._take(num_bytes - reserved)
        else:
            self._memory._free(reserved - num_bytes)
            self.num_bytes -= reserved - num_bytes

    def _take(self, num_bytes: int) -> None:
        self._memory._take(num_bytes, self.num_bytes)
        self.num_bytes += num_bytes

    def release(self) -> None:
        """Give all of it back; doing so twice is allowed."""
        self._memory._free(self.num_bytes)
        self.num_bytes = 0


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / MIB:.1f} MiB"
