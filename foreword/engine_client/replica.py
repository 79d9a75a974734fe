"""The members of a router: one engine each, with the requests that it runs. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from foreword.core.outputs import Event, StepStats
from foreword.core.readiness import ReplicaState
from foreword.core.request import Request
from foreword.engine_client.base import EngineCallbacks, ReplicaClient
from foreword.engine_client.inflight_request import InflightRequest
from foreword.engine_client.routing import BlockIndex


class RoutedRequest:
    """An open request, wherever it runs."""

    __slots__ = (
        "digests",
        "inflight",
        "num_placements",
        "num_prompt",
        "on_event",
        "replica",
        "sent_id",
        "waits_since_s",
    )

    def __init__(self, request: Request, on_event: Callable[[Event | None], None]) -> None:
        self.inflight = InflightRequest(request)
        self.on_event = on_event
        self.replica: RouterReplica | None = None  # None: it waits for a replica
        self.num_placements = 0
        self.sent_id = ""  # its id in the replica
        self.digests: list[bytes] = []  # blocks of the prompt that another request may share
        self.num_prompt = 0  # tokens without KV that `replica` counts
        self.waits_since_s: float | None = None

    @property
    def id(self) -> str:
        return self.inflight.request.id


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
    inflights = [each.inflight for each in requests]
    tokens = [each.num_output for each in inflights]
    ages_s = [now_s - each.request.arrival_s for each in inflights]
    return replace(
        stats,
        longest_running_tokens=max([stats.longest_running_tokens, *tokens]),
        oldest_running_seconds=max([stats.oldest_running_seconds, *ages_s]),
    )
