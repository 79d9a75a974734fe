"""Which tokens have a text in them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate

__all__ = ["TokenSearch"]

MAX_CACHED = 256  # texts; most callers ask for the same few


class TokenSearch:
    """All tokens of a vocabulary, laid end to end, so that one search goes through them all.

    tokens  bytes of each id
    """

    __slots__ = ("_cache", "_starts", "_text")

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._text = b"".join(tokens)
        self._starts = list(accumulate(map(len, tokens), initial=0))
        self._cache: dict[bytes, tuple[int, ...]] = {}

    def containing(self, part: bytes) -> tuple[int, ...]:
        """Ids of the tokens that have `part` in them, ascending."""
        found = self._cache.get(part)
        if found is None:
            found = tuple(self._search(part))
            if len(self._cache) >= MAX_CACHED:
                self._cache.clear()
            self._cache[part] = found
        return found

    def ending_with(self, part: bytes) -> Iterator[int]:
        """Ids of the tokens that end with `part`, ascending."""
        for token_id in self.containing(part):
            if self._text.endswith(part, self._starts[token_id], self._starts[token_id + 1]):
                yield token_id

    def _search(self, part: bytes) -> Iterator[int]:
        place = self._text.find(part)
        while place >= 0:
            token_id = bisect_right(self._starts, place) - 1
            end = self._starts[token_id + 1]
            if place + len(part) <= end:
                yield token_id
                place = end - 1
            place = self._text.find(part, place + 1)
