"""Whether an engine is well, judged from outside: no message is exchanged, so one that hangs need not answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from foreword.engine.board import IDLE, LOADING, BUSY, Heartbeat

__all__ = ["EngineHealth", "HangDetector", "cpu_seconds", "read_proc_stat"]

NO_HEARTBEAT_S: Final = 3.0  # without a sign of life, or in a step that computes nothing
MIN_CPU_S: Final = 0.05  # of CPU time: who used less in SILENT_S computed nothing
MAX_CHECK_GAP_S: Final = 1.0  # between two looks: the watch itself was held up, and what it missed is nobody's fault


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
