"""Incremental suffix matching for DRY penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foreword.core.params import MAX_REPEAT_LEN

INITIAL_CAPACITY = 1024  # tokens

Ids = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]


class SuffixRepeats:
    """For each index of a text, how many tokens before it equal the last tokens of the text.

    |<- ... a b c ->| d ... |<- a b c ->|     lengths[index of d] is 3: d would continue the repeat
                              end of text

    Lengths are capped at MAX_REPEAT_LEN, so only that many new tokens are replayed after a gap.
    """

    __slots__ = (
        "_breaker_ids",
        "_breaker_sequences",
        "_draft_ids",
        "_draft_lengths",
        "_ids",
        "_lengths",
        "_num_tokens",
    )

    def __init__(self, breakers: Sequence[tuple[int, ...]] = ()) -> None:
        """breakers  token sequences; no repeat extends over the end of one"""
        self._breaker_ids = frozenset(breaker[0] for breaker in breakers if len(breaker) == 1)
        self._breaker_sequences: dict[int, list[tuple[int, ...]]] = {}  # by their last token
        for breaker in breakers:
            if len(breaker) > 1:
                self._breaker_sequences.setdefault(breaker[-1], []).append(breaker)
        self._ids: Ids = np.zeros(INITIAL_CAPACITY, np.int64)
        self._lengths: Lengths = np.zeros(INITIAL_CAPACITY, np.int32)
        self._num_tokens = 0
        self._draft_ids: tuple[int, ...] = ()
        self._draft_lengths: Lengths = self._lengths

    def update(self, tokens: Sequence[int]) -> None:
        """Extend the text to `tokens`, which begin with the text so far."""
        start, end = self._num_tokens, len(tokens)
        if start == end:
            return
        self._ensure_capacity(end)
        self._ids[start:end] = tokens[start:]
        for index in range(self._first_counted(start, end), end):
            self._extend(self._lengths, index)
        self._num_tokens = end
        self._draft_ids, self._draft_lengths = (), self._lengths

    def find_continuations(self, draft: tuple[int, ...], min_length: int, window: int) -> tuple[Ids, Lengths]:
        """Ids that would continue a repeat of at least `min_length` last tokens, and the longest such length.

        window  how many last tokens of text and draft are searched; -1: all. Breakers are left out.
        """
        self._set_draft(draft)
        end = self._num_tokens + len(draft)
        start = 0 if window < 0 else max(end - window, 0)
        lengths = self._draft_lengths[start + 1 : end]
        indices = np.flatnonzero(lengths >= min_length)
        in_window = np.minimum(lengths[indices], indices + 1)
        return self._longest_per_id(self._ids[start + 1 : end][indices], in_window, min_length)

    def _first_counted(self, start: int, end: int) -> int:
        """The first index of [start, end) that affects the lengths at `end`; earlier ones need no replay."""
        oldest = max(start, end - MAX_REPEAT_LEN)
        after_breakers = (index + 1 for index in range(end - 1, oldest - 1, -1) if self._ends_breaker(index))
        first = next(after_breakers, oldest)
        if first > start:
            self._lengths[: first + 1] = 0
        return first

    def _longest_per_id(
        self, ids: Ids, lengths: npt.NDArray[np.int64], min_length: int
    ) -> tuple[Ids, Lengths]:
        base = MAX_REPEAT_LEN + 1
        keys = np.sort((ids * base + lengths)[lengths >= min_length])
        is_last_of_id = np.append(keys[1:] // base != keys[:-1] // base, True)[: len(keys)]
        ids, longest = np.divmod(keys[is_last_of_id], base)
        if self._breaker_ids:
            kept = np.array([token_id not in self._breaker_ids for token_id in ids.tolist()], np.bool_)
            ids, longest = ids[kept], longest[kept]
        return ids, longest.astype(np.int32)

    def _set_draft(self, draft: tuple[int, ...]) -> None:
        """Append `draft` to the text for the next query. The drafts of a step mostly extend each other."""
        if not draft:
            self._draft_ids, self._draft_lengths = (), self._lengths
        if draft == self._draft_ids:
            return
        known = len(self._draft_ids) if draft[: len(self._draft_ids)] == self._draft_ids else 0
        end = self._num_tokens + len(draft)
        self._ensure_capacity(end)
        lengths = np.zeros(len(self._lengths), np.int32)
        base = self._draft_lengths if known else self._lengths
        lengths[: self._num_tokens + known] = base[: self._num_tokens + known]
        self._ids[self._num_tokens : end] = draft
        for index in range(self._num_tokens + known, end):
            self._extend(lengths, index)
        self._draft_ids, self._draft_lengths = draft, lengths

    def _extend(self, lengths: Lengths, end: int) -> None:
        """Append the token at `_ids[end]` to the text of `end` tokens."""
        if self._ends_breaker(end):
            lengths[: end + 1] = 0
            return
        longer = np.minimum(lengths[:end] + 1, MAX_REPEAT_LEN)
        lengths[1 : end + 1] = np.where(self._ids[:end] == self._ids[end], longer, 0)
        lengths[0] = 0

    def _ends_breaker(self, index: int) -> bool:
        """Whether a breaker ends with the token at `index`."""
        token_id, end = int(self._ids[index]), index + 1
        return token_id in self._breaker_ids or any(
            len(sequence) <= end and tuple(self._ids[end - len(sequence) : end].tolist()) == sequence
            for sequence in self._breaker_sequences.get(token_id, ())
        )

    def _ensure_capacity(self, size: int) -> None:
        if size + 1 > len(self._ids):
            added = 2 * (size + 1) - len(self._ids)
            self._ids = np.concatenate((self._ids, np.zeros(added, np.int64)))
            self._lengths = np.concatenate((self._lengths, np.zeros(added, np.int32)))
