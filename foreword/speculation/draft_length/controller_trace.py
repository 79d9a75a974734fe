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
from foreword.speculation.draft_length.policy import PrefillLoad, Proposal, RequestStep, StepRecord
from foreword.speculation.engine_drafter import DraftRequest, OnePass
from foreword.utils import trace

# Parameters that represent their sampler class
PARAMS_BY_SAMPLER_CLASS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"top_p": 0.5},
    {"min_tokens": 1},
    {"logprobs": 0},
)
# Calls whose arguments are recorded as they are
TRACED = (
    *("max_draft_len", "may_propose", "record_proposing", "plan_draft_model", "select"),
    *("num_steps_to_skip", "record_skipped", "record_step", "record_plain_step", "enable_overlap"),
)


class RecordingController(DraftLengthController):
    """A controller that writes a trace. Raises OSError if the file cannot be written."""

    def __init__(
        self,
        path: Path,
        calibration: Calibration,
        max_tokens: int,
        pass_costs: Mapping[str, PassCost] | None = None,
        earning: Collection[str] = (),
        max_slowdown: float = DEFAULT_MAX_SLOWDOWN,
    ) -> None:
        super().__init__(calibration, max_tokens, pass_costs, earning, max_slowdown)
        curves = [*calibration.all_rows_sampled.items()], [*calibration.one_row_sampled.items()]
        contexts = calibration.context_cost_first_row, calibration.context_cost_extra_row
        costs = [*curves, *contexts, calibration.request_cost]
        passes = {name: [*cost.seconds.items()] for name, cost in (pass_costs or {}).items()}
        one_pass = {name: cost.one_pass for name, cost in (pass_costs or {}).items() if cost.one_pass}
        options = (list(earning), max_slowdown, one_pass)
        self._trace = trace.TraceWriter(path, costs, max_tokens, passes, *options)
        for name in TRACED:
            setattr(self, name, self._trace.traced(name, getattr(self, name), _encode))

    def start(self, state: RequestState) -> int:
        params = state.params
        tokens = [state.num_prompt, len(state.tokens), state.max_len]
        bounds = [params.max_tokens, params.speculation.max_draft_tokens]
        self._trace.write("start", state.id, classify_sampling(params), tokens, bounds)
        num_steps = super().start(state)
        self._trace.write_decision(num_steps)
        return num_steps

    def finish(self, request_id: str) -> None:
        self._trace.write("finish", _encode(self.requests[request_id].state))
        super().finish(request_id)

    def record_acceptance(self, state: RequestState, draft: Draft, output_ids: Sequence[int]) -> None:
        right = [
            draft_id == output_id for draft_id, output_id in zip(draft.token_ids, output_ids, strict=False)
        ]
        self._trace.write("record_acceptance", state.id, _encode(draft), right, len(output_ids))
        super().record_acceptance(state, draft, output_ids)


def replay(lines: Iterable[str]) -> Iterator[Any]:
    """See utils.trace.replay()."""
    return trace.replay(lines, _Replayer, _encode)


def _encode(value: Any) -> Any:
    """Arguments or a decision as JSON."""
    if isinstance(value, RequestState):
        return [value.id, len(value.tokens)]
    if isinstance(value, Draft):
        return [len(value.token_ids), value.drafter, list(value.confidence)]
    if isinstance(value, Proposal):
        return [_encode(value.request.state), value.request.max_draft_tokens, _encode(value.drafts)]
    if isinstance(value, PrefillLoad):
        return [value.num_rows, value.num_context_tokens]
    if isinstance(value, StepRecord):
        return [_encode(value.requests), dict(value.seconds_by_stage)]
    return [_encode(part) for part in value] if isinstance(value, list | tuple) else value


