"""Pictures through engines that die: real processes, really killed, before, while and after they have seen them."""

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
from foreword.engine_client.client import SubprocessClient
from foreword.engine_client.heartbeat import HeartbeatPage
from foreword.engine_client.messages import AddImage, DropImage
from foreword.engine_client.worker import _handle
from foreword.errors import RequestFailed
from tests.engine_client.test_client import Answer, Killer, answers, last_event
from tests.support.checkpoints import EOS
from tests.support.vision_checkpoints import IMAGE_TOKEN_ID, random_image, write_vision_checkpoint

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def anywhere() -> Iterator[None]:
    """The spawner finds the tests wherever they were started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("pictures") / "model", "llava", seed=5)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(checkpoint: Path) -> AsyncIterator[SubprocessClient]:
    config = Config(
        model=str(checkpoint), kv_cache_memory="2000tokens", max_num_batched_tokens=32, max_num_seqs=16, threads=1,
        log_level="error", test_mode=True,
    )  # fmt: skip
    client = SubprocessClient(
        config, (IMAGE_TOKEN_ID,), lambda: None, entry_module="tests.support.crashing_engine"
    )  # type: ignore[arg-type, return-value]
    await client.start()
    yield client
    await client.close()


def seeing(checkpoint: Path, name: str, pictures: Sequence[int], seed: int = 0, **params: Any) -> Request:
    """Shows random pictures of these numbers."""
    ids = [number for which in pictures for number in (40, 41, IMAGE_TOKEN_ID, 50 + which)]
    prompt, shown = expand_placeholders(
        ids, IMAGE_TOKEN_ID, [random_image(checkpoint, number) for number in pictures]
    )
    sampling = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "temperature": 1.0, **params})
    return Request(
        name, prompt, sampling, seed, (EOS,), images=shown, queue_deadline_s=time.monotonic() + WAIT_S
    )


def everybody(checkpoint: Path, prefix: str) -> list[Request]:
    """Choices of one prompt, others with pictures in common, and one that only reads."""
    return [
        *(seeing(checkpoint, f"{prefix}-x{seed}", [1, 2], seed) for seed in range(4)),
        seeing(checkpoint, f"{prefix}-y", [2, 3, 1], temperature=0.0),
        replace(seeing(checkpoint, f"{prefix}-text", []), prompt_ids=(40, 41, 42, 40, 41)),
    ]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(client: SubprocessClient, checkpoint: Path) -> dict[str, Answer]:
    """What everybody gets where nothing happens."""
    found = await answers(client, everybody(checkpoint, "undisturbed"))
    assert len({tuple(answer.token_ids) for answer in found.values()}) == 6
    assert client.stats.images_encoded_total == 3
    return found


def told(found: dict[str, Answer]) -> dict[str, Any]:
    """Without what the prefix cache held, which may be more or less."""
    return {name: (answer.token_ids, answer.hashes, answer.end) for name, answer in found.items()}


@pytest.mark.parametrize(("every", "times"), [(1, 3), (20, 1)])
async def test_everybody_gets_the_same_from_engines_that_are_killed(
    client: SubprocessClient, checkpoint: Path, undisturbed: dict[str, Answer], every: int, times: int
) -> None:
    killer = Killer(client, every, times)
    assert told(await answers(client, everybody(checkpoint, f"kills {every}"), killer)) == told(undisturbed)
    assert len(killer.killed) == times


@pytest.mark.parametrize(("fault", "picture"), [("killed", 7), ("broken", 8)])
async def test_an_engine_that_dies_while_it_encodes_is_replaced(
    client: SubprocessClient, checkpoint: Path, undisturbed: dict[str, Answer], fault: str, picture: int
) -> None:
    """Nobody was delivered anything: who showed the picture is suspected, and has no further reason to be."""
    before = client.readiness.restarts
    first, *others = everybody(checkpoint, f"while {fault}")
    fatal = seeing(checkpoint, f"{fault}-encoding-z", [picture])
    found = await answers(client, [first, fatal, *others])
    assert len(found.pop("z").token_ids) == 20
    assert told(found) == told(undisturbed) and client.readiness.restarts == before + 1


async def test_a_picture_that_kills_every_engine_ends_its_request_alone(
    client: SubprocessClient, checkpoint: Path, undisturbed: dict[str, Answer]
) -> None:
    poison = asyncio.create_task(last_event(client, seeing(checkpoint, "poison-encoding-x", [9])))
    found = await answers(client, everybody(checkpoint, "beside poison"))
    failed = await poison
    assert (
        isinstance(failed, ErrorEvent)
        and isinstance(failed.error, RequestFailed)
        and "died" in failed.error.message
    )
    assert told(found) == told(undisturbed)


async def test_pixels_cross_once_and_are_forgotten(
    client: SubprocessClient, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client._process is not None
    sent: list[Any] = []
    send = client._process.send
    monkeypatch.setattr(
        client._process, "send", lambda message, first=None: (sent.append(message), send(message, first))
    )
    await answers(client, everybody(checkpoint, "watched"))
    digests = {random_image(checkpoint, number).digest for number in (1, 2, 3)}
    shown = [message.digest for message in sent if isinstance(message, AddImage)]
    assert len(shown) == 3 and set(shown) == digests
    assert all(picture.pixels is None for one in sent if isinstance(one, Request) for picture in one.images)
    assert {message.digest for message in sent if isinstance(message, DropImage)} == digests


async def test_an_aborted_picture_is_forgotten(
    client: SubprocessClient, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert client._process is not None
    sent: list[Any] = []
    send = client._process.send
    monkeypatch.setattr(
        client._process, "send", lambda message, first=None: (sent.append(message), send(message, first))
    )
    stream = client.submit(seeing(checkpoint, "aborted", [10], max_tokens=None))
    assert isinstance(await anext(stream), TokenEvent)
    client.abort("aborted")
    assert isinstance(sent[-1], DropImage), "behind the end of the request"
    assert [event async for event in stream] == []


async def test_an_engine_takes_pictures_before_the_request_that_needs_them() -> None:
    kept: dict[bytes, bytes] = {}
    encoder = SimpleNamespace(add_pixels=kept.__setitem__, drop_pixels=kept.pop)
    with HeartbeatPage.create() as board:
        engine: Any = SimpleNamespace(num_submitted=7, encoder=encoder)
        _handle(engine, AddImage(b"a", b"abc"), board)
        assert kept == {b"a": b"abc"} and board.busy_requests() == (7,), (
            "the request that follows is to blame"
        )
        _handle(engine, DropImage(b"a"), board)
        assert not kept and board.busy_requests() == ()
