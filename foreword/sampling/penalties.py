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
from foreword.sampling.dry import SuffixRepeats

WORD_BITS = 32  # bits of a mask word
INITIAL_CAPACITY = 256  # distinct ids
MAX_PENALTY = 1e30  # finite after any temperature: a penalty never masks a token

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


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
