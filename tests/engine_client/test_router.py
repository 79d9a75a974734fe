"""Requests move between scripted engines, or wait for one: each caller gets one complete answer, in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.config.lora import AdapterInfo
from foreword.core.outputs import BlockUpdate, ErrorEvent, Event, StepStats, TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.readiness import Readiness
from foreword.core.request import Request
from foreword.engine_client import router
from foreword.engine_client.base import EngineCallbacks, ReplicaClient
from foreword.engine_client.crash_policy import CRASHES_TO_REFUSE, CRASHES_TO_SUSPECT
from foreword.engine_client.remote import RemoteClient
from foreword.engine_client.replica import RouterReplica
from foreword.engine_client.router import EngineRouter
from foreword.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    EngineDead,
    ForewordError,
    NoReplica,
    Overloaded,
    RequestFailed,
    ShuttingDown,
)
from foreword.planning.resolve import EngineInfo, KVFiles
from foreword.utils.logging import log_model
from tests.support.fakes import engine_info
from tests.support.waiting import wait_until_async

LENGTH = 30  # tokens of every answer


def token(request_id: str, position: int) -> int:
    """Token of the request's only possible answer, whatever id it was sent with."""
    return int(request_id.partition("~")[0]) * 1000 + position


class ScriptedEngine:
    """Implements ReplicaClient; the test says when it steps, crashes and recovers."""

    pid: int | None = None

    def __init__(self, max_model_len: int = 2048, fingerprint: str = "fp_fake") -> None:
        self.max_model_len = max_model_len
        self.fingerprint = fingerprint
        self.info: EngineInfo | None = None
        self.alive = False
        self.status = "ok"
        self.stats = StepStats()
        self.callbacks = EngineCallbacks()
        self.requests: dict[str, tuple[Request, Callable[[Event], None]]] = {}
        self.sent_ids: set[str] = set()
        self.positions: dict[str, int] = {}
        self.num_snapshots_asked = 0
        self.made_progress: list[bool] = []  # before each crash
        self.opened = asyncio.Event()  # start() waits for it
        self.opened.set()

    @property
    def readiness(self) -> Readiness:
        return Readiness(self.status)

    async def start(self, callbacks: EngineCallbacks, reuse: ReplicaClient | None = None) -> EngineInfo:
        await self.opened.wait()
        self.callbacks = callbacks
        self.info = replace(engine_info(self.max_model_len), fingerprint=self.fingerprint)
        self.alive, self.log_model = True, log_model.get()
        return self.info

    def listen(self, request: Request, on_event: Callable[[Event], None]) -> None:
        if not self.alive:
            raise EngineDead("gone")
        assert self.status == "ok" and request.id not in self.sent_ids, "each id is new to the engine"
        self.sent_ids.add(request.id)
        self.requests[request.id] = request, on_event
        self.positions[request.id] = len(request.resume_output_ids)
        assert request.resume_output_ids == tuple(
            token(request.id, position) for position in range(self.positions[request.id])
        )

    def step(self, sent_id: str, num_tokens: int) -> None:
        _, on_event = self.requests[sent_id]
        start = self.positions[sent_id]
        end = self.positions[sent_id] = min(start + num_tokens, LENGTH)
        ids = tuple(token(sent_id, position) for position in range(start, end))
        reason = "length" if end == LENGTH else None
        if reason is not None:
            del self.requests[sent_id]
        on_event(TokenEvent(sent_id, start, ids, finish_reason=reason, num_cached=len(self.requests)))

    def fail(self, sent_id: str, error: ForewordError) -> None:
        self.requests.pop(sent_id)[1](ErrorEvent(sent_id, error))

    def crash(self, busy_ids: Collection[str] = (), status: str = "restarting") -> None:
        self.status, self.alive = status, status != "dead"
        self.callbacks.on_restart("killed")
        self.made_progress.append(self.callbacks.on_crash(busy_ids))
        for sent_id in list(self.requests):
            if sent_id in self.requests:
                self.fail(sent_id, EngineDead("gone"))
        if status == "dead":
            self.callbacks.on_dead()

    def recover(self) -> None:
        self.status = "ok"
        self.callbacks.on_ready()

    def remove(self, request_id: str, num_tokens: int | None = None) -> None:
        self.requests.pop(request_id, None)

    def running_ids(self) -> Collection[str]:
        return list(self.requests)[:1]

    def request_blocks(self) -> None:
        self.num_snapshots_asked += 1

    def set_threads(self, num_threads: int) -> None:
        raise NotImplementedError

    def reload(self) -> AsyncIterator[str]:
        raise NotImplementedError

    async def load_adapter(self, path: str) -> AdapterInfo:
        raise NotImplementedError

    async def unload_adapter(self, digest: str) -> None:
        raise NotImplementedError

    def skip_drain(self) -> None:
        raise NotImplementedError

    async def close(self) -> None:
        self.alive = False


