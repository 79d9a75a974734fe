"""Seconds of a step by stage."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["StepTimer"]


class StepTimer:
    """Times the stages encode, schedule, assemble, forward, sample, draft, commit and embed."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self.current_stage = ""  # the stage that began last; errors are counted under it

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.current_stage = stage
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + self._clock() - start

    def snapshot(self) -> dict[str, float]:
        """Seconds by stage since the last reset()."""
        return dict(self._seconds)

    def reset(self) -> dict[str, float]:
        """Return the seconds by stage, and start at zero."""
        seconds, self._seconds = self._seconds, {}
        return seconds
