"""Prompt lookup: what followed the last time these few tokens stood here."""

from __future__ import annotations

from collections.abc import Container, Sequence, Set

from foreword.core.outputs import Draft
from foreword.core.request import RequestState
from foreword.speculation.base import DraftRequest

__all__ = ["NgramDrafter"]

# Probability that a token is right if those before it are, by length of the match, which grows with the guess.
# Measured: docs/lab/suffix.md.
CONFIDENCE = (0.0, 0.25, 0.42, 0.55, 0.75, 0.82, 0.85, 0.87, 0.88, 0.88, 0.89, 0.89, 0.9)


class _NgramIndex:
    """The tokens of one request and where each of their n-grams was last continued.

    Grows by what is appended; nothing is ever scanned again.

    fence  index behind the last token that is never drafted: no n-gram reaches over it
    """

    __slots__ = ("_continued_at", "_min_start", "_never_sampled_ids", "_ngram_sizes", "tokens")

    def __init__(self, ngram_sizes: range, never_sampled_ids: Set[int]) -> None:
        self.tokens: list[int] = []
        self._ngram_sizes = ngram_sizes
        self._never_sampled_ids = never_sampled_ids
        self._min_start = 0
        self._continued_at: dict[tuple[int, ...], int] = {}

    def extend(self, token_ids: Sequence[int]) -> None:
        tokens, continued_at = self.tokens, self._continued_at
        known = len(tokens)
        tokens += token_ids
        for end, token_id in enumerate(token_ids, start=known):
            if token_id in self._never_sampled_ids:
                self._min_start = end + 1
                continue
            for size in self._ngram_sizes:
                if size <= end - self._min_start:
                    continued_at[tuple(tokens[end - size : end])] = end

    def find_continuation(self, max_tokens: int) -> tuple[int, list[int]]:
        """Size of the longest known n-gram that ends the text, and what followed it; it may run on into itself.

        (0, []) where nothing matches.
        """
        tokens = self.tokens
        for size in reversed(self._ngram_sizes):
            start = (
                self._continued_at.get(tuple(tokens[-size:]))
                if size <= len(tokens) - self._min_start
                else None
            )
            if start is not None:
                found = tokens[start : start + max_tokens]
                while len(found) < max_tokens:
                    found += found[: max_tokens - len(found)]
                return size, self._truncate_at_never_sampled(found) if start < self._min_start else found
        return 0, []

    def _truncate_at_never_sampled(self, token_ids: list[int]) -> list[int]:
        """Up to the first token that is never drafted; the one in front was found to follow, so that it is none."""
        return token_ids[
            : next(
                (index for index, token_id in enumerate(token_ids) if token_id in self._never_sampled_ids),
                len(token_ids),
            )
        ]


class NgramDrafter:
    """Drafts from the request's own prompt and output, by n-grams of lookup_min..lookup_max tokens.

    Nothing is proposed where nothing matches. The latest occurrence of the longest n-gram wins.

    never  ids that are neither matched nor guessed
    """

    name = "ngram"

    def __init__(self, lookup_min: int, lookup_max: int, never_sampled_ids: Set[int] = frozenset()) -> None:
        assert 1 <= lookup_min <= lookup_max
        self._never_sampled_ids = never_sampled_ids
        self._ngram_sizes = range(lookup_min, lookup_max + 1)
        self._indexes: dict[str, _NgramIndex] = {}

    def start(self, state: RequestState) -> None:
        self._indexes[state.id] = _NgramIndex(self._ngram_sizes, self._never_sampled_ids)

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        self._indexes.pop(request_id, None)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._indexes)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        return [self._propose(ask) for ask in requests]

    def _propose(self, request: DraftRequest) -> Draft | None:
        index = self._indexes[request.state.id]
        index.extend(request.tokens_from(len(index.tokens)))
        size, guess = index.find_continuation(request.max_tokens)
        return Draft(tuple(guess), self.name, _confidence(size, len(guess))) if guess else None


def _confidence(match_len: int, draft_len: int) -> tuple[float, ...]:
    known = CONFIDENCE[match_len : match_len + draft_len]
    return known + CONFIDENCE[-1:] * (draft_len - len(known))
