"""The engines of one model as one: requests move between them, token for token. Imports no torch.

The router has every open request, with the tokens delivered so far (RoutedRequest). A replica that dies,
restarts, is drained or does not answer loses its requests to another, which computes their tokens again as
a prompt. If there is no other, they wait. One engine is the case of one replica.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from foreword.config.lora import AdapterInfo
from foreword.core.outputs import BlockUpdate, ErrorEvent, Event, StepStats, TokenEvent
from foreword.core.readiness import Readiness, ReplicaState
from foreword.core.request import Request, check_deadline
from foreword.engine_client.base import EngineCallbacks, ReplicaClient, is_last, iterate_events
from foreword.engine_client.crash_policy import CrashSuspects, crash_error
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.replica import RoutedRequest, RouterReplica, RoutingPolicy
from foreword.engine_client.replica_set import ReplicaSet
from foreword.errors import (
    AdapterConflict,
    EngineDead,
    ForewordError,
    NoReplica,
    RequestFailed,
    ShuttingDown,
)
from foreword.kv_cache.prefix_cache import extend_hashes
from foreword.planning.resolve import EngineInfo

logger = logging.getLogger(__name__)

TICK_S: Final = 0.25  # interval of checks of health and deadlines
MAX_LOST_TICKS: Final = 4  # until suspects no longer wait for a server elsewhere
HASHED_TOKENS: Final = 4096  # prompt tokens hashed at a time: more would hold the event loop for long


class EngineRouter:
    """See EngineClient: each open request runs in one replica, or waits for one."""

    def __init__(
        self,
        replicas: Sequence[RouterReplica],
        timeout_s: float = 60.0,
        fork_server: ForkServer | None = None,
        is_open_ended: bool = False,
        max_model_len: int | None = None,
    ) -> None:
        """timeout_s    limits the time that a request waits while none of several replicas is ready, and
                      the time that one that ran waits for room in a ready replica
        fork_server    starts local engines; close() closes it
        is_open_ended  others may be added when all are gone
        max_model_len  the context. None: that of the local replicas; without one, all must have the same
        """
        self.alive = False
        self.on_step: Callable[[StepStats], None] | None = None
        self.on_restart: Callable[[str | None], None] | None = None
        self.on_blocks: Callable[[BlockUpdate], None] | None = None
        self.dead = asyncio.Event()  # all replicas are gone for good
        self._timeout_s = timeout_s
        self._fork_server = fork_server
        self._is_open_ended = is_open_ended
        self._replicas = ReplicaSet(max_model_len)
        self._requests: dict[str, RoutedRequest] = {}
        self._waiting: dict[str, RoutedRequest] = {}  # ordered by arrival
        self._suspects = CrashSuspects()
        self._quarantine: RouterReplica | None = None  # where suspects run, one after another
        self._num_lost_ticks = 0  # consecutive ticks in which it was lost
        self._reload_lock = asyncio.Lock()
        self._usage_changed = asyncio.Event()  # a request ended
        self._tasks: set[asyncio.Task[None]] = set()
        self._failed_callbacks: set[str] = set()  # names of functions whose error is logged
        for each in replicas:
            self._add_replica(each)

    # Replicas

    def _add_replica(self, replica: RouterReplica) -> None:
        assert replica.id not in self._replicas.members, f"two replicas have the id {replica.id}"
        self._replicas.members[replica.id] = replica
        replica.callbacks = EngineCallbacks(
            partial(self._on_step, replica),
            partial(self._on_blocks, replica),
            partial(self._on_restart, replica),
            partial(self._on_crash, replica),
            partial(self._on_ready, replica),
            self._end_if_dead,
            "move to other replicas" if replica.id else "wait for a restart",
        )

    async def start(self) -> EngineInfo:
        """Start the replicas. Those of other machines may come later; if all are, wait for the first.

        A local one is started before them: what they are compared with does not depend on who is fast.
        """
        await self._replicas.start_local()
        remote = [each for each in self._replicas if each.address is not None]
        tasks = [asyncio.create_task(self._start_replica(each, None)) for each in remote]
        await self._replicas.wait_first(tasks)
        for task in tasks:
            self._keep(task)
        assert self.info is not None
        self.alive = True
        self._spawn(self._tick())
        return self.info

    async def _start_replica(self, replica: RouterReplica, reuse: ReplicaClient | None) -> None:
        try:
            await self._replicas.start(replica, reuse)
        except EngineDead:
            if replica.id in self._replicas.members:  # it was not drained meanwhile
                raise
        self._place_waiting()

    def add(self, replica: RouterReplica) -> None:
        """Start a further replica in the background."""
        reuse = self._reusable_client()
        self._add_replica(replica)
        self._spawn(self._start_replica(replica, reuse))

    def _reusable_client(self) -> ReplicaClient | None:
        """The client of a started engine, whose choices another one takes over."""
        return next((each.client for each in self._replicas if each.is_started and each.client.alive), None)

    async def drain(self, replica_id: str) -> None:
        """Move the requests of a replica to others, then close it. It does nothing for an unknown id."""
        replica = self._replicas.members.get(replica_id)
        if replica is None:
            return
        self._drain(replica)
        del self._replicas.members[replica_id]
        await replica.client.close()

    def _drain(self, replica: RouterReplica) -> None:
        replica.is_draining = True
        if self._quarantine is replica:
            self._quarantine = None
        self._move_requests(replica)

    async def reload(self) -> AsyncIterator[str]:
        """One replica after another: its requests move to the others first. A single one they wait for.

        A local one that is gone is started again. An error names those that could not be reloaded, once the
        others are replaced.
        """
        problems = []
        async with self._reload_lock:
            for replica in list(self._replicas):
                name, readiness = replica.id, replica.client.readiness
                if replica.address is not None and not readiness.is_ready:
                    problems.append(f"replica {name} is not reloaded: {readiness.detail}")
                    continue
                prefix = f"replica {name}: " if name else ""
                try:
                    if name:
                        yield f"{prefix}moving {len(replica.requests)} streams"
                        self._drain(replica)
                    else:
                        for sent_id in set(replica.client.running_ids()) & replica.requests.keys():
                            replica.requests[sent_id].has_run = True  # no queue deadline any more
                    if self.alive and replica.is_started and not replica.client.alive:
                        yield f"{prefix}starting it again"
                        await self._replicas.start(replica, self._reusable_client())
                    else:
                        async for text in replica.client.reload():
                            yield f"{prefix}{text}"
                except ForewordError as error:
                    problems.append(f"{prefix}{error.message}")
                finally:
                    replica.is_draining = False
                self._place_waiting()
        if problems:
            raise EngineDead("; ".join(problems))

    # Requests

    def submit(self, request: Request) -> AsyncIterator[Event]:
        return iterate_events(self, request)

    def listen(self, request: Request, on_event: Callable[[Event | None], None]) -> None:
        if not self.alive:
            raise EngineDead("the engine is not running")
        assert request.id not in self._requests, f"two open requests are called {request.id}"
        routed = self._requests[request.id] = RoutedRequest(request, on_event)
        if not self._shares_prefix(request):
            self._place(routed)
        elif len(request.prompt_ids) > HASHED_TOKENS:
            self._spawn(self._place_long(routed))
        else:
            self._hash_prompt(routed, len(request.prompt_ids))
            self._place(routed)

    def finish(self, request_id: str, num_tokens: int) -> None:
        self._remove(request_id, num_tokens)

    def abort(self, request_id: str) -> None:
        self._remove(request_id, None)

    def _remove(self, request_id: str, num_tokens: int | None) -> None:
        routed = self._requests.get(request_id)
        if routed is not None:
            makes_room = routed.replica is not None or routed.id in self._suspects
            self._end(routed, num_tokens)
            self._call(routed.on_event, None)
            if makes_room:
                self._place_waiting()

    def _end(self, routed: RoutedRequest, num_tokens: int | None = None) -> None:
        replica = routed.replica
        if replica is not None:
            self._leave(routed)
            replica.client.remove(routed.sent_id, num_tokens)  # nothing, if its last event came
        del self._requests[routed.id]
        self._waiting.pop(routed.id, None)
        self._clear_suspect(routed)
        self._usage_changed.set()

    # Placement

    def _shares_prefix(self, request: Request) -> bool:
        """Whether a replica may have blocks of its prompt that another one lacks."""
        assert self.info is not None
        has_choice = len(self._replicas) > 1 and self.info.resolved.prefix_caching
        return has_choice and request.params.prompt_logprobs is None and request.pooling != "mean"

    def _hash_prompt(self, routed: RoutedRequest, num_tokens: int) -> None:
        """Hash the blocks of the first prompt tokens, but not the last token's: its row is computed."""
        assert self.info is not None
        request, size = routed.request, self.info.resolved.block_size
        tokens = request.prompt_ids[: min(num_tokens, len(request.prompt_ids) - 1)]
        extend_hashes(routed.digests, tokens, size, request.namespace, request.images)

    async def _place_long(self, routed: RoutedRequest) -> None:
        """Place a request with a long prompt; the event loop runs between parts of the prompt."""
        length = len(routed.request.prompt_ids)
        for end in range(HASHED_TOKENS, length + HASHED_TOKENS, HASHED_TOKENS):
            self._hash_prompt(routed, end)
            await asyncio.sleep(0)
        if self._requests.get(routed.id) is routed and routed.replica is None:
            self._place(routed)

    def _place(self, routed: RoutedRequest) -> None:
        """Send the request to a replica; without one it waits. Another error fails this request alone."""
        while True:
            try:
                if (replica := self._choose(routed)) is None:
                    break
                self._send(routed, replica)
            except EngineDead:  # its client noticed first
                self._leave(routed)
                continue
            except Exception:
                logger.exception("client: request %s could not be sent", routed.id)
                self._waiting.pop(routed.id, None)
                if (replica := routed.replica) is not None:
                    self._leave(routed)
                    replica.client.remove(routed.sent_id)
                # Callers of listen() expect no event before it returns.
                error = RequestFailed("the request could not be sent to the engine")
                asyncio.get_running_loop().call_soon(self._fail, routed, error)
                return
            self._waiting.pop(routed.id, None)
            routed.waits_since_s = None
            return
        now_s = time.monotonic()
        if routed.waits_since_s is None:
            routed.waits_since_s = now_s
            self._waiting[routed.id] = routed
        if self._replicas.ready_for(routed.request):  # it waits for room, or for the end of suspects
            routed.last_ready_s = now_s

    def _choose(self, routed: RoutedRequest) -> RouterReplica | None:
        if routed.id not in self._suspects:
            since_s = routed.waits_since_s
            is_patient = since_s is None or time.monotonic() - since_s < self._timeout_s
            return self._replicas.choose(routed, self._quarantine, routed.has_run and is_patient)
        is_next, home = self._suspects.quarantined == routed.id, self._quarantine
        return home if is_next and home is not None and home.is_ready else None

    def _send(self, routed: RoutedRequest, replica: RouterReplica) -> None:
        assert self.info is not None and replica.client.info is not None
        request = routed.request
        if routed.num_placements:
            request = routed.make_resume_request(f"{request.id}~{routed.num_placements}")
        routed.num_placements += 1
        routed.replica, routed.sent_id = replica, request.id
        replica.requests[request.id] = routed
        matched = replica.blocks.num_matched(routed.digests) * self.info.resolved.block_size
        routed.num_prompt = len(request.prompt_ids) + len(request.resume_output_ids) - matched
        replica.num_prompt_tokens += routed.num_prompt
        replica.blocks.add_computing(routed.digests)
        max_len, params = self.info.resolved.max_model_len, request.params
        if request.pooling is None and replica.client.info.resolved.max_model_len > max_len:
            room = max_len - len(request.prompt_ids)
            most, least = min(params.max_tokens or room, room), min(params.min_tokens, room)
            request = replace(request, params=replace(params, max_tokens=most, min_tokens=least))
        replica.client.listen(request, partial(self._on_event, routed))

    def _leave(self, routed: RoutedRequest) -> None:
        """The request's replica does not run it any longer."""
        replica = routed.replica
        assert replica is not None
        self._on_prompt_done(routed, replica)
        del replica.requests[routed.sent_id]
        routed.replica = None

    def _move_requests(self, replica: RouterReplica) -> None:
        """Place the requests of a replica that could go on with them, as far as there is another."""
        for routed in list(replica.requests.values()):
            self._leave(routed)
            routed.has_run = True
            replica.client.remove(routed.sent_id)
            self._place(routed)

    def _on_prompt_done(self, routed: RoutedRequest, replica: RouterReplica) -> None:
        """The replica has computed the prompt, or the request leaves it."""
        if routed.num_prompt:
            replica.num_prompt_tokens -= routed.num_prompt
            routed.num_prompt = 0
            replica.blocks.remove_computing(routed.digests)

    def _place_waiting(self) -> None:
        for routed in list(self._waiting.values()):
            self._place(routed)

    # Events of replicas

    def _on_event(self, routed: RoutedRequest, event: Event) -> None:
        replica = routed.replica
        assert replica is not None, "a client passes on no event of a removed request"
        if isinstance(event, TokenEvent):
            new = routed.take_new(event)
            if new is None:
                return
        elif isinstance(event, ErrorEvent):
            if isinstance(event.error, EngineDead | ShuttingDown) and self.alive:
                self._leave(routed)
                if isinstance(event.error, EngineDead):
                    routed.has_run |= replica.address is not None  # it may have run there
                self._place(routed)
                return
            new = ErrorEvent(routed.id, event.error)
        else:
            new = replace(event, request_id=routed.id)
        replica.made_progress = True
        if routed.num_prompt:
            self._on_prompt_done(routed, replica)
        if makes_room := is_last(new):
            self._end(routed)
        else:
            makes_room = self._clear_suspect(routed)
        self._call(routed.on_event, new)
        if makes_room:
            self._place_waiting()

    def _on_crash(self, replica: RouterReplica, sent_ids: Collection[str]) -> bool:
        """Find out who is to blame; the requests of the replica leave it next."""
        busy = [routed for sent_id, routed in replica.requests.items() if sent_id in sent_ids]  # oldest first
        for routed in busy:
            routed.has_run = True
        busy_ids = [routed.id for routed in busy]
        idle_ids = {routed.id for routed in replica.requests.values()}.difference(busy_ids)
        refused = self._suspects.on_crash(busy_ids, idle_ids)
        if refused is not None:
            logger.error("client: request %s: %s", refused, crash_error())
            self._fail(self._requests[refused], crash_error())
        if self._suspects.quarantined is not None and self._quarantine is None:
            self._quarantine = replica  # it restarts without requests
        made_progress, replica.made_progress = replica.made_progress, False
        return made_progress

    def _clear_suspect(self, routed: RoutedRequest) -> bool:
        """The request gained a token, or ended. Returns whether it was suspected of crashes."""
        was_suspect = routed.id in self._suspects
        self._suspects.clear(routed.id)
        if self._suspects.quarantined is None:
            self._quarantine = None
        return was_suspect

    def _on_ready(self, replica: RouterReplica) -> None:
        self._replicas.on_restarted(replica)
        if replica.address is None:
            self._place_waiting()
        else:
            replica.is_started = True  # also after it has refused its first connection
            self._spawn(self._admit(replica))

    async def _admit(self, replica: RouterReplica) -> None:
        await self._replicas.admit(replica)
        self._place_waiting()

    def _on_blocks(self, replica: RouterReplica, update: BlockUpdate) -> None:
        if replica is self._replicas.only:
            if self.on_blocks is not None:
                self._call(self.on_blocks, update)
        elif not replica.blocks.update(update):
            replica.client.request_blocks()

    def _on_step(self, replica: RouterReplica, stats: StepStats) -> None:
        """Pass the stats on under the engine's name: that of a server elsewhere may have several."""
        if self.on_step is not None:
            name = f"{replica.id}/{stats.replica}" if stats.replica else replica.id
            self._call(self.on_step, replace(stats, replica=name) if name else stats)

    def _on_restart(self, replica: RouterReplica, reason: str | None) -> None:
        replica.blocks.clear()
        if self.on_restart is not None:
            named = f"replica {replica.id}: {reason}" if replica.id else reason
            self._call(self.on_restart, None if reason is None else named)
        if replica.id and replica.address is None:  # engines elsewhere may go on to count
            self._on_step(replica, StepStats())  # the new engine counts from zero

    def _end_if_dead(self) -> None:
        """End all requests once each replica is gone for good."""
        may_come = self._is_open_ended or not all(each.is_started for each in self._replicas)
        if self.alive and not may_come and not any(each.client.alive for each in self._replicas):
            self.alive = False
            text = "all replicas of the engine died"
            self._fail_all("the engine died and could not be restarted" if self._replicas.only else text)
            self.dead.set()

    def _fail(self, routed: RoutedRequest, error: ForewordError) -> None:
        if self._requests.get(routed.id) is routed:  # a callback may have ended it
            self._end(routed)
            self._call(routed.on_event, ErrorEvent(routed.id, error))

    def _fail_all(self, message: str) -> None:
        for routed in list(self._requests.values()):
            self._fail(routed, EngineDead(message))

    def _call(self, callback: Callable[..., None], *args: Any) -> None:
        """An error of a callback loses no event and ends no connection; each one's first is logged."""
        try:
            callback(*args)
        except Exception:
            function = callback.func if isinstance(callback, partial) else callback
            name = getattr(function, "__qualname__", type(function).__name__)
            if name not in self._failed_callbacks:
                logger.exception("client: %s failed; its later failures are not logged", name)
            self._failed_callbacks.add(name)

    # Health

    async def _tick(self) -> None:
        """Check replicas and deadlines."""
        while self.alive:
            self._call(self._end_if_dead)
            self._call(self._expire, time.monotonic())
            self._call(self._check_replicas)
            self._call(self._place_waiting)
            await asyncio.sleep(TICK_S)

    def _check_replicas(self) -> None:
        """Move the requests of replicas that do not answer; give suspects another one if theirs is gone."""
        replicas = self._replicas
        for replica in replicas:
            is_stuck = replica.requests and not replica.client.readiness.is_ready
            if is_stuck and any(each.is_ready for each in replicas if each is not self._quarantine):
                logger.warning("replica %s: %s", replica.id, replica.client.readiness.detail)
                self._move_requests(replica)
        home = self._quarantine
        self._num_lost_ticks = self._num_lost_ticks + 1 if home is not None and _is_lost(home) else 0
        is_gone = home is None or not home.client.alive or self._num_lost_ticks >= MAX_LOST_TICKS
        if self._suspects.quarantined is not None and is_gone:
            ready = [each for each in replicas if each.is_ready]
            self._quarantine = min(ready, key=lambda each: len(each.requests), default=None)
            if self._quarantine is not None:
                self._move_requests(self._quarantine)

    def _expire(self, now_s: float) -> None:
        """End requests beyond their deadlines; a responsive engine is usually earlier."""
        for replica in self._replicas:
            is_ready = replica.client.readiness.is_ready  # then it enforces queue deadlines itself
            running = () if is_ready or not replica.requests else replica.client.running_ids()
            for sent_id, routed in list(replica.requests.items()):
                self._check_deadline(routed, now_s, is_ready or sent_id in running)
        for routed in list(self._waiting.values()):
            self._check_deadline(routed, now_s, is_running=False)
            self._check_wait(routed, now_s)

    def _check_wait(self, routed: RoutedRequest, now_s: float) -> None:
        """End a waiting request if none of several replicas could take it for `timeout_s`."""
        since_s = max(routed.waits_since_s or 0.0, routed.last_ready_s)
        is_late = self._replicas.only is None and now_s - since_s >= self._timeout_s
        if is_late and not self._replicas.ready_for(routed.request):
            states = "; ".join(f"replica {each.id} is {each.status}" for each in self.replica_states())
            name = "replica with its adapter" if routed.request.adapter else "replica"
            self._fail(routed, NoReplica(f"no {name} was ready within {self._timeout_s:g} s: {states}"))

    def _check_deadline(self, routed: RoutedRequest, now_s: float, is_running: bool) -> None:
        error = check_deadline(routed.request, now_s, is_running or routed.has_started)
        if error is not None:
            self._fail(routed, error)

    @property
    def info(self) -> EngineInfo | None:
        return self._replicas.info

    @property
    def has_replicas(self) -> bool:
        """Whether there may be several engines."""
        return self._replicas.only is None

    @property
    def readiness(self) -> Readiness:
        if self.dead.is_set() and self.has_replicas:
            return replace(self._replicas.readiness(True), status="dead", detail="all replicas are gone")
        return self._replicas.readiness(self.alive)

    @property
    def stats(self) -> StepStats:
        return self._replicas.stats(self._waiting.values(), time.monotonic())

    @property
    def pids(self) -> Mapping[str, int]:
        """Process ids of local engines, by replica."""
        pids = {name: each.client.pid for name, each in self._replicas.members.items()}
        return {name: pid for name, pid in pids.items() if pid is not None}

    def replica_states(self) -> list[ReplicaState]:
        return self._replicas.states()

    def request_blocks(self) -> None:
        """Several replicas have a prefix cache each: no snapshot is of all."""
        if self._replicas.only is not None:
            self._replicas.only.client.request_blocks()

    def set_policy(self, policy: RoutingPolicy) -> None:
        """Choose the replica of a request among those that may take it; choose() is the default."""
        self._replicas.policy = policy

    def set_threads(self, num_threads: int) -> None:
        for replica in self._replicas:
            replica.client.set_threads(num_threads)

    # Adapters

    async def load_adapter(self, path: str) -> AdapterInfo:
        return await self._replicas.load_adapter(path)

    async def wait_unused(self, digest: str) -> None:
        while self.alive and self._num_users(digest):
            self._usage_changed.clear()
            await self._usage_changed.wait()

    def _num_users(self, digest: str) -> int:
        return sum(each.request.adapter == digest for each in self._requests.values())

    async def unload_adapter(self, digest: str) -> None:
        if num_users := self._num_users(digest):
            raise AdapterConflict(f"{num_users} requests use the adapter: it stays loaded", "lora_name")
        await self._replicas.unload_adapter(digest)

    # End

    def skip_drain(self) -> None:
        """Make close() kill local engines instead of waiting for their steps, also if it runs already."""
        for replica in self._replicas:
            replica.client.skip_drain()

    async def close(self) -> None:
        self.alive = False
        self._usage_changed.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(each.client.close() for each in self._replicas))
        if self._fork_server is not None:
            await self._fork_server.close()
        self._fail_all("the engine was shut down")

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


def _is_lost(replica: RouterReplica) -> bool:
    """Whether a server elsewhere may never come back; an engine that restarts does, or is given up."""
    is_restarting = replica.client.readiness.status == "restarting"
    return replica.address is not None and not replica.is_ready and not is_restarting
