"""Queues of requests that do not run yet: by rank, by fair share, by images and by grammar."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Sequence
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

DEFAULT_OUTPUT_TOKENS: Final = 256  # expected output tokens of a request, if its limit allows as many
MAX_TAG_UPDATES: Final = 256  # waiting requests per step whose tag may be updated


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
            if not (state.is_loading or is_skipped(state)):
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


@dataclass(slots=True)
class _Entry:
    """A live request."""

    virtual_arrival: int  # virtual time when it came
    cost: int  # estimated tokens


@dataclass(slots=True)
class _Flow:
    """The requests of one fairness key."""

    num_live: int = 0
    served_tag: int = 0  # finish tag of its started requests
    finish_tag: int = 0  # finish tag of all its requests


class FairQueue:
    """Start-time fair queueing (Goyal, Vin, Cheng 1996) between fairness keys, in tokens.

    A request's start tag is the later of its virtual arrival and the finish tag of its flow. The smallest
    tag starts first and advances virtual time. So busy flows get equal shares, a flow with few requests is
    served at once, and each flow is served in order of arrival. Costs are estimated on arrival; actual
    costs update the tags of waiting requests, less often the more of them wait.
    """

    def __init__(self) -> None:
        self._virtual_time = 0
        self._steps_since_update = 0
        self._stale_flows: set[str] = set()  # flows whose costs have changed since the last update
        self._entries: dict[str, _Entry] = {}
        self._flows: dict[str, _Flow] = {}

    def __len__(self) -> int:
        """The number of flows."""
        return len(self._flows)

    def add(self, state: RequestState) -> None:
        flow = self._flows.setdefault(state.request.fairness_key, _Flow())
        flow.num_live += 1
        num_tokens = len(state.tokens)
        cost = num_tokens + min(state.max_len - num_tokens, DEFAULT_OUTPUT_TOKENS)
        self._entries[state.id] = _Entry(self._virtual_time, cost)
        self._tag(state)

    def on_start(self, state: RequestState) -> None:
        """Called when a request runs for the first time."""
        flow = self._flows[state.request.fairness_key]
        flow.served_tag = max(flow.served_tag, state.virtual_start) + self._entries[state.id].cost
        flow.finish_tag = max(flow.finish_tag, flow.served_tag)
        if state.virtual_start > self._virtual_time:
            self._virtual_time = state.virtual_start
            self._prune()

    def on_finish(self, state: RequestState) -> None:
        entry, key = self._entries.pop(state.id), state.request.fairness_key
        flow = self._flows[key]
        flow.num_live -= 1
        if state.scheduled_s is not None:
            flow.served_tag += len(state.tokens) - state.num_cached - entry.cost
        self._stale_flows.add(key)
        self._prune()

    def update_tags(self, waiting: Collection[RequestState]) -> bool:
        """Called every step with the waiting requests by rank; returns whether tags have changed."""
        self._steps_since_update += 1
        too_many = self._steps_since_update * MAX_TAG_UPDATES < len(waiting)
        if too_many or not self._stale_flows or len(self._flows) < 2:
            return False
        self._steps_since_update = 0
        for key in self._stale_flows & self._flows.keys():
            self._flows[key].finish_tag = self._flows[key].served_tag
        for state in waiting:
            if state.request.fairness_key in self._stale_flows and state.scheduled_s is None:
                self._tag(state)
        self._stale_flows.clear()
        return True

    def _tag(self, state: RequestState) -> None:
        """Set the start tag of a request, and move the finish tag of its flow."""
        entry, flow = self._entries[state.id], self._flows[state.request.fairness_key]
        state.virtual_start = max(entry.virtual_arrival, flow.finish_tag)
        flow.finish_tag = state.virtual_start + entry.cost

    def _prune(self) -> None:
        """Forget flows without live requests whose served tag has passed."""
        if not self._entries:
            self._flows.clear()
            self._stale_flows.clear()
            self._virtual_time = 0
        elif len(self._flows) > 1:
            self._flows = {
                key: flow
                for key, flow in self._flows.items()
                if flow.num_live or flow.served_tag > self._virtual_time
            }
