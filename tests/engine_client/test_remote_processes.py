"""A real server on the loopback gives the answers of a local engine, bit for bit, and may be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from foreword.bench.server import ServerProcess
from foreword.config.options import Config
from foreword.engine_client.remote import RemoteClient
from foreword.engine_client.replica import RouterReplica
from foreword.engine_client.router import EngineRouter
from tests.support.checkpoints import write_checkpoint
from tests.support.client_answers import collect_answers, kind_requests, make_client
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.full

KEY = "a key of the engine"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("remote") / "model", "llama", seed=5)


@pytest.fixture
def node(checkpoint: Path) -> Iterator[ServerProcess]:
    config = Config(
        model=str(checkpoint), kv_cache_memory="4000tokens", threads=1, prefix_caching=False, test_mode=True
    )
    with ServerProcess(config, ("--engine-key", KEY, "--test-mode")) as server:
        yield server


async def test_answers_are_those_of_a_local_engine(checkpoint: Path, node: ServerProcess) -> None:
    local = make_client(checkpoint, max_model_len=None, prefix_caching=False)
    remote = EngineRouter([RouterReplica("host", RemoteClient(node.url, KEY, silence_s=WAIT_S), "host:1")])
    local_info, remote_info = await asyncio.gather(local.start(), remote.start())
    assert remote_info.fingerprint == local_info.fingerprint
    expected = await collect_answers(local, kind_requests("local"))
    assert await collect_answers(remote, kind_requests("remote")) == expected
    assert any(answer.hashes for answer in expected.values())
    await asyncio.gather(local.close(), remote.close())
