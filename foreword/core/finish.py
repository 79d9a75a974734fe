"""The end of an output: a stop id (EOS), the length limit, or a repeating pattern."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

# (max_pattern, min_repeating) in tokens: words and sentences; paragraphs; complete answers
PATTERN_LIMITS = ((128, 256), (512, 1024), (2048, 4096))
WINDOW_TOKENS = sum(PATTERN_LIMITS[-1])  # read by one check
SLACK_TOKENS = 1024  # kept in addition, so that old tokens are dropped rarely
TOKEN_BYTES = array("i").itemsize


@dataclass(frozen=True, slots=True)
class Repetition:
    """A repeated pattern, and the token that completed it."""

    num_tokens: int  # tokens of the fed run up to that token, including it
    pattern_len: int  # length of the shortest pattern

    def shifted(self, count: int) -> Repetition | None:
        """The repetition counted without the run's first `count` tokens; None if it was among them."""
        return Repetition(self.num_tokens - count, self.pattern_len) if self.num_tokens > count else None


class RepetitionDetector:
    """Follows one output until a repetition is detected. Keeps a bounded tail of it."""

    __slots__ = ("_next_check", "_next_checks", "_num_fed", "_tail")

    def __init__(self) -> None:
        self._tail = array("i")
        self._num_fed = 0
        self._next_checks = [enough for _, enough in PATTERN_LIMITS]  # values of _num_fed, by limit
        self._next_check = min(self._next_checks)

    def is_due(self, num_tokens: int) -> bool:
        """Whether a check is due within the next tokens; else feed() finds nothing."""
        return self._num_fed + num_tokens >= self._next_check

    def peek(self, token_ids: Sequence[int]) -> Repetition | None:
        """Return the result of feed() for these tokens, without feeding them."""
        if not self.is_due(len(token_ids)):
            return None
        trial = RepetitionDetector()
        trial._tail, trial._num_fed = self._tail[:], self._num_fed
        trial._next_checks, trial._next_check = self._next_checks[:], self._next_check
        return trial.feed(token_ids)

    def feed(self, token_ids: Sequence[int]) -> Repetition | None:
        """Feed the next tokens of the output, up to a repetition; then the detector is finished."""
        if not self.is_due(len(token_ids)):
            self._append(token_ids)
            return None
        fed = 0
        while (wanted := self._next_check - self._num_fed) <= len(token_ids) - fed:
            self._append(token_ids[fed : fed + wanted])
            fed += wanted
            pattern = self._check_due()
            if pattern:
                return Repetition(fed, pattern)
        self._append(token_ids[fed:])
        return None

    def _append(self, token_ids: Sequence[int]) -> None:
        self._tail.extend(token_ids)
        self._num_fed += len(token_ids)
        if len(self._tail) > WINDOW_TOKENS + SLACK_TOKENS:
            del self._tail[:-WINDOW_TOKENS]

    def _check_due(self) -> int:
        """The length of the repeated pattern, or 0 after scheduling the next check."""
        for index, (max_pattern, min_repeating) in enumerate(PATTERN_LIMITS):
            if self._next_checks[index] > self._num_fed:
                continue
            pattern, run = self._longest_run(max_pattern, min_repeating)
            if run >= min_repeating:
                return pattern
            self._next_checks[index] = self._num_fed + min_repeating - run
        self._next_check = min(self._next_checks)
        return 0

    def _longest_run(self, max_pattern: int, min_repeating: int) -> tuple[int, int]:
        """The shortest pattern that the last `max_pattern` tokens repeat, and its run up to `min_repeating`.

        Without such a pattern: 0, and the longest run that is then possible.
        """
        newest_first = self._tail[: -(max_pattern + min_repeating) - 1 : -1].tobytes()
        size = max_pattern * TOKEN_BYTES
        shift = newest_first.find(newest_first[:size], TOKEN_BYTES, 2 * size)
        while shift % TOKEN_BYTES and shift > 0:  # equal bytes that are not aligned with tokens
            shift = newest_first.find(newest_first[:size], shift + 1, 2 * size)
        if shift < 0:
            return 0, max_pattern - 1
        run = _common_prefix_len(newest_first, newest_first[shift:], max_pattern, min_repeating)
        return shift // TOKEN_BYTES, run


def _common_prefix_len(first: bytes, second: bytes, min_len: int, max_len: int) -> int:
    """Length of the common prefix in tokens, known to be at least `min_len`, capped at `max_len`."""

    def differ(num_tokens: int) -> bool:
        return first[: num_tokens * TOKEN_BYTES] != second[: num_tokens * TOKEN_BYTES]

    return bisect_left(range(max_len + 1), True, lo=min_len + 1, key=differ) - 1


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

    def check(
        self, run: Sequence[int], room: int, is_end: Callable[[Sequence[int], int], bool]
    ) -> FinishResult:
        """The end of a run, at most `room` tokens after the output so far.

        is_end  whether a stop id behind some tokens of the run ends the output
        The earliest token decides; at the same token, stop wins over length, and length over repetition.
        """
        detector = self._detector
        if (
            len(run) < room
            and self._stop_ids.isdisjoint(run)
            and (detector is None or not detector.is_due(len(run)))
        ):
            return FinishResult(len(run))
        end = self._check_stop(run, room, is_end)
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

    def _check_stop(
        self, run: Sequence[int], room: int, is_end: Callable[[Sequence[int], int], bool]
    ) -> FinishResult:
        for index, token_id in enumerate(run[:room]):
            if token_id in self._stop_ids and is_end(run[:index], token_id):
                return FinishResult(index + 1, "stop", token_id)
        return FinishResult(room, "length") if len(run) >= room else FinishResult(len(run))
