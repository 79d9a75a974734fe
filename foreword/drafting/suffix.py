"""Guesses from the longest suffix match in the request's own text and in what was answered before."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

from foreword.core.draft import Draft
from foreword.core.request import RequestState
from foreword.drafting.base import DraftRequest
from foreword.drafting.suffix_index import BYTES_PER_SLOT, SuffixIndexBackend, Query, SuffixIndex
from foreword.drafting.suffix_native import NativeSuffixIndex

__all__ = ["SuffixDrafter"]

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

    def __init__(self, corpus_bytes: int, never_sampled_ids: Collection[int], library: ctypes.CDLL | None) -> None:
        slots = min(corpus_bytes // BYTES_PER_SLOT, MAX_CORPUS_SLOTS)
        slots = slots if slots >= MIN_CORPUS_SLOTS else 0
        self._index: SuffixIndexBackend = SuffixIndex(slots, never_sampled_ids) if library is None else NativeSuffixIndex(library, slots, never_sampled_ids)
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
        return [Draft(token_ids, self.name, confidence) if token_ids else None for token_ids, confidence in guesses]

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
