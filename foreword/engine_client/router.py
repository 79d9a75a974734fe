"""Several engines of one model as one: streams move between them, token for token. Imports no torch.

A stream is a request and the tokens delivered so far (InflightRequest). A replica that dies, restarts, is
drained or does not answer loses its streams to another, which computes their tokens again as a prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from foreword.config.lora import AdapterInfo
from foreword.config.options import Config
from foreword.core.outputs import BlockUpdate, ErrorEvent, Event, StepStats, TokenEvent
from foreword.core.readiness import OnLoadProgress, Readiness, ReplicaState
from foreword.core.request import Request, check_deadline
from foreword.core.structured_output import Vocabulary
from foreword.engine_client.base import EngineClient, is_last, iterate_events
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.process_client import ProcessClient
from foreword.engine_client.remote import RemoteClient
from foreword.engine_client.resume import CrashSuspects, InflightRequest, crash_error
from foreword.engine_client.routing import BlockIndex, ReplicaLoad, RoutingPolicy, choose
from foreword.errors import AdapterConflict, ConfigError, EngineDead, ForewordError, NoReplica
from foreword.kv_cache.prefix_cache import extend_hashes
from foreword.planning.replica_resources import read_machine, replica_configs
from foreword.planning.resolve import EngineInfo
from foreword.utils.logging import log_model

logger = logging.getLogger(__name__)

TICK_S: Final = 0.1  # interval of checks of health and deadlines
HASHED_TOKENS: Final = 4096  # prompt tokens hashed at a time: more would hold the event loop for long
MAX_TENANTS: Final = 4096  # whose last replica is remembered
STATUSES = ("ok", "draining", "unresponsive", "restarting", "loading", "dead")  # the best first


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine of the model."""

    id: str
    client: EngineClient
    address: str | None = None  # host:port of another machine's engine; None: a process of this machine


