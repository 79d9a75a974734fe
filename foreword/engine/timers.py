"""Where the time of a step goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["StepTimer"]


class StepTimer:
    """Seconds by stage of the current step: encode, schedule, assemble, forward, sample, draft, commit, embed.

    current  the stage that began last: where an error that is being handled came from
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}
        self.current_stage = ""

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.current_stage = stage
        start = self._clock()
        try:
            yield
        finally:
            self._seconds[stage] = self._seconds.get(stage, 0.0) + self._clock() - start

    def snapshot(self) -> dict[str, float]:
        """The stages since the last take()."""
        return dict(self._seconds)

    def reset(self) -> dict[str, float]:
        """The stages since the last call."""
        seconds, self._seconds = self._seconds, {}
        return seconds
