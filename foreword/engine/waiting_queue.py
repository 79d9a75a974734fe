"""Queues of requests that do not run yet: by rank, by images and by grammar."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from operator import attrgetter, itemgetter
from typing import Final

from foreword.core.request import Request, RequestState
from foreword.core.structured_output import RequestGrammar
from foreword.kv_cache.prefix_cache import PrefixCache

IDLE_WAIT_S: Final = 0.01  # how long an idle step waits for a grammar

# state, start -> index of the first token at or after `start` that needs an image not yet encoded
ComputableUntil = Callable[[RequestState, int], int]

sort_key_of = attrgetter("sort_key")


class WaitingQueue:
    """Waiting requests by rank. Those blocked on images are parked, so that no step rescans them."""

    def __init__(self) -> None:
        self.ready: list[RequestState] = []
        self.blocked_on_images: list[RequestState] = []

    def __len__(self) -> int:
        return len(self.ready) + len(self.blocked_on_images)

    def __contains__(self, state: object) -> bool:
        return state in self.ready or state in self.blocked_on_images

    def __iter__(self) -> Iterator[RequestState]:
        return heapq.merge(self.ready, self.blocked_on_images, key=sort_key_of)

    def add(self, state: RequestState) -> None:
        insort(self.ready, state, key=sort_key_of)

    def remove(self, state: RequestState) -> None:
        (self.blocked_on_images if state in self.blocked_on_images else self.ready).remove(state)

    def block(self, index: int) -> None:
        """Park ready[index] until unblock_all()."""
        insort(self.blocked_on_images, self.ready.pop(index), key=sort_key_of)

    def unblock_all(self) -> None:
        self.ready, self.blocked_on_images = list(self), []

    def resort(self) -> None:
        """Sort again after ranks have changed."""
        self.ready = sorted((*self.ready, *self.blocked_on_images), key=sort_key_of)
        self.blocked_on_images = []


class UnencodedImages:
    """Running requests with tokens that need unencoded images, by rank."""

    def __init__(self, running: Sequence[RequestState], computable_until: ComputableUntil) -> None:
        counts = (
            (s, len(s.tokens) - computable_until(s, s.num_computed)) for s in running if s.request.images
        )
        self.entries = [(state.sort_key, state.id, count) for state, count in counts if count]

    def blocks(self, state: RequestState, max_tokens: int, max_slots: int) -> bool:
        """Whether better ranks fill a step with encoding, or requests like this one fill `max_slots`."""
        before = bisect_left(self.entries, state.sort_key, key=itemgetter(0))
        if sum(count for _, _, count in self.entries[:before]) >= max_tokens:
            return True
        return sum(rank[0] <= state.sort_key[0] for rank, _, _ in self.entries) >= max_slots


class AdmissionFilter:
    """Selects the waiting requests that could start now.

    Images take long to encode, and only running requests have theirs encoded. So few requests with
    unencoded images run at once: the others are parked and take no slot of a request that could start.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        running: Sequence[RequestState],
        prefix_cache: PrefixCache,
        computable_until: ComputableUntil,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._prefix_cache = prefix_cache
        self._computable_until = computable_until
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._unencoded: UnencodedImages | None = None  # None: running requests have changed
        self._parked_for: UnencodedImages | None = None  # the state for which requests were parked

    def refresh(self) -> None:
        """Unblock parked requests if images of running requests were encoded or requests have changed."""
        unencoded = UnencodedImages(self._running, self._computable_until)
        if self._parked_for is None or unencoded.entries != self._parked_for.entries:
            self._waiting.unblock_all()
        self._unencoded = self._parked_for = unencoded

    def invalidate(self, state: RequestState) -> None:
        """Called when `state` starts or stops running."""
        if state.request.images:
            self._unencoded = self._parked_for = None

    def next_candidate(self, include_pooling: bool = True) -> RequestState | None:
        return next(self.candidates(lambda state: state.is_pooling and not include_pooling), None)

    def candidates(self, is_skipped: Callable[[RequestState], bool]) -> Iterator[RequestState]:
        """Requests that lack only rows, blocks or a slot, by rank. The caller may start each one."""
        ready, index, deferred = self._waiting.ready, 0, 0
        while index < len(ready) and deferred < self._max_num_seqs:
            state = ready[index]
            if not is_skipped(state):
                if self._is_blocked_on_images(state):
                    self._waiting.block(index)
                    continue
                if self._prefix_cache.computing_request(state) is None:
                    yield state
                elif not state.request.images:
                    deferred += 1  # thousands may wait for one prefix: the count bounds the scan
            index += index < len(ready) and ready[index] is state

    def _is_blocked_on_images(self, state: RequestState) -> bool:
        self._prefix_cache.hash_blocks(state)
        if not state.request.images:
            return False
        owner = self._prefix_cache.computing_request(state)
        if owner is not None:  # it waits for the owner's image to share the block
            return self._computable_until(owner, owner.num_computed) == owner.num_computed
        if self._unencoded is None:
            self._unencoded = UnencodedImages(self._running, self._computable_until)
        max_slots = max(self._max_num_seqs // 2, 1)
        if not self._unencoded.blocks(state, self._max_num_batched_tokens, max_slots):
            return False
        start = len(self._prefix_cache.match(state)) * self._prefix_cache.block_size
        return self._computable_until(state, start) < len(state.tokens)


@dataclass(frozen=True, slots=True)
class PendingGrammar:
    request: Request
    arrival: int
    grammar: Future[RequestGrammar]


class PendingGrammars(dict[str, PendingGrammar]):
    """Requests whose grammar is being compiled, by id. They hold no scheduler resources."""

    def cancel(self, request_id: str) -> bool:
        """Drop a request; returns whether it was pending."""
        pending = self.pop(request_id, None)
        if pending is not None:
            pending.grammar.cancel()
        return pending is not None

    def running_arrivals(self) -> list[int]:
        """Arrival numbers of the requests whose grammar is being compiled right now."""
        return [pending.arrival for pending in self.values() if pending.grammar.running()]

    def pop_ready(self, block: bool) -> list[PendingGrammar]:
        """Remove and return the compiled ones; with `block` wait up to IDLE_WAIT_S for the first."""
        if block:
            wait([pending.grammar for pending in self.values()], IDLE_WAIT_S, FIRST_COMPLETED)
        ready = [pending for pending in self.values() if pending.grammar.done()]
        for pending in ready:
            del self[pending.request.id]
        return ready
