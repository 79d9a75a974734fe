"""A router with one engine process, which crashes and hangs under open requests: all answers stay the same.

--replica-timeout is shorter than any start here: it is for servers with several engines.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from foreword.core.outputs import ErrorEvent, Event, StepStats, TokenEvent
from foreword.core.params import SamplingParams, Speculation
from foreword.core.structured_output import StructuredOutput, Vocabulary
from foreword.engine_client.crash_policy import MAX_IDLE_CRASHES
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.heartbeat import HeartbeatPage
from foreword.engine_client.router import TICK_S, EngineRouter
from foreword.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    EngineDead,
    InvalidRequest,
    Overloaded,
    RequestFailed,
)
from tests.support.budget import is_full, some_of
from tests.support.checkpoints import STATE_FAMILIES, write_checkpoint, write_related_drafter
from tests.support.client_answers import (
    Answer,
    Killer,
    collect_answers,
    is_gone,
    kind_request,
    kind_requests,
    last_event,
    make_client,
    pid_of,
    process_of,
)
from tests.support.engines import make_request
from tests.support.waiting import WAIT_S, stop_process, wait_until_async

pytestmark = pytest.mark.asyncio(loop_scope="package")

KILLED_FAMILIES = ("deepseek_v2", "falcon_h1", "gemma4_text", "granitemoehybrid", "qwen3_5_text")
OPTIONS = {"replica_timeout": 0.01, "prefix_caching": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("client") / "model", "llama", seed=5)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def client(checkpoint: Path, fork_server: ForkServer) -> AsyncIterator[EngineRouter]:
    client = make_client(checkpoint, fork_server, **OPTIONS)
    await client.start()
    yield client
    await client.close()
    assert is_gone(pid_of(client))


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def undisturbed(client: EngineRouter) -> dict[str, Answer]:
    """The answers without any crash."""
    return await collect_answers(client, kind_requests("undisturbed"))


@pytest.mark.parametrize(("every", "times"), [(2, 4), (20, 2)])
async def test_answers_survive_killed_engines(
    client: EngineRouter,
    undisturbed: dict[str, Answer],
    caplog: pytest.LogCaptureFixture,
    every: int,
    times: int,
) -> None:
    reasons: list[str | None] = []
    client.on_restart = reasons.append
    before = client.readiness.restarts
    killer = Killer(client, every, times)
    assert await collect_answers(client, kind_requests(f"kills {every}"), killer) == undisturbed
    assert len(killer.killed) == len(reasons) == client.readiness.restarts - before == times
    assert caplog.text.count("signal 9") == times


async def test_a_vocabulary_that_fails_fails_the_start(fork_server: ForkServer, tmp_path: Path) -> None:
    """The engine waits for it where a drafter writes text."""
    client = make_client(write_checkpoint(tmp_path / "model"), fork_server, speculate="text")

    def fail() -> Vocabulary:
        raise ValueError("no vocabulary")

    process_of(client)._vocabulary = fail
    with pytest.raises(ValueError, match="no vocabulary"):
        await client.start()
    await client.close()


KEPT_FAMILIES = ("llama", *(STATE_FAMILIES if is_full() else ("qwen3_5_text",)))


@pytest.mark.parametrize(
    ("family", "tier"),
    some_of(
        [
            *((family, "none") for family in KILLED_FAMILIES),
            *zip(KEPT_FAMILIES, itertools.cycle(("disk", "memory")), strict=False),
        ],
        8,
    ),
)
async def test_long_answers_with_a_drafter_survive_killed_engines(
    fork_server: ForkServer, tmp_path: Path, family: str, tier: str
) -> None:
    """Layers with state, latent attention, shared K and V; prompts and answers longer than a segment.

    Some prompts have a common start; blocks perhaps outlive the engines.
    """
    options: dict[str, Any] = {"disk": {"kv_cache_dir": str(tmp_path / "kv")}}.get(tier, {})
    options["kv_cache_shared_memory"] = tier == "memory"
    seed = {"qwen3_next": 3, "nemotron_h": 3}.get(family, 6)  # some drafts are right
    model = write_checkpoint(tmp_path / "model", family, seed=seed, tie_word_embeddings=False)
    drafter = write_related_drafter(tmp_path / "drafter", model)
    options |= {"speculate": "draft", "draft_model": str(drafter), "draft_length": "fixed"}
    client = make_client(model, fork_server, max_num_seqs=3, num_speculative_tokens=3, **options)
    await client.start()

    async def answers(prefix: str, seen: Callable[[Event], None]) -> dict[str, tuple[list[int], list[int]]]:
        texts = {f"{prefix}-{n}": [*range(40, 140), *range(7 + n % 2, 60 + n)] for n in range(4)}
        asked = [
            make_request(name, text, seed=n, max_tokens=70, temperature=n % 2)
            for n, (name, text) in enumerate(texts.items())
        ]
        collected = await collect_answers(client, asked, seen)
        return {name: (answer.token_ids, answer.hashes) for name, answer in collected.items()}

    try:
        killer, events = Killer(client, 20, 2), list[Event]()
        expected = await answers("undisturbed", events.append)
        assert await answers("kills", killer) == expected and len(killer.killed) == 2
        assert all(len(hashes) == 70 for _, hashes in expected.values())
        assert len(events) < 4 * 70, "no draft was accepted"
        assert (process_of(client).stats.adopted_tokens > 0) == (tier == "memory")
    finally:
        await client.close()


async def test_memory_of_an_engine_that_crashed_by_itself_is_dropped(
    checkpoint: Path, fork_server: ForkServer
) -> None:
    """A fault may have written anywhere; a kill from outside has not."""

    def is_restarted(before: int) -> bool:
        return client.readiness.restarts > before and client.readiness.is_ready

    client = make_client(checkpoint, fork_server, kv_cache_shared_memory=True)
    await client.start()
    try:
        prompt = list(range(5, 105))
        expected = await collect_answers(client, [make_request("a", prompt)])
        for number, is_adopted in [(signal.SIGKILL, True), (signal.SIGSEGV, False), (signal.SIGKILL, True)]:
            restarts = client.readiness.restarts
            os.kill(pid_of(client), number)
            await wait_until_async(partial(is_restarted, restarts))
            answers = await collect_answers(client, [make_request(name := f"after {restarts}", prompt)])
            assert answers[name].token_ids == expected["a"].token_ids
            assert (process_of(client).stats.adopted_tokens > 0) == is_adopted
    finally:
        await client.close()


async def test_abort_frees_everything(client: EngineRouter) -> None:
    streams = {name: client.submit(kind_request(f"{name}-sampled")) for name in ("abort", "leave")}
    for stream in streams.values():
        await anext(stream)
    assert client.stats.kv_cache_usage_ratio > 0
    client.abort("abort-sampled")
    await streams["leave"].aclose()  # type: ignore[attr-defined]
    assert [event async for event in streams["abort"] if isinstance(event, ErrorEvent)] == []
    await wait_until_async(
        lambda: not client.stats.requests_running and not client.stats.kv_cache_usage_ratio
    )


async def test_invalid_request_fails_alone(client: EngineRouter) -> None:
    steps: list[StepStats] = []
    client.on_step = steps.append
    params = SamplingParams(speculation=Speculation("draft"))
    failed, answers = await asyncio.gather(
        last_event(client, replace(kind_request("invalid-sampled"), params=params)),
        collect_answers(client, [kind_request("valid-sampled")]),
    )
    client.on_step = None
    assert isinstance(failed, ErrorEvent) and isinstance(failed.error, InvalidRequest)
    assert failed.error.param == "speculation.method" and answers["sampled"].end == "length"
    assert steps[-1].stage_seconds.keys() >= {"schedule", "assemble", "forward", "sample", "draft", "commit"}


async def test_requests_wait_longer_than_the_replica_timeout(
    client: EngineRouter, undisturbed: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is restarted, however long it takes. A stopped fork server starts none."""
    monkeypatch.setattr("foreword.engine_client.engine_process.EXIT_CODE_TIMEOUT_S", 1000.0)
    monkeypatch.setattr("foreword.engine_client.forkserver.FORK_TIMEOUT_S", 1000.0)
    fork_server = process_of(client)._fork_server._process
    assert fork_server is not None
    stop_process(fork_server.pid)
    os.kill(pid_of(client), signal.SIGKILL)
    answering = asyncio.create_task(collect_answers(client, kind_requests("waits")))
    began_s = time.monotonic()
    await wait_until_async(lambda: client._waiting and time.monotonic() - began_s > 3 * TICK_S)
    os.kill(fork_server.pid, signal.SIGCONT)
    assert await answering == undisturbed


