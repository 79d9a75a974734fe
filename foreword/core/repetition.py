"""Whether an answer runs away: its end repeats one pattern and nothing else, over and over.

A token *repeats* a pattern of p tokens if it equals the token p before it. An answer runs away at the first token with which
so many in a row repeat one pattern as SCALES says. That is a function of the output alone, and so the same with speculation
on and off, for every drafter, and in an engine that takes an answer over from one that died.

It is found without a look at every token. Let `run` be the longest run of repeating tokens that ends the answer, over all
patterns of a scale, and `longest` the scale's longest pattern. A look tells `run` if it is at least `longest`, and else that
it is shorter. A token makes it longer by at most one: the next look is due when it could be `enough`, and not before. Runs
that are at least `longest` long belong to multiples of the shortest pattern (Fine and Wilf), whose run is the longest, so
that a look searches for the place nearest to the end at which the last `longest` tokens stand once more. Two looks of a scale
are at least `longest` tokens apart together, and each is linear in `longest`: a token costs O(1).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PATTERN_LIMITS", "Repetition", "RepetitionDetector"]

# (longest pattern, repeating tokens that are enough): words and sentences; paragraphs; whole answers begun anew
PATTERN_LIMITS = ((128, 256), (512, 1024), (2048, 4096))
WINDOW_TOKENS = sum(PATTERN_LIMITS[-1])  # tokens that a look may read
SLACK_TOKENS = 1024  # tokens kept beyond them, so that the oldest are dropped seldom
TOKEN_BYTES = array("i").itemsize


@dataclass(frozen=True, slots=True)
class Repetition:
    """Where a pattern was found.

    num_tokens  tokens of the run that was fed up to the one with which it was found, that one included
    pattern     length of the shortest pattern
    """

    num_tokens: int
    pattern_len: int

    def shifted(self, count: int) -> Repetition | None:
        """The same, told of the run without its first `count` tokens; None if it was found among them."""
        return Repetition(self.num_tokens - count, self.pattern_len) if self.num_tokens > count else None


class RepetitionDetector:
    """Follows one answer until it is found to repeat itself. Keeps at most WINDOW + SLACK tokens."""

    __slots__ = ("_next_check", "_next_checks", "_num_fed", "_tail")

    def __init__(self) -> None:
        self._tail = array("i")
        self._num_fed = 0  # tokens fed
        self._next_checks = [
            enough for _, enough in PATTERN_LIMITS
        ]  # value of _count at which to look, by scale
        self._next_check = min(self._next_checks)

    def peek(self, token_ids: Sequence[int]) -> Repetition | None:
        """What feed() would say of these tokens, without being fed."""
        if self._num_fed + len(token_ids) < self._next_check:
            return None
        trial = RepetitionDetector()
        trial._tail, trial._num_fed = self._tail[:], self._num_fed
        trial._next_checks, trial._next_check = self._next_checks[:], self._next_check
        return trial.feed(token_ids)

    def feed(self, token_ids: Sequence[int]) -> Repetition | None:
        """Take the next tokens of the answer, up to the one with which a pattern is found; then there is no more to find."""
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
        """The length of a pattern that was repeated often enough, or 0; then the next look is due later."""
        for scale, (longest, enough) in enumerate(PATTERN_LIMITS):
            if self._next_checks[scale] > self._num_fed:
                continue
            pattern, run = self._longest_run(longest, enough)
            if run >= enough:
                return pattern
            self._next_checks[scale] = self._num_fed + enough - run
        self._next_check = min(self._next_checks)
        return 0

    def _longest_run(self, max_pattern: int, min_repeating: int) -> tuple[int, int]:
        """The shortest pattern that the last `longest` tokens repeat, and how many do, counted up to `enough`.

        Where there is no such pattern: 0, and the most that there can be without one.
        """
        newest_first = self._tail[: -(max_pattern + min_repeating) - 1 : -1].tobytes()
        size = max_pattern * TOKEN_BYTES
        shift = newest_first.find(newest_first[:size], TOKEN_BYTES, 2 * size)
        while shift % TOKEN_BYTES and shift > 0:  # bytes that are alike, but not the same tokens
            shift = newest_first.find(newest_first[:size], shift + 1, 2 * size)
        if shift < 0:
            return 0, max_pattern - 1
        return shift // TOKEN_BYTES, _common_prefix_len(
            newest_first, newest_first[shift:], max_pattern, min_repeating
        )


def _common_prefix_len(first: bytes, second: bytes, min_len: int, max_len: int) -> int:
    """With how many of the same tokens both begin, known to be at least `least` and counted up to `most`."""

    def differ(num_tokens: int) -> bool:
        return first[: num_tokens * TOKEN_BYTES] != second[: num_tokens * TOKEN_BYTES]

    return bisect_left(range(max_len + 1), True, lo=min_len + 1, key=differ) - 1
