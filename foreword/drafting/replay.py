"""Recorded outputs as drafts, with a chosen error rate: measures the machinery apart from the guessing."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from operator import index
from pathlib import Path
from random import Random

from foreword.core.draft import Draft
from foreword.core.request import RequestState
from foreword.drafting.base import Ask
from foreword.errors import ConfigError

__all__ = ["ReplayDrafter", "read_recording"]

Recording = Mapping[tuple[tuple[int, ...], int], Sequence[int]]


class ReplayDrafter:
    """Drafts the recorded continuation of (prompt, seed); each token is wrong with probability error_rate.

    Which tokens are wrong depends on the seed and the token's absolute index alone.
    """

    name = "replay"

    def __init__(self, recording: Recording, error_rate: float, vocab_size: int) -> None:
        assert 0.0 <= error_rate <= 1.0
        self._recording = recording
        self._error_rate = error_rate
        self._vocab_size = vocab_size
        self._outputs: dict[str, Sequence[int]] = {}

    def start(self, state: RequestState) -> None:
        key = (state.request.prompt_ids, state.request.seed)
        greedy = (state.request.prompt_ids, -1)
        self._outputs[state.id] = self._recording.get(key) or self._recording.get(greedy) or ()

    def finish(self, request_id: str) -> None:
        self._outputs.pop(request_id, None)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._outputs)

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        return [self._propose(ask) for ask in asks]

    def _propose(self, ask: Ask) -> Draft | None:
        first = ask.length - ask.state.num_prompt
        recorded = self._outputs[ask.state.id][first : first + ask.max_tokens]
        guess = tuple(self._maybe_wrong(ask.state.request.seed, first + i, token_id) for i, token_id in enumerate(recorded))
        return Draft(guess, self.name) if guess else None

    def _maybe_wrong(self, seed: int, index: int, token_id: int) -> int:
        wrong = Random(seed * 1_000_003 + index).random() < self._error_rate
        return (token_id + 1) % self._vocab_size if wrong else token_id


def read_recording(path: str) -> Recording:
    """JSON lines of {"prompt_token_ids": [...], "token_ids": [...], "seed": n}; without a seed it serves any.

    Raises ConfigError with the line's number.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"replay_file {path}: {error}", "replay_file") from None
    recording: dict[tuple[tuple[int, ...], int], Sequence[int]] = {}
    for number, line in enumerate(lines, start=1):
        try:
            item = json.loads(line)
            prompt, seed = tuple(map(index, item["prompt_token_ids"])), index(item.get("seed", -1))
            recording[prompt, seed] = list(map(index, item["token_ids"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"replay_file {path}, line {number}: {error!r}", "replay_file") from None
    return recording
