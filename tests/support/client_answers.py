"""Engines of their own processes that are killed, and the answers of their client."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foreword.checkpoint import prepare_checkpoint
from foreword.config.options import Config
from foreword.core.outputs import EmbeddingEvent, ErrorEvent, Event, TokenLogprob
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.core.structured_output import StructuredOutput
from foreword.engine_client.base import EngineClient
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.make_client import make_engine_client
from foreword.engine_client.process_client import ProcessClient
from foreword.engine_client.router import EngineRouter
from tests.support.checkpoints import EOS
from tests.support.waiting import WAIT_S

CRASHING_ENGINE = "tests.support.crashing_engine"
LENGTH = 40
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string", "minLength": 20, "maxLength": 60}},
    "required": ["a"],
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "sampled": {"logprobs": 0, "prompt_logprobs": 1},
    "filtered": {"top_p": 0.9, "top_k": 50, "min_tokens": 10},
    "penalties": {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "dry_multiplier": 0.8,
    },
    "grammar": {"structured": StructuredOutput.json_schema(SCHEMA), "logprobs": 1},
    "choice 0": {"temperature": 1.2},
    "choice 1": {"temperature": 1.2},
    "choice 2": {"temperature": 1.2},
    "choice 3": {"temperature": 1.2},
    "short": {"max_tokens": 6},
    "last": {},
    "mean": {},
}


def kind_request(name: str, kind: str = "sampled") -> Request:
    params = SamplingParams(**({"max_tokens": LENGTH, "ignore_eos": True} | KINDS[kind]))
    pooling = kind if kind in ("last", "mean") else None
    seed = int(kind[-1]) if kind.startswith("choice") else 7
    return Request(name, (40, 41, 42, 40, 41), params, seed, eos_token_ids=(EOS,), pooling=pooling)


def kind_requests(prefix: str) -> list[Request]:
    """A request of each kind, at which its id ends."""
    return [kind_request(f"{prefix}-{kind}", kind) for kind in KINDS]


def make_client(
    checkpoint: Path, fork_server: ForkServer | None = None, entry: str = CRASHING_ENGINE, **options: Any
) -> EngineRouter:
    """A client that is not started, of engines that come from this fork server or run this module."""
    defaults = {"kv_cache_memory": "4000tokens", "threads": 1, "log_level": "error", "test_mode": True}
    prepared = prepare_checkpoint(Config(model=str(checkpoint), **(defaults | options)))
    client = make_engine_client(
        prepared.config,
        prepared.never_sampled_ids,
        prepared.tokenizer.engine_vocabulary,
        fork_server=(own := fork_server or ForkServer(entry)),
    )
    client._fork_server = own if fork_server is None else None  # close() closes it
    return client


def process_of(client: EngineRouter) -> ProcessClient:
    """The only engine."""
    assert client._replicas.only is not None
    process_client = client._replicas.only.client
    assert isinstance(process_client, ProcessClient)
    return process_client


def pid_of(client: EngineRouter) -> int:
    """The process of the only engine."""
    return client.pids[""]


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

    def __init__(self, client: EngineRouter, every: int, times: int) -> None:
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
