"""Whose fault the death of an engine may be, and how many deaths are borne."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["RestartPolicy", "CrashSuspects"]

CRASHES_TO_SUSPECT: Final = 2  # deaths in a row without a token between them that make a request suspect
CRASHES_TO_REFUSE: Final = 2  # deaths that are its own fault beyond doubt
MAX_IDLE_CRASHES: Final = 5
MAX_START_ATTEMPTS: Final = 3
HEALTHY_S: Final = 60.0  # an engine that was well for so long was no failure, whatever it did not do
CRASHES_TO_PROBE: Final = 2  # deaths in a row without a token to anybody, after which a replacement has to prove itself


class CrashSuspects:
    """Requests that may kill the engine.

    A request is suspect if it was worked on at two deaths in a row and gained no token between them. Suspects run alone, one
    after the other, each until it gains a token or ends; who dies alone twice is condemned.
    """

    __slots__ = ("_num_crashes", "_num_solo_crashes")

    def __init__(self) -> None:
        self._num_crashes: dict[str, int] = {}
        self._num_solo_crashes: dict[str, int] = {}  # how often each died alone, in the order of their turns

    @property
    def quarantined(self) -> str | None:
        """The request that nobody may run beside; None: there is no suspect."""
        return next(iter(self._num_solo_crashes), None)

    def on_crash(self, busy_ids: Sequence[str]) -> str | None:
        """An engine died while it worked on these, all of them still open. Returns the request that is condemned."""
        alone = self.quarantined
        if alone is None:
            self._count_crash(busy_ids)
        elif alone in busy_ids:
            self._num_solo_crashes[alone] += 1
            if self._num_solo_crashes[alone] >= CRASHES_TO_REFUSE:
                self.clear(alone)
                return alone
        return None

    def clear(self, request_id: str) -> None:
        """It gained a token, or has ended."""
        self._num_crashes.pop(request_id, None)
        self._num_solo_crashes.pop(request_id, None)

    def _count_crash(self, busy_ids: Sequence[str]) -> None:
        if busy_ids:  # who died idle, or while it was loading, says nothing about anybody
            self._num_crashes = {request_id: self._num_crashes.get(request_id, 0) + 1 for request_id in busy_ids}
            self._num_solo_crashes = {request_id: 0 for request_id, strikes in self._num_crashes.items() if strikes >= CRASHES_TO_SUSPECT}


class RestartPolicy:
    """How much is borne before an engine is given up for good.

    Requests that kill engines are refused in the end, so deaths in the midst of their work never lead to giving up, however
    many there are. What does: engines that do not start, and such that die of nothing. Who is in doubt gets work that kills
    nobody, so that one that is broken altogether dies of nothing too.
    """

    __slots__ = ("_failed_starts", "_fruitless_crashes", "_idle_crashes")

    def __init__(self) -> None:
        self._fruitless_crashes = 0
        self._idle_crashes = 0
        self._failed_starts = 0

    @property
    def needs_probe(self) -> bool:
        """Whether the next engine is to prove itself before it gets a request."""
        return self._fruitless_crashes >= CRASHES_TO_PROBE

    def on_crash(self, healthy_s: float, had_requests: bool) -> bool:
        """An engine died. Returns whether it is worth to start another.

        well_s  seconds from its readiness to the last step that it ended, or its last sign of life where it had none to do
        blamed  it worked on somebody's request
        """
        self._fruitless_crashes += 1
        if healthy_s >= HEALTHY_S:
            self._idle_crashes = 0
        self._idle_crashes += not had_requests
        return self._idle_crashes < MAX_IDLE_CRASHES

    def on_start_failed(self) -> bool:
        """Returns whether it is worth to try again."""
        self._failed_starts += 1
        return self._failed_starts < MAX_START_ATTEMPTS

    def on_started(self) -> None:
        self._failed_starts = 0

    def record_progress(self) -> None:
        """Somebody gained something: it was not in vain."""
        self._fruitless_crashes = self._idle_crashes = 0
