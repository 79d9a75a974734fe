"""n choices of several architectures: each equals the n = 1 request with its seed."""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from foreword.config.options import Config
from tests.support.asgi_client import ASGIServer, serving
from tests.support.checkpoints import write_checkpoint
from tests.support.images import image_part, png
from tests.support.vision_checkpoints import VISION_FAMILIES, write_vision_checkpoint

SEED, MOST = 2**63 + 5, 16
ASKED: dict[str, Any] = {  # as in the report that this project began with
    "temperature": 0.7,
    "top_p": 0.9,
    "repetition_penalty": 1.05,
    "max_tokens": 9,
    "logprobs": True,
    "top_logprobs": 2,
    "return_token_ids": True,
}
QUESTION = {"type": "text", "text": "the cat and the dog and the cat and"}
TEXTS = [{"role": "user", "content": [QUESTION]}]
PICTURES = [
    {"role": "user", "content": [image_part(png("red")), QUESTION, image_part(png("blue", (90, 30)))]}
]


@dataclass
class Choice:
    """Events of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, text: str | None, choice: dict[str, Any]) -> None:
        assert self.finish_reason is None, "an event after the finish"
        self.text += text or ""
        self.token_ids += choice.get("token_ids") or []
        self.logprobs += (choice.get("logprobs") or {}).get("content") or []
        self.finish_reason = choice["finish_reason"]


async def ask(
    server: ASGIServer, messages: Any, stream: bool = False, **fields: Any
) -> tuple[dict[int, Choice], dict[str, Any]]:
    """Choices by index, and usage."""
    body = {"messages": messages, **ASKED, **fields, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    reply = await server.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    found: defaultdict[int, Choice] = defaultdict(Choice)
    if not stream:
        whole = reply.json()
        assert [choice["index"] for choice in whole["choices"]] == list(range(len(whole["choices"])))
        for choice in whole["choices"]:
            found[choice["index"]].add(choice["message"]["content"], choice)
        return found, whole["usage"]
    lines = [line.removeprefix("data: ") for line in reply.text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    chunks = [json.loads(line) for line in lines]
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        found[choice["index"]].add(choice["delta"].get("content"), choice)
    return found, chunks[-1]["usage"]


def check_usage(usage: dict[str, Any], alone: dict[str, Any], choices: dict[int, Choice]) -> None:
    """The prompt's tokens once, and the tokens of all choices."""
    said = sum(len(choice.token_ids) for choice in choices.values())
    assert usage["prompt_tokens"] == alone["prompt_tokens"]
    assert usage["prompt_tokens_details"].get("image_tokens") == alone["prompt_tokens_details"].get(
        "image_tokens"
    )
    assert (usage["completion_tokens"], usage["total_tokens"]) == (said, said + usage["prompt_tokens"])


async def check_choices(config: Config, messages: Any) -> None:
    async with serving(config) as server:
        alone = await asyncio.gather(*(ask(server, messages, seed=SEED + i) for i in range(MOST)))
        assert len({tuple(choices[0].token_ids) for choices, _ in alone}) > 1, (
            "choices that are all alike prove nothing"
        )
        for n in (8, MOST):
            for stream in (False, True):
                for method in ("auto", "off"):
                    before = await server.metric("choices_returned_total")
                    choices, usage = await ask(
                        server, messages, stream, n=n, seed=SEED, speculation={"method": method}
                    )
                    assert sorted(choices) == list(range(n))
                    assert all(choice == alone[i][0][0] for i, choice in choices.items())
                    check_usage(usage, alone[0][1], choices)
                    assert await server.metric("choices_returned_total") - before == n
        if config.speculate != "off":
            assert await server.metric("spec_draft_tokens_total") > 0, "no draft was verified"
        assert server.app.state.models.admission.num_open == 0


def config(path: Path, **options: Any) -> Config:
    return Config(
        str(path), threads=1, max_model_len=256, kv_cache_memory="8000tokens", draft_length="fixed", **options
    )


@pytest.mark.parametrize("speculate", ["suffix", "off"])
@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "gpt_oss", "qwen3_5_text", "llava_next", "qwen2_5_vl"]
)
async def test_each_choice_is_the_request_with_its_seed(tmp_path: Path, family: str, speculate: str) -> None:
    is_vision = family in VISION_FAMILIES
    path = (write_vision_checkpoint if is_vision else write_checkpoint)(tmp_path / "model", family, seed=5)
    await check_choices(config(path, speculate=speculate), PICTURES if is_vision else TEXTS)
