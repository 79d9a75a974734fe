"""A record of everything that enters the controller, and a replay that checks its decisions against it.

The controller depends on nothing else, not even on a clock. Lines are JSON. They hold no token of any text: of a draft
only which of its guesses were right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foreword.core.outputs import Draft
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request, RequestState
from foreword.speculation.base import DraftRequest
from foreword.speculation.control.controller import DraftLengthController
from foreword.speculation.control.cost_model import Calibration, PassCost, classify_sampling
from foreword.speculation.policy import PrefillLoad, Proposal, RequestStep, StepRecord

__all__ = ["RecordingController", "replay"]

# Parameters that stand for all of their sampling class.
PARAMS_BY_SAMPLER_CLASS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"top_p": 0.5},
    {"min_tokens": 1},
    {"logprobs": 0},
)


class RecordingController(DraftLengthController):
    """A controller that writes down what it is told and what it decides; each line is on disk before it goes on.

    Raises OSError if the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        calibration: Calibration,
        max_tokens: int,
        pass_costs: Mapping[str, PassCost] | None = None,
    ) -> None:
        super().__init__(calibration, max_tokens, pass_costs)
        self._path = path
        path.write_text("")
        self._write(
            "setup",
            sampled=[*calibration.all_rows_sampled.items()],
            single=[*calibration.one_row_sampled.items()],
            reads=[calibration.context_cost_first_row, calibration.context_cost_extra_row],
            max_tokens=max_tokens,
            passes={name: [*cost.seconds.items()] for name, cost in (pass_costs or {}).items()},
        )

    def start(self, state: RequestState) -> None:
        params = state.params
        self._write(
            "start",
            id=state.id,
            kind=classify_sampling(params),
            tokens=[state.num_prompt, len(state.tokens), state.max_len],
            bounds=[params.max_tokens, params.speculation.max_tokens],
        )
        super().start(state)

    def finish(self, request_id: str) -> None:
        self._write("finish", id=request_id, length=len(self._requests[request_id].state.tokens))
        super().finish(request_id)

    def record_acceptance(self, state: RequestState, draft: Draft, output_ids: Sequence[int]) -> None:
        right = [guess == token for guess, token in zip(draft.token_ids, output_ids, strict=False)]
        self._write("score", id=state.id, draft=_draft_record(draft), right=right, run=len(output_ids))
        super().record_acceptance(state, draft, output_ids)

    def max_draft_len(self, draft_request: DraftRequest) -> int:
        length = super().max_draft_len(draft_request)
        self._write("bound", ask=_request_record(draft_request), decided=length)
        return length

    def plan_draft_model(
        self, proposals: Sequence[Proposal], load: PrefillLoad, drafter: str, pending_rows: Sequence[int]
    ) -> list[tuple[int, float]]:
        given = _proposals_record(proposals, load)
        wanted = super().plan_draft_model(proposals, load, drafter, pending_rows)
        self._write("passes", **given, drafter=drafter, backlogs=list(pending_rows), decided=_to_json(wanted))
        return wanted

    def select(self, proposals: Sequence[Proposal], load: PrefillLoad) -> list[Draft | None]:
        given = _proposals_record(proposals, load)
        admitted = super().select(proposals, load)
        self._write("admit", **given, decided=_to_json(admitted))
        return admitted

    def num_steps_to_skip(self) -> int:
        rounds = super().num_steps_to_skip()
        self._write("rest", decided=rounds)
        return rounds

    def record_skipped(self, num_steps: int, num_requests: int) -> None:
        self._write("rested", steps=num_steps, asks=num_requests)
        super().record_skipped(num_steps, num_requests)

    def record_step(self, step_record: StepRecord) -> None:
        served = [
            [s.state.id, s.num_tokens, s.num_draft_tokens, s.is_sampled, s.num_emitted, s.context_len]
            for s in step_record.requests
        ]
        self._write("measured", served=served, seconds=dict(step_record.seconds_by_stage))
        super().record_step(step_record)

    def _write(self, event: str, **fields: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"what": event, **fields}) + "\n")


def replay(lines: Iterable[str]) -> Iterator[Any]:
    """Drive a fresh controller by a record and yield its decisions, each equal to the recorded one (asserted)."""
    records = map(json.loads, lines)
    setup = next(records)
    assert setup["what"] == "setup", "a record begins with its setup"
    told = _Replayer(setup)
    for record in records:
        decided = _to_json(getattr(told, record["what"])(record))
        if "decided" in record:
            assert decided == record["decided"], f"decided {decided}, recorded {record['decided']}"
            yield decided


