"""Where a text repeats itself: what DRY penalties need, kept up token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from foreword.core.params import MAX_REPEAT_LEN

__all__ = ["SuffixRepeats"]

INITIAL_CAPACITY = 1024

Ids = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]


class SuffixRepeats:
    """For each place of a text, how many of the tokens before it are also the last tokens of the text.

    |<- ... a b c ->| d ... |<- a b c ->|     lengths[place of d] is 3: d would go on with the repeat
                              end of text

    A repeat counts as at most MAX_REPEAT tokens long, so that as many tokens are enough to know it.

    breakers  token sequences; no repeat reaches back behind the end of one
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
        """The text is now `tokens`, which begin with what it was."""
        begin, end = self._num_tokens, len(tokens)
        if begin == end:
            return
        self._ensure_capacity(end)
        self._ids[begin:end] = tokens[begin:]
        for place in range(self._first_counted(begin, end), end):
            self._extend(self._lengths, place)
        self._num_tokens = end
        self._draft_ids, self._draft_lengths = (), self._lengths

    def find_continuations(self, draft: tuple[int, ...], min_length: int, window: int) -> tuple[Ids, Lengths]:
        """Ids that would go on with a repeat of at least `allowed` of the last tokens of text and draft, with the longest.

        window  only so many last tokens are looked at; -1: all. Ids that are breakers are left out.
        """
        self._set_draft(draft)
        end = self._num_tokens + len(draft)
        start = 0 if window < 0 else max(end - window, 0)
        lengths = self._draft_lengths[start + 1 : end]
        places = np.flatnonzero(lengths >= min_length)
        found = np.minimum(lengths[places], places + 1)  # those that begin before the window are cut
        return self._longest_per_id(self._ids[start + 1 : end][places], found, min_length)

    def _first_counted(self, begin: int, end: int) -> int:
        """The first of the places [begin, end) from which on it is enough to count."""
        oldest = max(begin, end - MAX_REPEAT_LEN)
        first = next(
            (place + 1 for place in range(end - 1, oldest - 1, -1) if self._ends_breaker(place)), oldest
        )
        if first > begin:
            self._lengths[: first + 1] = 0
        return first

    def _longest_per_id(
        self, ids: Ids, lengths: npt.NDArray[np.int64], min_length: int
    ) -> tuple[Ids, Lengths]:
        keys = np.sort((ids * (MAX_REPEAT_LEN + 1) + lengths)[lengths >= min_length])
        keys = keys[
            np.append(keys[1:] // (MAX_REPEAT_LEN + 1) != keys[:-1] // (MAX_REPEAT_LEN + 1), True)[
                : len(keys)
            ]
        ]
        ids, found = np.divmod(keys, MAX_REPEAT_LEN + 1)
        if self._breaker_ids:
            kept = np.fromiter(
                (token_id not in self._breaker_ids for token_id in ids.tolist()), np.bool_, len(ids)
            )
            ids, found = ids[kept], found[kept]
        return ids, found.astype(np.int32)

    def _set_draft(self, draft: tuple[int, ...]) -> None:
        """Set what is behind the text; the drafts of a step mostly go on from each other."""
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
        for place in range(self._num_tokens + known, end):
            self._extend(lengths, place)
        self._draft_ids, self._draft_lengths = draft, lengths

    def _extend(self, lengths: Lengths, end: int) -> None:
        """The text of `end` tokens gets one more, which is in `ids` already."""
        if self._ends_breaker(end):
            lengths[: end + 1] = 0
            return
        longer = np.minimum(lengths[:end] + 1, MAX_REPEAT_LEN)
        lengths[1 : end + 1] = np.where(self._ids[:end] == self._ids[end], longer, 0)
        lengths[0] = 0

    def _ends_breaker(self, place: int) -> bool:
        """A breaker ends with the token there."""
        token_id = int(self._ids[place])
        sequences = self._breaker_sequences.get(token_id, ())
        return token_id in self._breaker_ids or any(
            self._ends_with(sequence, place + 1) for sequence in sequences
        )

    def _ends_with(self, sequence: tuple[int, ...], end: int) -> bool:
        return len(sequence) <= end and tuple(self._ids[end - len(sequence) : end].tolist()) == sequence

    def _ensure_capacity(self, size: int) -> None:
        if size + 1 > len(self._ids):
            room = 2 * (size + 1)
            self._ids = np.concatenate((self._ids, np.zeros(room - len(self._ids), np.int64)))
            self._lengths = np.concatenate((self._lengths, np.zeros(room - len(self._lengths), np.int32)))
