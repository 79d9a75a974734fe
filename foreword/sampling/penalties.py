"""Token counts and repeats of a request, kept between steps so that a step costs only its new tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.core.params import MAX_REPEAT_LEN
from foreword.core.request import Request, RequestState

WORD_BITS = 32  # bits of a mask word
INITIAL_CAPACITY = 256  # distinct ids
INITIAL_TEXT_CAPACITY = 1024  # tokens
MAX_TAIL = 4096  # last tokens that are searched one by one; the index of older ones is sorted
MAX_PENALTY = 1e30  # finite after any temperature: a penalty never masks a token

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Lengths = npt.NDArray[np.int32]
NO_IDS: Ids = np.zeros(0, np.int64)


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
            self._suffix_repeats = SuffixRepeats(
                params.dry_allowed_length, params.dry_penalty_last_n, self._request.dry_breakers
            )
            self._dry_table = _dry_penalty_table(params.dry_multiplier, params.dry_base)
        self._suffix_repeats.update(tokens)
        ids, lengths = self._suffix_repeats.find_continuations(draft)
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


@dataclass(frozen=True, slots=True)
class _Matches:
    """Earlier tokens of a text, where the tokens before each equal the last tokens of the text."""

    indices: Ids  # ascending
    lengths: Lengths  # number of equal tokens
    reach: int  # tokens since the last breaker; after a gap, MAX_REPEAT_LEN of them at most


NO_MATCHES = _Matches(NO_IDS, np.zeros(0, np.int32), 0)


class SuffixRepeats:
    """Finds the earlier tokens of a text that would continue a repeat of its last tokens.

    |<- ... a b c ->| d ... |<- a b c ->|     a match of length 3: d would continue the repeat
                              end of text

    A match has at least the last n-gram in common with the end, and an index finds all places of an n-gram.
    One more token makes a match longer or ends it. So a token's cost depends on the number of these places,
    not on the length of the text. Lengths are capped at MAX_REPEAT_LEN.

    |<------- sorted by n-gram ------->|<- tail, searched one by one ->|<- draft ->|
                            len(_sorted_keys)                     _num_tokens
    """

    def __init__(self, min_length: int, window: int = -1, breakers: Sequence[tuple[int, ...]] = ()) -> None:
        """min_length  tokens that a repeat has at least
        window      how many last tokens of text and draft are searched; -1: all
        breakers    token sequences; no repeat extends over the end of one
        """
        self._min_length, self._window = min_length, window
        self._ngram_size = min(max(min_length, 1), 2)
        self._breaker_ids = frozenset(breaker[0] for breaker in breakers if len(breaker) == 1)
        self._breaker_sequences: dict[int, list[tuple[int, ...]]] = {}  # by their last token
        for breaker in breakers:
            if len(breaker) > 1:
                self._breaker_sequences.setdefault(breaker[-1], []).append(breaker)
        self._ids: Ids = np.zeros(INITIAL_TEXT_CAPACITY, np.int64)
        self._keys: Ids = np.zeros(INITIAL_TEXT_CAPACITY, np.int64)  # the n-gram that ends with each token
        self._lengths_at: Lengths = np.zeros(INITIAL_TEXT_CAPACITY, np.int32)  # zero between calls
        self._num_tokens = 0
        self._sorted_keys, self._sorted_indices = NO_IDS, NO_IDS
        self._last_indices = NO_IDS  # the last place of each sorted n-gram
        self._matches = NO_MATCHES
        self._draft_ids: tuple[int, ...] = ()
        self._draft_matches: list[_Matches] = []  # after each token of the draft

    def update(self, tokens: Sequence[int]) -> None:
        """Extend the text to `tokens`, which begin with the text so far."""
        start, end = self._num_tokens, len(tokens)
        if start == end:
            return
        self._write(start, tokens[start:])
        self._num_tokens = end
        self._draft_ids, self._draft_matches = (), []
        if end - len(self._sorted_keys) > MAX_TAIL:
            self._sort_until(end - MAX_REPEAT_LEN)  # matches may be extended token by token after it
        first = self._first_counted(start, end)
        if first > start:
            self._matches = self._find_matches(first)
        else:
            for index in range(start, end):
                self._matches = self._extend(self._matches, index)

    def find_continuations(self, draft: tuple[int, ...]) -> tuple[Ids, Lengths]:
        """Ids that would continue a repeat after text and draft, and its longest length. No breakers."""
        matches = self._matches_after(draft)
        end = self._num_tokens + len(draft)
        start = self._window_start(end)
        indices, lengths = matches.indices, np.minimum(matches.lengths, matches.indices - start)
        if self._min_length == 0:  # each id of the window continues the empty repeat
            others = np.concatenate((self._last_indices, np.arange(len(self._sorted_keys), end)))
            others = others[others > start]
            indices = np.concatenate((indices, others))
            lengths = np.concatenate((lengths, np.zeros_like(others)))
        is_long = lengths >= self._min_length
        return self._longest_per_id(self._ids[indices[is_long]], lengths[is_long])

    def _window_start(self, end: int) -> int:
        """Index of the first token that is searched, with `end` tokens."""
        return 0 if self._window < 0 else max(end - self._window, 0)

    def _first_counted(self, start: int, end: int) -> int:
        """The first index of [start, end) that affects the matches at `end`."""
        oldest = max(start, end - MAX_REPEAT_LEN)
        after_breakers = (index + 1 for index in range(end - 1, oldest - 1, -1) if self._ends_breaker(index))
        return next(after_breakers, oldest)

    def _longest_per_id(self, ids: Ids, lengths: Ids) -> tuple[Ids, Lengths]:
        base = MAX_REPEAT_LEN + 1
        keys = np.sort(ids * base + lengths)
        is_last_of_id = np.append(keys[1:] // base != keys[:-1] // base, True)[: len(keys)]
        ids, longest = np.divmod(keys[is_last_of_id], base)
        if self._breaker_ids:
            kept = np.array([token_id not in self._breaker_ids for token_id in ids.tolist()], np.bool_)
            ids, longest = ids[kept], longest[kept]
        return ids, longest.astype(np.int32)

    def _matches_after(self, draft: tuple[int, ...]) -> _Matches:
        """The matches of text and draft. The drafts of a step mostly extend each other."""
        pairs = enumerate(zip(draft, self._draft_ids, strict=False))
        shorter = min(len(draft), len(self._draft_ids))
        known = next((index for index, (new, old) in pairs if new != old), shorter)
        if known < len(draft):
            self._write(self._num_tokens + known, draft[known:])
            self._draft_ids = draft
            del self._draft_matches[known:]
            matches = self._draft_matches[-1] if known else self._matches
            for index in range(self._num_tokens + known, self._num_tokens + len(draft)):
                matches = self._extend(matches, index)
                self._draft_matches.append(matches)
        return self._draft_matches[len(draft) - 1] if draft else self._matches

    def _find_matches(self, first: int) -> _Matches:
        """The matches at the end of the text, without those before; they reach back to `first` at most."""
        end = self._num_tokens
        if end - first < self._ngram_size:
            return replace(NO_MATCHES, reach=end - first)
        places = self._places_of(int(self._keys[end - 1]), self._window_start(end), end - 1)
        lengths = np.full(len(places), end - first, np.int32)
        rows, last = np.arange(len(places)), places  # matches that continue
        for length in range(self._ngram_size, end - first):
            before = last - length
            goes_on = (before >= 0) & (self._ids[before] == self._ids[end - 1 - length])
            lengths[rows[~goes_on]] = length
            rows, last = rows[goes_on], last[goes_on]
            if not len(rows):
                break
        return _Matches(places + 1, lengths, end - first)

    def _extend(self, matches: _Matches, index: int) -> _Matches:
        """The matches after the token at `index`, from those before it."""
        if self._ends_breaker(index):
            return NO_MATCHES
        if matches.reach + 1 < self._ngram_size:
            return replace(NO_MATCHES, reach=matches.reach + 1)
        places = self._places_of(int(self._keys[index]), self._window_start(index + 1), index)
        self._lengths_at[matches.indices] = matches.lengths
        lengths = self._lengths_at[places]
        self._lengths_at[matches.indices] = 0
        lengths = np.minimum(np.maximum(lengths + 1, self._ngram_size), MAX_REPEAT_LEN)
        return _Matches(places + 1, lengths, matches.reach + 1)

    def _places_of(self, key: int, start: int, end: int) -> Ids:
        """The indices in [start, end) where an n-gram ends; `end` is not below the tail."""
        low, high = np.searchsorted(self._sorted_keys, (key, key + 1))
        places = self._sorted_indices[low:high]
        if start > 0:
            places = places[np.searchsorted(places, start) :]
        tail = max(len(self._sorted_keys), start)
        return np.concatenate((places, np.flatnonzero(self._keys[tail:end] == key) + tail))

    def _ends_breaker(self, index: int) -> bool:
        """Whether a breaker ends with the token at `index`."""
        token_id, end = int(self._ids[index]), index + 1
        return token_id in self._breaker_ids or any(
            len(sequence) <= end and tuple(self._ids[end - len(sequence) : end].tolist()) == sequence
            for sequence in self._breaker_sequences.get(token_id, ())
        )

    def _write(self, start: int, tokens: Sequence[int]) -> None:
        """Put tokens at `start`, and the n-grams that they end."""
        end = start + len(tokens)
        if end >= len(self._ids):
            added = 2 * (end + 1) - len(self._ids)
            self._ids, self._keys = (
                np.concatenate((old, np.zeros(added, np.int64))) for old in (self._ids, self._keys)
            )
            self._lengths_at = np.concatenate((self._lengths_at, np.zeros(added, np.int32)))
        self._ids[start:end] = tokens
        self._keys[start:end] = self._ids[start:end]
        if self._ngram_size == 2:
            first = max(start, 1)
            self._keys[first:end] |= self._ids[first - 1 : end - 1] << 32
            if start == 0:
                self._keys[0] = -1  # no token before it

    def _sort_until(self, end: int) -> None:
        """Merge the n-grams up to `end` into the sorted ones."""
        start = len(self._sorted_keys)
        order = np.argsort(self._keys[start:end], kind="stable")
        keys = self._keys[start:end][order]
        slots = np.searchsorted(self._sorted_keys, keys, side="right")
        self._sorted_keys = np.insert(self._sorted_keys, slots, keys)
        self._sorted_indices = np.insert(self._sorted_indices, slots, order + start)
        is_last = np.append(self._sorted_keys[1:] != self._sorted_keys[:-1], True)
        self._last_indices = self._sorted_indices[is_last]