class _Member:
    """A replica and its streams."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.client = replica.client
        self.streams: dict[str, _Stream] = {}
        self.num_prompt_tokens = 0  # of its streams without a token
        self.blocks = BlockIndex()
        self.adapters: set[str] = set()  # digests
        self.chosen_at = 0
        self.is_started = False
        self.is_draining = False
        self.problem = ""  # why it gets no streams, though it is ready

    @property
    def is_ready(self) -> bool:
        """Whether it takes streams."""
        client = self.client
        return (
            self.is_started
            and client.alive
            and not self.is_draining
            and not self.problem
            and client.readiness.is_ready
        )

    def state(self) -> ReplicaState:
        replica, readiness, info = self.replica, self.client.readiness, self.client.info
        status, detail = readiness.status, readiness.detail
        if self.is_draining:
            status, detail = "draining", "its streams move to other replicas"
        elif self.problem:
            status, detail = "different", self.problem
        stats = self.client.stats
        return ReplicaState(
            replica.id,
            replica.address,
            status,
            detail,
            None if info is None else info.fingerprint,
            stats.requests_running,
            stats.requests_waiting,
        )


class _Stream:
    """An open request, wherever it runs."""

    __slots__ = ("attempt", "digests", "inflight", "member", "num_prompt", "on_event", "waits_since_s")

    def __init__(self, request: Request, on_event: Callable[[Event | None], None]) -> None:
        self.inflight = InflightRequest(request)
        self.on_event = on_event
        self.member: _Member | None = None  # None: it waits for a replica
        self.attempt = 0  # number of the placement; events of earlier ones are late
        self.digests: list[bytes] = []  # of the prompt's blocks that another request may share
        self.num_prompt = 0  # tokens without KV that `member` counts
        self.waits_since_s: float | None = None

    @property
    def id(self) -> str:
        return self.inflight.request.id


class EngineRouter:
    """See EngineClient: each open request is a stream of one replica, or waits for one."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        timeout_s: float = 60.0,
        fork_server: ForkServer | None = None,
        policy: RoutingPolicy = choose,
        is_open_ended: bool = False,
        max_model_len: int | None = None,
    ) -> None:
        """timeout_s    limits the time that a stream waits for a replica
        fork_server    starts local engines; close() closes it
        policy         chooses the replica of a stream among those that may take it
        is_open_ended  others may be added when all are gone
        max_model_len  the context. None: that of the local replicas; without one, all must have the same
        """
        self.info: EngineInfo | None = None
        self.alive = False
        self.on_step: Callable[[StepStats], None] | None = None
        self.on_restart: Callable[[str | None], None] | None = None
        self.on_ready: Callable[[], None] | None = None
        self.on_blocks: Callable[[BlockUpdate], None] | None = None
        self.on_crash: Callable[[Collection[str]], None] | None = None
        self.dead = asyncio.Event()  # all replicas are gone for good
        self._timeout_s = timeout_s
        self._fork_server = fork_server
        self.policy = policy
        self._is_open_ended = is_open_ended
        self._max_model_len = max_model_len
        self._members: dict[str, _Member] = {}
        self._streams: dict[str, _Stream] = {}
        self._waiting: dict[str, _Stream] = {}  # in order of arrival
        self._suspects = CrashSuspects()
        self._quarantine: _Member | None = None  # where suspects run, one after another
        self._adapters: dict[str, AdapterInfo] = {}  # by digest
        self._last_members: OrderedDict[str, str] = OrderedDict()  # by tenant
        self._num_choices = 0
        self._reload_lock = asyncio.Lock()
        self._usage_changed = asyncio.Event()  # a stream ended
        self._tasks: set[asyncio.Task[None]] = set()
        for each in replicas:
            self._add_member(each)

    # Replicas

    def _add_member(self, added: Replica) -> _Member:
        assert added.id not in self._members, f"two replicas have the id {added.id}"
        member = self._members[added.id] = _Member(added)
        client = added.client
        client.on_step = partial(self._on_step, member)
        client.on_restart = partial(self._on_restart, member)
        client.on_ready = partial(self._on_ready, member)
        client.on_blocks = partial(self._on_blocks, member)
        client.on_crash = partial(self._on_crash, member)
        return member

    async def start(self, like: EngineClient | None = None) -> EngineInfo:
        """The first local replica makes the choices, the others take them over.

        Replicas on other machines may come later; without a local one, wait for the first of them. A local
        one is started before them: what they are compared with does not depend on who is fast.
        """
        local = [each for each in self._members.values() if each.replica.address is None]
        remote = [each for each in self._members.values() if each.replica.address is not None]
        if local:
            await self._start_member(local[0], like)
            await asyncio.gather(*(self._start_member(each, local[0].client) for each in local[1:]))
        tasks = [asyncio.create_task(self._start_member(each, like)) for each in remote]
        await self._wait_first(tasks)
        assert self.info is not None
        self.alive = True
        self._spawn(self._tick())
        return self.info

    async def _wait_first(self, tasks: Collection[asyncio.Task[None]]) -> None:
        """Wait until there is a replica, of these starts or before. Raises an error if none may be used."""
        pending = set(tasks)
        while pending and self.info is None:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if self.info is None:
            for task in tasks:
                task.result()
            problems = (f"replica {each.id}: {each.detail}" for each in self.replica_states())
            raise ConfigError("; ".join(problems), "max_model_len")
        for task in tasks:
            self._keep(task)

    async def _start_member(self, member: _Member, like: EngineClient | None) -> None:
        before = log_model.get()
        if member.replica.address is None and len(self._members) > 1:
            # The client's tasks and its engine inherit it; lines about servers elsewhere have their address.
            log_model.set(f"{before}{', ' if before else ''}replica {member.replica.id}")
        try:
            await member.client.start(like)
        finally:
            log_model.set(before)
        member.is_started = True
        await self._admit(member)

    def add(self, added: Replica) -> None:
        """Start a further replica in the background."""
        member = self._add_member(added)
        like = next((each.client for each in self._members.values() if each.is_started), None)
        self._spawn(self._start_member(member, like))

    async def drain(self, replica_id: str) -> None:
        """Move the streams of a replica to others, then close it. It does nothing for an unknown id."""
        member = self._members.get(replica_id)
        if member is None:
            return
        self._drain(member)
        del self._members[replica_id]
        await member.client.close()

    def _drain(self, member: _Member) -> None:
        """Move the streams, as far as there is a replica for them; the others wait for one."""
        member.is_draining = True
        if self._quarantine is member:
            self._quarantine = None
        for stream in list(member.streams.values()):
            self._withdraw(stream)
            self._place(stream)

    async def reload(self) -> AsyncIterator[str]:
        """One replica after another: its streams move to the others first.

        An error names those of other machines that cannot be reached, once the others are replaced.
        """
        skipped = []
        async with self._reload_lock:
            for member in list(self._members.values()):
                name, readiness = member.replica.id, member.client.readiness
                if member.replica.address is not None and not readiness.is_ready:
                    skipped.append(f"replica {name} is not reloaded: {readiness.detail}")
                    continue
                yield f"replica {name}: moving {len(member.streams)} streams"
                self._drain(member)
                try:
                    async for text in member.client.reload():
                        yield f"replica {name}: {text}"
                finally:
                    member.is_draining = False
                self._place_waiting()
        if skipped:
            raise EngineDead("; ".join(skipped))

    async def _admit(self, member: _Member) -> None:
        """Give a ready replica the adapters it lacks, and streams if it samples the same tokens.

        The first one decides what the others must have.
        """
        info = member.client.info
        assert info is not None, "a started engine has info"
        if member.replica.address is None and self._max_model_len is None:
            self._max_model_len = info.resolved.max_model_len
        member.problem = describe_difference(self.info or info, info, self._max_model_len)
        if self.info is None and not member.problem:
            length = self._max_model_len or info.resolved.max_model_len
            self.info = replace(info, resolved=replace(info.resolved, max_model_len=length))
            self._adapters = {adapter.digest: adapter for adapter in info.adapters}
        member.adapters = {adapter.digest for adapter in info.adapters}
        for digest, adapter in list(self._adapters.items()):
            if digest not in member.adapters and not member.problem:
                try:
                    loaded = await member.client.load_adapter(adapter.path)
                except ForewordError as error:
                    member.problem = f"it cannot load the adapter {adapter.path}: {error.message}"
                else:
                    member.adapters.add(loaded.digest)
        if member.problem:
            logger.error("replica %s gets no requests: %s", member.replica.id, member.problem)
        self._place_waiting()

    # Requests

    def submit(self, request: Request) -> AsyncIterator[Event]:
        return iterate_events(self, request)

    def listen(self, request: Request, on_event: Callable[[Event | None], None]) -> None:
        if not self.alive:
            raise EngineDead("the engine is not running")
        stream = self._streams[request.id] = _Stream(request, on_event)
        if self._shares_prefix(request) and len(request.prompt_ids) > HASHED_TOKENS:
            self._spawn(self._place_long(stream))
        else:
            self._hash_prompt(stream, len(request.prompt_ids))
            self._place(stream)

    def finish(self, request_id: str, num_tokens: int) -> None:
        self._remove(request_id, lambda client: client.finish(request_id, num_tokens))

    def abort(self, request_id: str) -> None:
        self._remove(request_id, lambda client: client.abort(request_id))

    def _remove(self, request_id: str, remove: Callable[[EngineClient], None]) -> None:
        stream = self._streams.get(request_id)
        if stream is None:
            return
        member = stream.member
        self._end(stream)
        if member is not None:
            remove(member.client)
        stream.on_event(None)
        self._place_waiting()

    def _end(self, stream: _Stream) -> None:
        self._leave(stream)
        del self._streams[stream.id]
        self._waiting.pop(stream.id, None)
        self._clear_suspect(stream)
        self._usage_changed.set()

    # Placement

    def _shares_prefix(self, request: Request) -> bool:
        """Whether a replica may have blocks of its prompt."""
        assert self.info is not None
        resolved = self.info.resolved
        is_matched = request.params.prompt_logprobs is None and request.pooling != "mean"
        return len(self._members) > 1 and resolved.prefix_caching and is_matched

    def _hash_prompt(self, stream: _Stream, num_tokens: int) -> None:
        """Hash the blocks of the first prompt tokens, but not the last token's: its row is computed."""
        request = stream.inflight.request
        if self.info is not None and self._shares_prefix(request):
            size = self.info.resolved.block_size
            tokens = request.prompt_ids[: min(num_tokens, len(request.prompt_ids) - 1)]
            extend_hashes(stream.digests, tokens, size, request.namespace, request.images)

    async def _place_long(self, stream: _Stream) -> None:
        """Place a stream with a long prompt; the event loop runs between parts of the prompt."""
        length = len(stream.inflight.request.prompt_ids)
        for end in range(HASHED_TOKENS, length + HASHED_TOKENS, HASHED_TOKENS):
            self._hash_prompt(stream, end)
            await asyncio.sleep(0)
        if self._streams.get(stream.id) is stream and stream.member is None:
            self._place(stream)

    def _place(self, stream: _Stream) -> None:
        """Send the stream to a replica; without one it waits."""
        while (member := self._choose(stream)) is not None:
            try:
                self._send(stream, member)
            except EngineDead:  # its client noticed first
                self._leave(stream)
                continue
            self._waiting.pop(stream.id, None)
            stream.waits_since_s = None
            return
        if stream.waits_since_s is None:
            stream.waits_since_s = time.monotonic()
            self._waiting[stream.id] = stream

    def _choose(self, stream: _Stream) -> _Member | None:
        request, suspects = stream.inflight.request, self._suspects
        if stream.id in suspects:
            member = self._quarantine
            is_next = suspects.quarantined == stream.id
            return member if is_next and member is not None and member.is_ready else None
        members = [
            each
            for each in self._members.values()
            if each.is_ready
            and each is not self._quarantine
            and (request.adapter in each.adapters or request.adapter not in self._adapters)
        ]
        if stream.inflight.has_run:
            members = self._with_room(members)
        if not members:
            return None
        candidates = [
            ReplicaLoad(
                each.replica.id,
                len(each.streams),
                each.num_prompt_tokens,
                each.blocks.num_matched(stream.digests),
                each.chosen_at,
            )
            for each in members
        ]
        tenant = request.cache_salt
        last_id = self._last_members.get(tenant) if tenant else None
        chosen = self._members[self.policy(candidates, last_id)]
        self._num_choices += 1
        chosen.chosen_at = self._num_choices
        if tenant:
            self._last_members[tenant] = chosen.replica.id
            self._last_members.move_to_end(tenant)
            while len(self._last_members) > MAX_TENANTS:
                self._last_members.popitem(last=False)
        return chosen

    def _with_room(self, members: list[_Member]) -> list[_Member]:
        """Replicas that run a stream at once; all, if none has room and none will soon be ready."""
        assert self.info is not None
        limit = self.info.resolved.max_num_seqs
        with_room = [each for each in members if len(each.streams) < limit]
        is_soon_ready = any(each.client.readiness.status == "restarting" for each in self._members.values())
        return with_room if with_room or is_soon_ready else members

    def _send(self, stream: _Stream, member: _Member) -> None:
        assert self.info is not None and member.client.info is not None
        stream.attempt += 1
        stream.member = member
        member.streams[stream.id] = stream
        request = stream.inflight.make_resume_request()
        matched = member.blocks.num_matched(stream.digests) * self.info.resolved.block_size
        stream.num_prompt = len(request.prompt_ids) + len(request.resume_output_ids) - matched
        member.num_prompt_tokens += stream.num_prompt
        member.blocks.add_computing(stream.digests)
        max_len, params = self.info.resolved.max_model_len, request.params
        if request.pooling is None and member.client.info.resolved.max_model_len > max_len:
            room = max_len - len(request.prompt_ids)
            most, least = min(params.max_tokens or room, room), min(params.min_tokens, room)
            request = replace(request, params=replace(params, max_tokens=most, min_tokens=least))
        member.client.listen(request, partial(self._on_event, stream, stream.attempt))

    def _leave(self, stream: _Stream) -> None:
        """The stream's replica does not run it any longer."""
        member = stream.member
        if member is not None:
            self._on_prompt_done(stream)
            del member.streams[stream.id]
            stream.member = None
            stream.attempt += 1

    def _withdraw(self, stream: _Stream) -> None:
        """Take the stream from its replica, to move it."""
        member = stream.member
        assert member is not None
        self._leave(stream)
        stream.inflight.has_run = True
        member.client.abort(stream.id)

    def _on_prompt_done(self, stream: _Stream) -> None:
        """The replica has computed the prompt, or the stream leaves it."""
        if stream.num_prompt:
            assert stream.member is not None
            stream.member.num_prompt_tokens -= stream.num_prompt
            stream.num_prompt = 0
            stream.member.blocks.remove_computing(stream.digests)

    def _place_waiting(self) -> None:
        for stream in list(self._waiting.values()):
            self._place(stream)

    # Events of replicas

    def _on_event(self, stream: _Stream, attempt: int, event: Event | None) -> None:
        if event is None or attempt != stream.attempt:
            return  # the stream moved or ended
        if isinstance(event, ErrorEvent) and isinstance(event.error, EngineDead) and self.alive:
            self._leave(stream)
            stream.inflight.has_run = True
            self._place(stream)
            return
        new = stream.inflight.on_event(event) if isinstance(event, TokenEvent) else event
        if new is None:
            return
        if stream.num_prompt:
            self._on_prompt_done(stream)
        was_suspect = self._clear_suspect(stream)
        if is_last(new):
            member = stream.member
            self._end(stream)
            if isinstance(event, TokenEvent) and isinstance(new, ErrorEvent) and member is not None:
                member.client.abort(stream.id)
        if self._waiting and (was_suspect or is_last(new)):
            self._place_waiting()
        stream.on_event(new)

    def _on_crash(self, member: _Member, busy_ids: Collection[str]) -> None:
        """The local engine crashed with these streams in the batch; all its streams move next."""
        refused = self._suspects.on_crash(tuple(busy_ids), member.streams.keys() - set(busy_ids))
        if refused is not None:
            logger.error("request %s: %s", refused, crash_error())
            self._fail(self._streams[refused], crash_error())
        if self._suspects.quarantined is not None and self._quarantine is None:
            self._quarantine = member  # it restarts without streams

    def _clear_suspect(self, stream: _Stream) -> bool:
        """The stream gained a token, or ended. Returns whether it was suspected of crashes."""
        was_suspect = stream.id in self._suspects
        self._suspects.clear(stream.id)
        if self._suspects.quarantined is None:
            self._quarantine = None
        return was_suspect

    def _on_ready(self, member: _Member) -> None:
        if member.replica.address is None:
            self._place_waiting()
        else:
            member.is_started = True  # also after it has refused its first connection
            self._spawn(self._admit(member))

    def _on_blocks(self, member: _Member, update: BlockUpdate) -> None:
        if not member.blocks.update(update):
            member.client.request_blocks()

    def _on_step(self, member: _Member, stats: StepStats) -> None:
        if self.on_step is not None:
            self.on_step(replace(stats, replica=member.replica.id))

    def _on_restart(self, member: _Member, reason: str | None) -> None:
        member.blocks.clear()
        if self.on_restart is not None:
            self.on_restart(None if reason is None else f"replica {member.replica.id}: {reason}")
        self._on_step(member, StepStats())  # the new engine counts from zero

    def _fail(self, stream: _Stream, error: ForewordError) -> None:
        self._end(stream)
        stream.on_event(ErrorEvent(stream.id, error))

    # Health

    async def _tick(self) -> None:
        """Check replicas and deadlines until all replicas are gone."""
        while self._is_open_ended or any(
            each.client.alive or not each.is_started for each in self._members.values()
        ):
            self._expire(time.monotonic())
            self._check_members()
            self._place_waiting()
            await asyncio.sleep(TICK_S)
        self.alive = False
        self._fail_all("all replicas of the engine died")
        self.dead.set()

    def _check_members(self) -> None:
        """Move the streams of replicas that do not answer; give suspects another one if theirs is gone."""
        members = self._members.values()
        for member in members:
            is_stuck = member.streams and not member.client.readiness.is_ready
            if is_stuck and any(each.is_ready for each in members if each is not self._quarantine):
                logger.warning("replica %s: %s", member.replica.id, member.client.readiness.detail)
                for stream in list(member.streams.values()):
                    self._withdraw(stream)
                    self._place(stream)
        if self._suspects.quarantined is not None and (
            self._quarantine is None or not self._quarantine.client.alive
        ):
            ready = [each for each in members if each.is_ready]
            self._quarantine = min(ready, key=lambda each: len(each.streams), default=None)
            if self._quarantine is not None:
                for stream in list(self._quarantine.streams.values()):
                    self._withdraw(stream)
                    self._place(stream)

    def _expire(self, now_s: float) -> None:
        """End waiting streams beyond their deadlines."""
        for stream in list(self._waiting.values()):
            inflight, since_s = stream.inflight, stream.waits_since_s
            has_run = inflight.has_run or bool(inflight.delivered_ids)
            error = check_deadline(inflight.request, now_s, has_run)
            if error is None and since_s is not None and now_s - since_s >= self._timeout_s:
                states = "; ".join(f"replica {each.id} is {each.status}" for each in self.replica_states())
                error = NoReplica(f"no replica was ready within {self._timeout_s:g} s: {states}")
            if error is not None:
                self._fail(stream, error)

    @property
    def readiness(self) -> Readiness:
        all_states = [each.client.readiness for each in self._members.values()]
        restarts = sum(each.restarts for each in all_states)
        num_ready = sum(each.is_ready for each in self._members.values())
        detail = f"{num_ready} of {len(self._members)} replicas are ready"
        if self.dead.is_set():
            return Readiness("dead", "all replicas are gone", restarts=restarts)
        if not self.alive:
            progress = next((each.progress for each in all_states if each.progress is not None), None)
            return Readiness("loading", f"the engine is still loading: {detail}", progress, restarts)
        if num_ready:
            return Readiness("ok", "" if num_ready == len(self._members) else detail, restarts=restarts)
        if not all_states:
            return Readiness("restarting", "there is no replica")
        best = min(all_states, key=lambda each: STATUSES.index(each.status))
        status = "restarting" if best.is_ready else best.status  # draining, or different
        return Readiness(status, best.detail or detail, best.progress, restarts)

    @property
    def stats(self) -> StepStats:
        """Requests, memory and counters of all replicas; usage of the KV cache is their mean."""
        parts = [each.client.stats for each in self._members.values()]
        return StepStats(
            requests_running=sum(each.requests_running for each in parts),
            requests_waiting=sum(each.requests_waiting for each in parts) + len(self._waiting),
            longest_running_tokens=max((each.longest_running_tokens for each in parts), default=0),
            oldest_running_seconds=max((each.oldest_running_seconds for each in parts), default=0.0),
            kv_cache_usage_ratio=sum(each.kv_cache_usage_ratio for each in parts) / max(len(parts), 1),
            prefix_cache_queries_total=sum(each.prefix_cache_queries_total for each in parts),
            prefix_cache_hits_total=sum(each.prefix_cache_hits_total for each in parts),
            preemptions_total=sum(each.preemptions_total for each in parts),
            device_memory_bytes=sum(each.device_memory_bytes for each in parts),
        )

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids of local engines, by replica."""
        return {
            name: pid
            for name, each in self._members.items()
            if isinstance(each.client, ProcessClient) and (pid := each.client.pid) is not None
        }

    def replica_states(self) -> list[ReplicaState]:
        return [each.state() for each in self._members.values()]

    def request_blocks(self) -> None:
        """Without effect: each replica has a prefix cache of its own, and this client publishes none."""

    def set_threads(self, num_threads: int) -> None:
        """Of each replica."""
        for member in self._members.values():
            member.client.set_threads(num_threads)

    # Adapters

    async def load_adapter(self, path: str) -> AdapterInfo:
        """Load it into all replicas, or into none."""
        members = [each for each in self._members.values() if each.client.alive and not each.problem]
        results = await asyncio.gather(
            *(each.client.load_adapter(path) for each in members), return_exceptions=True
        )
        infos = [each for each in results if isinstance(each, AdapterInfo)]
        errors = [each for each in results if isinstance(each, BaseException)]
        if not errors and len({each.digest for each in infos}) > 1:
            errors = [AdapterConflict(f"{path} differs between the machines of the replicas", "lora_path")]
        if errors:
            for member, info in zip(members, results, strict=True):
                if isinstance(info, AdapterInfo) and info.digest not in member.adapters:
                    await self._unload(member, info.digest)
            raise errors[0]
        info = infos[0]
        self._adapters[info.digest] = info
        for member in members:
            member.adapters.add(info.digest)
        return info

    async def wait_unused(self, digest: str) -> None:
        while self.alive and self._num_users(digest):
            self._usage_changed.clear()
            await self._usage_changed.wait()

    def _num_users(self, digest: str) -> int:
        return sum(each.inflight.request.adapter == digest for each in self._streams.values())

    async def unload_adapter(self, digest: str) -> None:
        if num_users := self._num_users(digest):
            raise AdapterConflict(f"{num_users} requests use the adapter: it stays loaded", "lora_name")
        self._adapters.pop(digest, None)
        await asyncio.gather(*(self._unload(each, digest) for each in self._members.values()))

    async def _unload(self, member: _Member, digest: str) -> None:
        member.adapters.discard(digest)
        with contextlib.suppress(EngineDead):
            await member.client.unload_adapter(digest)

    # End

    def skip_drain(self) -> None:
        """Make close() kill local engines instead of waiting for their steps."""
        for member in self._members.values():
            if isinstance(member.client, ProcessClient):
                member.client.skip_drain()

    async def close(self) -> None:
        self.alive = False
        self._usage_changed.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(each.client.close() for each in self._members.values()))
        if self._fork_server is not None:
            await self._fork_server.close()
        self._fail_all("the engine was shut down")

    def _fail_all(self, message: str) -> None:
        for stream in list(self._streams.values()):
            self._fail(stream, EngineDead(message))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._keep(asyncio.create_task(work))

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Keep a background task until it is done, and log its error."""
        self._tasks.add(task)
        task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, ForewordError):
                logger.error("a replica could not be started: %s", error.message)
            else:
                logger.error("a task of the router failed", exc_info=error)


