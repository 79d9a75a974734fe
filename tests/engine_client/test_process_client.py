"""Real engine processes crash and hang under open requests: all answers stay the same."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from foreword.checkpoint import prepare_checkpoint
from foreword.config.options import Config
from foreword.core.outputs import ErrorEvent, StepStats, TokenEvent
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request
from foreword.core.structured_output import StructuredOutput, Vocabulary
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.heartbeat import HeartbeatPage
from foreword.engine_client.process_client import ProcessClient
from foreword.engine_client.resume import MAX_IDLE_CRASHES
from foreword.errors import ConfigError, DeadlineExceeded, EngineDead, Overloaded, RequestFailed
from tests.support.checkpoints import EOS, write_checkpoint
from tests.support.client_answers import Answer, Killer, collect_answers, last_event
from tests.support.waiting import WAIT_S, stop_process, wait_until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")

CRASHING_ENGINE = "tests.support.crashing_engine"
LENGTH = 40
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


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("client") / "model", "llama", seed=5)


@pytest.fixture(scope="module", autouse=True)
def anywhere() -> Iterator[None]:
    """The fork server can import the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        yield


def make_client(checkpoint: Path, entry: str = CRASHING_ENGINE, **options: Any) -> ProcessClient:
    defaults = {
        "kv_cache_memory": "4000tokens",
        "threads": 1,
        "log_level": "error",
        "test_mode": True,
        "prefix_caching": False,
    }
    prepared = prepare_checkpoint(Config(model=str(checkpoint), **(defaults | options)))
    return ProcessClient(
        prepared.config,
        prepared.never_sampled_ids,
        prepared.tokenizer.vocabulary,
        fork_server=ForkServer(entry),
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(checkpoint: Path) -> AsyncIterator[ProcessClient]:
    client = make_client(checkpoint)
    await client.start()
    yield client
    await client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(client: ProcessClient) -> dict[str, Answer]:
    """The answers without any crash."""
    return await collect_answers(client, requests("undisturbed"))


def make_request(name: str, kind: str = "sampled") -> Request:
    params = SamplingParams(**({"max_tokens": LENGTH, "ignore_eos": True} | KINDS[kind]))
    pooling = kind if kind in ("last", "mean") else None
    seed = int(kind[-1]) if kind.startswith("choice") else 7
    return Request(name, (40, 41, 42, 40, 41), params, seed, eos_token_ids=(EOS,), pooling=pooling)


def requests(prefix: str) -> list[Request]:
    return [make_request(f"{prefix}-{kind}", kind) for kind in KINDS]


@pytest.mark.parametrize(("every", "times"), [(2, 4), (20, 2), (50, 1)])
async def test_answers_survive_killed_engines(
    client: ProcessClient,
    undisturbed: dict[str, Answer],
    caplog: pytest.LogCaptureFixture,
    every: int,
    times: int,
) -> None:
    reasons: list[str | None] = []
    client.on_restart = reasons.append
    before = client.readiness.restarts
    killer = Killer(client, every, times)
    assert await collect_answers(client, requests(f"kills {every}"), killer) == undisturbed
    assert len(killer.killed) == len(reasons) == client.readiness.restarts - before == times
    assert caplog.text.count("signal 9") == times


async def test_threads_change_no_bit_in_any_step(checkpoint: Path, undisturbed: dict[str, Answer]) -> None:
    client = make_client(checkpoint, threads=3)
    await client.start()
    numbers = itertools.cycle((2, 1, 9, 3))
    client.on_step = lambda stats: client.set_threads(next(numbers))
    assert await collect_answers(client, requests("threads")) == undisturbed
    assert client.info is not None and client.info.resolved.threads == 3
    await client.close()


async def test_threads_hold_for_the_engine_after_a_crash(checkpoint: Path) -> None:
    """Fewer threads than at the start are a pool of their own, with one worker here."""

    def num_threads() -> int:
        return len(os.listdir(f"/proc/{client.pid}/task"))

    client = make_client(checkpoint, threads=3)
    await client.start()
    before = num_threads()
    client.set_threads(5)
    await collect_answers(client, [make_request("five-greedy", "greedy")])
    assert num_threads() == before
    client.set_threads(2)
    await wait_until_async(lambda: num_threads() == before + 1)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    await collect_answers(client, [make_request("two-greedy", "greedy")])
    await wait_until_async(lambda: num_threads() == before + 1)
    await client.close()


async def test_an_engine_runs_on_its_cores(checkpoint: Path) -> None:
    cpu = max(os.sched_getaffinity(0))
    client = make_client(checkpoint, cpus=str(cpu), gpus="7", threads=None)
    await client.start()
    assert client.pid is not None
    threads = [int(name) for name in os.listdir(f"/proc/{client.pid}/task")]
    assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {frozenset([cpu])}
    await client.close()


async def test_cores_that_do_not_exist_are_refused(checkpoint: Path) -> None:
    client = make_client(checkpoint, cpus="0-2,65000-65001")
    with pytest.raises(
        ConfigError, match=r"cpus 0-2,65000-65001: .*65000-65001 are not available; the server"
    ):
        await client.start()
    await client.close()


@pytest.mark.parametrize("fault", ["segfault", "exit", "broken"])
async def test_crash_in_a_step_restarts_the_engine(
    client: ProcessClient, undisturbed: dict[str, Answer], fault: str
) -> None:
    before = client.readiness.restarts
    asked = [
        make_request(f"{fault}-9-sampled"),
        *(make_request(f"{fault} beside-{kind}", kind) for kind in ("greedy", "grammar")),
    ]
    got = await collect_answers(client, asked)
    assert got == {kind: undisturbed[kind] for kind in ("sampled", "greedy", "grammar")}
    assert client.readiness.restarts == before + 1


async def test_crash_while_idle_restarts_the_engine(
    client: ProcessClient, undisturbed: dict[str, Answer]
) -> None:
    for name in "ab":
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        got = await collect_answers(client, [make_request(f"idle {name}-greedy", "greedy")])
        assert got["greedy"] == undisturbed["greedy"]


@pytest.mark.full
async def test_dead_fork_server_is_replaced(client: ProcessClient, undisturbed: dict[str, Answer]) -> None:
    fork_server = client._fork_server._process
    assert fork_server is not None and client.pid is not None
    os.kill(fork_server.pid, signal.SIGKILL)
    got = await collect_answers(client, [make_request("orphan-greedy", "greedy")])
    assert got["greedy"] == undisturbed["greedy"], "the engine outlives the fork server"
    os.kill(client.pid, signal.SIGKILL)
    got = await collect_answers(client, [make_request("again-greedy", "greedy")])
    assert got["greedy"] == undisturbed["greedy"]


async def test_poison_request_is_refused_and_others_finish(
    client: ProcessClient, undisturbed: dict[str, Answer]
) -> None:
    """It crashes each engine at the same token: with drafts it could gain some before it does."""
    before, request = client.readiness.restarts, make_request("poison-12-x")
    request = replace(request, params=replace(request.params, speculation=Speculation("off")))
    poison = asyncio.create_task(last_event(client, request))
    got = await collect_answers(
        client, [replace(request, id=f"beside {request.id}") for request in requests("poison")]
    )
    assert got == undisturbed
    failed = await poison
    assert (
        isinstance(failed, ErrorEvent)
        and isinstance(failed.error, RequestFailed)
        and "alone" in failed.error.message
    )
    assert client.readiness.restarts - before <= 4


async def test_poison_requests_in_a_row_do_not_end_the_client(
    client: ProcessClient, undisturbed: dict[str, Answer]
) -> None:
    """No other request makes progress."""
    for number in range(3):
        failed = await last_event(client, make_request(f"poison-0-{number}"))
        assert (
            isinstance(failed, ErrorEvent)
            and isinstance(failed.error, RequestFailed)
            and "alone" in failed.error.message
        )
    got = await collect_answers(client, [make_request("later-greedy", "greedy")])
    assert got["greedy"] == undisturbed["greedy"]


async def test_aborted_poison_requests_do_not_end_the_client(client: ProcessClient) -> None:
    for number in range(2 * MAX_IDLE_CRASHES):
        before = client.readiness.restarts
        client.submit(make_request(f"poison-0-{number}"))
        async with asyncio.timeout(WAIT_S):
            while client.readiness.restarts == before:
                await asyncio.sleep(0.001)
        client.abort(f"poison-0-{number}")
    assert isinstance(await last_event(client, make_request("after")), TokenEvent)


@pytest.mark.full
async def test_engine_that_always_crashes_is_given_up(checkpoint: Path) -> None:
    """Even if each crash has another request to blame."""
    client = make_client(checkpoint, entry="tests.support.restart_fails_engine")
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


@pytest.mark.full
async def test_deadlines_hold_while_the_engine_is_stopped(client: ProcessClient) -> None:
    await collect_answers(client, [make_request("well")])
    pid = client.pid
    assert pid is not None
    stop_process(pid)
    now_s = time.monotonic()
    asked = {
        DeadlineExceeded: replace(make_request("deadline"), arrival_s=now_s, deadline_s=now_s + 0.3),
        Overloaded: replace(make_request("start"), arrival_s=now_s, queue_deadline_s=now_s + 0.3),
    }
    events = await asyncio.gather(*(last_event(client, request) for request in asked.values()))
    stats = client.stats
    os.kill(pid, signal.SIGCONT)
    assert [type(one.error) for one in events if isinstance(one, ErrorEvent)] == list(asked)
    assert stats.requests_waiting == 0 and client.pid == pid


async def test_stats_count_open_requests_during_restart(client: ProcessClient) -> None:
    stats: list[StepStats] = []
    client.on_restart = lambda _: stats.append(client.stats)
    stream = client.submit(replace(make_request("open"), arrival_s=time.monotonic() - 100))
    await anext(stream)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    async for _ in stream:
        pass
    assert (stats[0].requests_running, stats[0].requests_waiting) == (0, 1) and stats[
        0
    ].oldest_running_seconds >= 100


@pytest.mark.full
async def test_stopped_fork_server_is_replaced(
    client: ProcessClient, undisturbed: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreword.engine_client.connection.EXIT_TIMEOUT_S", 1000.0)
    monkeypatch.setattr("foreword.engine_client.forkserver.FORK_TIMEOUT_S", 1000.0)
    fork_server = client._fork_server._process
    assert fork_server is not None and client.pid is not None
    stop_process(fork_server.pid)
    os.kill(client.pid, signal.SIGKILL)
    got = await collect_answers(client, [make_request("stopped fork server-greedy", "greedy")])
    assert got["greedy"] == undisturbed["greedy"]


async def test_unreadable_vocabulary_fails_its_request_only(
    client: ProcessClient, undisturbed: dict[str, Answer]
) -> None:
    def unreadable() -> Vocabulary:
        raise FileNotFoundError("tokenizer.json")

    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)  # the next engine has no vocabulary
    vocabulary, client._vocabulary = client._vocabulary, unreadable
    failed = asyncio.create_task(last_event(client, make_request("unread-grammar", "grammar")))
    got = await collect_answers(client, [make_request("beside-greedy", "greedy")])
    event = await failed
    client._vocabulary = vocabulary
    got |= await collect_answers(client, [make_request("after-grammar", "grammar")])
    assert isinstance(event, ErrorEvent) and "FileNotFoundError" in event.error.message
    assert got == {kind: undisturbed[kind] for kind in ("greedy", "grammar")}


@pytest.mark.full
async def test_restart_without_descriptors_is_retried(
    client: ProcessClient, undisturbed: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
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
    got = await collect_answers(client, [make_request("scarce-greedy", "greedy")])
    assert got["greedy"] == undisturbed["greedy"] and next(results, create) is create


@pytest.mark.full
@pytest.mark.parametrize("fault", ["stopped", "locked"])
async def test_close_does_not_wait_for_a_hung_engine(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """With a heartbeat close() waits for the step, until skip_drain()."""
    monkeypatch.setattr("foreword.engine_client.connection.EXIT_TIMEOUT_S", 1000.0)
    client = make_client(checkpoint)
    await client.start()
    stream = client.submit(make_request(f"{fault}-3-x"))
    await anext(stream)
    assert client.pid is not None and client._process is not None
    process = client._process
    async with asyncio.timeout(WAIT_S):
        while (
            not process.is_unresponsive()
            if fault == "stopped"
            else time.monotonic() - process.heartbeat.read().busy_since_s < 0.5
        ):
            await asyncio.sleep(0.05)
        closing = asyncio.create_task(client.close())
        if fault == "locked":
            await asyncio.sleep(0.2)
            assert not closing.done()
            client.skip_drain()
        await closing


async def test_abort_of_a_suspect_releases_waiting_requests(
    client: ProcessClient, undisturbed: dict[str, Answer]
) -> None:
    assert client.pid is not None
    stop_process(client.pid)
    client.submit(make_request("suspect"))
    for _ in range(2):
        client._inflight._suspects.on_crash(["suspect"])
    answering = asyncio.create_task(collect_answers(client, [make_request("waits-greedy", "greedy")]))
    while len(client._inflight) < 2:
        await asyncio.sleep(0)
    client.abort("suspect")
    os.kill(client.pid, signal.SIGCONT)
    assert (await answering)["greedy"] == undisturbed["greedy"]


async def test_requests_ended_during_restart_are_not_resumed(client: ProcessClient) -> None:
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


async def test_failing_callbacks_lose_no_event(client: ProcessClient, undisturbed: dict[str, Answer]) -> None:
    def fail(*_: object) -> None:
        raise ValueError("a callback")

    client.on_step = client.on_restart = fail
    got = await collect_answers(client, requests("callbacks"), Killer(client, 20, times=1))
    client.on_step = client.on_restart = None
    assert got == undisturbed


@pytest.mark.full
async def test_hung_engine_is_restarted(checkpoint: Path, undisturbed: dict[str, Answer]) -> None:
    """One hangs in a step, the other is stopped."""
    client = make_client(checkpoint, hang_timeout=2.0)
    await client.start()
    reasons: list[str | None] = []
    client.on_restart = reasons.append
    for fault in ("locked", "stopped"):
        got = await collect_answers(client, [make_request(f"{fault}-9-sampled")])
        assert got["sampled"] == undisturbed["sampled"]
    await client.close()
    assert "step" in str(reasons[0]) and "heartbeat" in str(reasons[1])


@pytest.mark.full
async def test_briefly_stopped_engine_goes_on(client: ProcessClient, undisturbed: dict[str, Answer]) -> None:
    pid = client.pid
    assert pid is not None
    answering = asyncio.create_task(collect_answers(client, [make_request("moment-greedy", "greedy")]))
    stop_process(pid)
    async with asyncio.timeout(WAIT_S):
        while client.readiness.status != "unresponsive":
            await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGCONT)
    assert (await answering)["greedy"] == undisturbed["greedy"]
    async with asyncio.timeout(WAIT_S):
        while not client.readiness.is_ready:
            await asyncio.sleep(0.05)
    assert client.pid == pid


@pytest.mark.full
async def test_engine_that_cannot_restart_is_given_up(checkpoint: Path, tmp_path: Path) -> None:
    moved = write_checkpoint(tmp_path / "model", "llama", seed=5)
    client = make_client(moved)
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


@pytest.mark.full
async def test_changed_checkpoint_is_not_resumed(checkpoint: Path, tmp_path: Path) -> None:
    changed = write_checkpoint(tmp_path / "model", "llama", seed=5)
    client = make_client(changed)
    await client.start()
    write_checkpoint(changed, "llama", seed=6)
    assert client.pid is not None
    os.kill(client.pid, signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        await client.dead.wait()
    await client.close()


@pytest.mark.full
async def test_engine_killed_while_loading_is_a_config_error(checkpoint: Path) -> None:
    client = make_client(checkpoint, entry="tests.support.start_fails_engine")
    with pytest.raises(ConfigError, match=r"while it was loading.*signal 9"):
        await client.start()
    await client.close()
