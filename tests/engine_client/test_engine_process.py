"""The engine process, as a real subprocess."""

from __future__ import annotations

import asyncio
import errno
import logging
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from foreword.config.options import Config
from foreword.core.outputs import ErrorEvent, TokenEvent
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request
from foreword.core.structured_output import StructuredOutput, Vocabulary
from foreword.engine_client import engine_process
from foreword.engine_client.engine_process import _handle
from foreword.engine_client.heartbeat import HeartbeatPage
from foreword.engine_client.messages import EngineStartFailed, Init, LoadAdapter, RemoveRequest
from foreword.engine_client.process_client import ProcessClient
from foreword.errors import CheckpointError, ConfigError, InvalidRequest, RequestFailed
from tests.support.checkpoints import EOS, write_checkpoint
from tests.support.client_answers import is_gone
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("process") / "model", "llama", seed=5)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(checkpoint: Path) -> AsyncIterator[ProcessClient]:
    client = ProcessClient(config_of(checkpoint), never_sampled_ids=(), vocabulary=no_tokens)
    await client.start()
    yield client
    await client.close()
    assert client.pid is not None and is_gone(client.pid)


def no_tokens() -> Vocabulary:
    """Requested with the first grammar, which no test here has."""
    return Vocabulary((), (), ())


def config_of(checkpoint: Path, **options: object) -> Config:
    defaults = {"kv_cache_memory": "4000tokens", "threads": 1, "log_level": "warning"}
    return Config(model=str(checkpoint), **(defaults | options))  # type: ignore[arg-type]


def make_request(name: str, seed: int = 1, max_tokens: int | None = 12, **params: object) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **params)  # type: ignore[arg-type]
    return Request(name, (40, 41, 42, 40, 41), sampling, seed, eos_token_ids=(EOS,))


async def collect(client: ProcessClient, request: Request) -> list[int]:
    token_ids: list[int] = []
    async for event in client.submit(request):
        assert isinstance(event, TokenEvent) and event.index == len(token_ids)
        token_ids += event.token_ids
    return token_ids


async def wait_idle(client: ProcessClient) -> None:
    """Wait until no request runs."""
    assert client.stats.kv_cache_usage_ratio > 0
    async with asyncio.timeout(WAIT_S):
        while (
            client.stats.requests_running
            or client.stats.requests_waiting
            or client.stats.kv_cache_usage_ratio
        ):
            await asyncio.sleep(0.01)


async def test_concurrent_requests_and_on_step(client: ProcessClient) -> None:
    steps = []
    client.on_step = steps.append
    answers = await asyncio.gather(*(collect(client, make_request(str(i), seed=i % 2)) for i in range(8)))
    assert {len(answer) for answer in answers} == {12}
    assert len({tuple(answer) for answer in answers}) == 2
    assert steps and steps[-1].stage_seconds.keys() >= {
        "schedule",
        "assemble",
        "forward",
        "sample",
        "draft",
        "commit",
    }


async def test_abort_frees_everything(client: ProcessClient) -> None:
    stream = client.submit(make_request("a", max_tokens=None))
    await anext(stream)
    client.abort("a")
    assert [event async for event in stream if isinstance(event, ErrorEvent)] == []
    await wait_idle(client)


async def test_closed_stream_aborts_its_request(client: ProcessClient) -> None:
    stream = client.submit(make_request("left", max_tokens=None))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await wait_idle(client)


