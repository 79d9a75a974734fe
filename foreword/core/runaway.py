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

__all__ = ["SCALES", "Repetition", "RunawayGuard"]

# (longest pattern, repeating tokens that are enough): words and sentences; paragraphs; whole answers begun anew
SCALES = ((128, 256), (512, 1024), (2048, 4096))
WINDOW = sum(SCALES[-1])  # tokens that a look may read
SLACK = 1024  # tokens kept beyond them, so that the oldest are dropped seldom
WIDTH = array("i").itemsize


@dataclass(frozen=True, slots=True)
class Repetition:
    """Where a pattern was found.

    num_tokens  tokens of the run that was fed up to the one with which it was found, that one included
    pattern     length of the shortest pattern
    """

    num_tokens: int
    pattern: int

    def behind(self, count: int) -> Repetition | None:
        """The same, told of the run without its first `count` tokens; None if it was found among them."""
        return Repetition(self.num_tokens - count, self.pattern) if self.num_tokens > count else None


class RunawayGuard:
    """Follows one answer until it is found to repeat itself. Keeps at most WINDOW + SLACK tokens."""

    __slots__ = ("_count", "_due", "_next", "_tail")

    def __init__(self) -> None:
        self._tail = array("i")
        self._count = 0  # tokens fed
        self._due = [enough for _, enough in SCALES]  # value of _count at which to look, by scale
        self._next = min(self._due)

    def find(self, token_ids: Sequence[int]) -> Repetition | None:
        """What feed() would say of these tokens, without being fed."""
        if self._count + len(token_ids) < self._next:
            return None
        trial = RunawayGuard()
        trial._tail, trial._count = self._tail[:], self._count
        trial._due, trial._next = self._due[:], self._next
        return trial.feed(token_ids)

    def feed(self, token_ids: Sequence[int]) -> Repetition | None:
        """Take the next tokens of the answer, up to the one with which a pattern is found; then there is no more to find."""
        fed = 0
        while (wanted := self._next - self._count) <= len(token_ids) - fed:
            self._take(token_ids[fed : fed + wanted])
            fed += wanted
            pattern = self._look()
            if pattern:
                return Repetition(fed, pattern)
        self._take(token_ids[fed:])
        return None

    def _take(self, token_ids: Sequence[int]) -> None:
        self._tail.extend(token_ids)
        self._count += len(token_ids)
        if len(self._tail) > WINDOW + SLACK:
            del self._tail[:-WINDOW]

    def _look(self) -> int:
        """The length of a pattern that was repeated often enough, or 0; then the next look is due later."""
        for scale, (longest, enough) in enumerate(SCALES):
            if self._due[scale] > self._count:
                continue
            pattern, run = self._repeating(longest, enough)
            if run >= enough:
                return pattern
            self._due[scale] = self._count + enough - run
        self._next = min(self._due)
        return 0

    def _repeating(self, longest: int, enough: int) -> tuple[int, int]:
        """The shortest pattern that the last `longest` tokens repeat, and how many do, counted up to `enough`.

        Where there is no such pattern: 0, and the most that there can be without one.
        """
        newest_first = self._tail[: -(longest + enough) - 1 : -1].tobytes()
        size = longest * WIDTH
        shift = newest_first.find(newest_first[:size], WIDTH, 2 * size)
        while shift % WIDTH and shift > 0:  # bytes that are alike, but not the same tokens
            shift = newest_first.find(newest_first[:size], shift + 1, 2 * size)
        if shift < 0:
            return 0, longest - 1
        return shift // WIDTH, _alike(newest_first, newest_first[shift:], longest, enough)


def _alike(first: bytes, second: bytes, least: int, most: int) -> int:
    """With how many of the same tokens both begin, known to be at least `least` and counted up to `most`."""

    def differ(num_tokens: int) -> bool:
        return first[: num_tokens * WIDTH] != second[: num_tokens * WIDTH]

    return bisect_left(range(most + 1), True, lo=least + 1, key=differ) - 1
