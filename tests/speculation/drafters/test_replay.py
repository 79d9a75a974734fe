"""Replayed drafts: matching, error rates, and the cost of a draft model."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from foreword.core.outputs import Draft
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.errors import ConfigError
from foreword.speculation.drafters.replay import (
    RecordedOutput,
    ReplayDrafter,
    ReplayWithDraftModel,
    read_recording,
)
from foreword.speculation.engine_drafter import DraftRequest
from tests.speculation.drafters.test_draft_model import Passes, drafter_of
from tests.support.checkpoints import write_checkpoint
from tests.support.fakes import extended

PROMPT, OUTPUT = (1, 2, 3), tuple(range(100, 160))


def state_of(seed: int = 0, prompt: tuple[int, ...] = PROMPT, name: str = "a") -> RequestState:
    return RequestState(Request(name, prompt, SamplingParams(temperature=0), seed), 0, 4096)


def replay_of(*recorded: tuple[int, RecordedOutput], error_rate: float = 0.0) -> ReplayDrafter:
    return ReplayDrafter({(PROMPT, seed): output for seed, output in recorded}, error_rate, 272)


def written(path: Path, *lines: dict[str, object]) -> str:
    file = path / "recording"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


def test_replays_the_output_of_prompt_and_seed() -> None:
    replay = replay_of((7, RecordedOutput(OUTPUT[:6])), (-1, RecordedOutput((5, 6))))
    own, other, unknown = state_of(7), state_of(8, name="b"), state_of(prompt=(9,), name="c")
    for state in (own, other, unknown):
        replay.start(state)
    assert replay.propose([DraftRequest(other, 3), DraftRequest(unknown, 3)]) == [
        Draft((5, 6), "replay"),
        None,
    ]
    for token_ids in (OUTPUT[2:5], OUTPUT[4:6], None):
        (draft,) = replay.propose([DraftRequest(extended(own, OUTPUT[own.num_output :][:2]), 3)])
        assert draft == (token_ids and Draft(token_ids, "replay"))
    for state in (own, other, unknown):
        replay.finish(state.id, OUTPUT)
    replay.check(())


@pytest.mark.parametrize(
    ("own", "flag", "rate"), [(None, 0.3, 0.3), (0.3, 0.9, 0.3), (0.0, 1.0, 0.0), (1.0, 0.0, 1.0)]
)
def test_line_error_rate_overrides_the_default(own: float | None, flag: float, rate: float) -> None:
    replay = replay_of((0, RecordedOutput(OUTPUT * 20, own)), error_rate=flag)
    state = state_of()
    replay.start(state)
    (draft,) = replay.propose([DraftRequest(state, 1200)])
    assert draft is not None
    wrong = sum(a != b for a, b in zip(draft.token_ids, OUTPUT * 20, strict=True)) / 1200
    assert wrong == pytest.approx(rate, abs=0.06 if 0 < rate < 1 else 0)
    (again,) = replay.propose([DraftRequest(extended(state, OUTPUT[:30]), 1200)])
    assert again is not None and again.token_ids == draft.token_ids[30:], (
        "errors must not depend on where a draft begins"
    )


def test_read_recording(tmp_path: Path) -> None:
    plain = {"prompt_token_ids": [1, 2], "token_ids": [3]}
    path = written(tmp_path, plain, {**plain, "seed": 4, "error_rate": 0.25})
    assert read_recording(path) == {
        ((1, 2), -1): RecordedOutput((3,)),
        ((1, 2), 4): RecordedOutput((3,), 0.25),
    }


@pytest.mark.parametrize(
    "change",
    [{"error_rate": 1.5}, {"error_rate": "x"}, {"error_rate": True}, {"seed": 1.5}, {"token_ids": 3}],
)
def test_invalid_line_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    plain = {"prompt_token_ids": [1, 2], "token_ids": [3]}
    with pytest.raises(ConfigError, match="line 2"):
        read_recording(written(tmp_path, plain, plain | change))


class Scripted:
    """A model-based drafter that drafts scripted lengths."""

    name = "draft"
    one_pass = None

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths
        self.draft_requests: list[DraftRequest] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        self.draft_requests += requests
        return [Draft((9,) * length, "draft", (0.1,) * length) if length else None for length in self.lengths]


def test_replay_is_cut_to_the_model_draft() -> None:
    """Requests without a recording run no model, and min_prob is 0."""
    replay = replay_of((0, RecordedOutput(OUTPUT[:8])))
    inner = Scripted((8, 3, 0))
    paid = ReplayWithDraftModel(replay, inner)  # type: ignore[arg-type]
    states = [state_of(name=f"{i}") for i in range(3)]
    for state in (*states, stranger := state_of(5, (8,), "stranger")):
        replay.start(state)
    drafts = paid.propose([DraftRequest(state, 20, min_prob=0.7) for state in (stranger, *states)])
    assert drafts == [None, Draft(OUTPUT[:8], "replay"), Draft(OUTPUT[:3], "replay"), None]
    assert inner.draft_requests == [DraftRequest(state, 8, min_prob=0.0) for state in states]


def test_replay_runs_the_draft_model(tmp_path: Path) -> None:
    """The model's own drafts are rejected; it continues from the common prefix."""
    counted: list[Passes] = []
    inner = drafter_of(write_checkpoint(tmp_path / "model", seed=5), counted=counted)
    paid = ReplayWithDraftModel(replay_of((0, RecordedOutput(OUTPUT))), inner)
    state = state_of()
    paid.start(state)
    pending_rows = []
    for begin in range(0, 40, 5):
        draft_request = DraftRequest(extended(state, OUTPUT[begin : begin + 5]), 4)
        pending_rows.append(paid.num_pending_rows(draft_request))
        (draft,) = paid.propose([draft_request])
        assert draft == Draft(OUTPUT[begin + 5 : begin + 9], "replay")
        paid.check({"a"})
    assert pending_rows == [8, 5, 5, 5, 5, 5, 5, 5]
    assert counted[0].rows == [row for pending_rows in pending_rows for row in (pending_rows, 1, 1, 1)]
    assert paid.pass_seconds(4, 4) > 0
    paid.finish("a", OUTPUT)
    paid.check(())
    assert inner._pool.num_used == 0
