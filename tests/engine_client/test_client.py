"""Engines that die and hang under open requests: real processes, really killed. Nobody gets other tokens for it."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from foreword.checkpoint import prepare_checkpoint
from foreword.config.options import Config
from foreword.core.outputs import EmbeddingEvent, ErrorEvent, Event, StepStats, TokenEvent, TokenLogprob
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.core.structured import StructuredOutput, Vocabulary
from foreword.engine_client.client import SubprocessClient
from foreword.engine_client.heartbeat import NO_HEARTBEAT_S, HeartbeatPage
from foreword.engine_client.inflight import MAX_IDLE_CRASHES
from foreword.errors import ConfigError, DeadlineExceeded, EngineDead, Overloaded, RequestFailed
from tests.support.checkpoints import EOS, write_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")

MORTAL = "tests.support.crashing_engine"
LENGTH = 40
WAIT_S = 60.0  # so long a test waits for what must happen
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 20, "maxLength": 60}},
    "required": ["a"],
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "sampled": {"logprobs": 0, "prompt_logprobs": 1},
    "filtered": {"top_p": 0.9, "top_k": 50, "min_tokens": 10},
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "dry_multiplier": 0.8,
    },
    "grammar": {"structured": StructuredOutput.json_schema(SCHEMA), "logprobs": 1},
    "choice 0": {"temperature": 1.2},
    "choice 1": {"temperature": 1.2},
    "choice 2": {"temperature": 1.2},
    "choice 3": {"temperature": 1.2},
    "short": {"max_tokens": 6},
    "last": {},
    "mean": {},
}


@dataclass
class Answer:
    """All that a caller gets of one request."""

    token_ids: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    cached: set[int] = field(default_factory=set)
    end: str | bytes | None = None

    def add(self, event: Event) -> None:
        assert not isinstance(event, ErrorEvent), event.error
        if isinstance(event, EmbeddingEvent):
            self.end = event.vector
            return
        assert event.index == len(self.token_ids)
        self.token_ids += event.token_ids
        self.hashes += event.logits_hashes
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        self.cached.add(event.num_cached)
        self.end = event.finish_reason


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("client") / "model", "llama", seed=5)


@pytest.fixture(scope="module", autouse=True)
def anywhere() -> Iterator[None]:
    """The spawner finds the tests wherever they were started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        yield


def client_of(checkpoint: Path, entry: str = MORTAL, **options: Any) -> SubprocessClient:
    defaults = {
        "kv_cache_memory": "4000tokens",
        "threads": 1,
        "log_level": "error",
        "test_mode": True,
        "prefix_caching": False,
    }
    prepared = prepare_checkpoint(Config(model=str(checkpoint), **(defaults | options)))
    return SubprocessClient(
        prepared.config, prepared.never_sampled_ids, prepared.tokenizer.vocabulary, entry_module=entry
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(checkpoint: Path) -> AsyncIterator[SubprocessClient]:
    client = client_of(checkpoint)
    await client.start()
    yield client
    await client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(client: SubprocessClient) -> dict[str, Answer]:
    """What everybody gets where nothing happens."""
    return await answers(client, requests("undisturbed"))


def make_request(name: str, kind: str = "sampled") -> Request:
    params = SamplingParams(**({"max_tokens": LENGTH, "ignore_eos": True} | KINDS[kind]))
    pooling = kind if kind in ("last", "mean") else None
    seed = int(kind[-1]) if kind.startswith("choice") else 7
    return Request(name, (40, 41, 42, 40, 41), params, seed, eos_token_ids=(EOS,), pooling=pooling)


def requests(prefix: str) -> list[Request]:
    return [make_request(f"{prefix}-{kind}", kind) for kind in KINDS]


async def answers(
    client: SubprocessClient, asked: Sequence[Request], seen: Callable[[Event], None] | None = None
) -> dict[str, Answer]:
    """By kind, which is the last part of an id."""

    async def collect(request: Request) -> Answer:
        answer = Answer()
        async for event in client.submit(request):
            answer.add(event)
            if seen is not None:
                seen(event)
        return answer

    async with asyncio.timeout(WAIT_S):
        found = await asyncio.gather(*(collect(request) for request in asked))
    return {request.id.rpartition("-")[2]: answer for request, answer in zip(asked, found, strict=True)}


async def last_event(client: SubprocessClient, request: Request) -> Event:
    async with asyncio.timeout(WAIT_S):
        return [event async for event in client.submit(request)][-1]


class Killer:
    """Kills an engine each time when so many events of its own came, `times` in all."""

    def __init__(self, client: SubprocessClient, every: int, times: int) -> None:
        self.client, self.every, self.times = client, every, times
        self.seen = 0
        self.killed: set[int | None] = set()

    def __call__(self, event: Event) -> None:
        pid = self.client.pid
        self.seen += 1
        if (
            pid is not None
            and self.seen >= self.every
            and pid not in self.killed
            and len(self.killed) < self.times
        ):
            self.seen = 0
            self.killed.add(pid)
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("every", "times"), [(2, 4), (20, 2), (50, 1)])
async def test_everybody_gets_the_same_from_engines_that_are_killed(
    client: SubprocessClient,
    undisturbed: dict[str, Answer],
    caplog: pytest.LogCaptureFixture,
    every: int,
    times: int,
) -> None:
    told: list[str] = []
    client.on_restart = told.append
    before = client.readiness.restarts
    killer = Killer(client, every, times)
    assert await answers(client, requests(f"kills {every}"), killer) == undisturbed
    assert len(killer.killed) == len(told) == client.readiness.restarts - before == times
    assert caplog.text.count("signal 9") == times


