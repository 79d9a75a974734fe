"""Images and engine crashes: real processes, killed before, during and after encoding."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from foreword.checkpoint import read_tokenizer
from foreword.config.options import Config
from foreword.core.images import expand_placeholders
from foreword.core.outputs import ErrorEvent
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.make_client import make_engine_client
from foreword.engine_client.router import EngineRouter
from foreword.errors import RequestFailed
from tests.support.checkpoints import EOS
from tests.support.client_answers import Answer, Killer, collect_answers, last_event
from tests.support.vision_checkpoints import IMAGE_TOKEN_ID, random_image, write_vision_checkpoint
from tests.support.waiting import WAIT_S

pytestmark = pytest.mark.asyncio(loop_scope="package")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision_checkpoint(tmp_path_factory.mktemp("pictures") / "model", "llava", seed=5)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def client(checkpoint: Path, fork_server: ForkServer) -> AsyncIterator[EngineRouter]:
    config = Config(
        model=str(checkpoint), kv_cache_memory="2000tokens", max_num_batched_tokens=32, max_num_seqs=16,
        threads=1,
        log_level="error", test_mode=True,
    )  # fmt: skip
    client = make_engine_client(
        config,
        (IMAGE_TOKEN_ID,),
        read_tokenizer(checkpoint)[0].engine_vocabulary,
        fork_server=fork_server,
    )
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


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def faultless(client: EngineRouter, checkpoint: Path) -> dict[str, Answer]:
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
    client: EngineRouter, checkpoint: Path, faultless: dict[str, Answer], every: int, times: int
) -> None:
    killer = Killer(client, every, times)
    assert outputs_of(
        await collect_answers(client, all_requests(checkpoint, f"kills {every}"), killer)
    ) == outputs_of(faultless)
    assert len(killer.killed) == times


@pytest.mark.parametrize(("fault", "image"), [("killed", 7), ("broken", 8)])
async def test_engine_crash_while_encoding_restarts_the_engine(
    client: EngineRouter, checkpoint: Path, faultless: dict[str, Answer], fault: str, image: int
) -> None:
    """No output was delivered: the image's request is a suspect, and then cleared."""
    before = client.readiness.restarts
    first, *others = all_requests(checkpoint, f"while {fault}")
    fatal = image_request(checkpoint, f"{fault}-encoding-z", [image])
    actual = await collect_answers(client, [first, fatal, *others])
    assert len(actual.pop("z").token_ids) == 20
    assert outputs_of(actual) == outputs_of(faultless) and client.readiness.restarts == before + 1


async def test_image_that_crashes_every_engine_fails_its_request_only(
    client: EngineRouter, checkpoint: Path, faultless: dict[str, Answer]
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
