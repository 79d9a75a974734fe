"""Prompt lookup: what followed the last time these few tokens stood here."""

from __future__ import annotations

from collections.abc import Container, Sequence, Set

from foreword.core.draft import Draft
from foreword.core.request import RequestState
from foreword.drafting.base import Ask

__all__ = ["NgramDrafter"]

# Probability that a token is right if those before it are, by length of the match, which grows with the guess.
# Measured: docs/lab/suffix.md.
CONFIDENCE = (0.0, 0.25, 0.42, 0.55, 0.75, 0.82, 0.85, 0.87, 0.88, 0.88, 0.89, 0.89, 0.9)


class _Index:
    """The tokens of one request and where each of their n-grams was last continued.

    Grows by what is appended; nothing is ever scanned again.

    fence  index behind the last token that is never drafted: no n-gram reaches over it
    """

    __slots__ = ("_continued_at", "_fence", "_never", "_sizes", "tokens")

    def __init__(self, sizes: range, never: Set[int]) -> None:
        self.tokens: list[int] = []
        self._sizes = sizes
        self._never = never
        self._fence = 0
        self._continued_at: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        tokens, continued_at = self.tokens, self._continued_at
        known = len(tokens)
        tokens += token_ids
        for end, token_id in enumerate(token_ids, start=known):
            if token_id in self._never:
                self._fence = end + 1
                continue
            for size in self._sizes:
                if size <= end - self._fence:
                    continued_at[tuple(tokens[end - size : end])] = end

    def continuation(self, max_tokens: int) -> tuple[int, list[int]]:
        """Size of the longest known n-gram that ends the text, and what followed it; it may run on into itself.

        (0, []) where nothing matches.
        """
        tokens = self.tokens
        for size in reversed(self._sizes):
            start = self._continued_at.get(tuple(tokens[-size:])) if size <= len(tokens) - self._fence else None
            if start is not None:
                found = tokens[start : start + max_tokens]
                while len(found) < max_tokens:
                    found += found[: max_tokens - len(found)]
                return size, self._cut(found) if start < self._fence else found
        return 0, []

    def _cut(self, found: list[int]) -> list[int]:
        """Up to the first token that is never drafted; the one in front was found to follow, so that it is none."""
        return found[: next((index for index, token_id in enumerate(found) if token_id in self._never), len(found))]


class NgramDrafter:
    """Drafts from the request's own prompt and output, by n-grams of lookup_min..lookup_max tokens.

    Nothing is proposed where nothing matches. The latest occurrence of the longest n-gram wins.

    never  ids that are neither matched nor guessed
    """

    name = "ngram"

    def __init__(self, lookup_min: int, lookup_max: int, never: Set[int] = frozenset()) -> None:
        assert 1 <= lookup_min <= lookup_max
        self._never = never
        self._sizes = range(lookup_min, lookup_max + 1)
        self._indexes: dict[str, _Index] = {}

    def start(self, state: RequestState) -> None:
        self._indexes[state.id] = _Index(self._sizes, self._never)

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        self._indexes.pop(request_id, None)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._indexes)

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> Draft | None:
        index = self._indexes[ask.state.id]
        index.extend(ask.tokens_from(len(index.tokens)))
        size, guess = index.continuation(ask.max_tokens)
        return Draft(tuple(guess), self.name, _confidence(size, len(guess))) if guess else None


def _confidence(size: int, count: int) -> tuple[float, ...]:
    known = CONFIDENCE[size : size + count]
    return known + CONFIDENCE[-1:] * (count - len(known))