class Caller:
    """Receives the events of one request."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.cached: set[int] = set()
        self.last: Event | None = None
        self.is_ended = False
        self.also: Callable[[], None] = lambda: None  # called with the last event

    def __call__(self, event: Event | None) -> None:
        assert not self.is_ended, "an event after the last"
        if isinstance(event, TokenEvent):
            assert event.index == len(self.token_ids), "in order, each token once"
            self.token_ids += event.token_ids
            self.cached.add(event.num_cached)
        self.is_ended = not isinstance(event, TokenEvent) or event.finish_reason is not None
        self.last = event
        if self.is_ended:
            self.also()


def make_request(request_id: str, **fields: Any) -> Request:
    return Request(request_id, tuple(range(40)), SamplingParams(max_tokens=LENGTH), seed=0, **fields)


def listen(client: EngineRouter, request_id: str, **fields: Any) -> Caller:
    caller = Caller()
    client.listen(make_request(request_id, **fields), caller)
    return caller


async def start(num_engines: int, **options: Any) -> tuple[EngineRouter, list[ScriptedEngine]]:
    """A router; with one engine as a server without replicas has it."""
    engines = [ScriptedEngine() for _ in range(num_engines)]
    names = [str(index) for index in range(num_engines)] if num_engines > 1 else [""]
    client = EngineRouter(list(map(RouterReplica, names, engines)), **options)
    await client.start()
    return client, engines


def check(client: EngineRouter, engines: Sequence[ScriptedEngine]) -> None:
    """Every open request runs in one engine, or waits."""
    running = [sent_id.partition("~")[0] for engine in engines for sent_id in engine.requests]
    assert len(running) == len(set(running)), "a request runs twice"
    assert sorted([*running, *client._waiting]) == sorted(client._requests)
    for replica in client._replicas:
        assert set(replica.requests) == set(replica.client.requests)  # type: ignore[attr-defined]
        if not any(routed.num_prompt for routed in replica.requests.values()):
            assert replica.num_prompt_tokens == 0 and not replica.blocks._computing
    if client._quarantine is not None:
        suspects = [each.id for each in client._quarantine.requests.values() if each.id in client._suspects]
        assert suspects in ([], [client._suspects.quarantined]), "suspects run one after another"


OPERATION = st.tuples(
    st.sampled_from(("submit", "step", "step", "crash", "recover", "stall", "die", "abort", "finish")),
    st.integers(0, 7),
    st.integers(0, 7),
)


@pytest.mark.parametrize("num_engines", [1, 3])
@given(operations=st.lists(OPERATION, min_size=20, max_size=80))
def test_every_caller_gets_its_answer(num_engines: int, operations: list[tuple[str, int, int]]) -> None:
    asyncio.run(play(num_engines, operations))


async def play(num_engines: int, operations: Sequence[tuple[str, int, int]]) -> None:
    client, engines = await start(num_engines)
    callers: dict[str, Caller] = {}
    num_crashes: dict[str, int] = {}

    def submit() -> None:
        name = str(len(callers))
        callers[name] = listen(client, name)

    for _ in range(6):
        submit()
    for kind, first, second in operations:
        engine = engines[first % num_engines]
        ids = list(engine.requests)
        if kind == "submit":
            submit()
        elif kind == "step" and ids and engine.status == "ok":
            for sent_id in ids[second % len(ids) :]:
                engine.step(sent_id, 1 + second % 4)
        elif kind == "crash" and engine.status != "dead":
            busy = ids[: second % (len(ids) + 1)]
            for sent_id in busy:
                name = sent_id.partition("~")[0]
                num_crashes[name] = num_crashes.get(name, 0) + 1
            engine.crash(busy)
        elif kind == "recover" and engine.status != "dead":
            engine.recover()
        elif kind == "stall" and engine.status == "ok":
            engine.status = "unresponsive"
            client._check_replicas()
        elif kind == "die" and sum(each.alive for each in engines) > 1 and engine.alive:
            engine.crash((), "dead")
            client._check_replicas()
        elif kind in ("abort", "finish") and client._requests:
            name = list(client._requests)[second % len(client._requests)]
            client.abort(name) if kind == "abort" else client.finish(name, 1)
            assert callers[name].last is None
        check(client, engines)
    while client._requests:
        for engine in engines:
            if engine.alive:
                engine.recover()
        client._check_replicas()
        client._place_waiting()
        check(client, engines)
        for engine in engines:
            for request_id in list(engine.requests):
                engine.step(request_id, 9)
    assert client._quarantine is None
    for name, caller in callers.items():
        expected = [token(name, position) for position in range(LENGTH)]
        assert caller.is_ended and caller.token_ids == expected[: len(caller.token_ids)]
        assert len(caller.cached) <= 1, "usage is that of the first placement"
        if isinstance(caller.last, TokenEvent):
            assert caller.token_ids == expected
        elif caller.last is not None:
            assert isinstance(caller.last, ErrorEvent) and isinstance(caller.last.error, RequestFailed)
            assert num_crashes[name] >= CRASHES_TO_SUSPECT + CRASHES_TO_REFUSE
    await client.close()


def error_of(caller: Caller) -> ForewordError:
    assert isinstance(caller.last, ErrorEvent), caller.last
    return caller.last.error


async def test_requests_that_ran_wait_for_room() -> None:
    """A full engine would queue them; the one that restarts runs them sooner. New requests do not wait."""
    client, engines = await start(2)
    assert client.info is not None
    limit = client.info.resolved.max_num_seqs
    for number in range(2 * limit):
        listen(client, str(number))
    assert [len(engine.requests) for engine in engines] == [limit, limit]
    engines[0].crash(list(engines[0].requests))
    assert len(client._waiting) == limit and len(engines[1].requests) == limit
    listen(client, "999")
    assert "999" in engines[1].requests
    engines[1].step("999", LENGTH)
    engines[1].step(next(iter(engines[1].requests)), LENGTH)
    assert len(client._waiting) == limit - 1 and len(engines[1].requests) == limit, "one found room"
    engines[0].recover()
    assert not client._waiting and len(engines[0].requests) == limit - 1
    await client.close()


@pytest.mark.parametrize("num_engines", [1, 3])
async def test_poison_request_runs_alone_after_two_crashes(num_engines: int) -> None:
    client, engines = await start(num_engines)
    callers = {str(number): listen(client, str(number)) for number in range(6)}
    crashed: list[ScriptedEngine] = []
    while not callers["0"].is_ended:
        (engine,) = (each for each in engines if any(name[0] == "0" for name in each.requests))
        if len(crashed) >= CRASHES_TO_SUSPECT:
            assert len(engine.requests) == 1, "no other request is beside it"
            listen(client, f"{10 + len(crashed)}")
            assert len(engine.requests) == 1
        crashed.append(engine)
        engine.crash(list(engine.requests))
        check(client, engines)
        if len(crashed) >= CRASHES_TO_SUSPECT:
            assert not engine.requests, "suspects wait, the others moved"
        engine.recover()
    assert len(crashed) == CRASHES_TO_SUSPECT + CRASHES_TO_REFUSE
    assert len({*map(id, crashed)}) == min(num_engines, 2)
    assert "alone" in error_of(callers["0"]).message
    for _ in range(2 * len(callers)):
        for engine in engines:
            for request_id in list(engine.requests):
                engine.step(request_id, LENGTH)
    assert not client._requests and client._quarantine is None
    await client.close()


async def test_abort_of_a_suspect_releases_waiting_requests() -> None:
    client, (engine,) = await start(1)
    listen(client, "0")
    for _ in range(2):
        engine.crash(list(engine.requests))
        engine.recover()
    listen(client, "1")
    assert list(engine.requests) == ["0~2"] and list(client._waiting) == ["1"]
    client.abort("0")
    assert list(engine.requests) == ["1"]
    await client.close()


async def test_suspects_run_in_order_of_arrival() -> None:
    client, (engine,) = await start(1)
    for number in range(6):
        listen(client, str(number))
    for _ in range(CRASHES_TO_SUSPECT):
        engine.crash(frozenset(engine.requests))
        engine.recover()
    order = []
    while engine.requests:
        (sent_id,) = engine.requests
        order.append(sent_id.partition("~")[0])
        client.abort(order[-1])
    assert order == [str(number) for number in range(6)]
    await client.close()


async def test_aborts_of_waiting_requests_try_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients that leave while the only engine restarts: work in proportion to their number."""
    client, (engine,) = await start(1)
    for number in range(20):
        listen(client, str(number))
    engine.crash()
    tries = []
    place = client._place
    monkeypatch.setattr(client, "_place", lambda routed: (tries.append(routed.id), place(routed)))
    for number in range(20):
        client.abort(str(number))
    assert not tries and not client._requests
    await client.close()


