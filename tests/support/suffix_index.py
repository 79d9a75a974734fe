"""The suffix index in Python: specification and oracle of csrc/drafting/suffix_index.cpp.

A text is a ring of slots. For each order n, a chain (as in zlib) links the slots after the same n tokens.
To draft, the chain of the longest order with a match is walked from its latest slot. Each match is
measured backwards; where matches disagree about the next token they vote, weighted by match length.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from foreword.speculation.drafters.suffix import NOVELTY_WEIGHTS, Query, SuffixDraft

ORDERS = (1, 2, 4, 8)  # n-grams that are chained
MAX_CHAIN = 16  # slots visited per chain
MIN_MATCHES = 4  # per text; with fewer, the next shorter order is walked as well
MAX_MATCH_LEN = 32  # longer matches count as this long
MATCH_LEN_BOUNDS = (
    *ORDERS,
    MAX_MATCH_LEN + 1,
)  # order i: [i] to [i + 1], exclusive
MIN_PREFIX_PROB = 0.05  # a draft ends before a token whose prefix probability is lower
SELF_WEIGHT = 4  # of a match in the request's own text; 1 in the corpus
INITIAL_SLOTS = 64  # of a new text
UINT64_MASK = 2**64 - 1
HASH_MULTIPLIER = 0x9E3779B97F4A7C15  # 2^64 / golden ratio
SEPARATOR = 0  # a slot without a token, which matches nothing; tokens are stored as id + 1
NULL_SLOT = 0  # no slot


class TokenRing:
    """A ring of tokens with their chains: a text, which is grown before it wraps, or the corpus."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.write_slot = 1
        # id + 1, or SEPARATOR before a text and after each output of the corpus
        self.tokens, self.namespaces = _zeros("i", capacity), _zeros("I", capacity)
        self.heads = [_zeros("i", capacity) for _ in ORDERS]  # by order: latest slot of each n-gram bucket
        # by order: previous slot of the chain; a stale one ends the walk or fails the comparison
        self.links = [_zeros("i", capacity) for _ in ORDERS]

    def hash_ngrams(self, namespace: int) -> list[int]:
        """32-bit hashes of the last n tokens for each order n, up to a separator."""
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
        if token != SEPARATOR:
            for key, heads, links in zip(self.hash_ngrams(namespace), self.heads, self.links, strict=False):
                bucket = key * self.capacity >> 32
                links[self.write_slot] = heads[bucket]
                heads[bucket] = self.write_slot
        self.tokens[self.write_slot] = token
        self.namespaces[self.write_slot] = namespace
        self.write_slot = self.next_slot(self.write_slot)

    def find_matches(self, keys: Sequence[int], text: TokenRing, namespace: int) -> list[MatchPosition]:
        """Matches of the end of `text`, by the longest orders first, until there are MIN_MATCHES."""
        matches: list[MatchPosition] = []
        for order in range(len(keys) - 1, -1, -1):
            if len(matches) >= MIN_MATCHES:
                break
            for slot in self._walk_chain(order, keys[order]):
                length = self._match_len(slot, text) if self.namespaces[slot] == namespace else 0
                if MATCH_LEN_BOUNDS[order] <= length < MATCH_LEN_BOUNDS[order + 1]:
                    weight = length**2 * (SELF_WEIGHT if self is text else 1)
                    matches.append(MatchPosition(self, slot, length, weight))
        return matches

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
        """How many tokens before `slot` equal the end of `text`."""
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
    """A match; its next token is at `slot`."""

    ring: TokenRing
    slot: int
    match_len: int
    weight: int

    def next_token(self, text: TokenRing, draft_ids: Sequence[int]) -> int:
        """At the end of the own text it continues in the draft."""
        if self.ring is text and self.slot >= text.write_slot:
            return draft_ids[self.slot - text.write_slot] + 1
        return self.ring.tokens[self.slot]

    def advance(self, text: TokenRing) -> None:
        self.slot = self.slot + 1 if self.ring is text else self.ring.next_slot(self.slot)


class IndexedText:
    """The text of one request, which evicts nothing."""

    def __init__(self, namespace: int) -> None:
        self.namespace = namespace
        self.ring = TokenRing(INITIAL_SLOTS)

    def extend(self, tokens: Sequence[int]) -> None:
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


class PythonSuffixIndex:
    """The interface of SuffixIndex."""

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
        namespace = self._texts.pop(text_id).namespace
        if self._corpus is not None and output:
            for token in self._encode(output[-self._corpus.capacity :]):
                self._corpus.append(token, namespace)
            self._corpus.append(SEPARATOR, namespace)

    def propose(self, queries: Sequence[Query]) -> list[SuffixDraft]:
        return [self._propose(self._texts[text], max_tokens, new) for text, max_tokens, new in queries]

    def num_texts(self) -> int:
        return len(self._texts)

    def _propose(self, text: IndexedText, max_tokens: int, new_ids: Sequence[int]) -> SuffixDraft:
        text.extend(self._encode(new_ids))
        slots = text.ring
        keys = slots.hash_ngrams(text.namespace)
        matches = slots.find_matches(keys, slots, text.namespace)
        if self._corpus is not None:
            matches += self._corpus.find_matches(keys, slots, text.namespace)
        return _draft(slots, matches, max_tokens)

    def _encode(self, token_ids: Sequence[int]) -> list[int]:
        return [SEPARATOR if token_id in self._never_sampled_ids else token_id + 1 for token_id in token_ids]


def _draft(text: TokenRing, matches: list[MatchPosition], max_tokens: int) -> SuffixDraft:
    """Follow the matches while the prefix is likely enough."""
    token_ids: list[int] = []
    confidence: list[float] = []
    prefix_prob = 1.0
    while len(token_ids) < max_tokens:
        tokens = [match.next_token(text, token_ids) for match in matches]
        matches = [match for match, token in zip(matches, tokens, strict=True) if token != SEPARATOR]
        tokens = [token for token in tokens if token != SEPARATOR]
        if not matches:
            break
        token, probability = _vote(matches, tokens, len(token_ids))
        prefix_prob *= probability
        if prefix_prob < MIN_PREFIX_PROB:
            break
        token_ids.append(token - 1)
        confidence.append(probability)
        matches = [match for match, other in zip(matches, tokens, strict=True) if other == token]
        for match in matches:
            match.advance(text)
    return tuple(token_ids), tuple(confidence)


def _vote(matches: Sequence[MatchPosition], tokens: Sequence[int], offset: int) -> tuple[int, float]:
    """The token with the highest weight, the first of equals, and its probability."""
    votes: dict[int, int] = {}
    for match, token in zip(matches, tokens, strict=True):
        votes[token] = votes.get(token, 0) + match.weight
    best = max(votes, key=lambda token: votes[token])
    length = max(match.match_len for match, token in zip(matches, tokens, strict=True) if token == best)
    novelty = NOVELTY_WEIGHTS[min(length + offset, len(NOVELTY_WEIGHTS) - 1)] * (SELF_WEIGHT * length**2)
    return best, votes[best] / (sum(votes.values()) + novelty)


def _zeros(typecode: str, count: int) -> array[int]:
    return array(typecode, bytes(4 * count))
