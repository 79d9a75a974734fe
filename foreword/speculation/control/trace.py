"""Record of all inputs of the controller, and a replay that checks its decisions.

The controller has no other input, not even a clock. Lines are JSON. They contain no token ids: of a draft
only which of its tokens were right.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foreword.core.outputs import Draft
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request, RequestState
from foreword.speculation.base import DraftRequest
from foreword.speculation.control.controller import DraftLengthController
from foreword.speculation.control.cost_model import Calibration, PassCost, classify_sampling
from foreword.speculation.control.fairness import DEFAULT_MAX_SLOWDOWN
from foreword.speculation.policy import PrefillLoad, Proposal, RequestStep, StepRecord

# Parameters that represent their sampler class.
PARAMS_BY_SAMPLER_CLASS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"top_p": 0.5},
    {"min_tokens": 1},
    {"logprobs": 0},
)


class RecordingController(DraftLengthController):
    """A controller that writes its inputs and decisions. Each line is on disk before it continues.

    Raises OSError if the file cannot be written.
    """

    def __init__(
        self,
        path: Path,
        calibration: Calibration,
        max_tokens: int,
        pass_costs: Mapping[str, PassCost] | None = None,
        plugins: Collection[str] = (),
        max_slowdown: float = DEFAULT_MAX_SLOWDOWN,
    ) -> None:
        super().__init__(calibration, max_tokens, pass_costs, plugins, max_slowdown)
        self._path = path
        path.write_text("")
        self._write(
            "setup",
            sampled=[*calibration.all_rows_sampled.items()],
            single=[*calibration.one_row_sampled.items()],
            reads=[
                calibration.context_cost_first_row,
                calibration.context_cost_extra_row,
                calibration.request_cost,
            ],
            max_tokens=max_tokens,
            passes={name: [*cost.seconds.items()] for name, cost in (pass_costs or {}).items()},
            plugins=list(plugins),
            max_slowdown=max_slowdown,
        )

    def start(self, state: RequestState) -> int:
        params = state.params
        tokens = [state.num_prompt, len(state.tokens), state.max_len]
        num_steps = super().start(state)
        self._write(
            "start",
            id=state.id,
            kind=classify_sampling(params),
            tokens=tokens,
            bounds=[params.max_tokens, params.speculation.max_draft_tokens],
            decided=num_steps,
        )
        return num_steps

    def finish(self, request_id: str) -> None:
        self._write("finish", id=request_id, length=len(self._requests[request_id].state.tokens))
        super().finish(request_id)

    def record_acceptance(self, state: RequestState, draft: Draft, output_ids: Sequence[int]) -> None:
        right = [
            draft_id == token_id for draft_id, token_id in zip(draft.token_ids, output_ids, strict=False)
        ]
        self._write("score", id=state.id, draft=_draft_record(draft), right=right, run=len(output_ids))
        super().record_acceptance(state, draft, output_ids)

    def max_draft_len(self, state: RequestState) -> int:
        length = super().max_draft_len(state)
        self._write("bound", id=state.id, length=len(state.tokens), decided=length)
        return length

    def may_propose(self, drafter: str, load: PrefillLoad) -> bool:
        is_allowed = super().may_propose(drafter, load)
        if drafter in self._accounts or drafter in self._model_drafters:
            load_record = [load.num_rows, load.num_context_tokens]
            self._write("may_propose", drafter=drafter, load=load_record, decided=is_allowed)
        return is_allowed

    def record_proposing(self, drafter: str, seconds: float) -> None:
        if drafter in self._accounts:
            self._write("proposing", drafter=drafter, seconds=seconds)
        super().record_proposing(drafter, seconds)

    def plan_draft_model(
        self, proposals: Sequence[Proposal], load: PrefillLoad, drafter: str, pending_rows: Sequence[int]
    ) -> list[tuple[int, float]]:
        inputs = _proposals_record(proposals, load)
        plans = super().plan_draft_model(proposals, load, drafter, pending_rows)
        self._write("passes", **inputs, drafter=drafter, backlogs=list(pending_rows), decided=_to_json(plans))
        return plans

    def select(self, proposals: Sequence[Proposal], load: PrefillLoad) -> list[Draft | None]:
        inputs = _proposals_record(proposals, load)
        selected = super().select(proposals, load)
        self._write("admit", **inputs, decided=_to_json(selected))
        return selected

    def num_steps_to_skip(self) -> int:
        num_steps = super().num_steps_to_skip()
        self._write("rest", decided=num_steps)
        return num_steps

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
    """Replay a record on a new controller and yield its decisions, asserted to equal the recorded ones."""
    records = map(json.loads, lines)
    setup = next(records)
    assert setup["what"] == "setup", "the record does not begin with its setup"
    replayer = _Replayer(setup)
    for record in records:
        decided = _to_json(getattr(replayer, record["what"])(record))
        if "decided" in record:
            assert decided == record["decided"], f"decided {decided}, recorded {record['decided']}"
            yield decided


class _Replayer:
    """A controller driven by a record. Methods are named as the lines."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        calibration = Calibration(dict(setup["sampled"]), dict(setup["single"]), *setup["reads"])
        passes = {name: PassCost.from_seconds(dict(seconds)) for name, seconds in setup["passes"].items()}
        plugins = setup.get("plugins", ())
        options = (passes, plugins, setup.get("max_slowdown", DEFAULT_MAX_SLOWDOWN))
        self.controller = DraftLengthController(calibration, setup["max_tokens"], *options)
        self.states: dict[str, RequestState] = {}

    def start(self, record: Mapping[str, Any]) -> int:
        params = PARAMS_BY_SAMPLER_CLASS[record["kind"]]
        return self.controller.start(
            self._add_state(record["id"], record["tokens"], record["bounds"], params)
        )

    def finish(self, record: Mapping[str, Any]) -> None:
        self._extend_to(record["id"], record["length"])
        del self.states[record["id"]]
        self.controller.finish(record["id"])

    def score(self, record: Mapping[str, Any]) -> None:
        length, drafter, confidence = record["draft"]
        token_ids = [*map(int, record["right"]), *(length - len(record["right"])) * [1]]
        draft = Draft(tuple(token_ids), drafter, tuple(confidence))
        self.controller.record_acceptance(self.states[record["id"]], draft, (1,) * record["run"])

    def bound(self, record: Mapping[str, Any]) -> int:
        return self.controller.max_draft_len(self._extend_to(record["id"], record["length"]))

    def may_propose(self, record: Mapping[str, Any]) -> bool:
        return self.controller.may_propose(record["drafter"], PrefillLoad(*record["load"]))

    def proposing(self, record: Mapping[str, Any]) -> None:
        self.controller.record_proposing(record["drafter"], record["seconds"])

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
        speculation = Speculation(max_draft_tokens=bounds[1])
        request = Request(
            id_, (1,) * num_prompt, SamplingParams(max_tokens=bounds[0], speculation=speculation, **params), 0
        )
        state = self.states[id_] = RequestState(request, 0, limit)
        return self._extend_to(state.id, length)

    def _state_of(self, id_: str) -> RequestState:
        """Requests without speculation are recorded only in steps."""
        return self.states.get(id_) or RequestState(Request(id_, (1,), SamplingParams(), 0), 0, 2)

    def _extend_to(self, id_: str, num_tokens: int) -> RequestState:
        """The state, extended to `num_tokens`."""
        state = self.states[id_]
        state.tokens.extend([1] * (num_tokens - len(state.tokens)))
        return state

    def _draft_request(self, record: Sequence[Any]) -> DraftRequest:
        id_, length, max_tokens = record
        return DraftRequest(self._extend_to(id_, length), max_tokens)

    def _proposals(self, record: Mapping[str, Any]) -> list[Proposal]:
        return [
            Proposal(
                self._draft_request(request),
                [Draft((1,) * length, drafter, tuple(confidence)) for length, drafter, confidence in drafts],
            )
            for request, drafts in record["offers"]
        ]


def _request_record(request: DraftRequest) -> list[Any]:
    return [request.state.id, request.num_tokens, request.max_draft_tokens]


def _draft_record(draft: Draft) -> list[Any]:
    return [len(draft.token_ids), draft.drafter, list(draft.confidence)]


def _proposals_record(proposals: Sequence[Proposal], load: PrefillLoad) -> dict[str, Any]:
    offers = [[_request_record(p.request), [_draft_record(draft) for draft in p.drafts]] for p in proposals]
    return {"offers": offers, "load": [load.num_rows, load.num_context_tokens]}


def _to_json(decision: Any) -> Any:
    """A decision as JSON; of drafts, the drafter and the length."""
    if isinstance(decision, Draft):
        return [decision.drafter, len(decision.token_ids)]
    return [_to_json(part) for part in decision] if isinstance(decision, list | tuple) else decision
