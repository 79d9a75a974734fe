"""The suffix index in C++ (csrc/suffix.cpp): the same guesses as `suffix_index`, much sooner."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Collection, Sequence

from foreword.drafting.suffix_index import NOVELTY_WEIGHTS, SuffixDraft, Query

__all__ = ["NativeSuffixIndex"]

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
            guesses.append((tuple(token_ids[first:end]), tuple(confidence[first:end])) if length else EMPTY_DRAFT)
            first = end
        return guesses

    def _allocate_buffers(self, max_queries: int, max_tokens: int) -> None:
        """Buffers for the answers of one call."""
        self._max_queries, self._max_tokens = max_queries, max_tokens
        self._lengths = array("i", bytes(4 * max_queries))
        self._token_ids = array("i", bytes(4 * max_tokens))
        self._confidence = array("d", bytes(8 * max_tokens))
        self._output_addresses = (_address(self._lengths), _address(self._token_ids), _address(self._confidence))


def _address(values: array[int] | array[float]) -> int:
    return values.buffer_info()[0]
