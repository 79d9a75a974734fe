"""What sampling keeps of a request between steps, so that a step costs what is new and not what is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.core.params import MAX_REPEAT_LEN
from foreword.core.request import Request
from foreword.sampling.dry import SuffixRepeats

__all__ = ["PenaltyState", "TokenCounts"]

WORD_BITS = 32
INITIAL_CAPACITY = 256
MAX_PENALTY = 1e30  # finite after any temperature: a penalty masks nothing

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class TokenCounts:
    """How often each id stands in a text from place `begin` on; ids in order of first appearance."""

    __slots__ = ("_counts", "_ids", "_index_of", "_num_counted")

    def __init__(self, begin: int = 0) -> None:
        self._num_counted = begin
        self._index_of: dict[int, int] = {}
        self._ids: Ids = np.zeros(INITIAL_CAPACITY, np.int64)
        self._counts: Ids = np.zeros(INITIAL_CAPACITY, np.int64)

    def update(self, tokens: Sequence[int]) -> None:
        """The text is now `tokens`, which begin with what it was."""
        for token_id, count in Counter(tokens[self._num_counted :]).items():
            place = self._index_of.setdefault(token_id, len(self._index_of))
            if place == len(self._ids):
                self._ids, self._counts = (
                    np.concatenate((old, np.zeros_like(old))) for old in (self._ids, self._counts)
                )
            self._ids[place] = token_id
            self._counts[place] += count
        self._num_counted = len(tokens)

    def counts(self, draft: Sequence[int]) -> tuple[Ids, Ids]:
        """Ids and counts of text and draft; valid until the text grows."""
        size = len(self._index_of)
        ids, counts = self._ids[:size], self._counts[:size]
        if not draft:
            return ids, counts
        drafted = Counter(draft)
        new = [token_id for token_id in drafted if token_id not in self._index_of]
        ids, counts = np.append(ids, np.array(new, np.int64)), np.append(counts, np.zeros(len(new), np.int64))
        places = {token_id: size + i for i, token_id in enumerate(new)}
        for token_id, count in drafted.items():
            counts[self._index_of.get(token_id, places.get(token_id, 0))] += count
        return ids, counts


class PenaltyState:
    """One request's; each part is made when it is first asked for, and follows the text from then on."""

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
        """Every id of prompt, output and draft, once."""
        self._all_counts.update(tokens)
        return self._all_counts.counts(draft)[0]

    def output_counts(self, tokens: Sequence[int], draft: Sequence[int]) -> tuple[Ids, Ids]:
        """Ids of output and draft, and how often each stands there."""
        self._output_counts.update(tokens)
        return self._output_counts.counts(draft)

    def dry_penalties(self, tokens: Sequence[int], draft: tuple[int, ...]) -> tuple[Ids, Floats]:
        """Ids that would go on with a repeat, and what that takes off their logits."""
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

        A draft model may have another vocabulary than the target.
        """
        words = self._allowed_masks.get(vocab_size)
        if words is None:
            words = self._allowed_masks[vocab_size] = _id_bitmask(
                self._request.params.allowed_token_ids or (), vocab_size
            )
        return words

    def logit_bias(self) -> tuple[Ids, Floats]:
        """`logit_bias`: ids, and what is added to their logits."""
        if self._logit_bias is None:
            biases = self._request.params.logit_bias
            self._logit_bias = np.array(list(biases), np.int64), np.array(list(biases.values()), np.float32)
        return self._logit_bias


def _id_bitmask(token_ids: Sequence[int], vocab_size: int) -> Tensor:
    ids = np.array(token_ids, np.int64)
    ids = np.unique(ids[ids < vocab_size])
    words = np.zeros(-(-vocab_size // WORD_BITS), np.uint32)
    np.bitwise_or.at(words, ids // WORD_BITS, np.uint32(1) << (ids % WORD_BITS).astype(np.uint32))
    return torch.from_numpy(words.view(np.int32))


def _dry_penalty_table(multiplier: float, base: float) -> Floats:
    """By how many tokens a repeat is longer than allowed."""
    penalties = [multiplier]
    for _ in range(MAX_REPEAT_LEN):
        penalties.append(min(penalties[-1] * base, MAX_PENALTY))
    return np.array(penalties, np.float32)
