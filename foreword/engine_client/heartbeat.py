"""Engine health without messages: the engine writes to a page of shared memory, the client reads it.

A write takes about a microsecond. The page is readable at any time, also of an engine that hangs or is gone.
CLOCK_MONOTONIC is the same in both processes.

    heartbeat | busy since | phase | number of requests | in plug-in | arrival numbers of requests ...
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

LOADING, IDLE, BUSY = range(3)
HEARTBEAT, BUSY_SINCE = range(2)  # float64, seconds
PHASE, NUM_REQUESTS, PLUGIN = range(2, 5)  # uint64, as the arrival numbers that follow
FIELD_BYTES: Final = 8
HEADER_FIELDS: Final = 5
MAX_REQUESTS: Final = 1 << 14  # requests of one step; more are not recorded
PAGE_BYTES: Final = (HEADER_FIELDS + MAX_REQUESTS) * FIELD_BYTES
HEARTBEAT_INTERVAL_S: Final = 0.25
NO_HEARTBEAT_S: Final = 3.0  # age of a heartbeat, or of a step without CPU use, that counts as unresponsive
MIN_CPU_S: Final = 0.05  # CPU time within NO_HEARTBEAT_S that counts as activity
MAX_CHECK_GAP_S: Final = 1.0  # check gap above which the watchdog itself was stalled: timers restart


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Contents of a page; times are time.monotonic()."""

    heartbeat_s: float  # time of the newest heartbeat; 0: none yet
    phase: int  # LOADING, IDLE or BUSY
    busy_since_s: float  # start of the current step or message

    @property
    def healthy_until_s(self) -> float:
        """Last time known to be healthy: a step that does not end is not counted."""
        return self.busy_since_s if self.phase == BUSY else self.heartbeat_s


class HeartbeatPage:
    """A page of shared memory; its file descriptor is sent to the engine."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._map = mmap.mmap(fd, PAGE_BYTES)
        page = memoryview(self._map)
        self._times = page.cast("d")
        self._numbers = page.cast("Q")
        self._closed = threading.Event()

    @classmethod
    def create(cls) -> HeartbeatPage:
        fd = os.memfd_create("foreword-heartbeat", os.MFD_CLOEXEC)
        os.ftruncate(fd, PAGE_BYTES)
        return cls(fd)

    # The engine writes

    def start(self) -> None:
        """Beat in a thread until close() or the end of the process."""
        self._times[HEARTBEAT] = time.monotonic()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def _run(self) -> None:
        while not self._closed.wait(HEARTBEAT_INTERVAL_S):
            self._times[HEARTBEAT] = time.monotonic()

    def set_idle(self) -> None:
        self._numbers[NUM_REQUESTS] = 0
        self._numbers[PHASE] = IDLE

    def set_busy(self, arrivals: Iterable[int] = ()) -> None:
        """A step or message begins, for the requests with these arrival numbers."""
        self._times[BUSY_SINCE] = time.monotonic()
        self.set_requests(arrivals)
        self._numbers[PHASE] = BUSY

    def set_requests(self, arrivals: Iterable[int]) -> None:
        """The step goes on with these requests."""
        recorded = array("Q", arrivals)[:MAX_REQUESTS]
        self._numbers[HEADER_FIELDS : HEADER_FIELDS + len(recorded)] = memoryview(recorded)
        self._numbers[NUM_REQUESTS] = len(recorded)

    def set_plugin(self, number: int) -> None:
        """A call of plugged-in drafter `number` begins, from 1; 0: it ends."""
        self._numbers[PLUGIN] = number

    # The client reads

    def read(self) -> Heartbeat:
        return Heartbeat(self._times[HEARTBEAT], self._numbers[PHASE], self._times[BUSY_SINCE])

    def busy_requests(self) -> tuple[int, ...]:
        """Arrival numbers of the requests in the current or last step; consistent once the engine is gone."""
        if self._numbers[PHASE] != BUSY:
            return ()
        return tuple(self._numbers[HEADER_FIELDS : HEADER_FIELDS + self._numbers[NUM_REQUESTS]])

    @property
    def plugin(self) -> int:
        """The plugged-in drafter in whose code the engine is, or was when it ended, from 1; 0: none."""
        return self._numbers[PLUGIN]

    def close(self) -> None:
        """May be called twice."""
        if not self._closed.is_set():
            self._closed.set()
            os.close(self.fd)

    def __enter__(self) -> HeartbeatPage:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class EngineHealth:
    """Result of a check."""

    ready: bool = True  # a step could run now
    hung: bool = False  # it must be restarted
    detail: str = ""  # the defect, as text


class HangDetector:
    """Checks one engine process several times a second."""

    def __init__(self, hang_timeout_s: float, cpu_seconds: Callable[[], float | None]) -> None:
        """hang_timeout_s limits one step, and the time without a heartbeat.

        cpu_seconds  CPU time of the process so far; None: no evidence (unknown, or a GPU computes)
        """
        self._hang_timeout_s = hang_timeout_s
        self._cpu_seconds = cpu_seconds
        self._last_check_s: float | None = None
        self._watching_since_s = 0.0
        self._last_active_s = 0.0
        self._last_cpu_s = 0.0

    def check(self, now_s: float, heartbeat: Heartbeat) -> EngineHealth:
        """now_s: time.monotonic()"""
        if self._last_check_s is None or now_s - self._last_check_s > MAX_CHECK_GAP_S:
            self._watching_since_s = self._last_active_s = now_s
        self._last_check_s = now_s
        if not heartbeat.heartbeat_s:
            return EngineHealth()
        silent_s = now_s - max(heartbeat.heartbeat_s, self._watching_since_s)
        if silent_s >= self._hang_timeout_s:
            return EngineHealth(False, True, f"no heartbeat for {silent_s:.0f} s (--hang-timeout)")
        if heartbeat.phase == LOADING:  # may take any time
            return EngineHealth()
        if silent_s >= NO_HEARTBEAT_S:
            return EngineHealth(False, False, f"no heartbeat for {silent_s:.0f} s")
        if heartbeat.phase == IDLE:
            self._last_active_s = now_s
            return EngineHealth()
        return self._check_step(now_s, heartbeat)

    def _check_step(self, now_s: float, heartbeat: Heartbeat) -> EngineHealth:
        step_s = now_s - max(heartbeat.busy_since_s, self._watching_since_s)
        cpu = self._cpu_seconds()
        if cpu is None or cpu - self._last_cpu_s >= MIN_CPU_S:
            self._last_cpu_s = cpu or 0.0
            self._last_active_s = now_s
        if step_s >= self._hang_timeout_s:
            return EngineHealth(False, True, f"a step runs for {step_s:.0f} s (--hang-timeout)")
        if min(now_s - self._last_active_s, step_s) >= NO_HEARTBEAT_S:
            return EngineHealth(False, False, f"a step runs for {step_s:.0f} s and uses no CPU time")
        return EngineHealth()


def cpu_seconds(pid: int) -> float | None:
    """CPU time of all threads of a process; None if the system does not report it."""
    try:
        user, system = read_proc_stat(pid)[11:13]
    except OSError:
        return None
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def read_proc_stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on, see proc(5). Raises OSError if there is no such process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
