"""Fairness: each request's lead over plain decoding bounds how far drafts of others may delay it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foreword.core.request import RequestState
from foreword.speculation.control.acceptance import RequestAcceptance
from foreword.speculation.control.cost_model import StepShape, classify_sampling
from foreword.speculation.policy import RequestStep

__all__ = ["BaseStep", "DelayBudget", "DelayLedger", "TrackedRequest"]

MAX_SLOWDOWN = 0.02  # of the request's time so far
MAX_EXPECTED_GAIN = 0.03  # of the request's time that expected savings by others may add to its budget
MIN_OUTPUT_TOKENS = 32  # assumed length of an output, for the initial budget
HIT_CREDIT_STEPS = 2.0  # plain steps of budget at a hit rate of 1: such a request will soon be ahead
HIT_RATE_ALPHA = 1 / 8
MEAN_HIT_RATE_ALPHA = 1 / 64
VACANCY_ALPHA = 1 / 16


@dataclass(slots=True)
class DelayBudget:
    """Delay budget of one request. Times are model seconds."""

    min_output_tokens: int  # assumed length of its output
    hit_rate: float = 0.0  # share of its next tokens that were drafted correctly, verified or not
    ahead_s: float = 0.0  # lead over plain decoding
    plain_s: float = 0.0  # duration of plain decoding so far
    context_len: int = 0  # tokens it last read
    expected_gain_s: float = 0.0  # saved when requests that are ahead end early

    def allowance(self, plain_cost: float) -> float:
        """Delay the request can still bear: its lead, 2 % of its time, and its expected gain."""
        time = max(self.plain_s, self.min_output_tokens * plain_cost)
        credit = HIT_CREDIT_STEPS * self.hit_rate * plain_cost * self.min_output_tokens / MIN_OUTPUT_TOKENS
        gain = min(self.expected_gain_s, MAX_EXPECTED_GAIN * time)
        return self.ahead_s + MAX_SLOWDOWN * time + gain + credit


class DelayLedger:
    """Delay budgets of live requests, and of *departed* ones: requests that ended early thanks to drafts.

    Plain decoding would still serve a departed request, at higher step costs, until its lead is used up. A
    new request replaces a departed one: many clients send a request when the last one ends, so plain decoding
    would never serve both. Savings by future departures are credited in advance, in proportion to the slots
    that stayed vacant recently.
    """

    def __init__(self) -> None:
        self.budgets: dict[str, DelayBudget] = {}
        self.departed: list[DelayBudget] = []
        self.mean_hit_rate = 0.5  # of recent requests
        self._vacancy_share = 0.5  # of departures whose slot stayed vacant

    @property
    def departed_context(self) -> int:
        return sum(budget.context_len for budget in self.departed)

    def open(self, request_id: str, max_tokens: int | None, is_speculative: bool = True) -> DelayBudget:
        """A request begins, with at most `max_tokens` output tokens."""
        if self.departed:
            self.departed.remove(max(self.departed, key=lambda departed: departed.ahead_s))
            self._vacancy_share -= self._vacancy_share * VACANCY_ALPHA
        tokens = MIN_OUTPUT_TOKENS if max_tokens is None else min(MIN_OUTPUT_TOKENS, max_tokens)
        budget = DelayBudget(tokens, self.mean_hit_rate if is_speculative else 0.0)
        self.budgets[request_id] = budget
        return budget

    def close(self, request_id: str) -> None:
        """A request ends; it departs early if it is ahead."""
        budget = self.budgets.pop(request_id, None)
        if budget is not None and budget.ahead_s > 0.0:
            self.departed.append(budget)

    def record_hit(self, budget: DelayBudget, is_hit: bool) -> None:
        """Record whether a request's last proposed draft began with its next token."""
        budget.hit_rate += (is_hit - budget.hit_rate) * HIT_RATE_ALPHA
        self.mean_hit_rate += (is_hit - self.mean_hit_rate) * MEAN_HIT_RATE_ALPHA

    def record_step(
        self,
        requests: Iterable[RequestStep],
        plain_cost: float,
        actual_cost: float,
        saving_per_request: float = 0.0,
    ) -> None:
        """A step took `actual_cost`; plain decoding takes `plain_cost` for each token or prefill chunk.

        saving_per_request  share of a step that is saved with one request less
        """
        for request_step in requests:
            state = request_step.state
            budget = self.budgets.get(state.id)
            if budget is None:
                budget = self.open(state.id, state.params.max_tokens, is_speculative=False)
            earned = request_step.num_emitted * plain_cost if request_step.is_sampled else plain_cost
            budget.plain_s += earned
            budget.ahead_s += earned - actual_cost
            budget.context_len = request_step.context_len
        # requests that are ahead end sooner by their lead, and make the others' steps cheaper for as long
        share = saving_per_request * self._vacancy_share
        ahead = sum(budget.ahead_s for budget in self.budgets.values() if budget.ahead_s > 0.0)
        for budget in self.budgets.values():
            budget.expected_gain_s = share * (ahead - max(budget.ahead_s, 0.0))
        self.advance_time(actual_cost)

    def advance_time(self, seconds: float) -> None:
        """Let time pass: the lead of departed requests shrinks, plain steps change no other."""
        for budget in self.departed:
            budget.ahead_s -= seconds
        left = [budget for budget in self.departed if budget.ahead_s > 0.0]
        for _ in range(len(self.departed) - len(left)):
            self._vacancy_share += (1.0 - self._vacancy_share) * VACANCY_ALPHA
        self.departed = left


class TrackedRequest:
    """The controller's record of a request."""

    __slots__ = (
        "acceptance",
        "context_len",
        "delay_budget",
        "first_hit",
        "max_draft_len",
        "misses",
        "probe_cost",
        "prompt_read",
        "sampler_class",
        "skip_until",
        "state",
    )

    def __init__(self, state: RequestState, max_draft_len: int, delay_budget: DelayBudget) -> None:
        bound = state.params.speculation.max_tokens
        self.state = state
        self.delay_budget = delay_budget
        self.max_draft_len = max_draft_len if bound is None else min(bound, max_draft_len)
        self.sampler_class = classify_sampling(state.params)
        self.acceptance: defaultdict[str, RequestAcceptance] = defaultdict(RequestAcceptance)  # by drafter
        self.misses = 0  # proposals in a row without a draft that pays
        self.skip_until = 0  # step index until which it backs off
        self.context_len = 0  # tokens that its next row reads
        self.prompt_read = False  # a draft model has computed its text once
        self.first_hit = False  # a draft proposed last began with the right token
        self.probe_cost = 0.0  # seconds of a draft model pass made only to learn


@dataclass(frozen=True, slots=True)
class BaseStep:
    """The next step without drafts. Costs are model seconds."""

    shape: StepShape
    cost: float
    plain_cost: float  # in plain decoding, which would also serve the departed requests
    delay_budgets: Sequence[DelayBudget]  # of all its requests
    has_prefill: bool

    def max_delay(self, drafted_for: Iterable[TrackedRequest]) -> float:
        """How much the step may be delayed for drafts of some requests, by the budgets of the others."""
        own = {id(request.delay_budget) for request in drafted_for}
        slacks = [budget.allowance(self.plain_cost) for budget in self.delay_budgets if id(budget) not in own]
        if self.has_prefill:
            slacks.append(MAX_SLOWDOWN * self.plain_cost)
        return max(min(slacks, default=float("inf")), 0.0)
