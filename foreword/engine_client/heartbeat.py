"""What an engine leaves behind: a page of shared memory on which it notes what it is doing.

Only the engine writes, and a write costs about a microsecond. Its client reads signs of life at any time, and once the
engine is gone, whom it was working for. CLOCK_MONOTONIC is the same in both processes.

    sign of life | phase | since | steps | how many | numbers of requests ...

Whether an engine is well, judged from outside: no message is exchanged, so one that hangs need not answer.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

__all__ = [
    "BUSY",
    "IDLE",
    "LOADING",
    "EngineHealth",
    "HangDetector",
    "Heartbeat",
    "HeartbeatPage",
    "cpu_seconds",
    "read_proc_stat",
]

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

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


NO_HEARTBEAT_S: Final = 3.0  # without a sign of life, or in a step that computes nothing
MIN_CPU_S: Final = 0.05  # of CPU time: who used less in SILENT_S computed nothing
MAX_CHECK_GAP_S: Final = (
    1.0  # between two looks: the watch itself was held up, and what it missed is nobody's fault
)


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """The state of an engine.

    ready   a step could run now
    hung    it is to be replaced
    detail  what is wrong, in words
    """

    ready: bool = True
    hung: bool = False
    detail: str = ""


class HangDetector:
    """Watches one engine process; look() is called a few times a second.

    hang_timeout_s  a step may take so long, and so long there may be no sign of life
    cpu_seconds     CPU time of the process so far; None: it says nothing (unknown, or the work is done on a GPU)
    """

    def __init__(self, hang_timeout_s: float, cpu_seconds: Callable[[], float | None]) -> None:
        self._hang_timeout_s = hang_timeout_s
        self._cpu_seconds = cpu_seconds
        self._last_check_s: float | None = None
        self._watching_since_s = 0.0
        self._last_busy_s = 0.0
        self._last_cpu_s = 0.0

    def check(self, now_s: float, heartbeat: Heartbeat) -> EngineHealth:
        """now_s: time.monotonic()"""
        if self._last_check_s is None or now_s - self._last_check_s > MAX_CHECK_GAP_S:
            self._watching_since_s = self._last_busy_s = now_s
        self._last_check_s = now_s
        if not heartbeat.heartbeat_s:
            return EngineHealth()
        silent_s = now_s - max(heartbeat.heartbeat_s, self._watching_since_s)
        if silent_s >= self._hang_timeout_s:
            return EngineHealth(False, True, f"it gave no sign of life for {silent_s:.0f} s")
        if heartbeat.phase == LOADING:  # however long it takes
            return EngineHealth()
        if silent_s >= NO_HEARTBEAT_S:
            return EngineHealth(False, False, f"the engine gives no sign of life since {silent_s:.0f} s")
        return self._check_step(now_s, heartbeat)

    def _check_step(self, now_s: float, heartbeat: Heartbeat) -> EngineHealth:
        if heartbeat.phase == IDLE:
            self._last_busy_s = now_s
            return EngineHealth()
        assert heartbeat.phase == BUSY
        working_s = now_s - max(heartbeat.busy_since_s, self._watching_since_s)
        resting_s = min(self._idle_s(now_s), working_s)
        if working_s >= self._hang_timeout_s:
            return EngineHealth(False, True, f"a step took longer than {working_s:.0f} s")
        if resting_s >= NO_HEARTBEAT_S:
            return EngineHealth(False, False, f"a step runs since {working_s:.0f} s and computes nothing")
        return EngineHealth()

    def _idle_s(self, now_s: float) -> float:
        """Seconds since the process was last seen to compute."""
        cpu = self._cpu_seconds()
        if cpu is None or cpu - self._last_cpu_s >= MIN_CPU_S:
            self._last_cpu_s = cpu or 0.0
            self._last_busy_s = now_s
        return now_s - self._last_busy_s


def cpu_seconds(pid: int) -> float | None:
    """CPU time of a process, all its threads together; None where the system does not tell."""
    try:
        user, system = read_proc_stat(pid)[11:13]
    except OSError:
        return None
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def read_proc_stat(pid: int) -> list[str]:
    """What Linux tells of a process, from its state on (proc(5)). Raises OSError where there is none."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