async def test_threads_change_no_bit_and_hold_for_the_engine_after_a_crash(
    checkpoint: Path, fork_server: ForkServer, undisturbed: dict[str, Answer]
) -> None:
    """Fewer threads than at the start are a pool of their own, with one worker here."""

    def num_threads() -> int:
        return len(os.listdir(f"/proc/{pid_of(client)}/task"))

    client = make_client(checkpoint, fork_server, threads=3, **OPTIONS)
    await client.start()
    before, numbers = num_threads(), itertools.cycle((2, 1, 9, 3))
    client.set_threads(5)
    client.on_step = lambda stats: client.set_threads(next(numbers))
    assert await collect_answers(client, kind_requests("threads")) == undisturbed
    client.on_step = None
    assert client.info is not None and client.info.resolved.threads == 3
    client.set_threads(2)
    await wait_until_async(lambda: num_threads() > before)
    fewer = num_threads()
    os.kill(pid_of(client), signal.SIGKILL)
    await collect_answers(client, [kind_request("two-greedy", "greedy")])
    await wait_until_async(lambda: num_threads() == before + 1)
    assert fewer >= before + 1
    await client.close()


async def test_an_engine_runs_on_its_cores(checkpoint: Path, fork_server: ForkServer) -> None:
    cpu = max(os.sched_getaffinity(0))
    client = make_client(checkpoint, fork_server, cpus=str(cpu), gpus="7", threads=None)
    await client.start()
    threads = [int(name) for name in os.listdir(f"/proc/{pid_of(client)}/task")]
    assert {frozenset(os.sched_getaffinity(thread)) for thread in threads} == {frozenset([cpu])}
    await client.close()