async def test_adapters_of_a_dead_engine_are_refused() -> None:
    client, (engine,) = await start(1)
    engine.crash(status="dead")
    with pytest.raises(EngineDead):
        await client.load_adapter("adapter")
    await client.close()


class AdapterEngine(ScriptedEngine):
    """It loads every adapter, until its files are gone."""

    has_files = True

    async def load_adapter(self, path: str) -> AdapterInfo:
        if not self.has_files:
            raise CheckpointError(f"{path} is gone", "lora_modules")
        return AdapterInfo(path, f"digest of {path}", 8, 4, 100)

    def restart(self) -> None:
        """Without an adapter."""
        self.crash(list(self.requests))
        self.recover()


async def start_with_adapter(*addresses: str | None) -> tuple[EngineRouter, list[AdapterEngine], str]:
    engines = [AdapterEngine() for _ in addresses]
    members = [RouterReplica(str(i), engines[i], address) for i, address in enumerate(addresses)]
    client = EngineRouter(members)
    await client.start()
    return client, engines, (await client.load_adapter("a")).digest


async def test_requests_go_where_their_adapter_is() -> None:
    """One engine was restarted without it. Where no engine has it, they are refused."""
    client, engines, digest = await start_with_adapter(None, None)
    engines[0].restart()
    for number in range(4):
        listen(client, str(number), adapter=digest)
    assert [len(engine.requests) for engine in engines] == [0, 4]
    engines[1].status = "unresponsive"
    waits = listen(client, "4", adapter=digest)
    assert list(client._waiting) == ["4"] and not waits.is_ended
    engines[1].restart()
    assert sum(len(engine.requests) for engine in engines) == 5
    await client.close()


