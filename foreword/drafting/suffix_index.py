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

__all__ = ["BYTES_PER_SLOT", "DOUBTS", "MAX_MATCH", "MAX_WALK", "MIN_REACH", "ORDERS", "Guess", "Index", "Query", "SuffixIndex"]

ORDERS = (1, 2, 4, 8)  # n-grams that are chained
MAX_WALK = 16  # places looked at in one chain
ENOUGH = 4  # places found in a text; if the longest order has fewer, the next one is walked as well
MAX_MATCH = 32  # matches are not measured beyond
LENGTHS = (*ORDERS, MAX_MATCH + 1)  # order i finds matches of LENGTHS[i] tokens up to LENGTHS[i + 1], exclusive
MIN_REACH = 0.05  # a draft ends before it reaches a token with less than this probability
BYTES_PER_SLOT = 4 * (2 + 2 * len(ORDERS))  # token, owner, and a head and a link for each order
OWN_WEIGHT = 4  # of a place in the own text; of one in the corpus 1

# Weight against all that was seen, by length of match in units of that match's weight: how often something new follows.
# Measured: docs/lab/suffix.md.
DOUBTS = (4.0, 4.0, *(2.2 * length**-1.15 for length in range(2, 2 * MAX_MATCH)))

SMALLEST = 64  # slots of a text that begins
MASK = 2**64 - 1
FACTOR = 0x9E3779B97F4A7C15  # 2^64 over the golden ratio
BOUNDARY = 0  # in a slot: no token, nothing matches it; token ids stand one higher
NOWHERE = 0  # no slot

Query = tuple[int, int, Sequence[int]]  # text, longest guess, tokens that are new in the text
Guess = tuple[tuple[int, ...], tuple[float, ...]]  # token ids, and for each the probability that it is right if those before are


class Index(Protocol):
    """Texts that grow, each of a namespace, and a corpus of those that were finished."""

    def start(self, namespace: int) -> int:
        """A handle for a new text."""

    def finish(self, text: int, output: Sequence[int]) -> None:
        """Forget the text; `output` enters the corpus of its namespace."""

    def propose(self, queries: Sequence[Query]) -> list[Guess]:
        """Grow each text, then guess how it goes on; the empty guess where nothing matches."""

    def num_texts(self) -> int:
        """Texts that were started and not finished."""