@pytest.mark.parametrize("fault", ["segfault", "exit", "broken"])
async def test_an_engine_that_dies_in_a_step_is_replaced(
    client: SubprocessClient, undisturbed: dict[str, Answer], fault: str
) -> None:
    before = client.readiness.restarts
    asked = [
        make_request(f"{fault}-9-sampled"),
        *(make_request(f"{fault} beside-{kind}", kind) for kind in ("greedy", "grammar")),
    ]
    found = await answers(client, asked)
    assert found == {kind: undisturbed[kind] for kind in ("sampled", "greedy", "grammar")}
    assert client.readiness.restarts == before + 1


async def test_an_engine_that_dies_idle_is_replaced(
    client: SubprocessClient, undisturbed: dict[str, Answer]
) -> None:
    for name in "ab":
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        found = await answers(client, [make_request(f"idle {name}-greedy", "greedy")])
        assert found["greedy"] == undisturbed["greedy"]


async def test_a_spawner_that_dies_is_replaced(
    client: SubprocessClient, undisturbed: dict[str, Answer]
) -> None:
    spawner = client._fork_server._process
    assert spawner is not None and client.pid is not None
    os.kill(spawner.pid, signal.SIGKILL)
    found = await answers(client, [make_request("orphan-greedy", "greedy")])
    assert found["greedy"] == undisturbed["greedy"], "the engine does not need it"
    os.kill(client.pid, signal.SIGKILL)
    found = await answers(client, [make_request("again-greedy", "greedy")])
    assert found["greedy"] == undisturbed["greedy"]


async def test_who_kills_every_engine_is_refused_and_the_others_wait(
    client: SubprocessClient, undisturbed: dict[str, Answer]
) -> None:
    before = client.readiness.restarts
    poison = asyncio.create_task(last_event(client, make_request("poison-12-x")))
    found = await answers(
        client, [replace(request, id=f"beside {request.id}") for request in requests("poison")]
    )
    assert found == undisturbed
    failed = await poison
    assert (
        isinstance(failed, ErrorEvent)
        and isinstance(failed.error, RequestFailed)
        and "alone" in failed.error.message
    )
    assert client.readiness.restarts - before <= 4


async def test_one_poison_after_the_other_does_not_end_the_engine(
    client: SubprocessClient, undisturbed: dict[str, Answer]
) -> None:
    """Nobody else is there who could gain a token."""
    for number in range(3):
        failed = await last_event(client, make_request(f"poison-0-{number}"))
        assert (
            isinstance(failed, ErrorEvent)
            and isinstance(failed.error, RequestFailed)
            and "alone" in failed.error.message
        )
    found = await answers(client, [make_request("later-greedy", "greedy")])
    assert found["greedy"] == undisturbed["greedy"]


async def test_poison_that_leaves_in_time_does_not_end_the_engine(client: SubprocessClient) -> None:
    for number in range(2 * MAX_IDLE_CRASHES):
        before = client.readiness.restarts
        client.submit(make_request(f"poison-0-{number}"))
        async with asyncio.timeout(WAIT_S):
            while client.readiness.restarts == before:
                await asyncio.sleep(0.001)
        client.abort(f"poison-0-{number}")
    assert isinstance(await last_event(client, make_request("after")), TokenEvent)