async def test_replica_without_an_adapter_gets_the_other_requests(caplog: pytest.LogCaptureFixture) -> None:
    client, engines, digest = await start_with_adapter(None, "host:1")
    engines[1].has_files = False
    engines[1].restart()
    await wait_until_async(lambda: "replica 1 has no adapter a: a is gone" in caplog.text)
    for number in range(4):
        listen(client, str(number), adapter=digest if number < 2 else "")
    assert list(engines[0].requests) == ["0", "1"] and list(engines[1].requests) == ["2", "3"]
    engines[1].has_files = True
    engines[1].restart()
    await wait_until_async(lambda: digest in client._replicas.members["1"].adapters)
    await client.close()


async def test_reload_keeps_requests_that_run_beyond_their_queue_deadline() -> None:
    client, (engine,) = await start(1)
    now_s = time.monotonic()
    caller = listen(client, "1", arrival_s=now_s, queue_deadline_s=now_s + 100)

    async def reload() -> AsyncIterator[str]:
        engine.crash()
        yield "replaced"

    engine.reload = reload  # type: ignore[method-assign]
    assert [text async for text in client.reload()] == ["replaced"]
    client._expire(now_s + 101)
    assert not caller.is_ended
    engine.recover()
    assert list(engine.requests) == ["1~1"]
    await client.close()


async def test_reload_replaces_the_others_of_a_dead_replica() -> None:
    """It is started again itself."""
    client, engines = await start(3)
    engines[0].crash(status="dead")
    engines[0].status = "ok"

    async def reload(error: EngineDead | None = None) -> AsyncIterator[str]:
        if error is not None:
            raise error
        yield "replaced"

    engines[1].reload = partial(reload, EngineDead("no memory"))  # type: ignore[method-assign]
    engines[2].reload = reload  # type: ignore[method-assign]
    lines: list[str] = []
    with pytest.raises(EngineDead, match=r"^replica 1: no memory$"):
        async for line in client.reload():
            lines.append(line)
    assert [line for line in lines if "moving" not in line] == [
        "replica 0: starting it again",
        "replica 2: replaced",
    ]
    assert all(replica.is_ready for replica in client._replicas)
    await client.close()


async def test_token_of_a_suspect_clears_it() -> None:
    """The others wait no longer; one more crash makes no suspect of it."""
    client, (engine,) = await start(1)

    def crash() -> None:
        engine.crash(list(engine.requests))
        engine.recover()

    listen(client, "0")
    crash()
    crash()
    listen(client, "1")
    assert list(client._waiting) == ["1"]
    engine.step("0~2", 7)
    assert list(engine.requests) == ["0~2", "1"]
    crash()
    assert not client._waiting and client._quarantine is None
    await client.close()


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_dead_engines_end_all_requests(num_engines: int) -> None:
    client, engines = await start(num_engines)
    caller = listen(client, "1")
    listen(client, "2")
    caller.also = lambda: client.abort("2")  # the answer of one choice ends the others
    for engine in engines:
        assert not client.dead.is_set()
        engine.crash(status="dead")
    assert client.dead.is_set() and isinstance(error_of(caller), EngineDead)
    assert not client.alive and client.readiness.status == "dead" and not client._requests
    with pytest.raises(EngineDead):
        listen(client, "3")
    await client.close()


