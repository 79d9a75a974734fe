"""Whose fault the death of an engine may be, and how many deaths are borne."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["Patience", "Suspects"]

STRIKES: Final = 2  # deaths in a row without a token between them that make a request suspect
ALONE: Final = 2  # deaths that are its own fault beyond doubt
MAX_DEATHS: Final = 5
MAX_STARTS: Final = 3
STEADY_S: Final = 60.0  # an engine that was well for so long was no failure, whatever it did not do
DOUBTS: Final = 2  # deaths in a row without a token to anybody, after which a replacement has to prove itself


class Suspects:
    """Requests that may kill the engine.

    A request is suspect if it was worked on at two deaths in a row and gained no token between them. Suspects run alone, one
    after the other, each until it gains a token or ends; who dies alone twice is condemned.
    """

    __slots__ = ("_strikes", "_suspects")

    def __init__(self) -> None:
        self._strikes: dict[str, int] = {}
        self._suspects: dict[str, int] = {}  # how often each died alone, in the order of their turns

    @property
    def alone(self) -> str | None:
        """The request that nobody may run beside; None: there is no suspect."""
        return next(iter(self._suspects), None)

    def died(self, at_work: Sequence[str]) -> str | None:
        """An engine died while it worked on these, all of them still open. Returns the request that is condemned."""
        alone = self.alone
        if alone is None:
            self._strike(at_work)
        elif alone in at_work:
            self._suspects[alone] += 1
            if self._suspects[alone] >= ALONE:
                self.clear(alone)
                return alone
        return None

    def clear(self, request_id: str) -> None:
        """It gained a token, or has ended."""
        self._strikes.pop(request_id, None)
        self._suspects.pop(request_id, None)

    def _strike(self, at_work: Sequence[str]) -> None:
        if at_work:  # who died idle, or while it was loading, says nothing about anybody
            self._strikes = {request_id: self._strikes.get(request_id, 0) + 1 for request_id in at_work}
            self._suspects = {request_id: 0 for request_id, strikes in self._strikes.items() if strikes >= STRIKES}


class Patience:
    """How much is borne before an engine is given up for good.

    Requests that kill engines are refused in the end, so deaths in the midst of their work never lead to giving up, however
    many there are. What does: engines that do not start, and such that die of nothing. Who is in doubt gets work that kills
    nobody, so that one that is broken altogether dies of nothing too.
    """

    __slots__ = ("_failed_starts", "_in_vain", "_of_nothing")

    def __init__(self) -> None:
        self._in_vain = 0
        self._of_nothing = 0
        self._failed_starts = 0

    @property
    def in_doubt(self) -> bool:
        """Whether the next engine is to prove itself before it gets a request."""
        return self._in_vain >= DOUBTS

    def died(self, well_s: float, blamed: bool) -> bool:
        """An engine died. Returns whether it is worth to start another.

        well_s  seconds from its readiness to the last step that it ended, or its last sign of life where it had none to do
        blamed  it worked on somebody's request
        """
        self._in_vain += 1
        if well_s >= STEADY_S:
            self._of_nothing = 0
        self._of_nothing += not blamed
        return self._of_nothing < MAX_DEATHS

    def failed_to_start(self) -> bool:
        """Returns whether it is worth to try again."""
        self._failed_starts += 1
        return self._failed_starts < MAX_STARTS

    def started(self) -> None:
        self._failed_starts = 0

    def delivered(self) -> None:
        """Somebody gained something: it was not in vain."""
        self._in_vain = self._of_nothing = 0
