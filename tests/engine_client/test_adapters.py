"""LoRA adapters in an engine of its own process: loaded and unloaded between steps, and after crashes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from foreword.core.outputs import ErrorEvent
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.router import EngineRouter
from foreword.errors import AdapterConflict, CheckpointError, ModelNotFound
from tests.support.checkpoints import write_checkpoint
from tests.support.client_answers import Killer, collect_answers, last_event, make_client, pid_of
from tests.support.lora_files import write_adapter

pytestmark = pytest.mark.asyncio(loop_scope="package")

PARAMS = SamplingParams(max_tokens=200, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint and adapters of it."""
    folder = tmp_path_factory.mktemp("adapters")
    model = write_checkpoint(folder / "model", "llama", seed=5)
    for seed, name in enumerate(("first", "second", "third")):
        write_adapter(folder / name, model, seed=seed, strength=0.3)
    write_adapter(folder / "wide", model, rank=32)
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def client(folder: Path, fork_server: ForkServer) -> AsyncIterator[EngineRouter]:
    client = make_client(
        folder / "model",
        fork_server,
        prefix_caching=False,
        lora_modules=f"first={folder / 'first'}",
        max_loras=2,
    )
    await client.start()
    yield client
    await client.close()


def requests(prefix: str, digests: dict[str, str]) -> list[Request]:
    return [
        Request(f"{prefix}-{name}", (40, 41, 42, 40), PARAMS, seed=7, adapter=digest)
        for name, digest in {"base": "", **digests}.items()
    ]


def first_digest(client: EngineRouter) -> str:
    assert client.info is not None
    return client.info.adapters[0].digest


@pytest.mark.full
async def test_answers_with_adapters_survive_killed_engines(client: EngineRouter, folder: Path) -> None:
    """The new engine has the adapters of the start and those loaded since."""
    second = await client.load_adapter(str(folder / "second"))
    digests = {"first": first_digest(client), "second": second.digest}
    expected = await collect_answers(client, requests("calm", digests))
    assert len({str(answer) for answer in expected.values()}) == 3
    for every in (5, 30):
        killer = Killer(client, every, 2)
        assert await collect_answers(client, requests(f"kills {every}", digests), killer) == expected
        assert len(killer.killed) == 2
    await client.unload_adapter(second.digest)


async def test_slots_are_bounded_and_freed(client: EngineRouter, folder: Path) -> None:
    second = await client.load_adapter(str(folder / "second"))
    assert await client.load_adapter(str(folder / "second")) == second, "the same content takes no slot"
    with pytest.raises(AdapterConflict, match="2 slots of --max-loras"):
        await client.load_adapter(str(folder / "third"))
    await client.unload_adapter(second.digest)
    third = await client.load_adapter(str(folder / "third"))
    event = await last_event(client, replace(requests("gone", {})[0], adapter=second.digest))
    assert isinstance(event, ErrorEvent) and isinstance(event.error, ModelNotFound)
    await client.unload_adapter(third.digest)


async def test_adapter_in_use_is_not_unloaded(client: EngineRouter, folder: Path) -> None:
    second = await client.load_adapter(str(folder / "second"))
    (expected,) = (await collect_answers(client, requests("calm", {"x": second.digest})[1:])).values()
    events = client.submit(requests("open", {"x": second.digest})[1])
    first = await anext(events)
    with pytest.raises(AdapterConflict, match="1 requests use the adapter"):
        await client.unload_adapter(second.digest)
    waiting = asyncio.create_task(client.wait_unused(second.digest))
    received = [first, *[event async for event in events]]
    await waiting
    assert [token for event in received for token in event.token_ids] == list(expected.token_ids)
    await client.unload_adapter(second.digest)


async def test_refused_adapters_leave_the_engine_as_it_was(client: EngineRouter, folder: Path) -> None:
    expected = await collect_answers(client, requests("before", {"first": first_digest(client)}))
    for path, problem in ((folder / "wide", "rank 32; --max-lora-rank is 16"), (folder / "none", "neither")):
        with pytest.raises(CheckpointError, match=problem):
            await client.load_adapter(str(path))
    assert await collect_answers(client, requests("after", {"first": first_digest(client)})) == expected


@pytest.mark.full
async def test_changed_adapter_fails_its_requests_only(
    folder: Path, fork_server: ForkServer, tmp_path: Path
) -> None:
    """A restarted engine must not go on with other weights."""
    path = write_adapter(tmp_path / "adapter", folder / "model", seed=1)
    options = {"lora_modules": f"first={folder / 'first'},changing={path}", "prefix_caching": False}
    client = make_client(folder / "model", fork_server, **options)
    info = await client.start()
    first, changing = (adapter.digest for adapter in info.adapters)
    expected = await collect_answers(client, requests("before", {"first": first, "changing": changing}))
    write_adapter(path, folder / "model", seed=2)
    os.kill(pid_of(client), signal.SIGKILL)
    again = await collect_answers(client, requests("after", {"first": first}))
    assert again == {name: expected[name] for name in ("base", "first")}
    (replica,) = client._replicas
    assert replica.adapters == {first}
    event = await last_event(client, requests("changed", {"x": changing})[1])
    assert isinstance(event, ErrorEvent) and isinstance(event.error, ModelNotFound)
    await client.close()
