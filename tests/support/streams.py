"""Many streams of a server at once, whose texts are compared with those of another server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import httpx

from tests.support.waiting import WAIT_S

NUM_STREAMS = 32


async def ask_all(url: str, on_event: Callable[[], None] = lambda: None, num_tokens: int = 200) -> list[str]:
    """Texts of NUM_STREAMS sampled completions. An error of a stream fails the test."""
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_S, limits=limits) as http:
        return await asyncio.gather(*(_ask(http, i, on_event, num_tokens) for i in range(NUM_STREAMS)))


async def _ask(http: httpx.AsyncClient, index: int, on_event: Callable[[], None], num_tokens: int) -> str:
    prompt = f"{index}: Once upon a time, "
    body = {"model": "demo", "prompt": prompt, "max_tokens": num_tokens, "seed": index, "stream": True}
    text = ""
    async with http.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as response:
        assert response.status_code == 200, (await response.aread()).decode()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                on_event()
    return text
