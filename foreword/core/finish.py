"""The end of an output: a stop id (EOS), the length limit, or a repeating pattern."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import NamedTuple

from foreword.core.repetition import Repetition, RepetitionDetector


class FinishResult(NamedTuple):
    """Where a run of new tokens ends the output, if it does."""

    num_kept: int  # tokens of the run that belong to the output
    finish_reason: str | None = None  # "stop", "length" or "repetition"; None: the request continues
    stop_id: int | None = None  # the token id that stopped it
    repetition: Repetition | None = None  # detected with these tokens


class FinishChecker:
    """Cuts the runs of one request at the first token that ends its output."""

    __slots__ = ("_detector", "_stop_ids", "_stops_at_repetition")

    def __init__(self, stop_ids: Set[int], on_runaway: str | None) -> None:
        """on_runaway  "warn" or "stop"; otherwise no pattern is looked for"""
        self._stop_ids = stop_ids
        self._stops_at_repetition = on_runaway == "stop"
        self._detector = RepetitionDetector() if on_runaway in ("warn", "stop") else None

    @property
    def detects_repetition(self) -> bool:
        """Until a pattern was reported once."""
        return self._detector is not None

    def check(self, run: Sequence[int], room: int) -> FinishResult:
        """The end of a run, at most `room` tokens after the output so far.

        The earliest token decides; at the same token, stop wins over length, and length over repetition.
        """
        detector = self._detector
        if (
            len(run) < room
            and self._stop_ids.isdisjoint(run)
            and (detector is None or not detector.is_due(len(run)))
        ):
            return FinishResult(len(run))
        end = self._check_stop(run, room)
        repetition = None if detector is None else detector.peek(run[: end.num_kept])
        if repetition is None:
            return end
        is_first = end.finish_reason is None or repetition.num_tokens < end.num_kept
        if self._stops_at_repetition and is_first:
            return FinishResult(repetition.num_tokens, "repetition", None, repetition)
        return end._replace(repetition=repetition)

    def record(self, token_ids: Sequence[int]) -> None:
        """Tokens become output."""
        if self._detector is not None and self._detector.feed(token_ids) is not None:
            self._detector = None

    def _check_stop(self, run: Sequence[int], room: int) -> FinishResult:
        for index, token_id in enumerate(run[:room]):
            if token_id in self._stop_ids:
                return FinishResult(index + 1, "stop", token_id)
        return FinishResult(room, "length") if len(run) >= room else FinishResult(len(run))