async def test_an_engine_that_dies_of_everything_is_given_up(checkpoint: Path) -> None:
    """Also if there is always another request to blame."""
    client = client_of(checkpoint, entry="tests.support.restart_fails_engine")
    await client.start()
    number = 0
    async with asyncio.timeout(WAIT_S):
        while client.alive:
            client.submit(make_request(str(number)))
            number += 1
            await asyncio.sleep(0.05)
        await client.dead.wait()
    assert client.readiness.restarts <= MAX_IDLE_CRASHES + 4
    await client.close()


async def test_time_runs_out_also_while_the_engine_is_stopped(client: SubprocessClient) -> None:
    await answers(client, [make_request("well")])
    pid = client.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    now_s = time.monotonic()
    asked = {
        DeadlineExceeded: replace(make_request("deadline"), arrival_s=now_s, deadline_s=now_s + 0.3),
        Overloaded: replace(make_request("start"), arrival_s=now_s, queue_deadline_s=now_s + 0.3),
    }
    found = await asyncio.gather(*(last_event(client, request) for request in asked.values()))
    stats = client.stats
    os.kill(pid, signal.SIGCONT)
    assert [type(one.error) for one in found if isinstance(one, ErrorEvent)] == list(asked)
    assert stats.requests_waiting == 0 and client.pid == pid


async def test_open_requests_are_counted_while_there_is_no_engine(client: SubprocessClient) -> None:
    told: list[StepStats] = []
    client.on_restart = lambda _: told.append(client.stats)
    stream = client.submit(replace(make_request("open"), arrival_s=time.monotonic() - 100))
    await anext(stream)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    async for _ in stream:
        pass
    assert (told[0].requests_running, told[0].requests_waiting) == (0, 1) and told[
        0
    ].oldest_running_seconds >= 100


async def test_a_spawner_that_is_stopped_is_not_waited_for(
    client: SubprocessClient, undisturbed: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreword.engine_client.connection.EXIT_TIMEOUT_S", 1000.0)
    monkeypatch.setattr("foreword.engine_client.forkserver.FORK_TIMEOUT_S", 1000.0)
    spawner = client._fork_server._process
    assert spawner is not None and client.pid is not None
    os.kill(spawner.pid, signal.SIGSTOP)
    os.kill(client.pid, signal.SIGKILL)
    found = await answers(client, [make_request("stopped spawner-greedy", "greedy")])
    assert found["greedy"] == undisturbed["greedy"]


async def test_a_vocabulary_that_is_not_to_be_had_ends_who_asked(
    client: SubprocessClient, undisturbed: dict[str, Answer]
) -> None:
    def unreadable() -> Vocabulary:
        raise FileNotFoundError("tokenizer.json")

    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)  # the next one knows none
    vocabulary, client._vocabulary = client._vocabulary, unreadable
    failed = asyncio.create_task(last_event(client, make_request("unread-grammar", "grammar")))
    found = await answers(client, [make_request("beside-greedy", "greedy")])
    event = await failed
    client._vocabulary = vocabulary
    found |= await answers(client, [make_request("after-grammar", "grammar")])
    assert isinstance(event, ErrorEvent) and "FileNotFoundError" in event.error.message
    assert found == {kind: undisturbed[kind] for kind in ("greedy", "grammar")}


