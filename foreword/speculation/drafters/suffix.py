"""Guesses from the longest suffix match in the request's own text and in what was answered before.

The suffix index in C++ (csrc/suffix.cpp): the same guesses as `suffix_index`, much sooner.
"""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

from foreword.core.outputs import Draft
from foreword.core.request import RequestState
from foreword.speculation.base import DraftRequest
from foreword.speculation.drafters.suffix_index import (
    BYTES_PER_SLOT,
    NOVELTY_WEIGHTS,
    Query,
    SuffixDraft,
    SuffixIndex,
    SuffixIndexBackend,
)

__all__ = ["NativeSuffixIndex", "SuffixDrafter"]

NO_MEMORY = "no memory for the suffix index"
EMPTY_DRAFT: SuffixDraft = ((), ())


class NativeSuffixIndex:
    """See Index. All queries of a step are one call. MemoryError where memory is short; texts stay sound."""

    def __init__(self, library: ctypes.CDLL, corpus_slots: int, never_sampled_ids: Collection[int]) -> None:
        self._library = library
        self._propose = library.foreword_suffix_propose
        doubts = array("d", NOVELTY_WEIGHTS)
        flags = bytearray(max(never_sampled_ids, default=-1) + 1)
        for token_id in never_sampled_ids:
            flags[token_id] = 1
        self._index: int | None = library.foreword_suffix_new(
            corpus_slots, _address(doubts), len(doubts), bytes(flags), len(flags)
        )
        if not self._index:
            raise MemoryError(NO_MEMORY)
        weakref.finalize(self, library.foreword_suffix_delete, self._index)
        self._allocate_buffers(0, 0)

    def start(self, namespace: int) -> int:
        text: int = self._library.foreword_suffix_start(self._index, namespace)
        if text < 0:
            raise MemoryError(NO_MEMORY)
        return text

    def finish(self, text_id: int, output: Sequence[int]) -> None:
        tokens = array("i", output)
        self._library.foreword_suffix_finish(self._index, text_id, _address(tokens), len(tokens))

    def num_texts(self) -> int:
        return int(self._library.foreword_suffix_num_texts(self._index))

    def propose(self, queries: Sequence[Query]) -> list[SuffixDraft]:
        flat: list[int] = []
        longest = 0
        for text, max_tokens, new in queries:
            flat += (text, max_tokens, len(new))
            flat += new
            longest += max_tokens
        if len(queries) > self._max_queries or longest > self._max_tokens:
            self._allocate_buffers(2 * len(queries), 2 * longest)
        packed = array("i", flat)
        if self._propose(self._index, _address(packed), len(queries), *self._output_addresses) < len(queries):
            raise MemoryError(NO_MEMORY)
        return self._read_drafts(len(queries))

    def _read_drafts(self, num_drafts: int) -> list[SuffixDraft]:
        lengths = self._lengths[:num_drafts].tolist()
        total = sum(lengths)
        token_ids, confidence = self._token_ids[:total].tolist(), self._confidence[:total].tolist()
        guesses = []
        first = 0
        for length in lengths:
            end = first + length
            guesses.append(
                (tuple(token_ids[first:end]), tuple(confidence[first:end])) if length else EMPTY_DRAFT
            )
            first = end
        return guesses

    def _allocate_buffers(self, max_queries: int, max_tokens: int) -> None:
        """Buffers for the answers of one call."""
        self._max_queries, self._max_tokens = max_queries, max_tokens
        self._lengths = array("i", bytes(4 * max_queries))
        self._token_ids = array("i", bytes(4 * max_tokens))
        self._confidence = array("d", bytes(8 * max_tokens))
        self._output_addresses = (
            _address(self._lengths),
            _address(self._token_ids),
            _address(self._confidence),
        )


def _address(values: array[int] | array[float]) -> int:
    return values.buffer_info()[0]


MIN_CORPUS_SLOTS = 64
MAX_CORPUS_SLOTS = 2**30  # slots are 32-bit numbers
MAX_NAMESPACES = 2**16  # that are remembered


@dataclass(slots=True)
class _TextState:
    """The text of one request in the index, and how many of its tokens stand there."""

    text_id: int
    num_indexed: int = 0


class SuffixDrafter:
    """Keeps the text of each request as it grows, and outputs that were delivered, in a corpus of bounded memory.

    A tenant's requests see that tenant's outputs alone. The oldest are forgotten first.

    corpus_bytes  memory of the corpus; 0 for none
    never         ids that are neither matched nor guessed
    library       the compiled library, or None: the same guesses in Python
    """

    name = "suffix"

    def __init__(
        self, corpus_bytes: int, never_sampled_ids: Collection[int], library: ctypes.CDLL | None
    ) -> None:
        slots = min(corpus_bytes // BYTES_PER_SLOT, MAX_CORPUS_SLOTS)
        slots = slots if slots >= MIN_CORPUS_SLOTS else 0
        self._index: SuffixIndexBackend = (
            SuffixIndex(slots, never_sampled_ids)
            if library is None
            else NativeSuffixIndex(library, slots, never_sampled_ids)
        )
        self._namespaces = _Namespaces(MAX_NAMESPACES)
        self._texts: dict[str, _TextState] = {}

    def start(self, state: RequestState) -> None:
        namespace = self._namespaces.get_id(state.request.cache_salt)
        self._texts[state.id] = _TextState(self._index.start(namespace))

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        track = self._texts.pop(request_id, None)
        if track is not None:
            self._index.finish(track.text_id, output)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._texts)
        assert self._index.num_texts() == len(self._texts)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        guesses = self._index.propose([self._make_query(ask) for ask in requests])
        return [
            Draft(token_ids, self.name, confidence) if token_ids else None
            for token_ids, confidence in guesses
        ]

    def _make_query(self, request: DraftRequest) -> Query:
        track = self._texts[request.state.id]
        new = request.tokens_from(track.num_indexed)
        track.num_indexed += len(new)
        return track.text_id, request.max_tokens, new


class _Namespaces:
    """A number for each tenant, never used for another. A tenant forgotten loses its part of the corpus."""

    def __init__(self, max_namespaces: int) -> None:
        self._max_namespaces = max_namespaces
        self._ids: OrderedDict[str, int] = OrderedDict()
        self._last_id = 0

    def get_id(self, cache_salt: str) -> int:
        if cache_salt not in self._ids:
            self._last_id += 1
            self._ids[cache_salt] = self._last_id
        self._ids.move_to_end(cache_salt)
        if len(self._ids) > self._max_namespaces:
            self._ids.popitem(last=False)
        return self._ids[cache_salt]
