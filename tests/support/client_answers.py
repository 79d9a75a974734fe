"""Collects the answers of a client while its engines are killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from foreword.core.outputs import EmbeddingEvent, ErrorEvent, Event, TokenLogprob
from foreword.core.request import Request
from foreword.engine_client.base import EngineClient
from foreword.engine_client.process_client import ProcessClient
from foreword.engine_client.router import EngineRouter
from tests.support.waiting import WAIT_S


def is_gone(pid: int) -> bool:
    """Whether the process is gone, or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@dataclass
class Answer:
    """All output of one request."""

    token_ids: list[int] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    cached: set[int] = field(default_factory=set)
    end: str | bytes | None = None

    def add(self, event: Event) -> None:
        assert not isinstance(event, ErrorEvent), event.error
        if isinstance(event, EmbeddingEvent):
            self.end = event.vector
            return
        assert event.index == len(self.token_ids)
        self.token_ids += event.token_ids
        self.hashes += event.logits_hashes
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        self.cached.add(event.num_cached)
        self.end = event.finish_reason


async def collect_answers(
    client: EngineClient, asked: Sequence[Request], seen: Callable[[Event], None] | None = None
) -> dict[str, Answer]:
    """Answers by kind, the last part of a request id."""

    async def collect(request: Request) -> Answer:
        answer = Answer()
        async for event in client.submit(request):
            answer.add(event)
            if seen is not None:
                seen(event)
        return answer

    async with asyncio.timeout(WAIT_S):
        collected = await asyncio.gather(*(collect(request) for request in asked))
    return {request.id.rpartition("-")[2]: answer for request, answer in zip(asked, collected, strict=True)}


async def last_event(client: EngineClient, request: Request) -> Event:
    async with asyncio.timeout(WAIT_S):
        return [event async for event in client.submit(request)][-1]


class Killer:
    """Kills an engine after every `every` of its events, `times` times in all; replicas in turn."""

    def __init__(self, client: ProcessClient | EngineRouter, every: int, times: int) -> None:
        self.client, self.every, self.times = client, every, times
        self.seen = 0
        self.killed: set[int] = set()

    def __call__(self, event: Event) -> None:
        self.seen += 1
        alive = [pid for pid in self.client.pids.values() if pid not in self.killed]
        if self.seen < self.every or not alive or len(self.killed) >= self.times:
            return
        self.seen = 0
        pid = alive[len(self.killed) % len(alive)]
        self.killed.add(pid)
        os.kill(pid, signal.SIGKILL)
