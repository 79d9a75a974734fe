"""`foreword serve` over HTTP, one client per stream. See peers_worker.py."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from peers_worker import peak_bytes, serve

from foreword.bench.server import ServerProcess
from foreword.cli.client import choices_of, iter_chunks_async, token_ids_of
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
            max_model_len=tokens,
            max_num_seqs=streams,
            prefix_caching=False,
            speculate="off",
            served_model_name="peer",
            **options,
        )
        self.server = self.stack.enter_context(ServerProcess(config))
        return {}

    def streams(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        """ "spans": when each request was sent and its answer complete."""
        seconds, answers = asyncio.run(self._all(prompts, tokens))
        return {
            "seconds": seconds,
            "ids": [ids for ids, _ in answers],
            "spans": [span for _, span in answers],
        }

    def peak(self) -> int:
        """Bytes of the server's processes, each at its peak."""
        return sum(map(peak_bytes, _process_tree(self.server.pid)))

    async def _all(
        self, prompts: list[list[int]], tokens: int
    ) -> tuple[float, list[tuple[list[int], tuple[float, float]]]]:
        async with httpx.AsyncClient(base_url=self.server.url, timeout=None) as http:
            started = time.perf_counter()
            answers = await asyncio.gather(*(_stream(http, prompt, tokens) for prompt in prompts))
            return time.perf_counter() - started, answers


def _process_tree(pid: int | str) -> Iterator[int | str]:
    yield pid
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        yield from _process_tree(child)


async def _stream(
    http: httpx.AsyncClient, prompt: list[int], tokens: int
) -> tuple[list[int], tuple[float, float]]:
    """Token ids of an answer, and when it was sent and complete."""
    body = {
        "model": "peer",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    ids: list[int] = []
    sent = time.perf_counter()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for chunk in iter_chunks_async(response):
            ids += [token_id for choice in choices_of(chunk) for token_id in token_ids_of(choice)]
    return ids, (sent, time.perf_counter())


if __name__ == "__main__":
    with ExitStack() as stack:
        serve(ServedPeer(stack))
