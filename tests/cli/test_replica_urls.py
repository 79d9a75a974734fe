"""A router of `foreword serve --replica-urls` over two servers, one of which is killed under its streams."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from foreword.bench.server import ServerProcess
from foreword.config.options import Config
from foreword.demo import BUNDLED, DEFAULT_MODEL
from foreword.engine_client.forkserver import ForkServer
from foreword.errors import ConfigError
from foreword.fleet.model_processes import open_processes
from tests.server.conftest import run_server
from tests.support.fakes import engine_info
from tests.support.processes import kill_tree
from tests.support.streams import NUM_STREAMS, ask_all
from tests.support.waiting import WAIT_S, wait_until

KEY = "a key of the engines"
ENGINE_FLAGS = ("--engine-key", KEY)


@pytest.fixture(scope="module")
def first() -> Iterator[ServerProcess]:
    with ServerProcess(Config(threads=1, max_model_len=1024), ENGINE_FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo without its weights."""
    folder = tmp_path_factory.mktemp("router") / "demo"
    shutil.copytree(BUNDLED[DEFAULT_MODEL][0], folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def start_router(checkpoint: Path, *urls: str) -> ServerProcess:
    flags = ("--replicas", "0", "--replica-urls", *urls, *ENGINE_FLAGS, "--served-model-name", "demo")
    return ServerProcess(Config(model=str(checkpoint)), flags)


@pytest.mark.full
async def test_streams_survive_the_death_of_a_server(first: ServerProcess, checkpoint: Path) -> None:
    expected = await ask_all(first.url)
    with (
        ServerProcess(Config(threads=1, max_model_len=1024), ENGINE_FLAGS) as second,
        start_router(checkpoint, first.url, second.url) as router,
    ):
        assert await ask_all(router.url) == expected
        num_events = 0

        def on_event() -> None:
            nonlocal num_events
            num_events += 1
            if num_events == 5 * NUM_STREAMS:
                kill_tree(second.pid)

        assert await ask_all(router.url, on_event) == expected
        (lost,) = [line for line in router.read_log() if "open requests end here" in line]
        assert " 0 open requests" not in lost


@pytest.mark.full
def test_router_that_ends_leaves_no_requests(first: ServerProcess, checkpoint: Path) -> None:
    with start_router(checkpoint, first.url) as router:
        body = {"model": "demo", "prompt": "Once", "max_tokens": 900, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{router.url}/v1/completions", json=body, timeout=WAIT_S) as response:
            next(response.iter_lines())
            kill_tree(router.pid)
    wait_until(lambda: "foreword_requests_running 0" in _running(first))


def _running(server: ServerProcess) -> str:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("foreword_requests_running{")]
    return "foreword_requests_running " + line.split()[-1].removesuffix(".0")


async def test_server_of_another_model_is_refused(checkpoint: Path) -> None:
    """A router without an engine here has no fingerprint to compare."""
    with run_server(Config(engine_key=KEY)) as node:
        config = Config(model=str(checkpoint), replicas=0, replica_urls=node.url, engine_key=KEY)
        processes = await open_processes(config, lambda *_: None, ForkServer())
        with pytest.raises(ConfigError, match=r"have another model than demo: fake, \d+ rows of logits"):
            await processes.start()
        await processes.close()


async def test_router_counts_drafts_of_drafters_that_the_first_server_lacks(checkpoint: Path) -> None:
    config = Config(model=str(checkpoint), replicas=0, replica_urls="http://a", engine_key=KEY)
    processes = await open_processes(config, lambda *_: None, ForkServer())
    info = replace(engine_info(), resolved=replace(engine_info().resolved, drafters=()))
    processes.engine._replicas.info = info
    assert b"foreword_spec_no_draft_total" in processes.make_recorder("demo").render()
    await processes.close()
