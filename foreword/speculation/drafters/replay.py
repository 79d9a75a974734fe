"""Recorded outputs as drafts, with a chosen error rate: measures the machinery apart from the guessing."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path
from random import Random

from foreword.core.outputs import Draft
from foreword.core.request import RequestState
from foreword.errors import ConfigError
from foreword.speculation.base import DraftRequest, ModelBasedDrafter

__all__ = ["RecordedOutput", "Recording", "ReplayDrafter", "ReplayWithDraftModel", "read_recording"]

ANY_SEED = -1


@dataclass(frozen=True, slots=True)
class RecordedOutput:
    """An output; error_rate None: that of the drafter."""

    token_ids: tuple[int, ...]
    error_rate: float | None = None


Recording = Mapping[tuple[tuple[int, ...], int], RecordedOutput]


class ReplayDrafter:
    """Drafts the recorded continuation of (prompt, seed); each token is wrong with probability error_rate.

    Which tokens are wrong depends on the seed and the token's absolute index alone. It has no confidence.
    """

    name = "replay"

    def __init__(self, recording: Recording, error_rate: float, vocab_size: int) -> None:
        assert 0.0 <= error_rate <= 1.0
        self._recording = recording
        self._error_rate = error_rate
        self._vocab_size = vocab_size
        self._outputs: dict[str, RecordedOutput] = {}

    def start(self, state: RequestState) -> None:
        key = (state.request.prompt_ids, state.request.seed)
        greedy = (state.request.prompt_ids, ANY_SEED)
        self._outputs[state.id] = (
            self._recording.get(key) or self._recording.get(greedy) or RecordedOutput(())
        )

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        self._outputs.pop(request_id, None)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._outputs)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        return [self._propose(ask) for ask in requests]

    def _propose(self, request: DraftRequest) -> Draft | None:
        recorded = self._outputs[request.state.id]
        error_rate = self._error_rate if recorded.error_rate is None else recorded.error_rate
        first = request.num_tokens - request.state.num_prompt
        guess = tuple(
            (token_id + 1) % self._vocab_size
            if _is_wrong(request.state.request.seed, number, error_rate)
            else token_id
            for number, token_id in enumerate(
                recorded.token_ids[first : first + request.max_tokens], start=first
            )
        )
        return Draft(guess, self.name) if guess else None


class ReplayWithDraftModel:
    """Replayed guesses at the price of a model's: its passes are run, and what it guesses is dropped.

    A replayed token is drafted if the model guessed one in its place, however unsure it was.
    """

    name = ReplayDrafter.name

    def __init__(self, replay: ReplayDrafter, draft_model: ModelBasedDrafter) -> None:
        self._replay = replay
        self._draft_model = draft_model

    def start(self, state: RequestState) -> None:
        self._replay.start(state)
        self._draft_model.start(state)

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        self._replay.finish(request_id, output)
        self._draft_model.finish(request_id, output)

    def check(self, live: Container[str]) -> None:
        self._replay.check(live)
        self._draft_model.check(live)

    def num_pending_rows(self, request: DraftRequest) -> int:
        return self._draft_model.num_pending_rows(request)

    def pass_seconds(self, num_rows: int, num_sampled: int) -> float:
        return self._draft_model.pass_seconds(num_rows, num_sampled)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        drafts = self._replay.propose(requests)
        wanted = {
            n: DraftRequest(requests[n].state, len(draft.token_ids))
            for n, draft in enumerate(drafts)
            if draft
        }
        paid = dict(zip(wanted, self._draft_model.propose(list(wanted.values())), strict=True))
        return [_truncate(draft, paid.get(n)) for n, draft in enumerate(drafts)]


def _is_wrong(seed: int, position: int, error_rate: float) -> bool:
    return Random(seed * 1_000_003 + position).random() < error_rate


def _truncate(draft: Draft | None, computed: Draft | None) -> Draft | None:
    """As much of a draft as was paid for."""
    if draft is None or computed is None:
        return None
    return Draft(draft.token_ids[: len(computed.token_ids)], draft.drafter)


def read_recording(path: str) -> Recording:
    """JSON lines of {"prompt_token_ids": [...], "token_ids": [...], "seed": n, "error_rate": x}.

    Without a seed a line serves any; without an error rate it has the drafter's. Raises ConfigError with the line's number.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"replay_file {path}: {error}", "replay_file") from None
    recording: dict[tuple[tuple[int, ...], int], RecordedOutput] = {}
    for number, line in enumerate(lines, start=1):
        try:
            item = json.loads(line)
            prompt, seed = tuple(map(index, item["prompt_token_ids"])), index(item.get("seed", ANY_SEED))
            recording[prompt, seed] = RecordedOutput(
                tuple(map(index, item["token_ids"])), _read_error_rate(item.get("error_rate"))
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"replay_file {path}, line {number}: {error!r}", "replay_file") from None
    return recording


def _read_error_rate(value: object) -> float | None:
    """Raises ValueError."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        raise ValueError(f"error_rate {value!r} is not a number from 0 to 1")
    return float(value)
