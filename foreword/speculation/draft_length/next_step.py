"""The step that is planned: its requests, and its cost without and with draft rows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foreword.core.request import RequestState
from foreword.speculation.draft_length.acceptance import RequestAcceptance
from foreword.speculation.draft_length.cost_model import CostModel, StepShape, classify_sampling
from foreword.speculation.draft_length.delay_budget import DEFAULT_MAX_SLOWDOWN, DelayBudget, DelayLedger
from foreword.speculation.draft_length.policy import PrefillLoad

MIN_PREFIX_PROB = 0.01  # less likely draft tokens are never verified
MIN_PRICE_SHARE = 0.5  # minimum probability, as a share of plain decoding's tokens in a row's time
PRICED_ROWS = (8, 32, 128)  # numbers of further rows among which the cheapest row is looked for


class TrackedRequest:
    """The controller's record of a request."""

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

    Costs exclude prefill. It is paid anyway, an accepted token saves only a decode step, and a long step
    would make draft rows look cheap.
    """

    shape: StepShape  # prompts included
    cost: float  # cost of its decoding
    plain_cost: float  # the same in plain decoding, without the cost of proposing
    delay_budgets: Sequence[DelayBudget]  # budgets of all its requests
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


class NextStep:
    """Collects the requests of the next step; base() and costs_by_draft_rows() give its costs."""

    def __init__(self, cost_model: CostModel, ledger: DelayLedger) -> None:
        self.index = 0  # number of steps before, also of those without proposals
        self.requests: list[TrackedRequest] = []  # requests that could draft
        self.sampler_classes: dict[str, int] = {}  # live requests that are not greedy
        self.draft_cost = 0.0  # model passes planned so far
        self.min_prefix_prob = MIN_PREFIX_PROB
        self._cost_model = cost_model
        self._ledger = ledger
        self._base: BaseStep | None = None

    def advance(self) -> None:
        """The next step is the one after."""
        self.index += 1
        self.requests.clear()
        self._base = None

    def base(self, load: PrefillLoad) -> BaseStep:
        """The next step without drafts: requests that could draft, and those without speculation."""
        if self._base is None:
            self._base = self._make_base(load)
        return self._base

    def costs_by_draft_rows(self, base_step: BaseStep, max_rows: int) -> Sequence[float]:
        """Costs of the decoding with 0, 1, ... draft rows; with 0 it could do without proposing."""
        costs = self._cost_model.step_costs.with_extra_rows(base_step.shape, max_rows)
        if base_step.has_prefill:
            return [max(cost - base_step.prefill_cost, base_step.cost) for cost in costs]
        ratio = self._cost_model.plain_ratio(False)
        return costs if ratio == 1.0 else [ratio * costs[0], *costs[1:]]

    def extra_sampling_cost(self, request: TrackedRequest) -> float:
        """Cost of sampling a row of the request beyond that of a greedy one."""
        return self._cost_model.sampling_costs.extra_cost(request.sampler_class)

    def _make_base(self, load: PrefillLoad) -> BaseStep:
        requests, nonspeculative = self.requests, self._ledger.nonspeculative
        budgets = [request.delay_budget for request in requests]
        context = sum(request.context_len for request in requests)
        if nonspeculative:
            budgets += nonspeculative.values()
            context += sum(budget.context_len for budget in nonspeculative.values())
        extra = 0.0
        if self.sampler_classes:
            extra = sum(map(self.extra_sampling_cost, requests))
        count, has_prefill = len(budgets), load.num_rows > 0
        shape = decode_shape = StepShape(count, count, context, 0, extra, count)
        prefill_cost, step_costs = 0.0, self._cost_model.step_costs
        if has_prefill:
            context += load.num_context_tokens
            shape = StepShape(count + load.num_rows, count, context, 0, extra, count)
            prefill_cost = max(step_costs.cost_of(shape) - step_costs.cost_of(decode_shape), 0.0)
        cost, plain_cost = (
            step_costs.cost_of(decode_shape),
            self._cost_model.plain_cost(decode_shape, has_prefill),
        )
        row_cost = step_costs.min_row_cost(shape.num_rows, PRICED_ROWS)
        self.min_prefix_prob = max(MIN_PREFIX_PROB, MIN_PRICE_SHARE * count * row_cost / plain_cost)
        return BaseStep(shape, cost, plain_cost, budgets, prefill_cost, self._ledger.max_slowdown)
