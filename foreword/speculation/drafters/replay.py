"""Recorded outputs as drafts, with a given error rate: benchmarks verification without a drafter."""

from __future__ import annotations

import json
import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from foreword.core.outputs import Draft
from foreword.core.request import RequestState
from foreword.errors import ConfigError
from foreword.speculation.engine_drafter import DraftRequest, EngineDrafter, ModelBasedDrafter

as_int = operator.index
ANY_SEED = -1  # key of an output recorded without a seed


@dataclass(frozen=True, slots=True)
class RecordedOutput:
    """A recorded output."""

    token_ids: tuple[int, ...]
    error_rate: float | None = None  # None: the drafter's


Recording = Mapping[tuple[tuple[int, ...], int], RecordedOutput]  # by (prompt, seed)


class ReplayDrafter(EngineDrafter):
    """Drafts the recorded continuation of (prompt, seed); each token is wrong with probability error_rate.

    Errors depend on the seed and the output index alone. Drafts have no confidence.
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
        any_seed = (state.request.prompt_ids, ANY_SEED)
        output = self._recording.get(key) or self._recording.get(any_seed)
        self._outputs[state.id] = output or RecordedOutput(())

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None:
        self._outputs.pop(request_id, None)

    def check(self, live: Container[str]) -> None:
        assert all(request_id in live for request_id in self._outputs)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        return [self._propose(request) for request in requests]

    def _propose(self, request: DraftRequest) -> Draft | None:
        recorded = self._outputs[request.state.id]
        error_rate = self._error_rate if recorded.error_rate is None else recorded.error_rate
        first, seed = request.state.num_output, request.state.request.seed
        continuation = recorded.token_ids[first : first + request.max_draft_tokens]
        token_ids = tuple(
            (token_id + 1) % self._vocab_size if _is_wrong(seed, index, error_rate) else token_id
            for index, token_id in enumerate(continuation, start=first)
        )
        return Draft(token_ids, self.name) if token_ids else None


class ReplayWithDraftModel(ModelBasedDrafter):
    """Replayed drafts at the cost of a draft model, which runs and limits the replayed lengths."""

    name = ReplayDrafter.name

    def __init__(self, replay: ReplayDrafter, draft_model: ModelBasedDrafter) -> None:
        self._replay = replay
        self._draft_model = draft_model
        self.one_pass = draft_model.one_pass

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
        proposed = [index for index, draft in enumerate(drafts) if draft]
        computed = self._draft_model.propose(
            [DraftRequest(requests[i].state, len(draft.token_ids)) for i in proposed if (draft := drafts[i])]
        )
        for index, paid in zip(proposed, computed, strict=True):
            drafts[index] = _truncate(drafts[index], paid)
        return drafts


def _is_wrong(seed: int, position: int, error_rate: float) -> bool:
    return Random(seed * 1_000_003 + position).random() < error_rate


def _truncate(draft: Draft | None, computed: Draft | None) -> Draft | None:
    """The draft cut to the length of the computed one."""
    if draft is None or computed is None:
        return None
    return Draft(draft.token_ids[: len(computed.token_ids)], draft.drafter)


def read_recording(path: str) -> Recording:
    """Read JSON lines of {"prompt_token_ids": [...], "token_ids": [...], "seed": n, "error_rate": x}.

    A line without a seed matches any; without an error rate it uses the drafter's. Raises ConfigError.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"replay_file {path}: {error}", "replay_file") from None
    recording: dict[tuple[tuple[int, ...], int], RecordedOutput] = {}
    for number, line in enumerate(lines, start=1):
        try:
            item = json.loads(line)
            prompt, seed = tuple(map(as_int, item["prompt_token_ids"])), as_int(item.get("seed", ANY_SEED))
            recording[prompt, seed] = RecordedOutput(
                tuple(map(as_int, item["token_ids"])), _read_error_rate(item.get("error_rate"))
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
