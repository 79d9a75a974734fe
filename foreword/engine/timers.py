"""Seconds of a step by stage."""

from __future__ import annotations

import time


class StepTimer:
    """Times the stages encode, schedule, assemble, forward, sample, draft, commit and embed."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.current_stage = ""  # the stage that began last; errors are counted under it

    def __call__(self, stage: str) -> _Span:
        """Time the body of a with statement."""
        return _Span(self, stage)

    def snapshot(self) -> dict[str, float]:
        """Seconds by stage since the last reset()."""
        return dict(self.seconds)

    def reset(self) -> dict[str, float]:
        """Return the seconds by stage, and start at zero."""
        seconds, self.seconds = self.seconds, {}
        return seconds


class _Span:
    """One stage of one step. A class, since generator context managers cost twice as much."""

    __slots__ = ("_stage", "_start", "_timer")

    def __init__(self, timer: StepTimer, stage: str) -> None:
        self._timer = timer
        self._stage = stage

    def __enter__(self) -> None:
        self._timer.current_stage = self._stage
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        seconds = self._timer.seconds
        seconds[self._stage] = seconds.get(self._stage, 0.0) + time.perf_counter() - self._start
