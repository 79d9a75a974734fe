"""Token counts and repeats of a request, kept between steps so that a step costs only its new tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.core.params import MAX_REPEAT_LEN
from foreword.core.request import Request, RequestState

WORD_BITS = 32  # bits of a mask word
INITIAL_CAPACITY = 256  # distinct ids
INITIAL_TEXT_CAPACITY = 1024  # tokens
MAX_PENALTY = 1e30  # finite after any temperature: a penalty never masks a token

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Lengths = npt.NDArray[np.int32]


def get_penalty_state(state: RequestState) -> PenaltyState:
    """The request's penalty state, shared by all its rows. Resetting `state.penalty_state` rebuilds it."""
    if not isinstance(state.penalty_state, PenaltyState):
        state.penalty_state = PenaltyState(state.request)
    return state.penalty_state


class TokenCounts:
    """Count of each id from index `start` of a text on; ids in order of first appearance."""

    __slots__ = ("_counts", "_ids", "_index_of", "_num_counted")

    def __init__(self, start: int = 0) -> None:
        self._num_counted = start
        self._index_of: dict[int, int] = {}
        self._ids: Ids = np.zeros(INITIAL_CAPACITY, np.int64)
        self._counts: Ids = np.zeros(INITIAL_CAPACITY, np.int64)

    def update(self, tokens: Sequence[int]) -> None:
        """Extend the text to `tokens`, which begin with the text so far."""
        for token_id, count in Counter(tokens[self._num_counted :]).items():
            index = self._index_of.setdefault(token_id, len(self._index_of))
            if index == len(self._ids):
                self._ids, self._counts = (
                    np.concatenate((old, np.zeros_like(old))) for old in (self._ids, self._counts)
                )
            self._ids[index] = token_id
            self._counts[index] += count
        self._num_counted = len(tokens)

    def counts(self, draft: Sequence[int]) -> tuple[Ids, Ids]:
        """Ids and counts of text and draft; valid until the text grows."""
        size = len(self._index_of)
        ids, counts = self._ids[:size], self._counts[:size]
        if not draft:
            return ids, counts
        draft_counts = Counter(draft)
        new = [token_id for token_id in draft_counts if token_id not in self._index_of]
        ids, counts = np.append(ids, np.array(new, np.int64)), np.append(counts, np.zeros(len(new), np.int64))
        new_index = {token_id: size + i for i, token_id in enumerate(new)}
        for token_id, count in draft_counts.items():
            counts[self._index_of.get(token_id, new_index.get(token_id, 0))] += count
        return ids, counts


class PenaltyState:
    """Penalties and biases of one request; each part is built on first use, then updated."""

    __slots__ = (
        "_all_counts",
        "_allowed_masks",
        "_dry_table",
        "_logit_bias",
        "_output_counts",
        "_request",
        "_suffix_repeats",
    )

    def __init__(self, request: Request) -> None:
        self._request = request
        self._all_counts = TokenCounts()
        self._output_counts = TokenCounts(len(request.prompt_ids))
        self._suffix_repeats: SuffixRepeats | None = None
        self._dry_table: Floats | None = None
        self._allowed_masks: dict[int, Tensor] = {}
        self._logit_bias: tuple[Ids, Floats] | None = None

    def seen_ids(self, tokens: Sequence[int], draft: Sequence[int]) -> Ids:
        """Distinct ids of prompt, output and draft."""
        self._all_counts.update(tokens)
        return self._all_counts.counts(draft)[0]

    def output_counts(self, tokens: Sequence[int], draft: Sequence[int]) -> tuple[Ids, Ids]:
        """Distinct ids of output and draft, and their counts."""
        self._output_counts.update(tokens)
        return self._output_counts.counts(draft)

    def dry_penalties(self, tokens: Sequence[int], draft: tuple[int, ...]) -> tuple[Ids, Floats]:
        """Ids that would continue a repeat, and the penalties subtracted from their logits."""
        params = self._request.params
        if self._suffix_repeats is None or self._dry_table is None:
            self._suffix_repeats = SuffixRepeats(self._request.dry_breakers)
            self._dry_table = _dry_penalty_table(params.dry_multiplier, params.dry_base)
        self._suffix_repeats.update(tokens)
        ids, lengths = self._suffix_repeats.find_continuations(
            draft, params.dry_allowed_length, params.dry_penalty_last_n
        )
        return ids, self._dry_table[lengths - params.dry_allowed_length]

    def allowed_mask(self, vocab_size: int) -> Tensor:
        """`allowed_token_ids` as bits: int32 [ceil(V / 32)], bit i % 32 of word i // 32 for id i.

        Kept by vocabulary size: a draft model may have another than the target.
        """
        mask = self._allowed_masks.get(vocab_size)
        if mask is None:
            ids = np.array(self._request.params.allowed_token_ids or (), np.int64)
            ids = np.unique(ids[(ids >= 0) & (ids < vocab_size)])
            words = np.zeros(-(-vocab_size // WORD_BITS), np.uint32)
            np.bitwise_or.at(words, ids // WORD_BITS, np.uint32(1) << (ids % WORD_BITS).astype(np.uint32))
            mask = self._allowed_masks[vocab_size] = torch.from_numpy(words.view(np.int32))
        return mask

    def logit_bias(self) -> tuple[Ids, Floats]:
        """Ids of `logit_bias` and their biases."""
        if self._logit_bias is None:
            biases = self._request.params.logit_bias
            self._logit_bias = np.array(list(biases), np.int64), np.array(list(biases.values()), np.float32)
        return self._logit_bias


def _dry_penalty_table(multiplier: float, base: float) -> Floats:
    """DRY penalty by the number of tokens that a repeat exceeds the allowed length."""
    penalties = [multiplier]
    for _ in range(MAX_REPEAT_LEN):
        penalties.append(min(penalties[-1] * base, MAX_PENALTY))
    return np.array(penalties, np.float32)


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
        self._ids: Ids = np.zeros(INITIAL_TEXT_CAPACITY, np.int64)
        self._lengths: Lengths = np.zeros(INITIAL_TEXT_CAPACITY, np.int32)
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
