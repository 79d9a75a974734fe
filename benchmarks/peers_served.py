"""`foreword serve` over HTTP, one client per stream. See peers_worker.py."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from peers_worker import peak_bytes, serve

from foreword.bench.server import ServerProcess
from foreword.config.options import Config


class ServedPeer:
    """Streamed greedy completions of token ids, without speculation and prefix cache."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack = stack

    def load(
        self, path: str, threads: int, tokens: int, streams: int, options: dict[str, Any]
    ) -> dict[str, Any]:
        config = Config(
            model=path,
            threads=threads,
            kv_cache_memory=f"{tokens}tokens",
            max_num_seqs=streams,
            prefix_caching=False,
            speculate="off",
            served_model_name="peer",
            **options,
        )
        self.server = self.stack.enter_context(ServerProcess(config))
        return {}

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, float]:
        return {"seconds": asyncio.run(self._all(prompts, tokens))}

    def peak(self) -> int:
        """Bytes of the server's processes, each at its peak."""
        children = Path(f"/proc/{self.server.pid}/task/{self.server.pid}/children").read_text().split()
        return sum(peak_bytes(pid) for pid in (self.server.pid, *children))

    async def _all(self, prompts: list[list[int]], tokens: int) -> float:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=None) as http:
            started = time.perf_counter()
            await asyncio.gather(*(_stream(http, prompt, tokens) for prompt in prompts))
            return time.perf_counter() - started


async def _stream(http: httpx.AsyncClient, prompt: list[int], tokens: int) -> None:
    body = {
        "model": "peer",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    usage: dict[str, Any] = {}
    async with http.stream(
        "POST", "/v1/completions", json=body | {"stream_options": {"include_usage": True}}
    ) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
    assert usage.get("completion_tokens") == tokens, f"answered with {usage}"


if __name__ == "__main__":
    with ExitStack() as stack:
        serve(ServedPeer(stack))
