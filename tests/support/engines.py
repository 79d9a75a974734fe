"""Engines of small checkpoints: load one, run requests on it, and read their events."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from foreword.config.options import Config
from foreword.core.outputs import Event, KVTierStats, TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.core.structured_output import Vocabulary
from foreword.engine.engine import Engine
from foreword.engine.loader import load
from foreword.models.model_loader import read_model_info
from tests.support.checkpoints import EOS, VOCAB_SIZE

DEFAULTS: dict[str, Any] = {
    "kv_cache_memory": "1000tokens",
    "max_model_len": 160,
    "threads": 1,
    "test_mode": True,
    "draft_length": "fixed",
}
# Ids up to 255 are bytes
VOCABULARY = Vocabulary(
    tuple(bytes([i]) if i < 256 else b"" for i in range(VOCAB_SIZE)), tuple(range(256, VOCAB_SIZE)), (EOS,)
)


def load_engine(checkpoint: Path, **options: Any) -> Engine:
    """An engine that never samples image placeholders. Its draft lengths are fixed unless options say so."""
    placeholder = image_token_id(checkpoint)
    config = Config(model=str(checkpoint), **(DEFAULTS | options))
    return load(config, never_sampled_ids=() if placeholder is None else (placeholder,))


@cache
def image_token_id(checkpoint: Path) -> int | None:
    return read_model_info(checkpoint).image_token_id


def make_request(
    name: str,
    prompt: Sequence[int] = (40, 41, 42, 40, 41),
    seed: int = 1,
    delivered: Sequence[int] = (),
    **params: Any,
) -> Request:
    """A request of 20 tokens."""
    sampling = SamplingParams(**{"max_tokens": 20, "ignore_eos": True, **params})
    return Request(name, tuple(prompt), sampling, seed, (EOS,), resume_output_ids=tuple(delivered))


def run(engine: Engine, requests: Sequence[Request] = (), apart: int = 0) -> dict[str, list[Event]]:
    """Step until idle, and check each step; the events by request.

    apart  steps between two of the `requests`
    """
    ids = (*engine.scheduler.states, *(request.id for request in requests))
    events: dict[str, list[Event]] = {request_id: [] for request_id in ids}
    to_come, num_steps = list(requests), 0
    while to_come or not engine.idle:
        if to_come and num_steps >= apart * (len(requests) - len(to_come)):
            engine.submit(to_come.pop(0))
            continue
        for event in engine.step().events:
            events.setdefault(event.request_id, []).append(event)
        engine.check()
        num_steps += 1
    assert engine.scheduler.pool.num_used == 0 and not engine.proposer._request_drafters
    assert engine.encoder.cache.num_bytes <= engine.encoder.cache.max_bytes
    return events


def tokens_of(events: Sequence[Event], name: str | None = None) -> list[int]:
    """Tokens of all events, or of one request's."""
    return [
        token_id
        for event in events
        if isinstance(event, TokenEvent) and name in (None, event.request_id)
        for token_id in event.token_ids
    ]


def verified_drafts(events: Sequence[Event]) -> list[tuple[int, int]]:
    """Draft tokens of each step that verified some, and how many of them were accepted."""
    results = [event.draft for event in events if isinstance(event, TokenEvent)]
    return [(draft.num_drafted, draft.num_accepted) for draft in results if draft is not None]


def token_hashes(events: Sequence[Event]) -> list[tuple[int, int]]:
    """Tokens with the hashes of their logits; every event has some."""
    hashes: list[int] = []
    for event in events:
        assert isinstance(event, TokenEvent), event
        hashes += event.logits_hashes
    return list(zip(tokens_of(events), hashes, strict=True))


def tier_stats(engine: Engine, tier: str) -> KVTierStats:
    assert engine.prefix_loader is not None
    return engine.prefix_loader.stats()[tier]
