"""Prompt lookup: what followed the last time these few tokens stood here."""

from __future__ import annotations

from collections.abc import Container, Sequence

from foreword.core.draft import Draft
from foreword.core.request import RequestState
from foreword.drafting.base import Ask

__all__ = ["NgramDrafter"]


class _Index:
    """The tokens of one request and where each of their n-grams was last continued.

    Grows by what is appended; nothing is ever scanned again.
    """

    __slots__ = ("_continued_at", "_sizes", "tokens")

    def __init__(self, sizes: range) -> None:
        self.tokens: list[int] = []
        self._sizes = sizes
        self._continued_at: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        tokens, continued_at = self.tokens, self._continued_at
        for token_id in token_ids:
            end = len(tokens)
            for size in self._sizes:
                if size <= end:
                    continued_at[tuple(tokens[end - size : end])] = end
            tokens.append(token_id)

    def continuation(self, max_tokens: int) -> tuple[int, ...]:
        """What followed the longest known n-gram that ends the text; it may run on into itself."""
        tokens = self.tokens
        for size in reversed(self._sizes):
            start = self._continued_at.get(tuple(tokens[-size:])) if size <= len(tokens) else None
            if start is not None:
                period = len(tokens) - start
                return tuple(tokens[start + i % period] for i in range(max_tokens))
        return ()


class NgramDrafter:
    """Drafts from the request's own prompt and output, by n-grams of lookup_min..lookup_max tokens.

    Nothing is proposed where nothing matches. The latest occurrence of the longest n-gram wins.
    """

    name = "ngram"

    def __init__(self, lookup_min: int, lookup_max: int) -> None:
        assert 1 <= lookup_min <= lookup_max
        self._sizes = range(lookup_min, lookup_max + 1)
        self._indexes: dict[str, _Index] = {}

    def start(self, state: RequestState) -> None:
        self._indexes[state.id] = _Index(self._sizes)

    def finish(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._indexes)

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> Draft | None:
        index = self._indexes[ask.state.id]
        index.extend(ask.tokens_from(len(index.tokens)))
        guess = index.continuation(ask.max_tokens)
        return Draft(guess, self.name) if guess else None
