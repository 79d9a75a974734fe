"""Images and engine crashes: real processes, killed before, during and after encoding."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from foreword.config.options import Config
from foreword.core.images import expand_placeholders
from foreword.core.outputs import ErrorEvent, TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine_client.engine_process import _handle
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.heartbeat import HeartbeatPage
from foreword.engine_client.messages import AddImage, DropImage
from foreword.engine_client.process_client import ProcessClient
from foreword.errors import RequestFailed
from tests.support.checkpoints import EOS
from tests.support.client_answers import Answer, Killer, collect_answers, last_event
from tests.support.vision_checkpoints import IMAGE_TOKEN_ID, random_image, write_vision_checkpoint
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module", autouse=True)
def python_path() -> Iterator[None]:
    """Let the fork server import the tests from any directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("pictures") / "model", "llava", seed=5)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(checkpoint: Path) -> AsyncIterator[ProcessClient]:
    config = Config(
        model=str(checkpoint), kv_cache_memory="2000tokens", max_num_batched_tokens=32, max_num_seqs=16,
        threads=1,
        log_level="error", test_mode=True,
    )  # fmt: skip
    client = ProcessClient(
        config, (IMAGE_TOKEN_ID,), lambda: None, fork_server=ForkServer("tests.support.crashing_engine")
    )  # type: ignore[arg-type, return-value]
    await client.start()
    yield client
    await client.close()


def image_request(
    checkpoint: Path, name: str, images: Sequence[int], seed: int = 0, **params: Any
) -> Request:
    """A request with the random images of these numbers."""
    ids = [number for which in images for number in (40, 41, IMAGE_TOKEN_ID, 50 + which)]
    prompt, shown = expand_placeholders(
        ids, IMAGE_TOKEN_ID, [random_image(checkpoint, number) for number in images]
    )
    sampling = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "temperature": 1.0, **params})
    return Request(
        name, prompt, sampling, seed, (EOS,), images=shown, queue_deadline_s=time.monotonic() + WAIT_S
    )


def all_requests(checkpoint: Path, prefix: str) -> list[Request]:
    """Choices of one prompt, a request that shares their images, and a text request."""
    return [
        *(image_request(checkpoint, f"{prefix}-x{seed}", [1, 2], seed) for seed in range(4)),
        image_request(checkpoint, f"{prefix}-y", [2, 3, 1], temperature=0.0),
        replace(image_request(checkpoint, f"{prefix}-text", []), prompt_ids=(40, 41, 42, 40, 41)),
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def faultless(client: ProcessClient, checkpoint: Path) -> dict[str, Answer]:
    """The outputs without crashes."""
    actual = await collect_answers(client, all_requests(checkpoint, "undisturbed"))
    assert len({tuple(answer.token_ids) for answer in actual.values()}) == 6
    assert client.stats.images_encoded_total == 3
    return actual


def outputs_of(actual: dict[str, Answer]) -> dict[str, Any]:
    """Without num_cached, which depends on the crashes."""
    return {name: (answer.token_ids, answer.hashes, answer.end) for name, answer in actual.items()}


@pytest.mark.full
@pytest.mark.parametrize(("every", "times"), [(1, 3), (20, 1)])
async def test_image_outputs_are_equal_after_engine_crashes(
    client: ProcessClient, checkpoint: Path, faultless: dict[str, Answer], every: int, times: int
) -> None:
    killer = Killer(client, every, times)
    assert outputs_of(
        await collect_answers(client, all_requests(checkpoint, f"kills {every}"), killer)
    ) == outputs_of(faultless)
    assert len(killer.killed) == times


@pytest.mark.parametrize(("fault", "image"), [("killed", 7), ("broken", 8)])
async def test_engine_crash_while_encoding_restarts_the_engine(
    client: ProcessClient, checkpoint: Path, faultless: dict[str, Answer], fault: str, image: int
) -> None:
    """No output was delivered: the image's request is a suspect, and then cleared."""
    before = client.readiness.restarts
    first, *others = all_requests(checkpoint, f"while {fault}")
    fatal = image_request(checkpoint, f"{fault}-encoding-z", [image])
    actual = await collect_answers(client, [first, fatal, *others])
    assert len(actual.pop("z").token_ids) == 20
    assert outputs_of(actual) == outputs_of(faultless) and client.readiness.restarts == before + 1


async def test_image_that_crashes_every_engine_fails_its_request_only(
    client: ProcessClient, checkpoint: Path, faultless: dict[str, Answer]
) -> None:
    poison = asyncio.create_task(last_event(client, image_request(checkpoint, "poison-encoding-x", [9])))
    actual = await collect_answers(client, all_requests(checkpoint, "with poison"))
    failed = await poison
    assert (
        isinstance(failed, ErrorEvent)
        and isinstance(failed.error, RequestFailed)
        and "died" in failed.error.message
    )
    assert outputs_of(actual) == outputs_of(faultless)


async def test_pixels_are_sent_once_and_dropped(
    client: ProcessClient, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client._process is not None
    sent: list[Any] = []
    send = client._process.send
    monkeypatch.setattr(
        client._process, "send", lambda message, first=None: (sent.append(message), send(message, first))
    )
    await collect_answers(client, all_requests(checkpoint, "watched"))
    digests = {random_image(checkpoint, number).digest for number in (1, 2, 3)}
    shown = [message.digest for message in sent if isinstance(message, AddImage)]
    assert len(shown) == 3 and set(shown) == digests
    assert all(image.pixels is None for one in sent if isinstance(one, Request) for image in one.images)
    assert {message.digest for message in sent if isinstance(message, DropImage)} == digests


async def test_abort_drops_the_pixels(
    client: ProcessClient, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client._process is not None
    sent: list[Any] = []
    send = client._process.send
    monkeypatch.setattr(
        client._process, "send", lambda message, first=None: (sent.append(message), send(message, first))
    )
    stream = client.submit(image_request(checkpoint, "aborted", [10], max_tokens=None))
    assert isinstance(await anext(stream), TokenEvent)
    client.abort("aborted")
    assert isinstance(sent[-1], DropImage), "pixels are dropped after the end of the request"
    assert [event async for event in stream] == []


async def test_worker_stores_pixels_and_blames_the_next_request() -> None:
    kept: dict[bytes, bytes] = {}
    encoder = SimpleNamespace(add_pixels=kept.__setitem__, drop_pixels=kept.pop)
    with HeartbeatPage.create() as heartbeat:
        engine: Any = SimpleNamespace(num_submitted=7, encoder=encoder)
        _handle(engine, AddImage(b"a", b"abc"), heartbeat)
        assert kept == {b"a": b"abc"} and heartbeat.busy_requests() == (7,), "the next request is blamed"
        _handle(engine, DropImage(b"a"), heartbeat)
        assert not kept and heartbeat.busy_requests() == ()
