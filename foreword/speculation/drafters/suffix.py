"""Drafts from the longest suffix match in the request's own text and in earlier outputs.

The index is C++ (csrc/drafting/suffix_index.cpp); tests/support/suffix_index.py specifies it in Python.
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
from foreword.speculation.engine_drafter import DraftRequest, EngineDrafter

BYTES_PER_SLOT = 40  # token, namespace, and a chain head and link for each of 4 n-gram orders
MIN_CORPUS_SLOTS = 64
MAX_CORPUS_SLOTS = 2**30  # slots are int32
MAX_NAMESPACES = 2**16  # remembered; older ones lose their part of the corpus
# Weight of an unseen continuation by match length, in units of one match of that length.
# Measured: docs/lab/suffix.md.
NOVELTY_WEIGHTS = (4.0, 4.0, *(2.2 * length**-1.15 for length in range(2, 64)))

Query = tuple[int, int, Sequence[int]]  # text id, max_tokens, new tokens of the text
SuffixDraft = tuple[tuple[int, ...], tuple[float, ...]]  # token ids, P(accepted | those before accepted)
EMPTY_DRAFT: SuffixDraft = ((), ())


class SuffixIndex:
    """Growing texts, each in a namespace, and a corpus of finished outputs. MemoryError leaves it intact."""

    def __init__(self, library: ctypes.CDLL, corpus_slots: int, never_sampled_ids: Collection[int]) -> None:
        self._library = library
        self._propose = library.foreword_suffix_propose
        weights = array("d", NOVELTY_WEIGHTS)
        flags = bytearray(max(never_sampled_ids, default=-1) + 1)
        for token_id in never_sampled_ids:
            flags[token_id] = 1
        self._index: int | None = library.foreword_suffix_new(
            corpus_slots, _address(weights), len(weights), bytes(flags), len(flags)
        )
        if not self._index:
            raise MemoryError("out of memory for the suffix index")
        # Not at exit: another thread may still call it, and the process frees its memory anyway.
        weakref.finalize(self, library.foreword_suffix_delete, self._index).atexit = False
        self._allocate_buffers(0, 0)

    def start(self, namespace: int) -> int:
        """The id of a new text."""
        text_id: int = self._library.foreword_suffix_start(self._index, namespace)
        if text_id < 0:
            raise MemoryError("out of memory for the suffix index")
        return text_id

    def finish(self, text_id: int, output: Sequence[int]) -> None:
        """Forget the text; `output` enters the corpus of its namespace."""
        tokens = array("i", output)
        self._library.foreword_suffix_finish(self._index, text_id, _address(tokens), len(tokens))

    def num_texts(self) -> int:
        return int(self._library.foreword_suffix_num_texts(self._index))

    def propose(self, queries: Sequence[Query]) -> list[SuffixDraft]:
        """Extend each text, then draft its continuation; one call for all."""
        packed: list[int] = []
        total_tokens = 0
        for text_id, max_tokens, new_ids in queries:
            packed += (text_id, max_tokens, len(new_ids))
            packed += new_ids
            total_tokens += max_tokens
        if len(queries) > self._max_queries or total_tokens > self._max_tokens:
            self._allocate_buffers(2 * len(queries), 2 * total_tokens)
        buffer = array("i", packed)
        lengths_at, *drafts_at = self._output_addresses
        inputs = (_address(buffer), len(buffer), len(queries))
        answered = self._propose(self._index, *inputs, lengths_at, self._max_tokens, *drafts_at)
        if answered < 0:
            raise ValueError("a query of no text, or of a negative length")
        if answered < len(queries):
            raise MemoryError("out of memory for the suffix index")
        lengths = self._lengths[: len(queries)].tolist()
        total = sum(lengths)
        token_ids, confidence = self._token_ids[:total].tolist(), self._confidence[:total].tolist()
        drafts = []
        start = 0
        for length in lengths:
            end = start + length
            draft = tuple(token_ids[start:end]), tuple(confidence[start:end])
            drafts.append(draft if length else EMPTY_DRAFT)
            start = end
        return drafts

    def _allocate_buffers(self, max_queries: int, max_tokens: int) -> None:
        """Output buffers of one call."""
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


@dataclass(slots=True)
class _TextState:
    """The text of one request in the index."""

    text_id: int
    num_indexed: int = 0  # its tokens in the index


class SuffixDrafter(EngineDrafter):
    """Drafts from each request's text as it grows, and from a bounded corpus of delivered outputs.

    A request matches only outputs of its namespace. The oldest outputs are evicted first.
    """

    name = "suffix"

    def __init__(self, corpus_bytes: int, never_sampled_ids: Collection[int], library: ctypes.CDLL) -> None:
        """never_sampled_ids  are neither matched nor drafted"""
        slots = min(corpus_bytes // BYTES_PER_SLOT, MAX_CORPUS_SLOTS)
        self._index = SuffixIndex(library, slots if slots >= MIN_CORPUS_SLOTS else 0, never_sampled_ids)
        self._namespaces = _Namespaces(MAX_NAMESPACES)
        self._texts: dict[str, _TextState] = {}

    def start(self, state: RequestState) -> None:
        namespace = self._namespaces.get_id(state.request.namespace)
        self._texts[state.id] = _TextState(self._index.start(namespace))

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        text = self._texts.pop(request_id, None)
        if text is not None:
            self._index.finish(text.text_id, output)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._texts)
        assert self._index.num_texts() == len(self._texts)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        drafts = self._index.propose([self._make_query(state, length) for state, length, _ in requests])
        return [
            Draft(token_ids, self.name, confidence) if token_ids else None for token_ids, confidence in drafts
        ]

    def _make_query(self, state: RequestState, max_tokens: int) -> Query:
        text = self._texts[state.id]
        new_ids = state.tokens[text.num_indexed :]
        text.num_indexed += len(new_ids)
        return text.text_id, max_tokens, new_ids


class _Namespaces:
    """A number for each namespace, least recently used first to be forgotten; numbers are not reused."""

    def __init__(self, max_namespaces: int) -> None:
        self._max_namespaces = max_namespaces
        self._ids: OrderedDict[str, int] = OrderedDict()
        self._last_id = 0

    def get_id(self, namespace: str) -> int:
        if namespace not in self._ids:
            self._last_id += 1
            self._ids[namespace] = self._last_id
        self._ids.move_to_end(namespace)
        if len(self._ids) > self._max_namespaces:
            self._ids.popitem(last=False)
        return self._ids[namespace]
