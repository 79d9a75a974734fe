"""n = 8 choices of a vision model through the openai client."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from foreword.bench.server import ServerProcess
from foreword.config.options import Config
from tests.support.images import image_part, png
from tests.support.vision_checkpoints import write_vision_checkpoint
from tests.support.waiting import WAIT_S, wait_until

PARAMS: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9, "max_tokens": 9, "seed": 11}
MORE = {"repetition_penalty": 1.05}
MESSAGES: Any = [
    {
        "role": "user",
        "content": [
            image_part(png("red")),
            {"type": "text", "text": "What is it?"},
            image_part(png("navy", (9, 50))),
        ],
    }
]


@pytest.fixture(scope="module", params=[pytest.param("off", marks=pytest.mark.full), "suffix"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ServerProcess, str]]:
    path = write_vision_checkpoint(tmp_path_factory.mktemp("vision") / "llava-tiny", "llava", seed=5)
    options: dict[str, Any] = {
        "threads": 1,
        "kv_cache_memory": "8000tokens",
        "log_interval": 0.1,
        "max_model_len": 256,
    }
    with ServerProcess(Config(model=str(path), speculate=request.param, **options)) as running:
        yield running, request.param


def choices_of(answer: Any) -> dict[int, str]:
    return {choice.index: choice.message.content for choice in answer.choices}


def streamed(chunks: Any) -> tuple[dict[int, str], Any]:
    """Texts by choice index, and usage."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
        usage = chunk.usage
    return texts, usage


def test_eight_choices_are_returned(server: tuple[ServerProcess, str]) -> None:
    running, speculate = server
    with openai.OpenAI(base_url=running.url + "/v1", api_key="none", max_retries=0, timeout=WAIT_S) as client:

        def ask(n: int, seed: int = 11, **fields: Any) -> Any:
            asked = {**PARAMS, "seed": seed, **fields}
            return client.chat.completions.create(
                model="llava-tiny", messages=MESSAGES, n=n, extra_body=MORE, **asked
            )

        for n in (8, 16):
            response = ask(n)
            texts = choices_of(response)
            assert sorted(texts) == list(range(n))
            assert streamed(ask(n, stream=True, stream_options={"include_usage": True}))[0] == texts
            assert texts[n - 1] == choices_of(ask(1, seed=11 + n - 1))[0]
        assert len(set(texts.values())) > 1
        assert response.usage.prompt_tokens_details.image_tokens == 2 * 16
    scrape = httpx.get(running.url + "/metrics").text
    assert re.search(r"^foreword_choices_returned_total{.*} 50\.0$", scrape, re.M)
    wait_until(lambda: any("Throughput:" in line for line in running.read_log()))
    lines = [line for line in running.read_log() if line not in running.banner_lines]
    request_lines = [line for line in lines if "request chatcmpl-" in line]
    assert len(request_lines) == 6 and all("32 for 2 images)" in line for line in request_lines)
    assert not [line for line in lines if "base64" in line or "data:" in line]
    speculation_lines = [
        line
        for line in (*lines, *scrape.splitlines())
        if re.search("spec|draft", line, re.IGNORECASE) and not line.startswith("foreword_info{")
    ]
    assert bool(speculation_lines) == (speculate != "off"), speculation_lines[:5]
