"""The members of a router, the requests that they run, and the choice between them. Imports no torch.

choose() lets load bound the choice; then cached prefix blocks decide. Without processes and clocks.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from foreword.core.outputs import BlockUpdate, ErrorEvent, Event, StepStats, TokenEvent, drop_prefix
from foreword.core.readiness import ReplicaState
from foreword.core.request import Request
from foreword.engine_client.base import EngineCallbacks, ReplicaClient
from foreword.errors import RequestFailed

# A replica may have this much more load than the mean, for the sake of its cache.
MAX_LOAD_RATIO: Final = 1.25
LOAD_SLACK: Final = 2.0  # streams
TOKENS_PER_STREAM: Final = 256  # prompt tokens without KV that count as one more stream
logger = logging.getLogger(__name__)
REPLAY_CHECK_TOKENS: Final = 4  # delivered tokens that a restart samples again and compares


class BlockIndex:
    """Hashes of the KV blocks that one replica has in its prefix cache, or is about to compute."""

    __slots__ = ("_cached", "_computing", "_sequence")

    def __init__(self) -> None:
        self._cached: set[bytes] = set()
        self._computing: Counter[bytes] = Counter()  # number of requests that compute a block
        self._sequence: int | None = None  # number of the newest update; None: a snapshot is missing

    def update(self, update: BlockUpdate) -> bool:
        """Apply an update. False if one before it is missing: the cache is unknown until a snapshot comes."""
        if update.is_snapshot:
            self._cached = set(update.added)
        elif self._sequence is not None and update.sequence == self._sequence + 1:
            self._cached.difference_update(update.removed)
            self._cached.update(update.added)
        else:
            self.clear()
            return False
        self._sequence = update.sequence
        return True

    def clear(self) -> None:
        """The cache is empty or unknown."""
        self._cached.clear()
        self._sequence = None

    def add_computing(self, digests: Iterable[bytes]) -> None:
        """A request that was sent to the replica computes these blocks."""
        self._computing.update(digests)

    def remove_computing(self, digests: Iterable[bytes]) -> None:
        """The request has computed them, or ended."""
        for digest in digests:
            self._computing[digest] -= 1
            if not self._computing[digest]:
                del self._computing[digest]

    def num_matched(self, digests: Sequence[bytes]) -> int:
        """Leading blocks of a prompt that the replica has or computes."""
        cached, computing = self._cached, self._computing
        for index, digest in enumerate(digests):
            if digest not in cached and digest not in computing:
                return index
        return len(digests)


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """A replica that could take a request."""

    id: str
    num_streams: int
    num_prompt_tokens: int  # prompt tokens of its streams that are still to be computed
    num_matched: int = 0  # blocks of the request's prompt that it has
    chosen_at: int = 0  # number of the last choice of this replica

    @property
    def load(self) -> float:
        return self.num_streams + self.num_prompt_tokens / TOKENS_PER_STREAM


# Takes candidates, and the id of the replica that last served the request's tenant; returns an id.
RoutingPolicy = Callable[[Sequence[ReplicaLoad], str | None], str]


def choose(candidates: Sequence[ReplicaLoad], last_id: str | None = None) -> str:
    """The replica for a request; there is at least one candidate.

    Among those within the load bound, the one with most matched blocks; then the one that last served the
    request's tenant, `last_id`, whose outputs its suffix drafter knows; then the least loaded; then the one
    that was chosen longest ago.
    """
    bound = MAX_LOAD_RATIO * sum(each.load for each in candidates) / len(candidates) + LOAD_SLACK
    return min(
        (each for each in candidates if each.load <= bound),
        key=lambda each: (-each.num_matched, each.id != last_id, each.load, each.chosen_at),
    ).id


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """An open request and the delivered part of its answer, from which any engine can go on.

    |<- request.resume_output_ids ->|<- delivered_ids ----------------------------->|
                                    |<- output of a resumed request ->|<- checked ->|<- new ...
    """

    request: Request
    on_event: Callable[[Event | None], None]
    has_run: bool = False  # an engine before ran it
    delivered_ids: list[int] = field(default_factory=list)
    _first_timing: tuple[int, float] | None = None  # num_cached and scheduled_s of the first event
    replica: RouterReplica | None = None  # None: it waits for a replica
    num_placements: int = 0
    sent_id: str = ""  # its id in the replica
    digests: list[bytes] = field(default_factory=list)  # blocks of the prompt that another request may share
    num_prompt: int = 0  # tokens without KV that `replica` counts
    waits_since_s: float | None = None
    last_ready_s: float = 0.0  # when it waited last beside a ready replica, for room or for suspects

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_output(self) -> int:
        return len(self.request.resume_output_ids) + len(self.delivered_ids)

    @property
    def has_started(self) -> bool:
        """Whether it ran in an engine before, or gained a token."""
        return self.has_run or bool(self.delivered_ids)

    def make_resume_request(self, request_id: str) -> Request:
        """The request for a new engine: delivered tokens are output already, except the last few.

        request_id  another one for each engine, so that late events are of no open request
        """
        if not self.delivered_ids:
            deadline_s = None if self.has_run else self.request.queue_deadline_s
            return replace(self.request, id=request_id, queue_deadline_s=deadline_s)
        kept = self.delivered_ids[: max(len(self.delivered_ids) - REPLAY_CHECK_TOKENS, 0)]
        params = self.request.params
        if params.prompt_logprobs is not None:  # delivered with the first token
            params = replace(params, prompt_logprobs=None)
        return replace(
            self.request,
            id=request_id,
            params=params,
            resume_output_ids=(*self.request.resume_output_ids, *kept),
            queue_deadline_s=None,
            is_resumed=True,
        )

    def take_new(self, event: TokenEvent) -> Event | None:
        """The part of an event that was not delivered, with the request's own id.

        None if there is none; an ErrorEvent if delivered tokens differ.
        """
        start = event.index - len(self.request.resume_output_ids)
        count = min(len(self.delivered_ids) - start, len(event.token_ids))
        delivered = tuple(self.delivered_ids[start : start + count])
        if start < 0 or count < 0 or delivered != event.token_ids[:count]:
            logger.error(
                "client: request %s differs after the restart at token %d; ending it",
                self.request.id,
                event.index,
            )
            error = "the engine was restarted and does not sample the same tokens again; the answer ends here"
            return ErrorEvent(self.request.id, RequestFailed(error))
        if count:
            event = drop_prefix(event, count)
        if not event.token_ids and event.finish_reason is None:
            return None
        self.delivered_ids += event.token_ids
        timing = event.num_cached, event.scheduled_s
        first = self._first_timing = self._first_timing or timing
        if first != timing or event.request_id != self.request.id:
            event = event._replace(request_id=self.request.id, num_cached=first[0], scheduled_s=first[1])
        return event


class RouterReplica:
    """One engine of the model, and the requests that it runs."""

    def __init__(self, replica_id: str, client: ReplicaClient, address: str | None = None) -> None:
        """replica_id  "": the only engine, now and later
        address     host:port of another machine's engine; None: a process of this machine
        """
        self.id = replica_id
        self.client = client
        self.address = address
        self.callbacks = EngineCallbacks()
        self.requests: dict[str, RoutedRequest] = {}  # keyed by the id that was sent
        self.num_prompt_tokens = 0  # prompt tokens of its requests without a token
        self.blocks = BlockIndex()
        self.adapters: set[str] = set()  # digests
        self.chosen_at = 0
        self.is_started = False
        self.is_draining = False
        self.made_progress = False  # a request gained a token or ended since the last crash
        self.problem = ""  # why it gets no requests, though it is ready

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests."""
        client = self.client
        return (
            self.is_started
            and client.alive
            and not self.is_draining
            and not self.problem
            and client.readiness.is_ready
        )

    def state(self) -> ReplicaState:
        readiness, info = self.client.readiness, self.client.info
        status, detail = readiness.status, readiness.detail
        if self.is_draining:
            status, detail = "draining", "its streams move to other replicas"
        elif self.problem:
            status, detail = "different", self.problem
        stats = self.client.stats
        return ReplicaState(
            self.id,
            self.address,
            status,
            detail,
            None if info is None else info.fingerprint,
            stats.requests_running,
            stats.requests_waiting,
        )

    def stats(self, now_s: float) -> StepStats:
        """Stats of the newest step; while the engine cannot report, counts of its open requests."""
        stats = self.client.stats
        if self.client.readiness.is_ready:
            return stats
        running = min(stats.requests_running, len(self.requests))
        stats = replace(
            stats,
            requests_running=running,
            requests_waiting=len(self.requests) - running,
            longest_running_tokens=0,
            oldest_running_seconds=0.0,
        )
        return with_ages(stats, self.requests.values(), now_s)


def with_ages(stats: StepStats, requests: Collection[RoutedRequest], now_s: float) -> StepStats:
    """The stats with the longest and the oldest of these requests."""
    tokens = [each.num_output for each in requests]
    ages_s = [now_s - each.request.arrival_s for each in requests]
    return replace(
        stats,
        longest_running_tokens=max([stats.longest_running_tokens, *tokens]),
        oldest_running_seconds=max([stats.oldest_running_seconds, *ages_s]),
    )
