"""What an engine leaves behind: a page of shared memory on which it notes what it is doing.

Only the engine writes, and a write costs about a microsecond. Its client reads signs of life at any time, and once the
engine is gone, whom it was working for. CLOCK_MONOTONIC is the same in both processes.

    sign of life | phase | since | steps | how many | numbers of requests ...
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Final

__all__ = ["IDLE", "LOADING", "BUSY", "HeartbeatPage", "Heartbeat"]

LOADING, IDLE, BUSY = range(3)
HEARTBEAT, BUSY_SINCE = range(2)  # seconds
PHASE, NUM_STEPS, NUM_REQUESTS = range(2, 5)  # whole numbers, and those of requests follow
FIELD_BYTES: Final = 8
HEADER_FIELDS: Final = 5
MAX_REQUESTS: Final = 1 << 14  # of requests that are worked on at once; more are not noted
PAGE_BYTES: Final = (HEADER_FIELDS + MAX_REQUESTS) * FIELD_BYTES
HEARTBEAT_INTERVAL_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a board says. Times are time.monotonic().

    sign_of_life_s  when the engine last noted that it is there; 0: not yet
    phase           LOADING, IDLE or WORKING
    since_s         when the step, or whatever else it is working on, began
    steps           how many steps began
    """

    heartbeat_s: float
    phase: int
    busy_since_s: float
    num_steps: int

    @property
    def healthy_until_s(self) -> float:
        """Until when it did what it should: work that has no end is not counted."""
        return self.busy_since_s if self.phase == BUSY else self.heartbeat_s


class HeartbeatPage:
    """A page of memory behind a file descriptor, which is passed to the other side. Closing it twice is fine."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, PAGE_BYTES)
        self._page = memoryview(self._map)
        self._times = self._page.cast("d")
        self._numbers = self._page.cast("Q")
        self._closed = threading.Event()

    @classmethod
    def create(cls) -> HeartbeatPage:
        """A blank one."""
        fd = os.memfd_create("foreword-board", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES)
        return cls(fd)

    # The engine writes

    def start(self) -> None:
        """Begin to note signs of life, in a thread, until the board is closed or the process ends."""
        self._times[HEARTBEAT] = time.monotonic()
        threading.Thread(target=self._run, name="sign-of-life", daemon=True).start()

    def _run(self) -> None:
        while not self._closed.wait(HEARTBEAT_INTERVAL_S):
            self._times[HEARTBEAT] = time.monotonic()

    def set_idle(self) -> None:
        """There is nothing to do."""
        self._numbers[NUM_REQUESTS] = 0
        self._numbers[PHASE] = IDLE

    def begin_step(self) -> None:
        """A step begins."""
        self._numbers[NUM_STEPS] += 1
        self.set_busy(())

    def set_busy(self, arrivals: Iterable[int]) -> None:
        """Work begins that has to end at some time: for these requests."""
        self._times[BUSY_SINCE] = time.monotonic()
        self.set_requests(arrivals)
        self._numbers[PHASE] = BUSY

    def set_requests(self, arrivals: Iterable[int]) -> None:
        """The work goes on with these requests."""
        noted = array("Q", arrivals)[:MAX_REQUESTS]
        self._numbers[HEADER_FIELDS : HEADER_FIELDS + len(noted)] = memoryview(noted)
        self._numbers[NUM_REQUESTS] = len(noted)

    # The client reads

    def read(self) -> Heartbeat:
        times, numbers = self._times, self._numbers
        return Heartbeat(times[HEARTBEAT], numbers[PHASE], times[BUSY_SINCE], numbers[NUM_STEPS])

    def busy_requests(self) -> tuple[int, ...]:
        """Numbers of the requests that were worked on last; to be read when the engine is gone."""
        if self._numbers[PHASE] != BUSY:
            return ()
        return tuple(self._numbers[HEADER_FIELDS : HEADER_FIELDS + self._numbers[NUM_REQUESTS]])

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        os.close(self.fd)

    def __enter__(self) -> HeartbeatPage:
        return self

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