def describe_difference(first: EngineInfo, other: EngineInfo, max_model_len: int | None = None) -> str:
    """Why an engine cannot go on with the answers of another, or "".

    It needs a context of `max_model_len` tokens or more; without that, the same as the other.
    """
    if first.fingerprint != other.fingerprint:
        return (
            f"it would sample other tokens: its fingerprint is {other.fingerprint}, not {first.fingerprint}"
        )
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


def remote_replica(config: Config, url: str) -> Replica:
    """The engine of the server at this URL."""
    assert config.engine_key is not None, "--replica-urls needs --engine-key"
    address = url.partition("://")[2]
    return Replica(address, RemoteClient(url, config.engine_key, config.adapters), address)


def make_engine_client(
    config: Config,
    never_sampled_ids: tuple[int, ...],
    vocabulary: Callable[[], Vocabulary],
    on_progress: OnLoadProgress | None = None,
    fork_server: ForkServer | None = None,
    owns_fork_server: bool = True,
) -> ProcessClient | EngineRouter:
    """The engine of a config, or its replicas; see ProcessClient. The first one reports its progress."""
    shared = fork_server or ForkServer()
    if config.replicas == 1 and not config.remote_urls:
        return ProcessClient(config, never_sampled_ids, vocabulary, on_progress, shared, owns_fork_server)
    replicas = []
    for index, own in enumerate(replica_configs(config, read_machine())):
        client = ProcessClient(
            own, never_sampled_ids, vocabulary, None if index else on_progress, shared, owns_fork_server=False
        )
        replicas.append(Replica(str(index), client))
    replicas += [remote_replica(config, url) for url in config.remote_urls]
    return EngineRouter(
        replicas,
        config.replica_timeout,
        shared if owns_fork_server else None,
        is_open_ended=bool(config.remote_urls),
        max_model_len=config.max_model_len,
    )
