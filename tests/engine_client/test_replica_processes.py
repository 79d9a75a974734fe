"""Replicas are real engine processes: they crash, drain and reload under streams whose answers stay equal."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from foreword.core.outputs import Event, TokenEvent
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.replica import RouterReplica
from foreword.engine_client.router import EngineRouter
from foreword.errors import AdapterConflict
from tests.support.checkpoints import write_checkpoint
from tests.support.client_answers import (
    Answer,
    Killer,
    collect_answers,
    kind_request,
    kind_requests,
    make_client,
)
from tests.support.heads import write_random_head
from tests.support.lora_files import write_adapter
from tests.support.waiting import stop_process, wait_until_async

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("replicas") / "model", "llama", seed=5)


def make_replicas(checkpoint: Path, fork_server: ForkServer, **options: Any) -> EngineRouter:
    return make_client(checkpoint, fork_server, **({"replicas": 2} | options))


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def client(checkpoint: Path, fork_server: ForkServer) -> AsyncIterator[EngineRouter]:
    """Drafts from a trained head, whose memory each replica makes anew."""
    head = write_random_head(checkpoint.parent / "head", checkpoint)
    options = {"draft_model": str(head), "speculate": "eagle3,suffix"}
    client = make_replicas(checkpoint, fork_server, replicas=3, **options)
    await client.start()
    yield client
    await client.close()


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def undisturbed(client: EngineRouter) -> dict[str, Answer]:
    return await collect_answers(client, kind_requests("undisturbed"))


async def wait_ready(client: EngineRouter) -> None:
    await wait_until_async(lambda: all(each.status == "ok" for each in client.replica_states()))


def placed(client: EngineRouter) -> list[int]:
    """Open streams of each replica."""
    return [len(each.requests) for each in client._replicas]


@pytest.mark.parametrize(("every", "times"), [(2, 6), (20, 3)])
async def test_answers_survive_killed_replicas(
    client: EngineRouter, undisturbed: dict[str, Answer], every: int, times: int
) -> None:
    await wait_ready(client)
    killer = Killer(client, every, times)
    got = await collect_answers(client, kind_requests(f"kills {every}"), killer)
    assert same_but_cached(got) == same_but_cached(undisturbed)
    assert len(killer.killed) == times


def same_but_cached(answers: dict[str, Answer]) -> dict[str, Answer]:
    """Which prompt tokens are cached depends on the requests before."""
    assert all(len(answer.cached) <= 1 for answer in answers.values()), "usage changed within an answer"
    return {kind: replace(answer, cached=set()) for kind, answer in answers.items()}


async def test_reload_replaces_every_engine_under_streams(
    client: EngineRouter, undisturbed: dict[str, Answer]
) -> None:
    await wait_ready(client)
    before, lines = dict(client.pids), []
    reloading: list[asyncio.Task[None]] = []

    async def reload() -> None:
        async for line in client.reload():
            lines.append(line)

    def begin(event: Event) -> None:
        if not reloading:
            reloading.append(asyncio.create_task(reload()))

    reasons: list[str | None] = []
    client.on_restart = reasons.append
    got = await collect_answers(client, kind_requests("reload"), begin)
    await reloading[0]
    client.on_restart = None
    assert reasons == [None] * 3, "a reload is no death"
    assert same_but_cached(got) == same_but_cached(undisturbed)
    assert len({*before.values(), *client.pids.values()}) == 6, "all processes are new"
    assert [line.split(":")[0] for line in lines] == [f"replica {i}" for i in "000111222"]
    assert all(each.status == "ok" for each in client.replica_states())


async def test_drained_replica_hands_over_its_streams(
    checkpoint: Path, fork_server: ForkServer, undisturbed: dict[str, Answer]
) -> None:
    client = make_replicas(checkpoint, fork_server)
    await client.start()
    seen = 0
    draining: list[asyncio.Task[None]] = []

    def drain(event: Event) -> None:
        nonlocal seen
        seen += 1
        if seen == 20:
            assert all(placed(client)), "both replicas have streams"
            draining.append(asyncio.create_task(client.drain("0")))

    got = await collect_answers(client, kind_requests("drain"), drain)
    await draining[0]
    assert same_but_cached(got) == same_but_cached(undisturbed)
    assert [each.id for each in client.replica_states()] == ["1"]
    await client.close()


@pytest.mark.full
async def test_added_replica_takes_streams(
    checkpoint: Path, fork_server: ForkServer, undisturbed: dict[str, Answer]
) -> None:
    """It makes the choices of the first, and the last one standing is removed."""
    client = make_replicas(checkpoint, fork_server)
    other = make_replicas(checkpoint, fork_server)
    await client.start()
    added = other._replicas.members.pop("1")
    client.add(RouterReplica("new", added.client))
    await wait_until_async(lambda: all(each.status == "ok" for each in client.replica_states()))
    for name in "01":
        await client.drain(name)
    got = await collect_answers(client, kind_requests("added"))
    assert same_but_cached(got) == same_but_cached(undisturbed)
    await client.close()
    await other.close()


@pytest.mark.full
async def test_stopped_replica_loses_its_streams(
    client: EngineRouter, undisturbed: dict[str, Answer]
) -> None:
    """It does not answer, and would hold them until --hang-timeout."""
    await wait_ready(client)
    stopped: list[int] = []

    def stop(event: Event) -> None:
        if not stopped:
            stopped.append(client.pids[client._requests[event.request_id].replica.id])  # type: ignore[union-attr]
            stop_process(stopped[0])

    got = await collect_answers(client, kind_requests("silence"), stop)
    assert same_but_cached(got) == same_but_cached(undisturbed)
    os.kill(stopped[0], signal.SIGCONT)
    await wait_ready(client)
    assert stopped[0] in client.pids.values(), "it was not replaced"


@pytest.mark.full
async def test_adapters_are_in_all_replicas_or_none(
    checkpoint: Path, fork_server: ForkServer, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "first", checkpoint, seed=1, strength=0.3)
    write_adapter(tmp_path / "second", checkpoint, seed=2, strength=0.3)
    client = make_replicas(checkpoint, fork_server, max_loras=1)
    await client.start()
    info = await client.load_adapter(str(tmp_path / "first"))
    asked = [replace(kind_request(f"calm-{i}"), adapter=info.digest) for i in range(6)]
    expected = await collect_answers(client, asked)
    killer = Killer(client, every=10, times=2)
    again = [replace(request, id=f"kills-{index}") for index, request in enumerate(asked)]
    got = await collect_answers(client, again, killer)
    assert same_but_cached(got) == same_but_cached(expected) and len(killer.killed) == 2
    with pytest.raises(AdapterConflict):
        await client.load_adapter(str(tmp_path / "second"))
    await client.unload_adapter(info.digest)
    one = client._replicas.members["1"].client
    await one.load_adapter(str(tmp_path / "second"))  # its only slot
    with pytest.raises(AdapterConflict):
        await client.load_adapter(str(tmp_path / "first"))
    await one.unload_adapter((await one.load_adapter(str(tmp_path / "second"))).digest)
    assert await client.load_adapter(str(tmp_path / "first")) == info, "the other replica had no room for it"
    await client.close()


async def test_choices_of_a_prompt_share_its_blocks(client: EngineRouter) -> None:
    """The router knows blocks that an engine is about to compute, and those that it has."""
    await wait_ready(client)
    prompt = tuple(range(60, 160))
    asked = [replace(kind_request(f"shared-{i}", "greedy"), prompt_ids=prompt) for i in range(3)]
    for request in asked:
        client.submit(request)
    assert sorted(placed(client)) == [0, 0, 3]
    home = next(each for each in client._replicas if each.requests)
    await wait_until_async(lambda: not home.num_prompt_tokens)
    for request in asked:
        client.abort(request.id)
    stream = client.submit(replace(asked[0], id="shared-again"))
    assert home.requests
    event = await anext(stream)
    assert isinstance(event, TokenEvent) and event.num_cached == 96
    client.abort("shared-again")
