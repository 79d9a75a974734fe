"""Guesses from the longest suffix match in the request's own text and in what was answered before."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass

from foreword.core.draft import Draft
from foreword.core.request import RequestState
from foreword.drafting.base import Ask
from foreword.drafting.suffix_index import BYTES_PER_SLOT, Index, Query, SuffixIndex
from foreword.drafting.suffix_native import NativeSuffixIndex

__all__ = ["SuffixDrafter"]

MIN_CORPUS_SLOTS = 64
MAX_CORPUS_SLOTS = 2**30  # slots are 32-bit numbers
MAX_TENANTS = 2**16  # that are remembered


@dataclass(slots=True)
class _Track:
    """The text of one request in the index, and how many of its tokens stand there."""

    text: int
    known: int = 0


class SuffixDrafter:
    """Keeps the text of each request as it grows, and outputs that were delivered, in a corpus of bounded memory.

    A tenant's requests see that tenant's outputs alone. The oldest are forgotten first.

    corpus_bytes  memory of the corpus; 0 for none
    never         ids that are neither matched nor guessed
    library       the compiled library, or None: the same guesses in Python
    """

    name = "suffix"

    def __init__(self, corpus_bytes: int, never: Collection[int], library: ctypes.CDLL | None) -> None:
        slots = min(corpus_bytes // BYTES_PER_SLOT, MAX_CORPUS_SLOTS)
        slots = slots if slots >= MIN_CORPUS_SLOTS else 0
        self._index: Index = SuffixIndex(slots, never) if library is None else NativeSuffixIndex(library, slots, never)
        self._namespaces = _Namespaces(MAX_TENANTS)
        self._tracks: dict[str, _Track] = {}

    def start(self, state: RequestState) -> None:
        namespace = self._namespaces.number(state.request.tenant)
        self._tracks[state.id] = _Track(self._index.start(namespace))

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        track = self._tracks.pop(request_id, None)
        if track is not None:
            self._index.finish(track.text, output)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._tracks)
        assert self._index.num_texts() == len(self._tracks)

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        guesses = self._index.propose([self._query(ask) for ask in asks])
        return [Draft(token_ids, self.name, confidence) if token_ids else None for token_ids, confidence in guesses]

    def _query(self, ask: Ask) -> Query:
        track = self._tracks[ask.state.id]
        new = ask.tokens_from(track.known)
        track.known += len(new)
        return track.text, ask.max_tokens, new


class _Namespaces:
    """A number for each tenant, never used for another. A tenant forgotten loses its part of the corpus."""

    def __init__(self, max_tenants: int) -> None:
        self._max_tenants = max_tenants
        self._numbers: OrderedDict[str, int] = OrderedDict()
        self._last = 0

    def number(self, tenant: str) -> int:
        if tenant not in self._numbers:
            self._last += 1
            self._numbers[tenant] = self._last
        self._numbers.move_to_end(tenant)
        if len(self._numbers) > self._max_tenants:
            self._numbers.popitem(last=False)
        return self._numbers[tenant]
