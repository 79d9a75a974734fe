"""Streams move between scripted engines: each caller gets one answer, complete and in order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.config.lora import AdapterInfo
from foreword.core.outputs import BlockUpdate, ErrorEvent, Event, StepStats, TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.readiness import Readiness
from foreword.core.request import Request
from foreword.engine_client.base import EngineClient, iterate_events
from foreword.engine_client.resume import CRASHES_TO_REFUSE, CRASHES_TO_SUSPECT
from foreword.engine_client.router import EngineRouter, Replica
from foreword.errors import ConfigError, EngineDead, RequestFailed
from foreword.planning.resolve import EngineInfo
from foreword.utils.logging import log_model
from tests.support.fakes import engine_info
from tests.support.waiting import wait_until_async

LENGTH = 30  # tokens of every answer
NUM_ENGINES = 3


def token(request_id: str, position: int) -> int:
    return int(request_id) * 1000 + position


class ScriptedEngine:
    """Implements EngineClient; the test says when it steps, crashes and recovers."""

    def __init__(self, max_model_len: int = 2048) -> None:
        self.max_model_len = max_model_len
        self.fingerprint = "fp_fake"
        self.info: EngineInfo | None = None
        self.alive = False
        self.status = "ok"
        self.stats = StepStats()
        self.on_step: Callable[[StepStats], None] | None = None
        self.on_restart: Callable[[str | None], None] | None = None
        self.on_ready: Callable[[], None] | None = None
        self.on_blocks: Callable[[BlockUpdate], None] | None = None
        self.on_crash: Callable[[Collection[str]], None] | None = None
        self.requests: dict[str, tuple[Request, Callable[[Event | None], None]]] = {}
        self.positions: dict[str, int] = {}
        self.num_snapshots_asked = 0

    @property
    def readiness(self) -> Readiness:
        return Readiness(self.status)

    async def start(self, like: EngineClient | None = None) -> EngineInfo:
        self.info = replace(engine_info(self.max_model_len), fingerprint=self.fingerprint)
        self.alive, self.log_model = True, log_model.get()
        return self.info

    def submit(self, request: Request) -> AsyncIterator[Event]:
        return iterate_events(self, request)

    def listen(self, request: Request, on_event: Callable[[Event | None], None]) -> None:
        if not self.alive:
            raise EngineDead("gone")
        assert request.id not in self.requests and self.status == "ok"
        self.requests[request.id] = request, on_event
        self.positions[request.id] = len(request.resume_output_ids)
        assert request.resume_output_ids == tuple(
            token(request.id, position) for position in range(self.positions[request.id])
        )

    def step(self, request_id: str, num_tokens: int) -> None:
        _, on_event = self.requests[request_id]
        start = self.positions[request_id]
        end = self.positions[request_id] = min(start + num_tokens, LENGTH)
        ids = tuple(token(request_id, position) for position in range(start, end))
        reason = "length" if end == LENGTH else None
        if reason is not None:
            del self.requests[request_id]
        on_event(TokenEvent(request_id, start, ids, finish_reason=reason, num_cached=len(self.requests)))

    def crash(self, busy_ids: Collection[str], status: str = "restarting") -> None:
        self.status = status
        assert self.on_restart is not None and self.on_crash is not None
        self.on_restart("killed")
        self.on_crash(busy_ids)
        lost, self.requests = self.requests, {}
        for request_id, (_, on_event) in lost.items():
            on_event(ErrorEvent(request_id, EngineDead("gone")))

    def recover(self) -> None:
        self.status = "ok"
        assert self.on_ready is not None
        self.on_ready()

    def finish(self, request_id: str, num_tokens: int) -> None:
        self.abort(request_id)

    def abort(self, request_id: str) -> None:
        removed = self.requests.pop(request_id, None)
        if removed is not None:
            removed[1](None)

    def reload(self) -> AsyncIterator[str]:
        raise NotImplementedError

    def request_blocks(self) -> None:
        self.num_snapshots_asked += 1

    async def load_adapter(self, path: str) -> AdapterInfo:
        raise NotImplementedError

    async def wait_unused(self, digest: str) -> None:
        raise NotImplementedError

    async def unload_adapter(self, digest: str) -> None:
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

    def __call__(self, event: Event | None) -> None:
        assert not self.is_ended, "an event after the last"
        if isinstance(event, TokenEvent):
            assert event.index == len(self.token_ids), "in order, each token once"
            self.token_ids += event.token_ids
            self.cached.add(event.num_cached)
        self.is_ended = not isinstance(event, TokenEvent) or event.finish_reason is not None
        self.last = event


def make_request(request_id: str) -> Request:
    return Request(request_id, tuple(range(40)), SamplingParams(max_tokens=LENGTH), seed=0)


async def start(num_engines: int = NUM_ENGINES) -> tuple[EngineRouter, list[ScriptedEngine]]:
    engines = [ScriptedEngine() for _ in range(num_engines)]
    client = EngineRouter([Replica(str(i), engine) for i, engine in enumerate(engines)])
    await client.start()
    return client, engines


def check(client: EngineRouter, engines: Sequence[ScriptedEngine]) -> None:
    """Every open stream runs in one engine, or waits."""
    running = [request_id for engine in engines for request_id in engine.requests]
    assert len(running) == len(set(running)), "a stream runs twice"
    assert sorted([*running, *client._waiting]) == sorted(client._streams)
    for member in client._members.values():
        assert set(member.streams) == set(member.client.requests)  # type: ignore[attr-defined]
        if not any(stream.num_prompt for stream in member.streams.values()):
            assert member.num_prompt_tokens == 0 and not member.blocks._computing
    if client._quarantine is not None:
        waiting = [each for each in client._quarantine.streams if each in client._suspects]
        assert waiting in ([], [client._suspects.quarantined]), "suspects run one after another"


OPERATION = st.tuples(
    st.sampled_from(("submit", "step", "step", "crash", "recover", "stall", "die", "abort", "finish")),
    st.integers(0, 7),
    st.integers(0, 7),
)


@given(st.lists(OPERATION, min_size=20, max_size=80))
def test_every_caller_gets_its_answer(operations: list[tuple[str, int, int]]) -> None:
    asyncio.run(play(operations))


async def play(operations: Sequence[tuple[str, int, int]]) -> None:
    client, engines = await start()
    callers: dict[str, Caller] = {}
    num_crashes: dict[str, int] = {}

    def submit() -> None:
        name = str(len(callers))
        callers[name] = Caller()
        client.listen(make_request(name), callers[name])

    for _ in range(6):
        submit()
    for kind, first, second in operations:
        engine = engines[first % NUM_ENGINES]
        ids = list(engine.requests)
        if kind == "submit":
            submit()
        elif kind == "step" and ids and engine.status == "ok":
            for request_id in ids[second % len(ids) :]:
                engine.step(request_id, 1 + second % 4)
        elif kind == "crash" and engine.status != "dead":
            busy = ids[: second % (len(ids) + 1)]
            for request_id in busy:
                num_crashes[request_id] = num_crashes.get(request_id, 0) + 1
            engine.crash(busy)
        elif kind == "recover" and engine.status != "dead":
            engine.recover()
        elif kind == "stall" and engine.status == "ok":
            engine.status = "unresponsive"
            client._check_members()
        elif kind == "die" and sum(each.alive for each in engines) > 1 and engine.alive:
            engine.alive = False
            engine.crash((), "dead")
            client._check_members()
        elif kind in ("abort", "finish") and client._streams:
            name = list(client._streams)[second % len(client._streams)]
            client.abort(name) if kind == "abort" else client.finish(name, 1)
            assert callers[name].last is None
        check(client, engines)
    while client._streams:
        for engine in engines:
            if engine.alive:
                engine.recover()
        client._check_members()
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


async def test_streams_that_ran_wait_for_room() -> None:
    """A full engine would queue them; the one that restarts runs them sooner. New requests do not wait."""
    client, engines = await start(2)
    assert client.info is not None
    limit = client.info.resolved.max_num_seqs
    for number in range(2 * limit):
        client.listen(make_request(str(number)), Caller())
    assert [len(engine.requests) for engine in engines] == [limit, limit]
    engines[0].crash(())
    assert len(client._waiting) == limit and len(engines[1].requests) == limit
    client.listen(make_request("999"), Caller())
    assert "999" in engines[1].requests
    engines[1].step("999", LENGTH)
    engines[1].step(next(iter(engines[1].requests)), LENGTH)
    assert len(client._waiting) == limit - 1 and len(engines[1].requests) == limit, "one found room"
    engines[0].recover()
    assert not client._waiting and len(engines[0].requests) == limit - 1
    await client.close()


async def test_poison_request_runs_alone_after_two_crashes_of_two_engines() -> None:
    client, engines = await start()
    callers = {str(number): Caller() for number in range(6)}
    for name, caller in callers.items():
        client.listen(make_request(name), caller)
    crashed: list[ScriptedEngine] = []
    while not callers["0"].is_ended:
        (engine,) = (each for each in engines if "0" in each.requests)
        if len(crashed) >= CRASHES_TO_SUSPECT:
            assert list(engine.requests) == ["0"], "no other stream is beside it"
            client.listen(make_request(f"{10 + len(crashed)}"), Caller())
            assert list(engine.requests) == ["0"]
        crashed.append(engine)
        engine.crash(list(engine.requests))
        check(client, engines)
        if len(crashed) >= CRASHES_TO_SUSPECT:
            assert not engine.requests, "suspects wait, the others moved"
        engine.recover()
    assert len(crashed) == CRASHES_TO_SUSPECT + CRASHES_TO_REFUSE and len({*map(id, crashed)}) == 2
    assert isinstance(callers["0"].last, ErrorEvent) and "alone" in callers["0"].last.error.message
    for _ in range(2 * len(callers)):
        for engine in engines:
            for request_id in list(engine.requests):
                engine.step(request_id, LENGTH)
    assert not client._streams and client._quarantine is None
    await client.close()


async def test_dead_replicas_end_all_requests() -> None:
    client, engines = await start(2)
    caller = Caller()
    client.listen(make_request("1"), caller)
    for engine in engines:
        engine.alive = False
        engine.crash((), "dead")
    await wait_until_async(client.dead.is_set)
    assert isinstance(caller.last, ErrorEvent) and isinstance(caller.last.error, EngineDead)
    assert not client.alive and client.readiness.status == "dead"
    with pytest.raises(EngineDead):
        client.listen(make_request("2"), caller)
    await client.close()


async def test_log_lines_name_the_replica_if_there_are_several() -> None:
    log_model.set("m")
    client, engines = await start(3)
    assert [engine.log_model for engine in engines] == [f"m, replica {i}" for i in range(3)]
    assert log_model.get() == "m"
    await client.close()
    log_model.set("")
    client, engines = await start(1)
    assert [engine.log_model for engine in engines] == [""]
    await client.close()


async def test_gap_in_block_updates_asks_for_a_snapshot() -> None:
    client, engines = await start(1)
    assert engines[0].on_blocks is not None
    engines[0].on_blocks(BlockUpdate(1, (b"a",), is_snapshot=True))
    assert engines[0].num_snapshots_asked == 0
    engines[0].on_blocks(BlockUpdate(3, (b"b",)))
    assert engines[0].num_snapshots_asked == 1
    await client.close()


async def test_requests_of_a_tenant_go_where_its_last_one_went() -> None:
    client, engines = await start(3)
    for number in range(6):
        caller = Caller()
        request = replace(make_request(str(number)), cache_salt=f"tenant {number % 2}")
        client.listen(request, caller)
        (engine,) = (each for each in engines if request.id in each.requests)
        assert number < 2 or engine is engines[number % 2]
        engine.step(request.id, LENGTH)
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
    (stream,) = client._streams.values()
    assert len(stream.digests) == 99 // 16
    await client.close()


async def test_unreachable_replica_is_no_obstacle() -> None:
    """A replica on another machine may come later; then it takes streams."""
    client, (engine,) = await start(1)
    remote = ScriptedEngine()
    opened = asyncio.Event()
    begin = remote.start

    async def start_later(like: EngineClient | None = None) -> EngineInfo:
        await opened.wait()
        return await begin(like)

    remote.start = start_later  # type: ignore[method-assign]
    client.add(Replica("remote", remote, "10.0.0.7:8000"))
    caller = Caller()
    client.listen(make_request("1"), caller)
    assert "1" in engine.requests
    opened.set()
    await wait_until_async(lambda: client._members["remote"].is_ready)
    engine.alive = False
    engine.crash((), "dead")
    assert "1" in remote.requests and client.replica_states()[1].address == "10.0.0.7:8000"
    await client.close()


async def start_elsewhere(
    max_model_len: int | None, *contexts: int
) -> tuple[EngineRouter, list[ScriptedEngine]]:
    """A router over engines of other machines that answer in this order."""
    engines = [ScriptedEngine(context) for context in contexts]
    replicas = [Replica(f"host{i}", engine, f"host{i}:1") for i, engine in enumerate(engines)]
    client = EngineRouter(replicas, max_model_len=max_model_len)
    await client.start()
    await wait_until_async(lambda: all(engine.alive for engine in engines))
    return client, engines


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
    local, other = ScriptedEngine(2048), ScriptedEngine(4096)
    other.fingerprint = "fp_other"
    loaded = asyncio.Event()
    local_start = local.start

    async def load(like: EngineClient | None = None) -> EngineInfo:
        await loaded.wait()
        return await local_start(like)

    local.start = load  # type: ignore[method-assign]
    client = EngineRouter([Replica("0", local), Replica("host", other, "host:1")])
    starting = asyncio.create_task(client.start())
    for _ in range(10):
        await asyncio.sleep(0)
    loaded.set()
    info = await starting
    assert (info.fingerprint, info.resolved.max_model_len) == ("fp_fake", 2048)
    await wait_until_async(lambda: [each.status for each in client.replica_states()] == ["ok", "different"])
    await client.close()