class _Replayer:
    """A controller driven by a trace."""

    def __init__(
        self,
        costs: Sequence[Any],
        max_tokens: int,
        pass_seconds: Mapping[str, Any],
        earning: Sequence[str],
        max_slowdown: float,
        one_pass: Mapping[str, Sequence[int]],
    ) -> None:
        all_sampled, one_sampled, *others = costs
        passes = PassCost.by_drafter(
            {name: dict(seconds) for name, seconds in pass_seconds.items()},
            {name: OnePass(*figures) for name, figures in one_pass.items()},
        )
        calibration = Calibration(dict(all_sampled), dict(one_sampled), *others)
        self.controller = DraftLengthController(calibration, max_tokens, passes, earning, max_slowdown)
        self.states: dict[str, RequestState] = {}
        self.record_proposing = self.controller.record_proposing
        self.num_steps_to_skip = self.controller.num_steps_to_skip
        self.record_skipped = self.controller.record_skipped
        self.enable_overlap = self.controller.enable_overlap

    def start(
        self, id_: str, sampler_class: int, num_tokens: Sequence[int], bounds: Sequence[int | None]
    ) -> int:
        (num_prompt, length, max_len), (max_tokens, max_draft_tokens) = num_tokens, bounds
        others = PARAMS_BY_SAMPLER_CLASS[sampler_class]
        speculation = Speculation(max_draft_tokens=max_draft_tokens)
        params = SamplingParams(max_tokens=max_tokens, speculation=speculation, **others)
        self.states[id_] = RequestState(Request(id_, (1,) * num_prompt, params, 0), 0, max_len)
        return self.controller.start(self._state([id_, length]))

    def finish(self, record: Sequence[Any]) -> None:
        state = self._state(record)
        del self.states[state.id]
        self.controller.finish(state.id)

    def record_acceptance(
        self, id_: str, draft: Sequence[Any], right: Sequence[bool], num_output: int
    ) -> None:
        length, drafter, confidence = draft
        token_ids = (*map(int, right), *(1,) * (length - len(right)))
        scored = Draft(token_ids, drafter, tuple(confidence))
        self.controller.record_acceptance(self.states[id_], scored, (1,) * num_output)

    def max_draft_len(self, record: Sequence[Any]) -> int:
        return self.controller.max_draft_len(self._state(record))

    def may_propose(self, drafter: str, load: Sequence[int]) -> bool:
        return self.controller.may_propose(drafter, PrefillLoad(*load))

    def plan_draft_model(
        self, proposals: Sequence[Any], load: Sequence[int], drafter: str, pending_rows: Sequence[int]
    ) -> list[tuple[int, float]]:
        made = self._proposals(proposals)
        return self.controller.plan_draft_model(made, PrefillLoad(*load), drafter, pending_rows)

    def select(self, proposals: Sequence[Any], load: Sequence[int]) -> list[Draft | None]:
        return self.controller.select(self._proposals(proposals), PrefillLoad(*load))

    def record_step(self, record: Sequence[Any]) -> None:
        self.controller.record_step(self._step_record(record))

    def record_plain_step(self, record: Sequence[Any]) -> None:
        self.controller.record_plain_step(self._step_record(record))

    def _step_record(self, record: Sequence[Any]) -> StepRecord:
        requests, seconds = record
        steps = [RequestStep(self._state(state), *figures) for state, *figures in requests]
        return StepRecord(tuple(steps), seconds)

    def _state(self, record: Sequence[Any]) -> RequestState:
        """The state, extended to its number of tokens."""
        id_, num_tokens = record
        if id_ not in self.states:  # requests without speculation are recorded only in steps
            return RequestState(Request(id_, (1,), SamplingParams(), 0), 0, 2)
        state = self.states[id_]
        state.tokens.extend([1] * (num_tokens - len(state.tokens)))
        return state

    def _proposals(self, records: Sequence[Any]) -> list[Proposal]:
        return [
            Proposal(
                DraftRequest(self._state(state), max_draft_tokens),
                [Draft((1,) * length, drafter, tuple(confidence)) for length, drafter, confidence in drafts],
            )
            for state, max_draft_tokens, drafts in records
        ]