async def test_requests_wait_for_one_of_several_engines_for_a_time() -> None:
    client, engines = await start(2, timeout_s=0.0)
    for engine in engines:
        engine.crash(status="unresponsive")
    caller = listen(client, "1")
    await wait_until_async(lambda: caller.is_ended)
    error = error_of(caller)
    assert isinstance(error, NoReplica) and "replica 0 is unresponsive" in error.message
    await client.close()


async def test_wait_for_room_ends_in_the_queue_of_a_full_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with an error: a replica is ready all the time."""
    client, engines = await start(2)
    assert client.info is not None
    limit = client.info.resolved.max_num_seqs
    callers = [listen(client, str(number)) for number in range(2 * limit)]
    engines[0].crash(list(engines[0].requests))
    late_s = time.monotonic() + 61
    client._expire(late_s)
    client._place_waiting()
    assert len(client._waiting) == limit and not any(caller.is_ended for caller in callers)
    monkeypatch.setattr(router, "time", SimpleNamespace(monotonic=lambda: late_s))
    client._place_waiting()
    assert not client._waiting and len(engines[1].requests) == 2 * limit
    await client.close()


async def test_suspects_that_wait_for_their_turn_are_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the time without a ready replica counts, though the first suspect crashes it at once."""
    client, engines = await start(2)
    now_s = time.monotonic()
    monkeypatch.setattr(router, "time", SimpleNamespace(monotonic=lambda: now_s))
    engines[1].crash()
    callers = [listen(client, str(number)) for number in range(3)]
    for _ in range(CRASHES_TO_SUSPECT):
        engines[0].crash(list(engines[0].requests))
        engines[0].recover()
    assert len(engines[0].requests) == 1 and len(client._waiting) == 2
    now_s += 100
    client._expire(now_s)
    for _ in range(CRASHES_TO_REFUSE):
        client._place_waiting()
        engines[0].crash(list(engines[0].requests))
        now_s += 40
        client._expire(now_s)
        engines[0].recover()
    assert [caller.is_ended for caller in callers] == [True, False, False]
    engines[0].crash(list(engines[0].requests))
    now_s += 61
    client._expire(now_s)
    assert all(isinstance(error_of(caller), NoReplica) for caller in callers[1:])
    await client.close()


async def test_requests_wait_for_the_only_engine_as_long_as_it_is_restarted() -> None:
    client, (engine,) = await start(1, timeout_s=0.0)
    caller = listen(client, "1")
    engine.step("1", 3)
    engine.crash(["1"])
    late = listen(client, "2")
    for now_s in (time.monotonic() + 1, time.monotonic() + 1e6):
        client._expire(now_s)
    assert not caller.is_ended and not late.is_ended and not client.dead.is_set()
    engine.recover()
    assert set(engine.requests) == {"1~1", "2"}
    await client.close()


@pytest.mark.parametrize("status", ["ok", "unresponsive", "restarting"])
async def test_deadlines(status: str) -> None:
    """A ready engine enforces queue deadlines; otherwise a request that does not run is too late."""
    client, (engine,) = await start(1)
    now_s = time.monotonic()
    times = {"arrival_s": now_s, "queue_deadline_s": now_s + 100, "deadline_s": now_s + 200}
    runs, queued = listen(client, "1", **times), listen(client, "2", **times)
    if status == "restarting":
        engine.crash(["1"])
    engine.status = status
    client._expire(now_s + 99)
    assert not runs.is_ended and not queued.is_ended
    client._expire(now_s + 101)
    assert not runs.is_ended and queued.is_ended == (status != "ok")
    client._expire(now_s + 201)
    assert isinstance(error_of(runs), DeadlineExceeded)
    assert isinstance(error_of(queued), DeadlineExceeded if status == "ok" else Overloaded)
    assert not engine.requests and not client._requests
    await client.close()


async def test_stats_count_open_requests_while_the_engine_cannot() -> None:
    client, (engine,) = await start(1)
    engine.stats = StepStats(step=9, requests_running=2, oldest_running_seconds=3.0)
    assert client.stats is engine.stats
    for name in "123":
        listen(client, name, arrival_s=time.monotonic() - 100)
    engine.step("1", 6)
    engine.status = "unresponsive"
    hung = client.stats
    assert (hung.step, hung.requests_running, hung.requests_waiting, hung.longest_running_tokens) == (
        9,
        2,
        1,
        6,
    )
    assert hung.oldest_running_seconds >= 100
    engine.stats = StepStats()
    engine.crash(["1"])
    gone = client.stats
    assert (gone.requests_running, gone.requests_waiting, gone.longest_running_tokens) == (0, 3, 6)
    assert gone.oldest_running_seconds >= 100
    await client.close()


