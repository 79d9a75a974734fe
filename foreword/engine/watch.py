"""Whether an engine is well, judged from outside: no message is exchanged, so one that hangs need not answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from foreword.engine.board import IDLE, LOADING, WORKING, Glance

__all__ = ["Finding", "Watch", "cpu_seconds", "stat_of"]

SILENT_S: Final = 3.0  # without a sign of life, or in a step that computes nothing
BUSY_S: Final = 0.05  # of CPU time: who used less in SILENT_S computed nothing
LATE_S: Final = 1.0  # between two looks: the watch itself was held up, and what it missed is nobody's fault


@dataclass(frozen=True, slots=True)
class Finding:
    """The state of an engine.

    ready   a step could run now
    hung    it is to be replaced
    detail  what is wrong, in words
    """

    ready: bool = True
    hung: bool = False
    detail: str = ""


class Watch:
    """Watches one engine process; look() is called a few times a second.

    hang_timeout_s  a step may take so long, and so long there may be no sign of life
    cpu_seconds     CPU time of the process so far; None: it says nothing (unknown, or the work is done on a GPU)
    """

    def __init__(self, hang_timeout_s: float, cpu_seconds: Callable[[], float | None]) -> None:
        self._hang_timeout_s = hang_timeout_s
        self._cpu_seconds = cpu_seconds
        self._looked_s: float | None = None
        self._awake_s = 0.0
        self._busy_s = 0.0
        self._cpu = 0.0

    def look(self, now_s: float, glance: Glance) -> Finding:
        """now_s: time.monotonic()"""
        if self._looked_s is None or now_s - self._looked_s > LATE_S:
            self._awake_s = self._busy_s = now_s
        self._looked_s = now_s
        if not glance.sign_of_life_s:
            return Finding()
        silent_s = now_s - max(glance.sign_of_life_s, self._awake_s)
        if silent_s >= self._hang_timeout_s:
            return Finding(False, True, f"it gave no sign of life for {silent_s:.0f} s")
        if glance.phase == LOADING:  # however long it takes
            return Finding()
        if silent_s >= SILENT_S:
            return Finding(False, False, f"the engine gives no sign of life since {silent_s:.0f} s")
        return self._look_at_work(now_s, glance)

    def _look_at_work(self, now_s: float, glance: Glance) -> Finding:
        if glance.phase == IDLE:
            self._busy_s = now_s
            return Finding()
        assert glance.phase == WORKING
        working_s = now_s - max(glance.since_s, self._awake_s)
        resting_s = min(self._resting_s(now_s), working_s)
        if working_s >= self._hang_timeout_s:
            return Finding(False, True, f"a step took longer than {working_s:.0f} s")
        if resting_s >= SILENT_S:
            return Finding(False, False, f"a step runs since {working_s:.0f} s and computes nothing")
        return Finding()

    def _resting_s(self, now_s: float) -> float:
        """Seconds since the process was last seen to compute."""
        cpu = self._cpu_seconds()
        if cpu is None or cpu - self._cpu >= BUSY_S:
            self._cpu = cpu or 0.0
            self._busy_s = now_s
        return now_s - self._busy_s


def cpu_seconds(pid: int) -> float | None:
    """CPU time of a process, all its threads together; None where the system does not tell."""
    try:
        user, system = stat_of(pid)[11:13]
    except OSError:
        return None
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def stat_of(pid: int) -> list[str]:
    """What Linux tells of a process, from its state on (proc(5)). Raises OSError where there is none."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
