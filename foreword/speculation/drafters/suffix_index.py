"""The suffix index in Python: the specification of csrc/suffix.cpp, and what runs where that was not compiled.

A text is a row of slots, and for each order n a chain (as in zlib) through the slots that go on from the same n tokens.
To guess, the chain of the longest order that has a match is walked from its latest place on; each place found is measured
backwards, and where places differ about what comes next they vote, the longer match with the greater weight.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "BYTES_PER_SLOT",
    "MAX_CHAIN",
    "MAX_MATCH_LEN",
    "MIN_PREFIX_PROB",
    "NOVELTY_WEIGHTS",
    "ORDERS",
    "Query",
    "SuffixDraft",
    "SuffixIndex",
    "SuffixIndexBackend",
]

ORDERS = (1, 2, 4, 8)  # n-grams that are chained
MAX_CHAIN = 16  # places looked at in one chain
MIN_MATCHES = 4  # places found in a text; if the longest order has fewer, the next one is walked as well
MAX_MATCH_LEN = 32  # matches are not measured beyond
MATCH_LEN_BOUNDS = (
    *ORDERS,
    MAX_MATCH_LEN + 1,
)  # order i finds matches of LENGTHS[i] tokens up to LENGTHS[i + 1], exclusive
MIN_PREFIX_PROB = 0.05  # a draft ends before it reaches a token with less than this probability
BYTES_PER_SLOT = 4 * (2 + 2 * len(ORDERS))  # token, owner, and a head and a link for each order
SELF_WEIGHT = 4  # of a place in the own text; of one in the corpus 1

# Weight against all that was seen, by length of match in units of that match's weight: how often something new follows.
# Measured: docs/lab/suffix.md.
NOVELTY_WEIGHTS = (4.0, 4.0, *(2.2 * length**-1.15 for length in range(2, 2 * MAX_MATCH_LEN)))

INITIAL_SLOTS = 64  # slots of a text that begins
UINT64_MASK = 2**64 - 1
HASH_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
SEPARATOR = 0  # in a slot: no token, nothing matches it; token ids stand one higher
NULL_SLOT = 0  # no slot

Query = tuple[int, int, Sequence[int]]  # text, longest guess, tokens that are new in the text
SuffixDraft = tuple[
    tuple[int, ...], tuple[float, ...]
]  # token ids, and for each the probability that it is right if those before are


class SuffixIndexBackend(Protocol):
    """Texts that grow, each of a namespace, and a corpus of those that were finished."""

    def start(self, namespace: int) -> int:
        """A handle for a new text."""

    def finish(self, text_id: int, output: Sequence[int]) -> None:
        """Forget the text; `output` enters the corpus of its namespace."""

    def propose(self, queries: Sequence[Query]) -> list[SuffixDraft]:
        """Grow each text, then guess how it goes on; the empty guess where nothing matches."""

    def num_texts(self) -> int:
        """Texts that were started and not finished."""


class TokenRing:
    """A ring of tokens with their chains: one text, which is moved before the ring would close, or the corpus, which forgets.

    tokens  id + 1, or BOUNDARY: before the first slot of a text, and after each of a corpus. Slot 0 is nowhere
    owners  namespace of each token
    heads   for each order: latest slot of each bucket of n-grams
    links   for each order: the slot before it in the same chain. It may be stale: what is found there is compared anyway,
            and a walk ends where it would turn to younger slots
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.write_slot = 1
        self.tokens, self.namespaces = _zeros("i", capacity), _zeros("I", capacity)
        self.heads = [_zeros("i", capacity) for _ in ORDERS]
        self.links = [_zeros("i", capacity) for _ in ORDERS]

    def hash_ngrams(self, namespace: int) -> list[int]:
        """32-bit hashes of the last n tokens for each order n, as far as no boundary stands between."""
        found: list[int] = []
        key, slot = namespace, self.write_slot
        for length in range(1, ORDERS[-1] + 1):
            slot = self.prev_slot(slot)
            if self.tokens[slot] == SEPARATOR:
                break
            key = (key ^ self.tokens[slot]) * HASH_MULTIPLIER & UINT64_MASK
            key ^= key >> 29
            if length in ORDERS:
                found.append(key >> 32)
        return found

    def append(self, token: int, namespace: int) -> None:
        """token  id + 1, or BOUNDARY"""
        if token != SEPARATOR:
            for key, heads, links in zip(self.hash_ngrams(namespace), self.heads, self.links, strict=False):
                bucket = key * self.capacity >> 32
                links[self.write_slot] = heads[bucket]
                heads[bucket] = self.write_slot
        self.tokens[self.write_slot] = token
        self.namespaces[self.write_slot] = namespace
        self.write_slot = self.next_slot(self.write_slot)

    def find_matches(self, keys: Sequence[int], text: TokenRing, namespace: int) -> list[MatchPosition]:
        """Where the end of `text` stands here too, by the longest orders that have matches, until there are ENOUGH."""
        places: list[MatchPosition] = []
        for order in range(len(keys) - 1, -1, -1):
            if len(places) >= MIN_MATCHES:
                break
            for slot in self._walk_chain(order, keys[order]):
                length = self._match_len(slot, text) if self.namespaces[slot] == namespace else 0
                if MATCH_LEN_BOUNDS[order] <= length < MATCH_LEN_BOUNDS[order + 1]:
                    places.append(
                        MatchPosition(self, slot, length, length**2 * (SELF_WEIGHT if self is text else 1))
                    )
        return places

    def _walk_chain(self, order: int, key: int) -> Iterator[int]:
        """Latest first."""
        slot, youngest = self.heads[order][key * self.capacity >> 32], 0
        for _ in range(MAX_CHAIN):
            age = (self.write_slot - slot) % (self.capacity - 1)
            if slot == NULL_SLOT or age <= youngest:
                return
            yield slot
            youngest, slot = age, self.links[order][slot]

    def _match_len(self, slot: int, text: TokenRing) -> int:
        """How many tokens before `slot` are those that end `text`."""
        end = text.write_slot
        for length in range(MAX_MATCH_LEN):
            slot, end = self.prev_slot(slot), text.prev_slot(end)
            if self.tokens[slot] == SEPARATOR or self.tokens[slot] != text.tokens[end]:
                return length
        return MAX_MATCH_LEN

    def prev_slot(self, slot: int) -> int:
        return slot - 1 if slot > 1 else self.capacity - 1

    def next_slot(self, slot: int) -> int:
        return slot + 1 if slot + 1 < self.capacity else 1


