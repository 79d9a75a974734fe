"""Fairness: each request's lead over plain decoding bounds how far drafts of others may delay it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foreword.core.request import RequestState
from foreword.speculation.control.acceptance import RequestAcceptance
from foreword.speculation.control.cost_model import StepShape, classify_sampling
from foreword.speculation.policy import RequestStep

DEFAULT_MAX_SLOWDOWN = 0.02  # share of its time that a request may lose
MIN_OUTPUT_TOKENS = 32  # assumed length of an output, for the initial budget


@dataclass(slots=True)
class DelayBudget:
    """Delay budget of one request. Times are model seconds."""

    min_output_tokens: int  # assumed length of its output
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN
    ahead_s: float = 0.0  # lead over plain decoding
    plain_s: float = 0.0  # duration of plain decoding so far
    context_len: int = 0  # tokens it last read

    def allowance(self, plain_cost: float) -> float:
        """Delay the request can still bear: its lead, and a share of its time."""
        return self.ahead_s + self.max_slowdown * max(self.plain_s, self.min_output_tokens * plain_cost)


class DelayLedger:
    """Delay budgets of live requests, by id."""

    def __init__(self, max_slowdown: float = DEFAULT_MAX_SLOWDOWN) -> None:
        self.max_slowdown = max_slowdown
        self.budgets: dict[str, DelayBudget] = {}

    def open(self, request_id: str, max_tokens: int | None) -> DelayBudget:
        """A request begins, with at most `max_tokens` output tokens."""
        tokens = MIN_OUTPUT_TOKENS if max_tokens is None else min(MIN_OUTPUT_TOKENS, max_tokens)
        budget = self.budgets[request_id] = DelayBudget(tokens, self.max_slowdown)
        return budget

    def close(self, request_id: str) -> None:
        """A request ends."""
        self.budgets.pop(request_id, None)

    def record_step(
        self, requests: Iterable[RequestStep], plain_cost: float, decode_cost: float, actual_cost: float
    ) -> None:
        """A step took `actual_cost`.

        Plain decoding takes `plain_cost` for its tokens or prefill chunks, and `decode_cost` for each further
        token of a request.
        """
        for request_step in requests:
            state = request_step.state
            budget = self.budgets.get(state.id)
            if budget is None:
                budget = self.open(state.id, state.params.max_tokens)
            earned = plain_cost + max(request_step.num_emitted - 1, 0) * decode_cost
            budget.plain_s += earned
            budget.ahead_s += earned - actual_cost
            budget.context_len = request_step.context_len


class TrackedRequest:
    """The controller's record of a request."""

    __slots__ = (
        "acceptance",
        "context_len",
        "delay_budget",
        "max_draft_len",
        "misses",
        "probe_cost",
        "prompt_read",
        "sampler_class",
        "skip_until",
        "state",
    )

    def __init__(self, state: RequestState, max_draft_len: int, delay_budget: DelayBudget) -> None:
        bound = state.params.speculation.max_draft_tokens
        self.state = state
        self.delay_budget = delay_budget
        self.max_draft_len = max_draft_len if bound is None else min(bound, max_draft_len)
        self.sampler_class = classify_sampling(state.params)
        self.acceptance: defaultdict[str, RequestAcceptance] = defaultdict(RequestAcceptance)  # by drafter
        self.misses = 0.0  # proposals that no draft has paid for
        self.skip_until = 0  # step index until which it backs off
        self.context_len = 0  # tokens that its next row reads
        self.prompt_read = False  # a draft model has computed its text once
        self.probe_cost = 0.0  # seconds of a draft model pass made only to learn


@dataclass(frozen=True, slots=True)
class BaseStep:
    """The next step without drafts. Costs are model seconds.

    The time of prompts is spent with or without drafts, and an accepted token saves a decode step, not a
    prompt's. So costs leave it out: a long step would make draft rows look cheap.
    """

    shape: StepShape  # prompts included
    cost: float  # of its decoding
    plain_cost: float  # the same in plain decoding, whose steps may overlap with the host
    delay_budgets: Sequence[DelayBudget]  # of all its requests
    prefill_cost: float = 0.0
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN

    @property
    def has_prefill(self) -> bool:
        return self.shape.num_rows > self.shape.num_sampled

    def max_delay(self, drafted_for: Iterable[TrackedRequest]) -> float:
        """How much the step may be delayed for drafts of some requests, by the budgets of the others."""
        own = {id(request.delay_budget) for request in drafted_for}
        slacks = [budget.allowance(self.plain_cost) for budget in self.delay_budgets if id(budget) not in own]
        if self.has_prefill:
            slacks.append(self.max_slowdown * (self.plain_cost + self.prefill_cost))
        return max(min(slacks, default=float("inf")), 0.0)
