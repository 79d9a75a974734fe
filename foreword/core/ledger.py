"""What sampling keeps of a request between steps, so that a step costs what is new and not what is there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.core.params import MAX_REPEAT
from foreword.core.repeats import Repeats
from foreword.core.request import Request

__all__ = ["Ledger", "Tally"]

WORD_BITS = 32
FEWEST = 256
HIGHEST_PENALTY = 1e30  # finite after any temperature: a penalty masks nothing

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class Tally:
    """How often each id stands in a text from place `begin` on; ids in order of first appearance."""

    __slots__ = ("_counts", "_end", "_ids", "_places")

    def __init__(self, begin: int = 0) -> None:
        self._end = begin
        self._places: dict[int, int] = {}
        self._ids: Ids = np.zeros(FEWEST, np.int64)
        self._counts: Ids = np.zeros(FEWEST, np.int64)

    def follow(self, tokens: Sequence[int]) -> None:
        """The text is now `tokens`, which begin with what it was."""
        for token_id, count in Counter(tokens[self._end :]).items():
            place = self._places.setdefault(token_id, len(self._places))
            if place == len(self._ids):
                self._ids, self._counts = (np.concatenate((old, np.zeros_like(old))) for old in (self._ids, self._counts))
            self._ids[place] = token_id
            self._counts[place] += count
        self._end = len(tokens)

    def counts(self, draft: Sequence[int]) -> tuple[Ids, Ids]:
        """Ids and counts of text and draft; valid until the text grows."""
        size = len(self._places)
        ids, counts = self._ids[:size], self._counts[:size]
        if not draft:
            return ids, counts
        drafted = Counter(draft)
        new = [token_id for token_id in drafted if token_id not in self._places]
        ids, counts = np.append(ids, np.array(new, np.int64)), np.append(counts, np.zeros(len(new), np.int64))
        places = {token_id: size + i for i, token_id in enumerate(new)}
        for token_id, count in drafted.items():
            counts[self._places.get(token_id, places.get(token_id, 0))] += count
        return ids, counts


class Ledger:
    """One request's; each part is made when it is first asked for, and follows the text from then on."""

    __slots__ = ("_allowed", "_bias", "_dry", "_output", "_repeats", "_request", "_text")

    def __init__(self, request: Request) -> None:
        self._request = request
        self._text = Tally()
        self._output = Tally(len(request.prompt_ids))
        self._repeats: Repeats | None = None
        self._dry: Floats | None = None
        self._allowed: dict[int, Tensor] = {}
        self._bias: tuple[Ids, Floats] | None = None

    def seen(self, tokens: Sequence[int], draft: Sequence[int]) -> Ids:
        """Every id of prompt, output and draft, once."""
        self._text.follow(tokens)
        return self._text.counts(draft)[0]

    def counts(self, tokens: Sequence[int], draft: Sequence[int]) -> tuple[Ids, Ids]:
        """Ids of output and draft, and how often each stands there."""
        self._output.follow(tokens)
        return self._output.counts(draft)

    def dry(self, tokens: Sequence[int], draft: tuple[int, ...]) -> tuple[Ids, Floats]:
        """Ids that would go on with a repeat, and what that takes off their logits."""
        params = self._request.params
        if self._repeats is None or self._dry is None:
            self._repeats = Repeats(self._request.dry_breakers)
            self._dry = _dry_penalties(params.dry_multiplier, params.dry_base)
        self._repeats.follow(tokens)
        ids, lengths = self._repeats.continued(draft, params.dry_allowed_length, params.dry_penalty_last_n)
        return ids, self._dry[lengths - params.dry_allowed_length]

    def allowed(self, vocab_size: int) -> Tensor:
        """`allowed_token_ids` as bits: int32 [ceil(V / 32)], bit i % 32 of word i // 32 for id i.

        A draft model may have another vocabulary than the target.
        """
        words = self._allowed.get(vocab_size)
        if words is None:
            words = self._allowed[vocab_size] = _bits(self._request.params.allowed_token_ids or (), vocab_size)
        return words

    def bias(self) -> tuple[Ids, Floats]:
        """`logit_bias`: ids, and what is added to their logits."""
        if self._bias is None:
            biases = self._request.params.logit_bias
            self._bias = np.array(list(biases), np.int64), np.array(list(biases.values()), np.float32)
        return self._bias


def _bits(token_ids: Sequence[int], vocab_size: int) -> Tensor:
    ids = np.array(token_ids, np.int64)
    ids = np.unique(ids[ids < vocab_size])
    words = np.zeros(-(-vocab_size // WORD_BITS), np.uint32)
    np.bitwise_or.at(words, ids // WORD_BITS, np.uint32(1) << (ids % WORD_BITS).astype(np.uint32))
    return torch.from_numpy(words.view(np.int32))


def _dry_penalties(multiplier: float, base: float) -> Floats:
    """By how many tokens a repeat is longer than allowed."""
    penalties = [multiplier]
    for _ in range(MAX_REPEAT):
        penalties.append(min(penalties[-1] * base, HIGHEST_PENALTY))
    return np.array(penalties, np.float32)