@dataclass(slots=True)
class MatchPosition:
    """Where a match goes on: the next token stands at `slot`."""

    ring: TokenRing
    slot: int
    match_len: int
    weight: int

    def next_token(self, text: TokenRing, draft_ids: Sequence[int]) -> int:
        """At the end of the own text it runs on into the guess."""
        if self.ring is text and self.slot >= text.write_slot:
            return draft_ids[self.slot - text.write_slot] + 1
        return self.ring.tokens[self.slot]

    def advance(self, text: TokenRing) -> None:
        self.slot = self.slot + 1 if self.ring is text else self.ring.next_slot(self.slot)


class IndexedText:
    """The text of one request, which forgets nothing."""

    def __init__(self, namespace: int) -> None:
        self.namespace = namespace
        self.ring = TokenRing(INITIAL_SLOTS)

    def extend(self, tokens: Sequence[int]) -> None:
        """tokens  ids + 1, or BOUNDARY"""
        self._reserve(len(tokens))
        for token in tokens:
            self.ring.append(token, self.namespace)

    def _reserve(self, count: int) -> None:
        old = self.ring
        capacity = old.capacity
        while old.write_slot + count >= capacity:
            capacity *= 2
        if capacity > old.capacity:
            self.ring = TokenRing(capacity)
            for token in old.tokens[1 : old.write_slot]:
                self.ring.append(token, self.namespace)


class SuffixIndex:
    """See Index.

    corpus_slots  0 for no corpus
    never         ids that are neither matched nor guessed
    """

    def __init__(self, corpus_slots: int, never_sampled_ids: Collection[int]) -> None:
        self._corpus = TokenRing(corpus_slots) if corpus_slots else None
        self._never_sampled_ids = frozenset(never_sampled_ids)
        self._texts: dict[int, IndexedText] = {}
        self._last_id = 0

    def start(self, namespace: int) -> int:
        self._last_id += 1
        self._texts[self._last_id] = IndexedText(namespace)
        return self._last_id

    def finish(self, text_id: int, output: Sequence[int]) -> None:
        owner = self._texts.pop(text_id).namespace
        if self._corpus is not None and output:
            for token in self._encode(output[-self._corpus.capacity :]):
                self._corpus.append(token, owner)
            self._corpus.append(SEPARATOR, owner)

    def propose(self, queries: Sequence[Query]) -> list[SuffixDraft]:
        return [self._propose(self._texts[text], max_tokens, new) for text, max_tokens, new in queries]

    def num_texts(self) -> int:
        return len(self._texts)

    def _propose(self, text: IndexedText, max_tokens: int, new_ids: Sequence[int]) -> SuffixDraft:
        text.extend(self._encode(new_ids))
        slots = text.ring
        keys = slots.hash_ngrams(text.namespace)
        places = slots.find_matches(keys, slots, text.namespace)
        if self._corpus is not None:
            places += self._corpus.find_matches(keys, slots, text.namespace)
        return _draft(slots, places, max_tokens)

    def _encode(self, token_ids: Sequence[int]) -> list[int]:
        return [SEPARATOR if token_id in self._never_sampled_ids else token_id + 1 for token_id in token_ids]


def _draft(text: TokenRing, matches: list[MatchPosition], max_tokens: int) -> SuffixDraft:
    """Follow the places for as long as they go on and are likely to be right."""
    token_ids: list[int] = []
    confidence: list[float] = []
    reach = 1.0
    while len(token_ids) < max_tokens:
        tokens = [place.next_token(text, token_ids) for place in matches]
        matches = [place for place, token in zip(matches, tokens, strict=True) if token != SEPARATOR]
        tokens = [token for token in tokens if token != SEPARATOR]
        if not matches:
            break
        token, probability = _vote(matches, tokens, len(token_ids))
        reach *= probability
        if reach < MIN_PREFIX_PROB:
            break
        token_ids.append(token - 1)
        confidence.append(probability)
        matches = [place for place, other in zip(matches, tokens, strict=True) if other == token]
        for place in matches:
            place.advance(text)
    return tuple(token_ids), tuple(confidence)


def _vote(matches: Sequence[MatchPosition], tokens: Sequence[int], offset: int) -> tuple[int, float]:
    """The token that weighs most, on a draw the one found first, and how likely it is right."""
    votes: dict[int, int] = {}
    for place, token in zip(matches, tokens, strict=True):
        votes[token] = votes.get(token, 0) + place.weight
    best = max(votes, key=lambda token: votes[token])
    length = max(place.match_len for place, token in zip(matches, tokens, strict=True) if token == best)
    doubt = NOVELTY_WEIGHTS[min(length + offset, len(NOVELTY_WEIGHTS) - 1)] * (SELF_WEIGHT * length**2)
    return best, votes[best] / (sum(votes.values()) + doubt)


def _zeros(typecode: str, count: int) -> array[int]:
    return array(typecode, bytes(4 * count))