async def test_a_start_that_lacks_descriptors_is_tried_again(
    client: SubprocessClient, undisturbed: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    create = HeartbeatPage.create
    results = iter([None, None])

    def scarce() -> HeartbeatPage:
        if next(results, create) is None:
            raise OSError(errno.EMFILE, "Too many open files")
        return create()

    monkeypatch.setattr(HeartbeatPage, "create", scarce)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    found = await answers(client, [make_request("scarce-greedy", "greedy")])
    assert found["greedy"] == undisturbed["greedy"] and next(results, create) is create


@pytest.mark.parametrize("fault", ["stopped", "locked"])
async def test_the_end_does_not_wait_for_an_engine_that_hangs(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """One that gives signs of life may be in the midst of a step: there it waits, unless it is told to hurry."""
    monkeypatch.setattr("foreword.engine_client.connection.EXIT_TIMEOUT_S", 1000.0)
    client = client_of(checkpoint)
    await client.start()
    stream = client.submit(make_request(f"{fault}-3-x"))
    await anext(stream)
    assert client.pid is not None and client._process is not None
    child = client._process
    async with asyncio.timeout(WAIT_S):
        while (
            not child.is_unresponsive()
            if fault == "stopped"
            else time.monotonic() - child.heartbeat.read().busy_since_s < 0.5
        ):
            await asyncio.sleep(0.05)
        closing = asyncio.create_task(client.close())
        if fault == "locked":
            await asyncio.sleep(0.2)
            assert not closing.done()
            client.skip_drain()
        await closing


async def test_who_waits_for_a_suspect_goes_on_when_that_is_aborted(
    client: SubprocessClient, undisturbed: dict[str, Answer]
) -> None:
    assert client.pid is not None
    os.kill(client.pid, signal.SIGSTOP)
    client.submit(make_request("suspect"))
    for _ in range(2):
        client._inflight._suspects.on_crash(["suspect"])
    answering = asyncio.create_task(answers(client, [make_request("waits-greedy", "greedy")]))
    while len(client._inflight) < 2:
        await asyncio.sleep(0)
    client.abort("suspect")
    os.kill(client.pid, signal.SIGCONT)
    assert (await answering)["greedy"] == undisturbed["greedy"]


async def test_who_aborts_or_stops_while_there_is_no_engine_is_not_resumed(client: SubprocessClient) -> None:
    streams = {name: client.submit(make_request(f"gone-{name}")) for name in ("abort", "finish", "leave")}
    for stream in streams.values():
        await anext(stream)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    while client.readiness.is_ready:
        await asyncio.sleep(0.001)
    client.abort("gone-abort")
    client.finish("gone-finish", 1)
    await streams["leave"].aclose()  # type: ignore[attr-defined]
    assert len(client._inflight) == 0
    for name in ("abort", "finish"):
        assert not [event async for event in streams[name] if isinstance(event, ErrorEvent)]


async def test_callbacks_that_fail_lose_nothing(
    client: SubprocessClient, undisturbed: dict[str, Answer]
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a callback")

    client.on_step = client.on_restart = fail
    found = await answers(client, requests("callbacks"), Killer(client, 20, times=1))
    client.on_step = client.on_restart = None
    assert found == undisturbed


async def test_an_engine_that_hangs_is_noticed_and_replaced(
    checkpoint: Path, undisturbed: dict[str, Answer]
) -> None:
    """One stands still in a step, the other altogether."""
    client = client_of(checkpoint, hang_timeout=2.0)
    await client.start()
    told: list[str] = []
    client.on_restart = told.append
    for fault in ("locked", "stopped"):
        found = await answers(client, [make_request(f"{fault}-9-sampled")])
        assert found["sampled"] == undisturbed["sampled"]
    await client.close()
    assert "step" in told[0] and "sign of life" in told[1]


async def test_an_engine_that_was_stopped_for_a_moment_goes_on(
    client: SubprocessClient, undisturbed: dict[str, Answer]
) -> None:
    pid = client.pid
    assert pid is not None
    answering = asyncio.create_task(answers(client, [make_request("moment-greedy", "greedy")]))
    os.kill(pid, signal.SIGSTOP)
    async with asyncio.timeout(NO_HEARTBEAT_S + 2):
        while client.readiness.status != "unresponsive":
            await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGCONT)
    assert (await answering)["greedy"] == undisturbed["greedy"]
    async with asyncio.timeout(WAIT_S):
        while not client.readiness.is_ready:
            await asyncio.sleep(0.05)
    assert client.pid == pid


async def test_an_engine_that_cannot_come_back_is_given_up(checkpoint: Path, tmp_path: Path) -> None:
    moved = write_checkpoint(tmp_path / "model", "llama", seed=5)
    client = client_of(moved)
    await client.start()
    stream = client.submit(make_request("a"))
    await anext(stream)
    (moved / "model.safetensors").unlink()
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        events = [event async for event in stream]
        await client.dead.wait()
    assert isinstance(events[-1], ErrorEvent) and isinstance(events[-1].error, EngineDead)
    assert not client.alive and client.readiness.status == "dead"
    with pytest.raises(EngineDead):
        client.submit(make_request("b"))
    await client.close()


async def test_a_checkpoint_that_changed_is_not_gone_on_with(checkpoint: Path, tmp_path: Path) -> None:
    changed = write_checkpoint(tmp_path / "model", "llama", seed=5)
    client = client_of(changed)
    await client.start()
    write_checkpoint(changed, "llama", seed=6)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        await client.dead.wait()
    await client.close()


async def test_an_engine_that_is_killed_while_it_loads_says_so(checkpoint: Path) -> None:
    client = client_of(checkpoint, entry="tests.support.start_fails_engine")
    with pytest.raises(ConfigError, match=r"while it was loading.*signal 9"):
        await client.start()
    await client.close()