async def test_crash_is_told_whether_there_was_progress() -> None:
    client, (engine,) = await start(1)
    listen(client, "1")
    engine.step("1", 6)
    for _ in range(2):
        engine.crash(["1"])
        engine.recover()
    engine.step("1~2", 4)  # delivered before
    engine.crash()
    engine.recover()
    engine.step("1~3", 5)
    engine.crash()
    assert engine.made_progress == [True, False, False, True]
    await client.close()


async def test_failing_callbacks_lose_no_event() -> None:
    client, (engine,) = await start(1)

    def fail(*_: object) -> None:
        raise ValueError("a callback")

    client.on_step = client.on_restart = client.on_blocks = fail
    client.listen(make_request("1"), fail)
    caller = listen(client, "2")
    engine.callbacks.on_step(StepStats(1))
    engine.callbacks.on_blocks(BlockUpdate(1, (), is_snapshot=True))
    engine.step("1", LENGTH)
    engine.crash(["2"])
    engine.recover()
    engine.step("2~1", LENGTH)
    assert isinstance(caller.last, TokenEvent) and len(caller.token_ids) == LENGTH
    await client.close()


async def test_refusal_of_a_draining_server_moves_the_request() -> None:
    """It did not run there: its queue deadline stays."""
    client, engines = await start(2)
    late = listen(client, "1", arrival_s=0.0, queue_deadline_s=time.monotonic() + 100)
    assert list(engines[0].requests) == ["1"]
    engines[0].status = "draining"
    engines[0].fail("1", ShuttingDown("no new requests"))
    ((request, _),) = engines[1].requests.values()
    assert request.id == "1~1" and request.queue_deadline_s is not None and not late.is_ended
    await client.close()


class RefusingEngine(ScriptedEngine):
    """Its client cannot send one request."""

    refused = "1"

    def listen(self, request: Request, on_event: Callable[[Event], None]) -> None:
        if request.id.partition("~")[0] == self.refused:
            raise ValueError("not serializable")
        super().listen(request, on_event)


async def test_request_that_cannot_be_sent_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    """It waits first: the end of another request and a drain go on beside its failure."""
    engines = [RefusingEngine(), RefusingEngine()]
    client = EngineRouter([RouterReplica(str(index), engine) for index, engine in enumerate(engines)])
    await client.start()
    for engine in engines:
        engine.crash()
    caller, others = listen(client, "1"), [listen(client, "2"), listen(client, "3")]
    engines[0].recover()
    assert set(engines[0].requests) == {"2", "3"} and not client._waiting
    engines[0].step("2", LENGTH)
    await wait_until_async(lambda: caller.is_ended)
    assert isinstance(error_of(caller), RequestFailed) and "request 1 could not be sent" in caplog.text
    late = listen(client, "1")
    assert not late.is_ended, "no event comes before listen() returns"
    engines[1].recover()
    await client.drain("0")
    assert list(engines[1].requests) == ["3~1"] and list(client._replicas.members) == ["1"]
    engines[1].step("3~1", LENGTH)
    await wait_until_async(lambda: late.is_ended)
    assert all(isinstance(other.last, TokenEvent) and other.is_ended for other in others)
    assert not client._requests and not any(replica.requests for replica in client._replicas)
    await client.close()


async def test_last_event_comes_before_waiting_requests_are_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    client, (engine,) = await start(1)
    caller = listen(client, "1")
    ended: list[bool] = []
    monkeypatch.setattr(client, "_place_waiting", lambda: ended.append(caller.is_ended))
    engine.step("1", LENGTH)
    assert ended == [True]
    await client.close()


async def test_tick_goes_on_after_a_failing_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    client, (engine,) = await start(1)

    def check_replicas() -> None:
        raise ValueError("a bug")

    monkeypatch.setattr(router, "TICK_S", 0.0)
    monkeypatch.setattr(client, "_check_replicas", check_replicas)
    engine.crash()
    listen(client, "1")
    engine.status = "ok"
    await wait_until_async(lambda: "1" in engine.requests)
    assert caplog.text.count("check_replicas failed") == 1
    await client.close()


