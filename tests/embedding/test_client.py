"""The encoder process: concurrent and cancelled calls, crashes and restarts."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from foreword.config.options import Config
from foreword.embedding import client as client_module
from foreword.embedding.client import EncodeCall, EncoderClient
from foreword.embedding.local import LocalEncoder, load_local_encoder
from foreword.errors import (
    CheckpointError,
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    Overloaded,
    RequestFailed,
    Unsupported,
)
from foreword.workers import pool
from tests.support.embedding_checkpoints import write_encoder
from tests.support.waiting import WAIT_S, wait_until_async

pytestmark = pytest.mark.asyncio(loop_scope="module")  # the tests share one process
TEXTS = ["hello", "The quick brown fox jumps over the lazy dog.", "", "tokens of speculation " * 8]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    path = tmp_path_factory.mktemp("tiny-bert")
    write_encoder(path)
    return Config(embedding_model=str(path), threads=1, max_waiting=64)


@pytest.fixture(scope="module")
def local(config: Config) -> LocalEncoder:
    return load_local_encoder(config)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(config: Config) -> AsyncIterator[EncoderClient]:
    client = EncoderClient(config)
    await client.start()
    yield client
    await client.close()


def tokenize(client: EncoderClient, *texts: str) -> list[list[int]]:
    assert client.tokenizer is not None
    return [client.tokenizer.encode(text) for text in texts]


def pid_of(client: EncoderClient) -> int:
    assert client._process is not None
    return client._process._process.pid


async def test_concurrent_callers_get_their_own_vectors(client: EncoderClient, local: LocalEncoder) -> None:
    assert client.info == local.info
    ids = tokenize(client, *TEXTS)
    answers = await asyncio.gather(*(client.encode([text] * count) for count, text in enumerate(ids * 3)))
    for count, (text, answer) in enumerate(zip(ids * 3, answers, strict=True)):
        assert answer == local.encode([text]) * count
    assert await client.encode(ids, "cls") == local.encode(ids, "cls") != local.encode(ids)


async def test_invalid_inputs_are_named(client: EncoderClient) -> None:
    (ids,) = tokenize(client, "hello")
    with pytest.raises(ContextLengthExceeded, match=r"input\[1\] has 131 tokens; .* at most 130"):
        await client.encode([ids, [5] * 131])
    with pytest.raises(InvalidRequest, match=r"input\[0\] has token id 100000"):
        await client.encode([[100000]])
    with pytest.raises(InvalidRequest, match=r"input\[0\] has no tokens"):
        await client.encode([[]])
    with pytest.raises(InvalidRequest, match="pooling"):
        await client.encode([ids], "median")
    with pytest.raises(Unsupported, match="does not score"):
        await client.score([(ids, [])])
    with pytest.raises(InvalidRequest, match="at most 64"):
        await client.encode([ids] * 65)
    assert await client.encode([]) == []


async def test_short_call_overtakes_a_long_one(client: EncoderClient) -> None:
    (short,) = tokenize(client, "hello")
    long = asyncio.ensure_future(client.encode([[5] * 130] * 60))
    await asyncio.sleep(0)
    await client.encode([short])
    assert not long.done()
    assert len(await long) == 60


async def test_full_queue_is_overload_until_it_drains(client: EncoderClient) -> None:
    calls = [asyncio.ensure_future(client.encode([[5] * 130] * 30)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match="at most 64"):
        await client.encode([[5]] * 30)
    await asyncio.gather(*calls)
    assert len(await client.encode([[5]] * 30)) == 30


async def test_inputs_of_a_cancelled_call_are_dropped(client: EncoderClient) -> None:
    call = asyncio.ensure_future(client.encode([[5] * 130] * 60))
    await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert client._batcher.num_waiting == 0 and not client._open_calls
    assert len(await client.encode([[5]])) == 1


async def test_calls_survive_a_crash(client: EncoderClient, local: LocalEncoder) -> None:
    """Inputs in flight, waiting inputs and calls during the restart all get their vectors."""
    ids = tokenize(client, *TEXTS)
    long = [[5, 6 + i] * 60 for i in range(40)]
    call = asyncio.ensure_future(client.encode(long))
    await asyncio.sleep(0)
    os.kill(pid_of(client), signal.SIGKILL)
    while client.readiness.is_ready:
        await asyncio.sleep(0.002)
    assert client.alive and client.readiness.status == "restarting"
    assert await client.encode(ids) == local.encode(ids)
    assert await call == local.encode(long)
    assert client.readiness.is_ready
    assert client._batcher.num_waiting == 0 and not client._open_calls and not client._retries


@pytest.mark.full
async def test_input_that_crashes_twice_fails_alone(client: EncoderClient, local: LocalEncoder) -> None:
    """The process is killed whenever it has the bad input."""
    bad_input, good = [7, 7, 7], [[5, 6 + i] * 40 for i in range(6)]
    send_batch = client._send_batch

    def send(members: list[tuple[EncodeCall, int]]) -> None:
        send_batch(members)
        if any(list(call.inputs[index].token_ids) == bad_input for call, index in members):
            os.kill(pid_of(client), signal.SIGKILL)

    client._send_batch = send  # type: ignore[method-assign]
    try:
        good_call, bad_call = (asyncio.ensure_future(client.encode(ids)) for ids in (good, [bad_input]))
        assert await good_call == local.encode(good)
        with pytest.raises(RequestFailed, match="crashed twice"):
            await bad_call
    finally:
        client._send_batch = send_batch  # type: ignore[method-assign]
    assert await client.encode(good) == local.encode(good)


async def test_ranker_scores_pairs(tmp_path: Path) -> None:
    write_encoder(tmp_path, "roberta", ranks=True)
    client = EncoderClient(Config(embedding_model=str(tmp_path), threads=1))
    info = await client.start()
    assert info.task == "rank" and client.tokenizer is not None
    pairs = [client.tokenizer.encode_pair("quick fox", text) for text in TEXTS]
    scores = await client.score(pairs)
    assert scores == load_local_encoder(Config(embedding_model=str(tmp_path), threads=1)).score(pairs)
    assert all(0 < score < 1 for score in scores)
    with pytest.raises(Unsupported, match="no embeddings"):
        await client.encode([[5]])
    await client.close()


async def test_decoder_checkpoint_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    client = EncoderClient(Config(embedding_model=str(tmp_path)))
    with pytest.raises(CheckpointError, match="'llama' is not a supported encoder"):
        await client.start()
    assert not client.alive and client._process is None


async def test_failed_start_is_repeated(
    client: EncoderClient, local: LocalEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has no memory for a process at the first try."""
    errors = [OSError(errno.ENOMEM, "no memory")]

    def spawn(*args: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return pool.spawn(*args, **options)

    monkeypatch.setattr(client_module, "START_RETRY_S", 0.0)
    monkeypatch.setattr(client_module, "spawn", spawn)
    call = asyncio.ensure_future(client.encode([[5]]))
    await asyncio.sleep(0)
    os.kill(pid_of(client), signal.SIGKILL)
    async with asyncio.timeout(WAIT_S):
        assert await call == local.encode([[5]])
    # The call may have ended before the process did.
    await wait_until_async(lambda: not errors and client.readiness.is_ready)


async def test_internal_error_fails_open_and_later_calls(config: Config) -> None:
    client = EncoderClient(config)
    await client.start()
    client._on_message = lambda message: 1 // 0  # type: ignore[assignment, method-assign]
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(EngineDead):
            await client.encode([[5]])
        assert not client.alive
        with pytest.raises(EngineDead):
            await client.encode([[5]])
        await client.close()


async def test_restarts_end_after_too_many_crashes(
    client: EncoderClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Must be the last test: the encoder stays down."""
    monkeypatch.setattr(client_module, "MAX_RESTARTS", 1)
    monkeypatch.setattr(client, "_crash_times", deque([time.monotonic()], maxlen=1))
    os.kill(pid_of(client), signal.SIGKILL)
    assert client._serve_task is not None
    await client._serve_task
    assert not client.alive and client._process is None
    with pytest.raises(EngineDead):
        await client.encode([[5]])