class _Replayer:
    """A controller that is told what a record says. Methods are named as the lines."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        calibration = Calibration(dict(setup["sampled"]), dict(setup["single"]), *setup["reads"])
        passes = {name: PassCost.from_seconds(dict(seconds)) for name, seconds in setup["passes"].items()}
        self.controller = DraftLengthController(calibration, setup["max_tokens"], passes)
        self.states: dict[str, RequestState] = {}

    def start(self, record: Mapping[str, Any]) -> None:
        self.controller.start(
            self._add_state(
                record["id"], record["tokens"], record["bounds"], PARAMS_BY_SAMPLER_CLASS[record["kind"]]
            )
        )

    def finish(self, record: Mapping[str, Any]) -> None:
        self._extend_to(record["id"], record["length"])
        del self.states[record["id"]]
        self.controller.finish(record["id"])

    def score(self, record: Mapping[str, Any]) -> None:
        length, drafter, confidence = record["draft"]
        guesses = [*map(int, record["right"]), *(length - len(record["right"])) * [1]]
        draft = Draft(tuple(guesses), drafter, tuple(confidence))
        self.controller.record_acceptance(self.states[record["id"]], draft, (1,) * record["run"])

    def bound(self, record: Mapping[str, Any]) -> int:
        return self.controller.max_draft_len(self._draft_request(record["ask"]))

    def passes(self, record: Mapping[str, Any]) -> list[tuple[int, float]]:
        return self.controller.plan_draft_model(
            self._proposals(record), PrefillLoad(*record["load"]), record["drafter"], record["backlogs"]
        )

    def admit(self, record: Mapping[str, Any]) -> list[Draft | None]:
        return self.controller.select(self._proposals(record), PrefillLoad(*record["load"]))

    def rest(self, record: Mapping[str, Any]) -> int:
        return self.controller.num_steps_to_skip()

    def rested(self, record: Mapping[str, Any]) -> None:
        self.controller.record_skipped(record["steps"], record["asks"])

    def measured(self, record: Mapping[str, Any]) -> None:
        served = tuple(RequestStep(self._state_of(id_), *figures) for id_, *figures in record["served"])
        self.controller.record_step(StepRecord(served, record["seconds"]))

    def _add_state(
        self, id_: str, tokens: Sequence[int], bounds: Sequence[int | None], params: Mapping[str, Any]
    ) -> RequestState:
        num_prompt, length, limit = tokens
        speculation = Speculation(max_tokens=bounds[1])
        request = Request(
            id_, (1,) * num_prompt, SamplingParams(max_tokens=bounds[0], speculation=speculation, **params), 0
        )
        state = self.states[id_] = RequestState(request, 0, limit)
        return self._extend_to(state.id, length)

    def _state_of(self, id_: str) -> RequestState:
        """Requests that may not be drafted for are met first in a step that serves them."""
        return self.states.get(id_) or RequestState(Request(id_, (1,), SamplingParams(), 0), 0, 2)

    def _extend_to(self, id_: str, num_tokens: int) -> RequestState:
        """The state, brought to so many tokens."""
        state = self.states[id_]
        state.tokens.extend([1] * (num_tokens - len(state.tokens)))
        return state

    def _draft_request(self, record: Sequence[Any]) -> DraftRequest:
        id_, length, max_tokens = record
        return DraftRequest(self._extend_to(id_, length), max_tokens)

    def _proposals(self, record: Mapping[str, Any]) -> list[Proposal]:
        return [
            Proposal(
                self._draft_request(ask),
                [Draft((1,) * length, drafter, tuple(confidence)) for length, drafter, confidence in drafts],
            )
            for ask, drafts in record["offers"]
        ]


def _request_record(request: DraftRequest) -> list[Any]:
    return [request.state.id, request.num_tokens, request.max_tokens]


def _draft_record(draft: Draft) -> list[Any]:
    return [len(draft.token_ids), draft.drafter, list(draft.confidence)]


def _proposals_record(proposals: Sequence[Proposal], load: PrefillLoad) -> dict[str, Any]:
    listed = [
        [_request_record(offer.request), [_draft_record(draft) for draft in offer.drafts]]
        for offer in proposals
    ]
    return {"offers": listed, "load": [load.num_rows, load.num_context_tokens]}


def _to_json(decision: Any) -> Any:
    """A decision as JSON holds it; of drafts, whose they are and how long."""
    if isinstance(decision, Draft):
        return [decision.drafter, len(decision.token_ids)]
    return [_to_json(part) for part in decision] if isinstance(decision, list | tuple) else decision