@pytest.mark.parametrize("num_engines", [1, 2])
async def test_folder_of_kv_blocks_is_that_of_the_last_engine(num_engines: int) -> None:
    client, engines = await start(num_engines)

    def restart(kv_files: KVFiles | None) -> KVFiles | None:
        """Returns what the server knows then."""
        assert engines[-1].info is not None and client.info is not None
        engines[-1].crash()
        engines[-1].info = replace(engines[-1].info, kv_files=kv_files)
        engines[-1].recover()
        return client.info.kv_files

    kv_files = KVFiles("folder", bytes(16), 64, None)
    assert restart(kv_files) == kv_files
    assert restart(None) == (None if num_engines == 1 else kv_files), "another one may still have it"
    await client.close()


@pytest.mark.parametrize(
    ("num_engines", "names", "detail"), [(1, [""], ""), (3, ["0", "1", "2"], "2 of 3 replicas are ready")]
)
async def test_only_several_engines_have_names(num_engines: int, names: list[str], detail: str) -> None:
    """In logs, metrics and lists."""
    log_model.set("m")
    reasons: list[str | None] = []
    steps: list[StepStats] = []
    client, engines = await start(num_engines)
    client.on_step, client.on_restart = steps.append, reasons.append
    assert [each.log_model for each in engines] == [f"m, replica {name}" if name else "m" for name in names]
    assert log_model.get() == "m"
    engines[0].callbacks.on_step(StepStats(4))
    engines[0].crash()
    assert reasons == ["replica 0: killed" if num_engines > 1 else "killed"]
    assert steps == ([StepStats(4, replica="0"), StepStats(replica="0")] if detail else [StepStats(4)])
    assert [each.id for each in client.replica_states()] == [name for name in names if name]
    assert client.readiness == Readiness("ok" if detail else "restarting", detail)
    await client.close()
    log_model.set("")


async def test_steps_name_each_engine_of_a_server_elsewhere() -> None:
    """Each has counters of its own. They go on after a lost connection."""
    engine, steps = ScriptedEngine(), list[StepStats]()
    client = EngineRouter([RouterReplica("host", engine, "host:1")])
    await client.start()
    client.on_step = steps.append
    for stats in (StepStats(4), StepStats(7, replica="0"), StepStats(5, replica="1")):
        engine.callbacks.on_step(stats)
    engine.crash()
    assert [(stats.step, stats.replica) for stats in steps] == [(4, "host"), (7, "host/0"), (5, "host/1")]
    await client.close()


