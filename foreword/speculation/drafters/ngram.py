"""Prompt lookup: draft the continuation of the latest n-gram that matches the end of the text."""

from __future__ import annotations

from collections.abc import Sequence, Set
from itertools import takewhile

from foreword.core.outputs import Draft
from foreword.speculation.drafter import Drafter, RequestView

# P(token accepted | those before it accepted) by length of the match, which grows along the draft.
# Measured: docs/lab/suffix.md.
CONFIDENCE = (0.0, 0.25, 0.42, 0.55, 0.75, 0.82, 0.85, 0.87, 0.88, 0.88, 0.89, 0.89, 0.9)


class _NgramIndex:
    """Tokens of one request, and the latest continuation of each n-gram, updated incrementally."""

    __slots__ = ("_continued_at", "_min_start", "_never_sampled_ids", "_ngram_sizes", "tokens")

    def __init__(self, ngram_sizes: range, never_sampled_ids: Set[int]) -> None:
        self.tokens: list[int] = []
        self._ngram_sizes = ngram_sizes
        self._never_sampled_ids = never_sampled_ids
        self._min_start = 0  # index after the last never-sampled id; no n-gram includes one
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
        """Size and continuation of the longest known n-gram at the end of the text; (0, []) without a match.

        A continuation that reaches the end of the text repeats itself.
        """
        tokens = self.tokens
        for size in reversed(self._ngram_sizes):
            if size > len(tokens) - self._min_start:
                continue
            start = self._continued_at.get(tuple(tokens[-size:]))
            if start is not None:
                draft = tokens[start : start + max_tokens]
                while len(draft) < max_tokens:
                    draft += draft[: max_tokens - len(draft)]
                if start < self._min_start:  # it may include such ids later
                    draft = list(takewhile(lambda token_id: token_id not in self._never_sampled_ids, draft))
                return size, draft
        return 0, []


class NgramDrafter(Drafter):
    """Drafts from the request's own prompt and output, by n-grams of lookup_min..lookup_max tokens.

    The longest n-gram wins, at its latest occurrence. Never-sampled ids are neither matched nor drafted.
    """

    def __init__(self, lookup_min: int, lookup_max: int, never_sampled_ids: Set[int] = frozenset()) -> None:
        assert 1 <= lookup_min <= lookup_max
        self._never_sampled_ids = never_sampled_ids
        self._ngram_sizes = range(lookup_min, lookup_max + 1)
        self._indexes: dict[str, _NgramIndex] = {}

    def start(self, request: RequestView) -> None:
        self._indexes[request.id] = _NgramIndex(self._ngram_sizes, self._never_sampled_ids)

    def finish(self, request: RequestView, output: Sequence[int]) -> None:
        del self._indexes[request.id]

    def propose(self, requests: Sequence[RequestView]) -> list[Draft | None]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: RequestView) -> Draft | None:
        index = self._indexes[request.id]
        index.extend(request.tokens[len(index.tokens) :])
        size, draft = index.find_continuation(request.max_tokens)
        confidence = CONFIDENCE[size : size + len(draft)]
        confidence += CONFIDENCE[-1:] * (len(draft) - len(confidence))
        return Draft(tuple(draft), confidence=confidence) if draft else None
