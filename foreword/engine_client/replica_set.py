"""The replicas of a router: what they share, and what they report together. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Final

from foreword.config.lora import AdapterInfo
from foreword.core.outputs import StepStats
from foreword.core.readiness import Readiness, ReplicaState
from foreword.core.request import Request
from foreword.engine_client.base import ReplicaClient
from foreword.engine_client.replica import (
    ReplicaLoad,
    RoutedRequest,
    RouterReplica,
    RoutingPolicy,
    choose,
    with_ages,
)
from foreword.errors import AdapterConflict, ConfigError, EngineDead, ForewordError
from foreword.planning.resolve import EngineInfo
from foreword.utils.logging import log_model

logger = logging.getLogger(__name__)

MAX_TENANTS: Final = 4096  # whose last replica is remembered
STATUSES: Final = ("ok", "draining", "unresponsive", "restarting", "loading", "dead")  # the best first


class ReplicaSet:
    """Replicas by id: the first one to start decides on tokens, context and adapters of all."""

    def __init__(self, max_model_len: int | None) -> None:
        """max_model_len  see EngineRouter"""
        self.info: EngineInfo | None = None  # the first one's
        self.members: dict[str, RouterReplica] = {}
        self.adapters: dict[str, AdapterInfo] = {}  # keyed by digest
        self.policy: RoutingPolicy = choose
        self._max_model_len = max_model_len
        self._last_ids: OrderedDict[str, str] = OrderedDict()  # tenant to the replica that served it last
        self._num_choices = 0

    def __iter__(self) -> Iterator[RouterReplica]:
        return iter(self.members.values())

    def __len__(self) -> int:
        return len(self.members)

    @property
    def only(self) -> RouterReplica | None:
        """The replica, if there is never another one: nothing names it, and requests wait for it."""
        return self.members.get("")

    # Start

    async def start_local(self) -> None:
        """The first local replica makes the choices, the others take them over."""
        local = [each for each in self if each.address is None]
        if local:
            await self.start(local[0], None)
            await asyncio.gather(*(self.start(each, local[0].client) for each in local[1:]))

    async def start(self, replica: RouterReplica, reuse: ReplicaClient | None) -> None:
        """reuse  see ReplicaClient.start()"""
        before = log_model.get()
        if replica.id and replica.address is None:
            # The client's tasks and its engine inherit it; lines about servers elsewhere have their address.
            log_model.set(f"{before}{', ' if before else ''}replica {replica.id}")
        try:
            await replica.client.start(replica.callbacks, reuse)
        finally:
            log_model.set(before)
        replica.is_started = True
        await self.admit(replica)

    async def wait_first(self, tasks: Collection[asyncio.Task[None]]) -> None:
        """Wait until there is a replica, of these starts or before. Raises an error if none may be used."""
        pending = set(tasks)
        while pending and self.info is None:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if self.info is None:
            for task in tasks:
                task.result()
            problems = (f"replica {each.id}: {each.detail}" for each in self.states())
            raise ConfigError("; ".join(problems), "max_model_len")

    async def admit(self, replica: RouterReplica) -> None:
        """Give a ready replica the adapters it lacks, and requests if it samples the same tokens.

        The first one decides what the others must have. Requests of an adapter that it cannot load go
        to the others.
        """
        info = replica.client.info
        assert info is not None, "a started engine has info"
        if replica.address is None and self._max_model_len is None:
            self._max_model_len = info.resolved.max_model_len
        replica.problem = describe_difference(self.info or info, info, self._max_model_len)
        if self.info is None and not replica.problem:
            length = self._max_model_len or info.resolved.max_model_len
            self.info = replace(info, resolved=replace(info.resolved, max_model_len=length))
            self.adapters = {adapter.digest: adapter for adapter in info.adapters}
        replica.adapters = {adapter.digest for adapter in info.adapters}
        for digest, adapter in list(self.adapters.items()):
            if digest not in replica.adapters and not replica.problem:
                try:
                    loaded = await replica.client.load_adapter(adapter.path)
                except ForewordError as error:
                    logger.error("replica %s has no adapter %s: %s", replica.id, adapter.path, error.message)
                else:
                    replica.adapters.add(loaded.digest)
        if replica.problem:
            logger.error("replica %s gets no requests: %s", replica.id, replica.problem)

    def on_restarted(self, replica: RouterReplica) -> None:
        """An engine was replaced: it may lack adapters, and have another folder of KV blocks."""
        info = replica.client.info
        if self.info is None or info is None:
            return
        replica.adapters = {adapter.digest for adapter in info.adapters}
        if replica.address is not None:
            return
        # One of several may have restarted without its directory, which the others still have
        if info.kv_files is not None or self.only is not None:
            self.info = replace(self.info, kv_files=info.kv_files)

    # Choice

    def ready_for(self, request: Request) -> list[RouterReplica]:
        """The ready replicas with the request's adapter; all ready ones if none has it: they refuse it."""
        has_adapter = [each for each in self if each.client.alive and request.adapter in each.adapters]
        return [each for each in has_adapter or self if each.is_ready]

    def choose(
        self, routed: RoutedRequest, excluded: RouterReplica | None, needs_room: bool
    ) -> RouterReplica | None:
        """The replica for a request; None if it has to wait.

        needs_room  wait for a free batch slot while a replica restarts
        """
        replicas = [each for each in self.ready_for(routed.request) if each is not excluded]
        if needs_room:
            replicas = self._with_room(replicas)
        if len(replicas) < 2:
            return replicas[0] if replicas else None
        candidates = [
            ReplicaLoad(
                each.id,
                len(each.requests),
                each.num_prompt_tokens,
                each.blocks.num_matched(routed.digests),
                each.chosen_at,
            )
            for each in replicas
        ]
        tenant = routed.request.cache_salt
        chosen = self.members[self.policy(candidates, self._last_ids.get(tenant) if tenant else None)]
        self._num_choices += 1
        chosen.chosen_at = self._num_choices
        if tenant:
            self._last_ids[tenant] = chosen.id
            self._last_ids.move_to_end(tenant)
            while len(self._last_ids) > MAX_TENANTS:
                self._last_ids.popitem(last=False)
        return chosen

    def _with_room(self, replicas: list[RouterReplica]) -> list[RouterReplica]:
        """Replicas with a free batch slot; all of them if none has one and none is restarting."""
        assert self.info is not None
        limit = self.info.resolved.max_num_seqs
        with_room = [each for each in replicas if len(each.requests) < limit]
        is_restarting = any(each.client.readiness.status == "restarting" for each in self)
        return with_room if with_room or is_restarting else replicas

    # Reports

    def states(self) -> list[ReplicaState]:
        return [each.state() for each in self if each.id]

    def readiness(self, is_started: bool) -> Readiness:
        """is_started: requests are accepted, or were."""
        if self.only is not None:
            return self.only.client.readiness
        all_states = [each.client.readiness for each in self]
        restarts = sum(each.restarts for each in all_states)
        num_ready = sum(each.is_ready for each in self)
        detail = f"{num_ready} of {len(self)} replicas are ready"
        if not is_started:
            progress = next((each.progress for each in all_states if each.progress is not None), None)
            return Readiness("loading", f"the engine is still loading: {detail}", progress, restarts)
        if num_ready:
            return Readiness("ok", "" if num_ready == len(self) else detail, restarts=restarts)
        if not all_states:
            return Readiness("restarting", "there is no replica")
        best = min(all_states, key=lambda each: STATUSES.index(each.status))
        status = "restarting" if best.is_ready else best.status  # draining, or different
        return Readiness(status, best.detail or detail, best.progress, restarts)

    def stats(self, waiting: Collection[RoutedRequest], now_s: float) -> StepStats:
        """Requests, memory and counters of all replicas; usage of the KV cache is their mean.

        waiting  requests without a replica
        """
        parts = [each.stats(now_s) for each in self]
        total = parts[0] if len(parts) == 1 else _sum_stats(parts)
        if not waiting:
            return total
        return with_ages(
            replace(total, requests_waiting=total.requests_waiting + len(waiting)), waiting, now_s
        )

    # Adapters

    async def load_adapter(self, path: str) -> AdapterInfo:
        """Load it into all replicas, or into none."""
        replicas = [each for each in self if each.client.alive and not each.problem]
        if not replicas:
            raise EngineDead("the engine is not running")
        results = await asyncio.gather(
            *(each.client.load_adapter(path) for each in replicas), return_exceptions=True
        )
        infos = [each for each in results if isinstance(each, AdapterInfo)]
        errors = [each for each in results if isinstance(each, BaseException)]
        if not errors and len({each.digest for each in infos}) > 1:
            errors = [AdapterConflict(f"{path} differs between the machines of the replicas", "lora_path")]
        if errors:
            for replica, info in zip(replicas, results, strict=True):
                if isinstance(info, AdapterInfo) and info.digest not in replica.adapters:
                    await self._unload(replica, info.digest)
            raise errors[0]
        info = infos[0]
        self.adapters[info.digest] = info
        for replica in replicas:
            replica.adapters.add(info.digest)
        return info

    async def unload_adapter(self, digest: str) -> None:
        self.adapters.pop(digest, None)
        await asyncio.gather(*(self._unload(each, digest) for each in self))

    async def _unload(self, replica: RouterReplica, digest: str) -> None:
        replica.adapters.discard(digest)
        with contextlib.suppress(EngineDead):
            await replica.client.unload_adapter(digest)


