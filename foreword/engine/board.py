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

__all__ = ["IDLE", "LOADING", "WORKING", "Board", "Glance"]

LOADING, IDLE, WORKING = range(3)
SIGN_OF_LIFE, SINCE = range(2)  # seconds
PHASE, STEPS, HOW_MANY = range(2, 5)  # whole numbers, and those of requests follow
FIELD_BYTES: Final = 8
HEADER: Final = 5
CAPACITY: Final = 1 << 14  # of requests that are worked on at once; more are not noted
BYTES: Final = (HEADER + CAPACITY) * FIELD_BYTES
BEAT_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class Glance:
    """What a board says. Times are time.monotonic().

    sign_of_life_s  when the engine last noted that it is there; 0: not yet
    phase           LOADING, IDLE or WORKING
    since_s         when the step, or whatever else it is working on, began
    steps           how many steps began
    """

    sign_of_life_s: float
    phase: int
    since_s: float
    steps: int

    @property
    def well_until_s(self) -> float:
        """Until when it did what it should: work that has no end is not counted."""
        return self.since_s if self.phase == WORKING else self.sign_of_life_s


class Board:
    """A page of memory behind a file descriptor, which is passed to the other side. Closing it twice is fine."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, BYTES)
        self._page = memoryview(self._map)
        self._times = self._page.cast("d")
        self._numbers = self._page.cast("Q")
        self._closed = threading.Event()

    @classmethod
    def create(cls) -> Board:
        """A blank one."""
        fd = os.memfd_create("foreword-board", os.MFD_CLOEXEC)
        os.ftruncate(fd, BYTES)
        return cls(fd)

    # The engine writes

    def beat(self) -> None:
        """Begin to note signs of life, in a thread, until the board is closed or the process ends."""
        self._times[SIGN_OF_LIFE] = time.monotonic()
        threading.Thread(target=self._beat, name="sign-of-life", daemon=True).start()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT_S):
            self._times[SIGN_OF_LIFE] = time.monotonic()

    def rest(self) -> None:
        """There is nothing to do."""
        self._numbers[HOW_MANY] = 0
        self._numbers[PHASE] = IDLE

    def step(self) -> None:
        """A step begins."""
        self._numbers[STEPS] += 1
        self.work(())

    def work(self, numbers: Iterable[int]) -> None:
        """Work begins that has to end at some time: for these requests."""
        self._times[SINCE] = time.monotonic()
        self.note(numbers)
        self._numbers[PHASE] = WORKING

    def note(self, numbers: Iterable[int]) -> None:
        """The work goes on with these requests."""
        noted = array("Q", numbers)[:CAPACITY]
        self._numbers[HEADER : HEADER + len(noted)] = memoryview(noted)
        self._numbers[HOW_MANY] = len(noted)

    # The client reads

    def glance(self) -> Glance:
        times, numbers = self._times, self._numbers
        return Glance(times[SIGN_OF_LIFE], numbers[PHASE], times[SINCE], numbers[STEPS])

    def working_for(self) -> tuple[int, ...]:
        """Numbers of the requests that were worked on last; to be read when the engine is gone."""
        if self._numbers[PHASE] != WORKING:
            return ()
        return tuple(self._numbers[HEADER : HEADER + self._numbers[HOW_MANY]])

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        os.close(self.fd)

    def __enter__(self) -> Board:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
