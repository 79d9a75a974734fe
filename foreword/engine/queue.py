"""Requests that wait for their turn, and the pictures that some of them wait for.

Pictures take long to encode, and only those of running requests are. So few requests run that still have some to see, and
those behind them are kept apart: they take no place of anybody who could start, and nobody looks at them in vain.

Who of those that wait could start: whoever would only wait for others is passed over.

Whose turn it is among accounts: start-time fair queueing (Goyal, Vin, Cheng 1996), in tokens.

Each request that waits has a turn: the later of the moment at which it came and of the end of what its account has had
before it. The smallest turn starts first, and moves the clock. So accounts that want more than there is get equal shares,
whoever sends more; an account that wants little is served at once; and within an account nobody overtakes.

What a request costs is estimated when it comes; what it turns out to have cost changes the turns of those behind it, the less
often the more there are.

Requests whose grammar is being compiled; they hold nothing of the scheduler, and delay nobody.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Final

from foreword.core.request import Request, RequestState
from foreword.core.structured import RequestGrammar
from foreword.kv_cache.prefix_cache import PrefixCache

__all__ = [
    "AdmissionFilter",
    "FairQueue",
    "PendingGrammar",
    "PendingGrammars",
    "PendingImages",
    "WaitingQueue",
    "sort_key_of",
]


def sort_key_of(state: RequestState) -> tuple[int, int, int]:
    return state.sort_key


class WaitingQueue:
    """By rank.

    ready  those that could be looked at
    apart  those that wait for pictures of running requests, until these have changed
    """

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
        """One of those that are ready is not."""
        insort(self.blocked_on_images, self.ready.pop(index), key=sort_key_of)

    def unblock_all(self) -> None:
        """What they wait for has changed."""
        self.ready = list(self)
        self.blocked_on_images = []

    def resort(self) -> None:
        """Ranks have changed."""
        self.ready = sorted((*self.ready, *self.blocked_on_images), key=sort_key_of)
        self.blocked_on_images = []


class PendingImages:
    """Running requests that have pictures to see before all of their tokens can be computed.

    running  by rank
    reach    see Scheduler
    """

    def __init__(
        self, running: Sequence[RequestState], computable_until: Callable[[RequestState, int], int]
    ) -> None:
        seeing = (state for state in running if state.request.images)
        unseen = (
            (state, len(state.tokens) - computable_until(state, state.num_computed)) for state in seeing
        )
        self._pending = [(state.sort_key, state.id, num_tokens) for state, num_tokens in unseen if num_tokens]

    def __eq__(self, other: object) -> bool:
        """They have as much to see, each of them."""
        return isinstance(other, PendingImages) and self._pending == other._pending

    __hash__ = None  # type: ignore[assignment]

    def blocks(self, state: RequestState, max_tokens: int, max_slots: int) -> bool:
        """Those before it have enough to see for a step, or those that need not give way to it hold so many places."""
        before = bisect_left(self._pending, state.sort_key, key=_sort_key_in)
        if sum(num_tokens for _, _, num_tokens in self._pending[:before]) >= max_tokens:
            return True
        return sum(rank[0] <= state.sort_key[0] for rank, _, _ in self._pending) >= max_slots


def _sort_key_in(entry: tuple[tuple[int, int, int], str, int]) -> tuple[int, int, int]:
    return entry[0]


class AdmissionFilter:
    """Between `waiting` and `running`, which it looks at; whoever takes a request through tells it.

    reach  see Scheduler
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        running: Sequence[RequestState],
        prefix_cache: PrefixCache,
        block_size: int,
        computable_until: Callable[[RequestState, int], int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._prefix_cache = prefix_cache
        self._block_size = block_size
        self._computable_until = computable_until
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._pending_images: PendingImages | None = None  # None: it has changed
        self._last_pending_images: PendingImages | None = None  # for which nobody is apart without need

    def refresh(self) -> None:
        """Who waits for pictures of others may go on when these have changed."""
        crowd = PendingImages(self._running, self._computable_until)
        if crowd != self._last_pending_images:
            self._waiting.unblock_all()
        self._pending_images = self._last_pending_images = crowd

    def invalidate(self, state: RequestState) -> None:
        """A request that joined or left those who run may have been one of those with pictures to see."""
        if state.request.images:
            self._pending_images = self._last_pending_images = None

    def next_candidate(self, include_pooling: bool = True) -> RequestState | None:
        """The first that waits for rows, blocks or a place, and not for others; `vectors`: also one that wants no tokens."""
        return next(self.candidates(lambda state: state.is_pooling and not include_pooling), None)

    def candidates(self, is_skipped: Callable[[RequestState], bool]) -> Iterator[RequestState]:
        """Those that wait for rows, blocks or a place and not for others, by rank. Whoever takes one may start it."""
        ready, index, deferred = self._waiting.ready, 0, 0
        while index < len(ready) and deferred < self._max_num_seqs:
            state = ready[index]
            if not is_skipped(state):
                if self._is_blocked_on_images(state):
                    self._waiting.block(index)
                    continue
                if self._prefix_cache.computing_request(state) is None:
                    yield state
                elif (
                    not state.request.images
                ):  # of these there may be thousands, and it is a matter of a few steps
                    deferred += 1
            index += index < len(ready) and ready[index] is state

    def _is_blocked_on_images(self, state: RequestState) -> bool:
        """It lets others see their pictures first, or one whose block it could share."""
        self._prefix_cache.hash_blocks(state)
        if not state.request.images:
            return False
        owner = self._prefix_cache.computing_request(state)
        if owner is not None:
            return self._computable_until(owner, owner.num_computed) == owner.num_computed
        if self._pending_images is None:
            self._pending_images = PendingImages(self._running, self._computable_until)
        if not self._pending_images.blocks(
            state, self._max_num_batched_tokens, max(self._max_num_seqs // 2, 1)
        ):
            return False
        start = len(self._prefix_cache.match(state)) * self._block_size
        return self._computable_until(state, start) < len(state.tokens)


DEFAULT_OUTPUT_TOKENS: Final = 256  # tokens that an answer is thought to have, if it may have so many
MAX_TAG_UPDATES: Final = 256  # turns that a plan may correct; of more, in so many plans as it takes


@dataclass(slots=True)
class _Entry:
    """A live request: the clock when it came, and its cost in tokens."""

    virtual_arrival: int
    cost: int


@dataclass(slots=True)
class _Flow:
    """live: its requests. used: where what has started of them ends; end: the same of all of them."""

    num_live: int = 0
    served_tag: int = 0
    finish_tag: int = 0


class FairQueue:
    """Gives each request its turn. Accounts that have neither requests nor debts are forgotten."""

    def __init__(self) -> None:
        self._virtual_time = 0
        self._steps_since_update = 0  # since turns were corrected
        self._stale_flows: set[str] = set()
        self._entries: dict[str, _Entry] = {}
        self._flows: dict[str, _Flow] = {}

    def __len__(self) -> int:
        """Accounts that are known."""
        return len(self._flows)

    def add(self, state: RequestState) -> None:
        """A request waits."""
        account = self._flows.setdefault(state.request.fairness_key, _Flow())
        account.num_live += 1
        entry = self._entries[state.id] = _Entry(self._virtual_time, _estimate_cost(state))
        state.virtual_start = max(entry.virtual_arrival, account.finish_tag)
        account.finish_tag = state.virtual_start + entry.cost

    def on_start(self, state: RequestState) -> None:
        """It runs for the first time."""
        account = self._flows[state.request.fairness_key]
        account.served_tag = max(account.served_tag, state.virtual_start) + self._entries[state.id].cost
        account.finish_tag = max(account.finish_tag, account.served_tag)
        if state.virtual_start > self._virtual_time:
            self._virtual_time = state.virtual_start
            self._prune()

    def on_finish(self, state: RequestState) -> None:
        """It is over."""
        entry = self._entries.pop(state.id)
        name = state.request.fairness_key
        account = self._flows[name]
        account.num_live -= 1
        if state.scheduled_s is not None:
            account.served_tag += len(state.tokens) - state.num_cached - entry.cost
        self._stale_flows.add(name)
        self._prune()

    def update_tags(self, waiting: Collection[RequestState]) -> bool:
        """Called with each plan. Returns whether turns have changed: of some that wait, which are in `waiting` by rank."""
        self._steps_since_update += 1
        if (
            self._steps_since_update * MAX_TAG_UPDATES < len(waiting)
            or not self._stale_flows
            or len(self._flows) < 2
        ):
            return False
        self._steps_since_update = 0
        for name in self._stale_flows & self._flows.keys():
            self._flows[name].finish_tag = self._flows[name].served_tag
        for state in waiting:
            name = state.request.fairness_key
            if name in self._stale_flows and state.scheduled_s is None:
                entry, account = self._entries[state.id], self._flows[name]
                state.virtual_start = max(entry.virtual_arrival, account.finish_tag)
                account.finish_tag = state.virtual_start + entry.cost
        self._stale_flows.clear()
        return True

    def _prune(self) -> None:
        """Whoever has nothing here and owes nothing begins anew when it comes again."""
        if not self._entries:
            self._flows.clear()
            self._stale_flows.clear()
            self._virtual_time = 0
        elif len(self._flows) > 1:
            self._flows = {
                name: one
                for name, one in self._flows.items()
                if one.num_live or one.served_tag > self._virtual_time
            }


def _estimate_cost(state: RequestState) -> int:
    return len(state.tokens) + min(state.max_len - len(state.tokens), DEFAULT_OUTPUT_TOKENS)


IDLE_WAIT_S: Final = 0.01  # a step that has nothing to do but to wait for a grammar takes so long


@dataclass(frozen=True, slots=True)
class PendingGrammar:
    """arrival: the request's number among all. grammar: what comes of it, or why there is none."""

    request: Request
    arrival: int
    grammar: Future[RequestGrammar]


class PendingGrammars:
    """By id. Iterated over, it yields the requests."""

    def __init__(self) -> None:
        self._pending: dict[str, PendingGrammar] = {}

    def __len__(self) -> int:
        return len(self._pending)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending

    def __iter__(self) -> Iterator[Request]:
        return (one.request for one in self._pending.values())

    def add(self, pending: PendingGrammar) -> None:
        self._pending[pending.request.id] = pending

    def cancel(self, request_id: str) -> bool:
        """Whether it was here."""
        one = self._pending.pop(request_id, None)
        if one is not None:
            one.grammar.cancel()
        return one is not None

    def running_arrivals(self) -> list[int]:
        """Numbers of the requests whose grammar is worked on just now."""
        return [one.arrival for one in self._pending.values() if one.grammar.running()]

    def pop_ready(self, block: bool) -> list[PendingGrammar]:
        """Those that are done. patient: there is nothing else to do, so that one may be waited for, a moment long."""
        if block:
            wait([one.grammar for one in self._pending.values()], IDLE_WAIT_S, FIRST_COMPLETED)
        done = [one for one in self._pending.values() if one.grammar.done()]
        for one in done:
            del self._pending[one.request.id]
        return done