def _sum_stats(parts: Collection[StepStats]) -> StepStats:
    return StepStats(
        requests_running=sum(each.requests_running for each in parts),
        requests_waiting=sum(each.requests_waiting for each in parts),
        longest_running_tokens=max((each.longest_running_tokens for each in parts), default=0),
        oldest_running_seconds=max((each.oldest_running_seconds for each in parts), default=0.0),
        kv_cache_usage_ratio=sum(each.kv_cache_usage_ratio for each in parts) / max(len(parts), 1),
        prefix_cache_queries_total=sum(each.prefix_cache_queries_total for each in parts),
        prefix_cache_hits_total=sum(each.prefix_cache_hits_total for each in parts),
        preemptions_total=sum(each.preemptions_total for each in parts),
        device_memory_bytes=sum(each.device_memory_bytes for each in parts),
    )


def describe_difference(first: EngineInfo, other: EngineInfo, max_model_len: int | None = None) -> str:
    """Why an engine cannot go on with the answers of another, or "".

    It needs a context of `max_model_len` tokens or more; without that, the same as the other.
    """
    if first.fingerprint != other.fingerprint:
        return f"fingerprint {other.fingerprint} differs from {first.fingerprint}: its tokens would differ"
    length, first_length = other.resolved.max_model_len, first.resolved.max_model_len
    if max_model_len is not None:
        problem = f"its context of {length} tokens is shorter than the router's {max_model_len}"
        return problem if length < max_model_len else ""
    if length != first_length:
        comparative = "shorter" if length < first_length else "longer"
        hint = f"--max-model-len {min(length, first_length)} uses both"
        return (
            f"its context of {length} tokens is {comparative} than the first replica's {first_length}; {hint}"
        )
    return ""