async def test_finish_and_abort_reach_the_engine(
    client: ProcessClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(client, "_send", sent.append)
    for name in "ab":
        client.submit(make_request(name))
    client.finish("a", 5)
    client.abort("b")
    client.finish("gone", 7)
    assert sent == [RemoveRequest("a", 5), RemoveRequest("b", None)]
    received: list[tuple[str, int | None]] = []
    engine: Any = SimpleNamespace(
        remove=lambda request_id, num_tokens: received.append((request_id, num_tokens))
    )
    with HeartbeatPage.create() as page:
        for message in sent:
            _handle(engine, message, page)
    assert received == [("a", 5), ("b", None)]


async def test_vocabulary_is_blamed_on_its_request() -> None:
    noted: list[tuple[int, ...]] = []
    with HeartbeatPage.create() as page:
        engine: Any = SimpleNamespace(
            num_submitted=7, set_vocabulary=lambda _: noted.append(page.busy_requests())
        )
        _handle(engine, no_tokens(), page)
    assert noted == [(7,)]


async def test_unforeseen_error_of_an_adapter_is_its_reply() -> None:
    """Not the end of the engine and of all other requests."""

    def load_adapter(path: str) -> None:
        raise RuntimeError(f"{path}: can't allocate memory")

    engine: Any = SimpleNamespace(num_submitted=0, load_adapter=load_adapter)
    with HeartbeatPage.create() as page:
        reply = _handle(engine, LoadAdapter(3, "a"), page)
    assert reply is not None and reply.call == 3 and isinstance(reply.result, RequestFailed)
    assert "a: can't allocate memory" in reply.result.message


@pytest.mark.full
async def test_queued_grammars_do_not_delay_close(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With minutes of compilation queued, the process exits by itself."""
    monkeypatch.setattr("foreword.engine_client.connection.EXIT_TIMEOUT_S", 40.0)
    vocabulary = Vocabulary(tuple(bytes([i]) for i in range(256)), (), ())
    client = ProcessClient(config_of(checkpoint), never_sampled_ids=(), vocabulary=lambda: vocabulary)
    await client.start()
    for number in range(400):
        schema = {"properties": {f"{number} {name}": {"type": "integer"} for name in range(1500)}}
        client.submit(make_request(str(number), structured=StructuredOutput.json_schema(schema)))
    await asyncio.sleep(0.5)  # some have reached the engine
    await client.close()
    assert client._process is not None and "exit code 0" in await client._process.reap(client._fork_server)


async def test_invalid_request_fails_alone(client: ProcessClient) -> None:
    bad = make_request("bad", speculation=Speculation("draft"))
    good, events = await asyncio.gather(collect(client, make_request("good")), _events(client, bad))
    assert len(good) == 12
    (failed,) = events
    assert isinstance(failed, ErrorEvent) and isinstance(failed.error, InvalidRequest)
    assert failed.error.param == "speculation.method" and "suffix" in failed.error.message


async def _events(client: ProcessClient, request: Request) -> list[object]:
    return [event async for event in client.submit(request)]


@pytest.mark.full
async def test_load_progress_is_reported(checkpoint: Path) -> None:
    progress: list[tuple[str, int, int]] = []
    client = ProcessClient(config_of(checkpoint), (), no_tokens, lambda *stage: progress.append(stage))
    info = await client.start()
    assert info.architecture == "llama" and info.resolved.drafters == ("grammar", "prediction", "suffix")
    assert {stage for stage, _, _ in progress} == {"weights"} and progress[-1][1] == progress[-1][2] > 0
    await client.close()
    assert not client.dead.is_set()


@pytest.mark.full
async def test_too_long_context_is_a_config_error(checkpoint: Path) -> None:
    client = ProcessClient(config_of(checkpoint, max_model_len=100_000), (), no_tokens)
    with pytest.raises(ConfigError, match="100000 is above the checkpoint's 512 positions") as caught:
        await client.start()
    assert caught.value.param == "max_model_len"
    await client.close()


@pytest.mark.full
async def test_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    client = ProcessClient(config_of(tmp_path / "nowhere"), (), no_tokens)
    with pytest.raises(CheckpointError, match="nowhere"):
        await client.start()
    await client.close()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/t"), "start: /x/t: No space left on device"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), "start: out of memory"),
        (MemoryError(), "start: out of memory"),
        (CheckpointError("no weights"), "^no weights$"),
    ],
)
@pytest.mark.parametrize("level", [logging.INFO, logging.DEBUG])
async def test_expected_start_error_is_one_line(
    error: Exception,
    message: str,
    level: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The client reports it; only level debug logs a traceback."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(engine_process, "load", fail)
    monkeypatch.setattr(engine_process, "set_up_logging", lambda *_: None)
    caplog.set_level(level, "foreword")
    client, engine = Pipe()
    client.send(Init(Config(), ()))
    page: Any = SimpleNamespace(start=lambda: None)
    assert engine_process._run(engine, page, lambda engine: None) == 1
    failure = client.recv()
    assert isinstance(failure, EngineStartFailed) and isinstance(failure.error, ConfigError | CheckpointError)
    assert re.search(message, str(failure.error))
    assert [bool(record.exc_info) for record in caplog.records] == [True] * (level == logging.DEBUG)


async def test_client_does_not_import_torch() -> None:
    code = "import sys, foreword.engine_client.process_client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