async def test_cores_that_do_not_exist_are_refused(checkpoint: Path, fork_server: ForkServer) -> None:
    client = make_client(checkpoint, fork_server, cpus="0-2,65000-65001")
    with pytest.raises(
        ConfigError, match=r"cpus 0-2,65000-65001: .*65000-65001 are not available; the server"
    ):
        await client.start()
    await client.close()


@pytest.mark.parametrize("fault", ["segfault", "exit", "broken"])
async def test_crash_in_a_step_restarts_the_engine(
    client: EngineRouter, undisturbed: dict[str, Answer], fault: str
) -> None:
    before = client.readiness.restarts
    asked = [
        kind_request(f"{fault}-9-sampled"),
        *(kind_request(f"{fault} beside-{kind}", kind) for kind in ("greedy", "grammar")),
    ]
    got = await collect_answers(client, asked)
    assert got == {kind: undisturbed[kind] for kind in ("sampled", "greedy", "grammar")}
    assert client.readiness.restarts == before + 1


async def test_crash_while_idle_restarts_the_engine(
    client: EngineRouter, undisturbed: dict[str, Answer]
) -> None:
    for name in "ab":
        os.kill(pid_of(client), signal.SIGKILL)
        got = await collect_answers(client, [kind_request(f"idle {name}-greedy", "greedy")])
        assert got["greedy"] == undisturbed["greedy"]


async def test_poison_request_is_refused_and_others_finish(
    client: EngineRouter, undisturbed: dict[str, Answer]
) -> None:
    """It crashes each engine at the same token: with drafts it could gain some before it does."""
    before, request = client.readiness.restarts, kind_request("poison-12-x")
    request = replace(request, params=replace(request.params, speculation=Speculation("off")))
    poison = asyncio.create_task(last_event(client, request))
    got = await collect_answers(
        client, [replace(request, id=f"beside {request.id}") for request in kind_requests("poison")]
    )
    assert got == undisturbed
    failed = await poison
    assert (
        isinstance(failed, ErrorEvent)
        and isinstance(failed.error, RequestFailed)
        and "alone" in failed.error.message
    )
    assert client.readiness.restarts - before <= 4