async def test_prompt_of_the_only_engine_is_not_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are those of the whole server, and another router may ask for them."""
    monkeypatch.setattr("foreword.engine_client.router.extend_hashes", None)
    client, (engine,) = await start(1)
    listen(client, "1")
    updates: list[BlockUpdate] = []
    client.on_blocks = updates.append
    engine.callbacks.on_blocks(BlockUpdate(3, (b"b",)))
    assert updates == [BlockUpdate(3, (b"b",))] and engine.num_snapshots_asked == 0
    client.request_blocks()
    assert engine.num_snapshots_asked == 1
    await client.close()


async def test_gap_in_block_updates_asks_for_a_snapshot() -> None:
    client, engines = await start(2)
    engines[0].callbacks.on_blocks(BlockUpdate(1, (b"a",), is_snapshot=True))
    assert engines[0].num_snapshots_asked == 0
    engines[0].callbacks.on_blocks(BlockUpdate(3, (b"b",)))
    assert engines[0].num_snapshots_asked == 1
    await client.close()


async def test_requests_of_a_tenant_go_where_its_last_one_went() -> None:
    client, engines = await start(3)
    for number in range(6):
        name = str(number)
        listen(client, name, cache_salt=f"tenant {number % 2}")
        (engine,) = (each for each in engines if name in each.requests)
        assert number < 2 or engine is engines[number % 2]
        engine.step(name, LENGTH)
    await client.close()


async def test_long_prompt_is_hashed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foreword.engine_client.router.HASHED_TOKENS", 32)
    client, engines = await start(2)
    asked = [replace(make_request(str(number)), prompt_ids=tuple(range(100))) for number in range(2)]
    for request in asked:
        client.listen(request, Caller())
    assert not any(engine.requests for engine in engines)
    client.abort("1")
    await wait_until_async(lambda: any(engine.requests for engine in engines))
    (routed,) = client._requests.values()
    assert len(routed.digests) == 99 // 16
    await client.close()


async def test_unreachable_replica_is_no_obstacle() -> None:
    """A replica on another machine may come later; then it takes requests."""
    client, (engine, _) = await start(2)
    await client.drain("1")
    remote = ScriptedEngine()
    remote.opened.clear()
    client.add(RouterReplica("remote", remote, "10.0.0.7:8000"))
    listen(client, "1")
    assert "1" in engine.requests
    remote.opened.set()
    await wait_until_async(lambda: client.readiness.detail == "")
    engine.crash(["1"], "dead")
    assert "1~1" in remote.requests and client.replica_states()[1].address == "10.0.0.7:8000"
    await client.close()


async def start_elsewhere(
    max_model_len: int | None, *contexts: int
) -> tuple[EngineRouter, list[ScriptedEngine]]:
    """A router over engines of other machines that answer in this order."""
    engines = [ScriptedEngine(context) for context in contexts]
    replicas = [RouterReplica(f"host{i}", engine, f"host{i}:1") for i, engine in enumerate(engines)]
    client = EngineRouter(replicas, max_model_len=max_model_len)
    await client.start()
    await wait_until_async(lambda: all(engine.alive for engine in engines))
    return client, engines


async def test_drain_of_a_server_that_never_answered_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    client, _ = await start(2)
    client.add(RouterReplica("host", RemoteClient("http://127.0.0.1:9", "key"), "host"))
    await wait_until_async(lambda: client.replica_states()[2].detail.startswith("no connection"))
    await client.drain("host")
    await wait_until_async(lambda: len(client._tasks) == 1)  # the tick
    assert "could not be started" not in caplog.text
    await client.close()


@pytest.mark.parametrize(("status", "moves"), [("unresponsive", True), ("restarting", False)])
async def test_suspects_do_not_wait_for_a_lost_server(status: str, moves: bool) -> None:
    """They run in another one then."""
    client, engines = await start_elsewhere(None, 2048, 2048)
    listen(client, "1")
    for _ in range(CRASHES_TO_SUSPECT):
        (engine,) = (each for each in engines if each.requests)
        engine.crash(list(engine.requests))
    assert list(client._waiting) == ["1"]
    engine.status = status
    for _ in range(router.MAX_LOST_TICKS - 1):
        client._check_replicas()
    (other,) = (each for each in engines if each is not engine)
    other.status = "ok"
    client._check_replicas()
    client._place_waiting()
    assert bool(other.requests) == moves and not engine.requests
    await client.close()


@pytest.mark.parametrize("contexts", [(1024, 2048, 4096), (4096, 2048, 1024)])
async def test_context_of_the_router_is_its_option(
    contexts: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """Whichever engine answers first."""
    client, engines = await start_elsewhere(2048, *contexts)
    assert client.info is not None and client.info.resolved.max_model_len == 2048
    refused = "its context of 1024 tokens is shorter than the router's 2048"
    short, host = contexts.index(1024), f"host{contexts.index(1024)}"
    states = {each.id: (each.status, each.detail) for each in client.replica_states()}
    assert states.pop(host) == ("different", refused)
    assert [status for status, _ in states.values()] == ["ok", "ok"]
    assert f"replica {host} gets no requests: {refused}" in caplog.text
    params = SamplingParams(max_tokens=3000, min_tokens=2500)
    for start in (0, 40):
        prompt = tuple(range(start, start + 40))
        client.listen(Request(str(start), prompt, params, seed=0), Caller())
    assert not engines[short].requests
    ((request, _),) = engines[contexts.index(4096)].requests.values()
    assert (request.params.max_tokens, request.params.min_tokens) == (2008, 2008)
    await client.close()


async def test_contexts_of_other_machines_are_equal_without_the_option() -> None:
    client, _ = await start_elsewhere(None, 2048, 4096, 1024, 2048)
    details = [each.detail for each in client.replica_states()]
    longer = (
        "its context of 4096 tokens is longer than the first replica's 2048; --max-model-len 2048 uses both"
    )
    shorter = (
        "its context of 1024 tokens is shorter than the first replica's 2048; --max-model-len 1024 uses both"
    )
    assert details == ["", longer, shorter, ""]
    await client.close()


async def test_router_does_not_start_if_all_contexts_are_shorter_than_its_option() -> None:
    with pytest.raises(ConfigError, match="replica host1: its context of 1000 tokens is shorter than"):
        await start_elsewhere(2048, 1024, 1000)


async def test_engines_elsewhere_are_compared_with_the_local_one() -> None:
    """Though they answer while it loads."""
    local, other = ScriptedEngine(2048), ScriptedEngine(4096, "fp_other")
    local.opened.clear()
    client = EngineRouter([RouterReplica("0", local), RouterReplica("host", other, "host:1")])
    starting = asyncio.create_task(client.start())
    for _ in range(10):
        await asyncio.sleep(0)
    local.opened.set()
    info = await starting
    assert (info.fingerprint, info.resolved.max_model_len) == ("fp_fake", 2048)
    await wait_until_async(lambda: [each.status for each in client.replica_states()] == ["ok", "different"])
    await client.close()