class Slots:
    """A ring of tokens with their chains: one text, which is moved before the ring would close, or the corpus, which forgets.

    tokens  id + 1, or BOUNDARY: before the first slot of a text, and after each of a corpus. Slot 0 is nowhere
    owners  namespace of each token
    heads   for each order: latest slot of each bucket of n-grams
    links   for each order: the slot before it in the same chain. It may be stale: what is found there is compared anyway,
            and a walk ends where it would turn to younger slots
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.write = 1
        self.tokens, self.owners = _zeros("i", capacity), _zeros("I", capacity)
        self.heads = [_zeros("i", capacity) for _ in ORDERS]
        self.links = [_zeros("i", capacity) for _ in ORDERS]

    def keys(self, owner: int) -> list[int]:
        """32-bit hashes of the last n tokens for each order n, as far as no boundary stands between."""
        found: list[int] = []
        key, slot = owner, self.write
        for length in range(1, ORDERS[-1] + 1):
            slot = self.before(slot)
            if self.tokens[slot] == BOUNDARY:
                break
            key = (key ^ self.tokens[slot]) * FACTOR & MASK
            key ^= key >> 29
            if length in ORDERS:
                found.append(key >> 32)
        return found

    def append(self, token: int, owner: int) -> None:
        """token  id + 1, or BOUNDARY"""
        if token != BOUNDARY:
            for key, heads, links in zip(self.keys(owner), self.heads, self.links, strict=False):
                bucket = key * self.capacity >> 32
                links[self.write] = heads[bucket]
                heads[bucket] = self.write
        self.tokens[self.write] = token
        self.owners[self.write] = owner
        self.write = self.after(self.write)

    def places(self, keys: Sequence[int], text: Slots, owner: int) -> list[Place]:
        """Where the end of `text` stands here too, by the longest orders that have matches, until there are ENOUGH."""
        places: list[Place] = []
        for order in range(len(keys) - 1, -1, -1):
            if len(places) >= ENOUGH:
                break
            for slot in self._chain(order, keys[order]):
                length = self._common(slot, text) if self.owners[slot] == owner else 0
                if LENGTHS[order] <= length < LENGTHS[order + 1]:
                    places.append(Place(self, slot, length, length**2 * (OWN_WEIGHT if self is text else 1)))
        return places

    def _chain(self, order: int, key: int) -> Iterator[int]:
        """Latest first."""
        slot, youngest = self.heads[order][key * self.capacity >> 32], 0
        for _ in range(MAX_WALK):
            age = (self.write - slot) % (self.capacity - 1)
            if slot == NOWHERE or age <= youngest:
                return
            yield slot
            youngest, slot = age, self.links[order][slot]

    def _common(self, slot: int, text: Slots) -> int:
        """How many tokens before `slot` are those that end `text`."""
        end = text.write
        for length in range(MAX_MATCH):
            slot, end = self.before(slot), text.before(end)
            if self.tokens[slot] == BOUNDARY or self.tokens[slot] != text.tokens[end]:
                return length
        return MAX_MATCH

    def before(self, slot: int) -> int:
        return slot - 1 if slot > 1 else self.capacity - 1

    def after(self, slot: int) -> int:
        return slot + 1 if slot + 1 < self.capacity else 1


@dataclass(slots=True)
class Place:
    """Where a match goes on: the next token stands at `slot`."""

    slots: Slots
    slot: int
    length: int
    weight: int

    def token(self, text: Slots, guess: Sequence[int]) -> int:
        """At the end of the own text it runs on into the guess."""
        if self.slots is text and self.slot >= text.write:
            return guess[self.slot - text.write] + 1
        return self.slots.tokens[self.slot]

    def advance(self, text: Slots) -> None:
        self.slot = self.slot + 1 if self.slots is text else self.slots.after(self.slot)


class Text:
    """The text of one request, which forgets nothing."""

    def __init__(self, owner: int) -> None:
        self.owner = owner
        self.slots = Slots(SMALLEST)

    def extend(self, tokens: Sequence[int]) -> None:
        """tokens  ids + 1, or BOUNDARY"""
        self._make_room(len(tokens))
        for token in tokens:
            self.slots.append(token, self.owner)

    def _make_room(self, count: int) -> None:
        old = self.slots
        capacity = old.capacity
        while old.write + count >= capacity:
            capacity *= 2
        if capacity > old.capacity:
            self.slots = Slots(capacity)
            for token in old.tokens[1 : old.write]:
                self.slots.append(token, self.owner)


class SuffixIndex:
    """See Index.

    corpus_slots  0 for no corpus
    never         ids that are neither matched nor guessed
    """

    def __init__(self, corpus_slots: int, never: Collection[int]) -> None:
        self._corpus = Slots(corpus_slots) if corpus_slots else None
        self._never = frozenset(never)
        self._texts: dict[int, Text] = {}
        self._last = 0

    def start(self, namespace: int) -> int:
        self._last += 1
        self._texts[self._last] = Text(namespace)
        return self._last

    def finish(self, text: int, output: Sequence[int]) -> None:
        owner = self._texts.pop(text).owner
        if self._corpus is not None and output:
            for token in self._tokens(output[-self._corpus.capacity :]):
                self._corpus.append(token, owner)
            self._corpus.append(BOUNDARY, owner)

    def propose(self, queries: Sequence[Query]) -> list[Guess]:
        return [self._propose(self._texts[text], max_tokens, new) for text, max_tokens, new in queries]

    def num_texts(self) -> int:
        return len(self._texts)

    def _propose(self, text: Text, max_tokens: int, new: Sequence[int]) -> Guess:
        text.extend(self._tokens(new))
        slots = text.slots
        keys = slots.keys(text.owner)
        places = slots.places(keys, slots, text.owner)
        if self._corpus is not None:
            places += self._corpus.places(keys, slots, text.owner)
        return _guess(slots, places, max_tokens)

    def _tokens(self, token_ids: Sequence[int]) -> list[int]:
        return [BOUNDARY if token_id in self._never else token_id + 1 for token_id in token_ids]


def _guess(text: Slots, places: list[Place], max_tokens: int) -> Guess:
    """Follow the places for as long as they go on and are likely to be right."""
    token_ids: list[int] = []
    confidence: list[float] = []
    reach = 1.0
    while len(token_ids) < max_tokens:
        tokens = [place.token(text, token_ids) for place in places]
        places = [place for place, token in zip(places, tokens, strict=True) if token != BOUNDARY]
        tokens = [token for token in tokens if token != BOUNDARY]
        if not places:
            break
        token, probability = _vote(places, tokens, len(token_ids))
        reach *= probability
        if reach < MIN_REACH:
            break
        token_ids.append(token - 1)
        confidence.append(probability)
        places = [place for place, other in zip(places, tokens, strict=True) if other == token]
        for place in places:
            place.advance(text)
    return tuple(token_ids), tuple(confidence)


def _vote(places: Sequence[Place], tokens: Sequence[int], step: int) -> tuple[int, float]:
    """The token that weighs most, on a draw the one found first, and how likely it is right."""
    votes: dict[int, int] = {}
    for place, token in zip(places, tokens, strict=True):
        votes[token] = votes.get(token, 0) + place.weight
    best = max(votes, key=lambda token: votes[token])
    length = max(place.length for place, token in zip(places, tokens, strict=True) if token == best)
    doubt = DOUBTS[min(length + step, len(DOUBTS) - 1)] * (OWN_WEIGHT * length**2)
    return best, votes[best] / (sum(votes.values()) + doubt)


def _zeros(kind: str, count: int) -> array[int]:
    return array(kind, bytes(4 * count))
