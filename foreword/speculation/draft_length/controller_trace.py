"""Trace of the draft length controller, which has no other input, not even a clock.

Lines contain no token ids: of a draft only which of its tokens were right.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foreword.core.outputs import Draft
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request, RequestState
from foreword.speculation.draft_length.controller import DraftLengthController
from foreword.speculation.draft_length.cost_model import Calibration, PassCost, classify_sampling
from foreword.speculation.draft_length.delay_budget import DEFAULT_MAX_SLOWDOWN
from foreword.speculation.draft_length.policy import Proposal
from foreword.speculation.draft_length.step_record import PrefillLoad, RequestStep, StepRecord
from foreword.speculation.engine_drafter import DraftRequest
from foreword.utils import trace

# Parameters that represent their sampler class
PARAMS_BY_SAMPLER_CLASS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"top_p": 0.5},
    {"min_tokens": 1},
    {"logprobs": 0},
)


class RecordingController(DraftLengthController):
    """A controller that writes a trace. Raises OSError if the file cannot be written."""

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
        curves = [*calibration.all_rows_sampled.items()], [*calibration.one_row_sampled.items()]
        contexts = calibration.context_cost_first_row, calibration.context_cost_extra_row
        self._trace = trace.TraceWriter(
            path,
            calibration=[*curves, *contexts, calibration.request_cost],
            max_tokens=max_tokens,
            pass_seconds={name: [*cost.seconds.items()] for name, cost in (pass_costs or {}).items()},
            plugins=list(plugins),
            max_slowdown=max_slowdown,
        )

    def start(self, state: RequestState) -> int:
        params, num_steps = state.params, super().start(state)
        self._trace.write(
            "start",
            id=state.id,
            sampler_class=classify_sampling(params),
            num_tokens=[state.num_prompt, len(state.tokens), state.max_len],
            bounds=[params.max_tokens, params.speculation.max_draft_tokens],
            decided=num_steps,
        )
        return num_steps

    def finish(self, request_id: str) -> None:
        num_tokens = len(self.requests[request_id].state.tokens)
        self._trace.write("finish", id=request_id, num_tokens=num_tokens)
        super().finish(request_id)

    def record_acceptance(self, state: RequestState, draft: Draft, output_ids: Sequence[int]) -> None:
        right = [
            draft_id == token_id for draft_id, token_id in zip(draft.token_ids, output_ids, strict=False)
        ]
        self._trace.write(
            "record_acceptance",
            id=state.id,
            draft=_draft_record(draft),
            right=right,
            num_output=len(output_ids),
        )
        super().record_acceptance(state, draft, output_ids)

    def max_draft_len(self, state: RequestState) -> int:
        length = super().max_draft_len(state)
        self._trace.write("max_draft_len", id=state.id, num_tokens=len(state.tokens), decided=length)
        return length

    def may_propose(self, drafter: str, load: PrefillLoad) -> bool:
        is_allowed = super().may_propose(drafter, load)
        self._trace.write("may_propose", drafter=drafter, load=_load_record(load), decided=is_allowed)
        return is_allowed

    def record_proposing(self, drafter: str, seconds: float) -> None:
        self._trace.write("record_proposing", drafter=drafter, seconds=seconds)
        super().record_proposing(drafter, seconds)

    def plan_draft_model(
        self, proposals: Sequence[Proposal], load: PrefillLoad, drafter: str, pending_rows: Sequence[int]
    ) -> list[tuple[int, float]]:
        inputs = _proposals_record(proposals), _load_record(load), drafter, list(pending_rows)
        plans = super().plan_draft_model(proposals, load, drafter, pending_rows)
        self._trace.write("plan_draft_model", inputs=inputs, decided=[list(plan) for plan in plans])
        return plans

    def select(self, proposals: Sequence[Proposal], load: PrefillLoad) -> list[Draft | None]:
        inputs = _proposals_record(proposals), _load_record(load)
        selected = super().select(proposals, load)
        self._trace.write("select", inputs=inputs, decided=_selection_record(selected))
        return selected

    def num_steps_to_skip(self) -> int:
        num_steps = super().num_steps_to_skip()
        self._trace.write("num_steps_to_skip", decided=num_steps)
        return num_steps

    def record_skipped(self, num_steps: int, num_requests: int) -> None:
        self._trace.write("record_skipped", num_steps=num_steps, num_requests=num_requests)
        super().record_skipped(num_steps, num_requests)

    def record_step(self, step_record: StepRecord) -> None:
        requests = [[request.state.id, *request[1:]] for request in step_record.requests]
        self._trace.write("record_step", requests=requests, seconds=dict(step_record.seconds_by_stage))
        super().record_step(step_record)


def replay(lines: Iterable[str]) -> Iterator[Any]:
    """See utils.trace.replay(); decisions are as in the trace."""
    return trace.replay(lines, _Replayer)


class _Replayer:
    """A controller driven by a trace."""

    def __init__(
        self,
        calibration: Sequence[Any],
        max_tokens: int,
        pass_seconds: Mapping[str, Any],
        plugins: Sequence[str],
        max_slowdown: float,
    ) -> None:
        all_sampled, one_sampled, *costs = calibration
        passes = {name: PassCost.from_seconds(dict(seconds)) for name, seconds in pass_seconds.items()}
        measured = Calibration(dict(all_sampled), dict(one_sampled), *costs)
        self.controller = DraftLengthController(measured, max_tokens, passes, plugins, max_slowdown)
        self.states: dict[str, RequestState] = {}
        self.record_proposing = self.controller.record_proposing
        self.num_steps_to_skip = self.controller.num_steps_to_skip
        self.record_skipped = self.controller.record_skipped

    def start(
        self, id: str, sampler_class: int, num_tokens: Sequence[int], bounds: Sequence[int | None]
    ) -> int:
        (num_prompt, length, max_len), (max_tokens, max_draft_tokens) = num_tokens, bounds
        params = SamplingParams(
            max_tokens=max_tokens,
            speculation=Speculation(max_draft_tokens=max_draft_tokens),
            **PARAMS_BY_SAMPLER_CLASS[sampler_class],
        )
        self.states[id] = RequestState(Request(id, (1,) * num_prompt, params, 0), 0, max_len)
        return self.controller.start(self._state(id, length))

    def finish(self, id: str, num_tokens: int) -> None:
        self._state(id, num_tokens)
        del self.states[id]
        self.controller.finish(id)

    def record_acceptance(
        self, id: str, draft: Sequence[Any], right: Sequence[bool], num_output: int
    ) -> None:
        length, drafter, confidence = draft
        token_ids = (*map(int, right), *(1,) * (length - len(right)))
        scored = Draft(token_ids, drafter, tuple(confidence))
        self.controller.record_acceptance(self.states[id], scored, (1,) * num_output)

    def max_draft_len(self, id: str, num_tokens: int) -> int:
        return self.controller.max_draft_len(self._state(id, num_tokens))

    def may_propose(self, drafter: str, load: Sequence[int]) -> bool:
        return self.controller.may_propose(drafter, PrefillLoad(*load))

    def plan_draft_model(self, inputs: Sequence[Any]) -> list[list[float]]:
        proposals, load, drafter, pending_rows = inputs
        plans = self.controller.plan_draft_model(
            self._proposals(proposals), PrefillLoad(*load), drafter, pending_rows
        )
        return [list(plan) for plan in plans]

    def select(self, inputs: Sequence[Any]) -> list[Any]:
        proposals, load = inputs
        return _selection_record(self.controller.select(self._proposals(proposals), PrefillLoad(*load)))

    def record_step(self, requests: Sequence[Any], seconds: Mapping[str, float]) -> None:
        # Requests without speculation are recorded only in steps
        states = [
            self.states.get(id_) or RequestState(Request(id_, (1,), SamplingParams(), 0), 0, 2)
            for id_, *_ in requests
        ]
        steps = [RequestStep(state, *request[1:]) for state, request in zip(states, requests, strict=True)]
        self.controller.record_step(StepRecord(tuple(steps), seconds))

    def _state(self, id: str, num_tokens: int) -> RequestState:
        """The state, extended to `num_tokens`."""
        state = self.states[id]
        state.tokens.extend([1] * (num_tokens - len(state.tokens)))
        return state

    def _proposals(self, records: Sequence[Any]) -> list[Proposal]:
        return [
            Proposal(
                DraftRequest(self._state(id_, num_tokens), max_draft_tokens),
                [Draft((1,) * length, drafter, tuple(confidence)) for length, drafter, confidence in drafts],
            )
            for id_, num_tokens, max_draft_tokens, drafts in records
        ]


def _draft_record(draft: Draft) -> list[Any]:
    return [len(draft.token_ids), draft.drafter, list(draft.confidence)]


def _load_record(load: PrefillLoad) -> list[int]:
    return [load.num_rows, load.num_context_tokens]


def _proposals_record(proposals: Sequence[Proposal]) -> list[Any]:
    return [
        [
            p.request.state.id,
            p.request.num_tokens,
            p.request.max_draft_tokens,
            [*map(_draft_record, p.drafts)],
        ]
        for p in proposals
    ]


def _selection_record(drafts: Sequence[Draft | None]) -> list[Any]:
    return [draft and [draft.drafter, len(draft.token_ids)] for draft in drafts]