async def test_aborted_poison_requests_do_not_end_the_client(client: EngineRouter) -> None:
    for number in range(MAX_IDLE_CRASHES + 1):
        before = client.readiness.restarts
        client.submit(kind_request(f"poison-0-{number}"))
        async with asyncio.timeout(WAIT_S):
            while client.readiness.restarts == before:
                await asyncio.sleep(0.001)
        client.abort(f"poison-0-{number}")
    assert isinstance(await last_event(client, kind_request("after")), TokenEvent)


async def test_unreadable_vocabulary_fails_its_request_only(
    client: EngineRouter, undisturbed: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = process_of(client)
    readable, errors = engine._vocabulary, [FileNotFoundError("tokenizer.json")]

    def vocabulary() -> Vocabulary:
        if errors:
            raise errors.pop()
        return readable()

    monkeypatch.setattr(engine, "_vocabulary", vocabulary)
    # the drafter `text` reads it before the first request
    monkeypatch.setattr(engine, "_config", replace(engine._config, speculate="suffix"))
    os.kill(pid_of(client), signal.SIGKILL)  # the next engine has no vocabulary
    failed = asyncio.create_task(last_event(client, kind_request("unread-grammar", "grammar")))
    got = await collect_answers(client, [kind_request("beside-greedy", "greedy")])
    event = await failed
    got |= await collect_answers(client, [kind_request("after-grammar", "grammar")])
    assert isinstance(event, ErrorEvent) and "FileNotFoundError" in event.error.message
    assert got == {kind: undisturbed[kind] for kind in ("greedy", "grammar")}


# Rarer failures


@pytest.mark.full
async def test_engine_that_always_crashes_is_given_up(checkpoint: Path) -> None:
    """Even if each crash has another request to blame."""
    client = make_client(checkpoint, entry="tests.support.restart_fails_engine")
    await client.start()
    number = 0
    async with asyncio.timeout(WAIT_S):
        while client.alive:
            client.submit(kind_request(str(number)))
            number += 1
            await asyncio.sleep(0.05)
        await client.dead.wait()
    assert client.readiness.restarts <= MAX_IDLE_CRASHES + 4
    await client.close()


@pytest.mark.full
async def test_deadlines_hold_while_the_engine_is_stopped(client: EngineRouter) -> None:
    await collect_answers(client, [kind_request("well")])
    pid = pid_of(client)
    assert pid is not None
    stop_process(pid)
    now_s = time.monotonic()
    asked = {
        DeadlineExceeded: replace(kind_request("deadline"), arrival_s=now_s, deadline_s=now_s + 0.3),
        Overloaded: replace(kind_request("start"), arrival_s=now_s, queue_deadline_s=now_s + 0.3),
    }
    events = await asyncio.gather(*(last_event(client, request) for request in asked.values()))
    stats = client.stats
    os.kill(pid, signal.SIGCONT)
    assert [type(one.error) for one in events if isinstance(one, ErrorEvent)] == list(asked)
    assert stats.requests_waiting == 0 and pid_of(client) == pid


@pytest.mark.full
async def test_dead_fork_server_is_replaced(client: EngineRouter, undisturbed: dict[str, Answer]) -> None:
    fork_server = process_of(client)._fork_server._process
    assert fork_server is not None
    os.kill(fork_server.pid, signal.SIGKILL)
    got = await collect_answers(client, [kind_request("orphan-greedy", "greedy")])
    assert got["greedy"] == undisturbed["greedy"], "the engine outlives the fork server"
    os.kill(pid_of(client), signal.SIGKILL)
    got = await collect_answers(client, [kind_request("again-greedy", "greedy")])
    assert got["greedy"] == undisturbed["greedy"]


@pytest.mark.full
async def test_stopped_fork_server_is_replaced(
    client: EngineRouter, undisturbed: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreword.engine_client.engine_process.EXIT_TIMEOUT_S", 1000.0)
    monkeypatch.setattr("foreword.engine_client.forkserver.FORK_TIMEOUT_S", 1000.0)
    fork_server = process_of(client)._fork_server._process
    assert fork_server is not None
    stop_process(fork_server.pid)
    os.kill(pid_of(client), signal.SIGKILL)
    got = await collect_answers(client, [kind_request("stopped fork server-greedy", "greedy")])
    assert got["greedy"] == undisturbed["greedy"]


@pytest.mark.full
async def test_restart_without_descriptors_is_retried(
    client: EngineRouter, undisturbed: dict[str, Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    create = HeartbeatPage.create
    results = iter([None, None])

    def scarce() -> HeartbeatPage:
        if next(results, create) is None:
            raise OSError(errno.EMFILE, "Too many open files")
        return create()

    monkeypatch.setattr(HeartbeatPage, "create", scarce)
    os.kill(pid_of(client), signal.SIGKILL)
    got = await collect_answers(client, [kind_request("scarce-greedy", "greedy")])
    assert got["greedy"] == undisturbed["greedy"] and next(results, create) is create


async def test_restart_without_a_new_memory_file_is_retried(
    checkpoint: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The damaged file stays open meanwhile: its number would be another file's."""
    client = make_client(checkpoint, fork_server, kv_cache_shared_memory=True)
    await client.start()
    memory, create = process_of(client)._kv_memory, os.memfd_create
    assert memory is not None
    before, errors = os.fstat(memory.fd).st_ino, [OSError(errno.EMFILE, "Too many open files")]

    def scarce(name: str, flags: int) -> int:
        if "kv-cache" in name and errors:
            assert os.fstat(memory.fd).st_ino == before
            raise errors.pop()
        return create(name, flags)

    monkeypatch.setattr(os, "memfd_create", scarce)
    try:
        os.kill(pid_of(client), signal.SIGSEGV)
        await wait_until_async(lambda: client.readiness.restarts > 0 and client.readiness.is_ready)
        assert not errors and os.fstat(memory.fd).st_ino != before
    finally:
        await client.close()


async def test_reload_with_changed_weights_has_another_folder(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """The server saves conversations there."""
    model = write_checkpoint(tmp_path / "model")
    client = make_client(model, fork_server, kv_cache_dir=str(tmp_path / "kv"))
    folders: list[str] = []
    await client.start()
    try:
        for _ in range(2):
            assert client.info is not None and client.info.kv_files is not None
            folders.append(client.info.kv_files.folder)
            for path in model.glob("*.safetensors"):
                os.utime(path, (1e9, 1e9))
            async for _ in client.reload():
                pass
    finally:
        await client.close()
    assert set(folders) == {path.name for path in tmp_path.glob("kv/model-*")} and len(set(folders)) == 2


@pytest.mark.full
@pytest.mark.parametrize("fault", ["stopped", "locked"])
async def test_close_does_not_wait_for_a_hung_engine(
    checkpoint: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """With a heartbeat close() waits for the step, until skip_drain()."""
    monkeypatch.setattr("foreword.engine_client.engine_process.EXIT_TIMEOUT_S", 1000.0)
    client = make_client(checkpoint, fork_server)
    await client.start()
    stream = client.submit(kind_request(f"{fault}-3-x"))
    await anext(stream)
    process = process_of(client)._session.process  # type: ignore[union-attr]
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


@pytest.mark.full
async def test_hung_engine_is_restarted(
    checkpoint: Path, fork_server: ForkServer, undisturbed: dict[str, Answer]
) -> None:
    """One hangs in a step, the other is stopped."""
    client = make_client(checkpoint, fork_server, hang_timeout=2.0)
    await client.start()
    reasons: list[str | None] = []
    client.on_restart = reasons.append
    for fault in ("locked", "stopped"):
        got = await collect_answers(client, [kind_request(f"{fault}-9-sampled")])
        assert got["sampled"] == undisturbed["sampled"]
    await client.close()
    assert "step" in str(reasons[0]) and "heartbeat" in str(reasons[1])


@pytest.mark.full
async def test_briefly_stopped_engine_goes_on(client: EngineRouter, undisturbed: dict[str, Answer]) -> None:
    pid = pid_of(client)
    assert pid is not None
    answering = asyncio.create_task(collect_answers(client, [kind_request("moment-greedy", "greedy")]))
    stop_process(pid)
    async with asyncio.timeout(WAIT_S):
        while client.readiness.status != "unresponsive":
            await asyncio.sleep(0.05)
    os.kill(pid, signal.SIGCONT)
    assert (await answering)["greedy"] == undisturbed["greedy"]
    async with asyncio.timeout(WAIT_S):
        while not client.readiness.is_ready:
            await asyncio.sleep(0.05)
    assert pid_of(client) == pid


@pytest.mark.full
async def test_engine_that_cannot_restart_is_given_up(
    checkpoint: Path, fork_server: ForkServer, tmp_path: Path
) -> None:
    moved = write_checkpoint(tmp_path / "model", "llama", seed=5)
    client = make_client(moved, fork_server)
    await client.start()
    stream = client.submit(kind_request("a"))
    await anext(stream)
    weights = moved / "model.safetensors"
    weights.rename(tmp_path / "weights")
    os.kill(pid_of(client), signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        events = [event async for event in stream]
        await client.dead.wait()
    assert isinstance(events[-1], ErrorEvent) and isinstance(events[-1].error, EngineDead)
    assert not client.alive and client.readiness.status == "dead"
    with pytest.raises(EngineDead):
        client.submit(kind_request("b"))
    (tmp_path / "weights").rename(weights)
    await start_again(client)
    await client.close()


async def start_again(client: EngineRouter) -> None:
    """As a reload does beside other replicas."""
    (replica,) = client._replicas
    before = client.pids
    await replica.client.start(replica.callbacks, replica.client)
    assert replica.is_ready and client.pids != before
    for pid in before.values():
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.full
async def test_changed_checkpoint_is_not_resumed(
    checkpoint: Path, fork_server: ForkServer, tmp_path: Path
) -> None:
    changed = write_checkpoint(tmp_path / "model", "llama", seed=5)
    client = make_client(changed, fork_server)
    await client.start()
    write_checkpoint(changed, "llama", seed=6)
    os.kill(pid_of(client), signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        await client.dead.wait()
    await start_again(client)
    await client.close()


@pytest.mark.full
async def test_engine_killed_while_loading_is_a_config_error(checkpoint: Path) -> None:
    client = make_client(checkpoint, entry="tests.support.start_fails_engine")
    with pytest.raises(ConfigError, match=r"while it was loading.*signal 9"):
        await client.start()
    await client.close()


@pytest.mark.full
async def test_queued_grammars_do_not_delay_close(
    checkpoint: Path, fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With minutes of compilation queued, the process exits by itself."""
    monkeypatch.setattr("foreword.engine_client.engine_process.EXIT_TIMEOUT_S", 40.0)
    client = make_client(checkpoint, fork_server)
    await client.start()
    sampled = kind_request("")
    for number in range(400):
        schema = {"properties": {f"{number} {name}": {"type": "integer"} for name in range(1500)}}
        params = replace(sampled.params, structured=StructuredOutput.json_schema(schema))
        client.submit(replace(sampled, id=str(number), params=params))
    await asyncio.sleep(0.5)  # some have reached the engine
    await client.close()
    engine = process_of(client)
    assert engine._session is not None
    assert "exit code 0" in await engine._session.process.reap(engine._fork_server)


@pytest.mark.full
async def test_load_progress_is_reported(checkpoint: Path, fork_server: ForkServer) -> None:
    progress: list[tuple[str, int, int]] = []
    client = make_client(checkpoint, fork_server)
    process_of(client)._on_progress = lambda *stage: progress.append(stage)
    info = await client.start()
    assert info.architecture == "llama"
    assert info.resolved.drafters == ("grammar", "prediction", "suffix", "text")
    assert {stage for stage, _, _ in progress} == {"weights"} and progress[-1][1] == progress[-1][2] > 0
    await client.close()
    assert not client.dead.is_set()


@pytest.mark.full
async def test_missing_checkpoint_is_refused(fork_server: ForkServer, tmp_path: Path) -> None:
    moved = write_checkpoint(tmp_path / "moved", "llama")
    client = make_client(moved, fork_server)
    (moved / "config.json").unlink()
    with pytest.raises(CheckpointError, match="moved"):
        await client.start()
    await client.close()
