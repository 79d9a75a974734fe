"""Plans of a draft model: the requests that it drafts for, and how many tokens."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from foreword.speculation.draft_length.acceptance import AcceptanceModel
from foreword.speculation.draft_length.backoff import MAX_BACKOFF_NO_CANDIDATE, Backoff
from foreword.speculation.draft_length.cost_model import CostModel
from foreword.speculation.draft_length.exploration import Exploration
from foreword.speculation.draft_length.next_step import BaseStep, NextStep, TrackedRequest
from foreword.speculation.draft_length.policy import PrefillLoad, Proposal
from foreword.speculation.draft_length.row_selection import MIN_SPEEDUP, select_rows
from foreword.speculation.draft_length.verify_planner import VerifyPlanner

DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 24)  # lengths that plans consider, and the longest possible
MAX_DRAFT_LEN = DRAFT_LENGTHS[-1]
FEW_PENDING_ROWS = 8  # requests with more come last
MAX_PLANS_CHECKED = 12  # plans searched for one within the delay budgets
MAX_PLANNED_DELAY = 0.75  # share of its expected gain that a request over its budget is delayed by
EARLY_STOP_RATIO = 0.97  # share of the best rate so far, below which longer drafts are not better
NO_BACKOFF_STEPS = 8  # after a draft model ran: it may draft for all requests in the same passes
DEFAULT_OUTPUT_TOKENS = 128.0  # mean output length before any request has ended

DraftCostFn = Callable[[int, int, int], float]  # (pending rows, requests, draft length) -> model seconds
ModelPlan = list[tuple[int, float]]  # (draft tokens, least confidence product) by proposal


class DraftModelPlanner:
    """Runs a draft model only where its tokens pay for its passes, in addition to the drafts of others."""

    def __init__(
        self,
        cost_model: CostModel,
        acceptance: defaultdict[str, AcceptanceModel],
        next_step: NextStep,
        verify_planner: VerifyPlanner,
        exploration: Exploration,
        backoff: Backoff,
    ) -> None:
        self._cost_model = cost_model
        self._acceptance = acceptance
        self._next_step = next_step
        self._verify_planner = verify_planner
        self._exploration = exploration
        self._backoff = backoff
        self._mean_output_tokens = DEFAULT_OUTPUT_TOKENS
        self._last_plan_step = -NO_BACKOFF_STEPS
        self._num_failures: Counter[str] = Counter()  # plans in a row that did not pay, by drafter
        self.no_plan_until: Counter[str] = Counter()  # step index, by drafter
        self._no_plan_requests: Counter[str] = Counter()  # live requests when no plan paid

    def record_output(self, num_tokens: int) -> None:
        """A request ended with `num_tokens` of output."""
        self._mean_output_tokens += (num_tokens - self._mean_output_tokens) / 16

    def backs_off(self, drafter: str, num_live: int) -> bool:
        """No plan paid the last time, and about as many requests are live as then."""
        is_same_load = 2 * num_live > self._no_plan_requests[drafter]
        return self._next_step.index < self.no_plan_until[drafter] and is_same_load

    def suspends_backoff(self, step_index: int) -> bool:
        """A draft model ran shortly before this step: requests that back off may join its next passes."""
        return step_index < self._last_plan_step + NO_BACKOFF_STEPS

    def has_planned(self, step_index: int) -> bool:
        """A draft model ran for this step because it was to pay."""
        return step_index == self._last_plan_step

    def plan(
        self,
        drafter: str,
        proposals: Sequence[Proposal],
        requests: Sequence[TrackedRequest],
        pending_rows: Sequence[int],
        load: PrefillLoad,
        num_live: int,
    ) -> ModelPlan:
        """See Policy.plan_draft_model().

        requests  those of the proposals
        num_live  live requests that may draft
        """
        draft_plans = [(0, 0.0)] * len(proposals)
        if not proposals:
            return draft_plans
        base_step = self._next_step.base(load)
        plan = self._best_plan(drafter, proposals, requests, pending_rows, base_step)
        if plan is None:
            self._num_failures[drafter] += 1
            num_steps = self._backoff.length(self._num_failures[drafter], MAX_BACKOFF_NO_CANDIDATE)
            self.no_plan_until[drafter] = self._next_step.index + num_steps
            self._no_plan_requests[drafter] = num_live
            self._explore(drafter, requests, pending_rows, base_step, draft_plans)
            return draft_plans
        self._num_failures[drafter] = 0
        min_prob = self._min_prob(plan, drafter, base_step)
        for request in plan.requests:
            draft_plans[request.index] = plan.draft_len, min_prob
        self._last_plan_step = self._next_step.index
        self._next_step.draft_cost += plan.draft_cost + plan.catch_up_cost
        return draft_plans

    def _best_plan(
        self,
        drafter: str,
        proposals: Sequence[Proposal],
        requests: Sequence[TrackedRequest],
        pending_rows: Sequence[int],
        base_step: BaseStep,
    ) -> DraftModelPlan | None:
        """The best plan for the drafter, in addition to the drafts of others."""
        probs = self._baseline_probs(proposals, requests, base_step)
        members = [
            self._make_request(index, proposal, request, drafter, rows, probs.get(index, ()))
            for index, (proposal, request, rows) in enumerate(
                zip(proposals, requests, pending_rows, strict=True)
            )
        ]
        base_rows = sum(map(len, probs.values()))
        base_tokens = base_step.shape.num_sampled + sum(map(sum, probs.values()))
        costs = self._next_step.costs_by_draft_rows(base_step, base_rows + MAX_DRAFT_LEN * len(members))
        draft_cost = partial(self._cost_model.draft_cost, drafter)
        proposing = self._backoff.proposal_cost
        plans = rank_plans(members, base_tokens, base_rows, costs, draft_cost, proposing)
        return affordable_plan(plans, base_step)

    def _baseline_probs(
        self, proposals: Sequence[Proposal], requests: Sequence[TrackedRequest], base_step: BaseStep
    ) -> dict[int, Sequence[float]]:
        """Acceptance probabilities of the drafts that would be verified so far, by proposal."""
        candidates = [
            self._verify_planner.best_candidate(index, request, proposal.drafts)
            for index, (proposal, request) in enumerate(zip(proposals, requests, strict=True))
            if proposal.drafts
        ]
        if not candidates:
            return {}
        num_rows = sum(len(candidate.gains) for candidate in candidates)
        costs = self._next_step.costs_by_draft_rows(base_step, num_rows)
        lengths = select_rows(candidates, base_step, costs, 0.0).lengths
        return {c.index: c.prefix_probs[:length] for c, length in zip(candidates, lengths, strict=True)}

    def _make_request(
        self,
        index: int,
        proposal: Proposal,
        request: TrackedRequest,
        drafter: str,
        num_pending_rows: int,
        baseline_probs: Sequence[float],
    ) -> DraftModelRequest:
        state = proposal.request.state
        longest = min(MAX_DRAFT_LEN, self._cost_model.max_draft_len(drafter))
        draft_len = min(proposal.request.max_draft_tokens, int(longest))
        probs = self._acceptance[drafter].expected_prefix_probs(request.acceptance[drafter], draft_len)
        mean = self._mean_output_tokens
        tokens_left = min(max(mean - state.num_output, mean / 4), state.max_len - len(state.tokens))
        steps_left = max(tokens_left / (1 + sum(probs[:4])), 1.0)
        base_tokens, base_rows = sum(baseline_probs), len(baseline_probs)
        return DraftModelRequest(index, request, probs, base_tokens, base_rows, num_pending_rows, steps_left)

    def _min_prob(self, plan: DraftModelPlan, drafter: str, base_step: BaseStep) -> float:
        """The drafter's confidence below which a further token does not pay for its pass and its row."""
        count = len(plan.requests)
        one, two = (self._cost_model.draft_cost(drafter, count, count, length) for length in (1, 2))
        pass_cost = (two - one) / count
        row_cost = max(plan.verify_cost - base_step.cost, 0.0) / (count * plan.draft_len)
        return self._acceptance[drafter].to_confidence(plan.rate * (pass_cost + row_cost))

    def _explore(
        self,
        drafter: str,
        requests: Sequence[TrackedRequest],
        pending_rows: Sequence[int],
        base_step: BaseStep,
        draft_plans: ModelPlan,
    ) -> None:
        """Draft one token with a drafter that does not seem to pay, if all budgets suffice."""
        if not self._exploration.explores_models:
            return
        max_rows = max(min(pending_rows), FEW_PENDING_ROWS)
        probed = [index for index, rows in enumerate(pending_rows) if rows <= max_rows]
        total_rows = sum(pending_rows[index] for index in probed)
        cost = self._cost_model.draft_cost(drafter, total_rows, len(probed), 1)
        if cost > base_step.max_delay(requests[index] for index in probed):
            return
        if self._exploration.probe_draft_model([requests[index] for index in probed], cost):
            self._next_step.draft_cost += cost
            for index in probed:
                draft_plans[index] = 1, 0.0


@dataclass(frozen=True, slots=True)
class DraftModelRequest:
    """A request that the draft model could draft for."""

    index: int  # index of its proposal
    request: TrackedRequest
    prefix_probs: Sequence[float]  # predicted acceptance
    base_tokens: float  # expected from other drafters' rows
    base_rows: int  # verified without this drafter
    num_pending_rows: int  # rows to compute before the first draft token
    remaining_steps: float  # steps that benefit from computing them

    def expected_tokens(self, draft_len: int) -> float:
        return sum(self.prefix_probs[:draft_len])

    def regains(self, plan: DraftModelPlan, delay: float, plain_cost: float) -> bool:
        """Whether its expected tokens compensate the plan's delay beyond its budget.

        Else it would soon be over its budget, and allow no draft of others to be verified.
        """
        if self.request.prompt_read:
            delay += plan.catch_up_cost / self.remaining_steps  # prompts of others
        slack = self.request.delay_budget.allowance(plain_cost)
        if delay <= max(slack, 0.0):
            return True
        gain = self.expected_tokens(plan.draft_len) * plain_cost
        return gain >= min(delay - slack, delay / MAX_PLANNED_DELAY)


class DraftModelPlan(NamedTuple):
    """Draft `draft_len` tokens for each request. Costs are model seconds."""

    requests: Sequence[DraftModelRequest]
    draft_len: int
    rate: float  # expected tokens per model second of the step, drafting included
    draft_cost: float  # cost of the recurring passes
    catch_up_cost: float  # cost of the pending rows, an investment for later steps
    verify_cost: float  # cost of the step that verifies the drafts


def affordable_plan(plans: Sequence[DraftModelPlan], base_step: BaseStep) -> DraftModelPlan | None:
    """The best plan that delays no request beyond its budget, unless its own tokens compensate it.

    A prompt's first read is an investment of its own request, which `rate` accounts for.
    """
    plain_cost = base_step.plain_cost
    for plan in plans[:MAX_PLANS_CHECKED]:
        delay = plan.draft_cost + plan.verify_cost - plain_cost
        is_affordable = delay + plan.catch_up_cost <= base_step.max_delay(r.request for r in plan.requests)
        if is_affordable and all(r.regains(plan, delay, plain_cost) for r in plan.requests):
            for request in plan.requests:
                if not request.request.prompt_read:
                    request.request.prompt_read = True
                    request.request.delay_budget.ahead_s += plan.catch_up_cost
            return plan
    return None


def rank_plans(
    requests: Sequence[DraftModelRequest],
    base_tokens: float,
    base_rows: int,
    costs: Sequence[float],
    draft_cost_fn: DraftCostFn,
    proposal_cost: float = 0.0,
) -> list[DraftModelPlan]:
    """Plans that pay, best first: for the most promising requests, by their number and draft length.

    base_tokens, base_rows  expected tokens and draft rows of the step without this drafter
    costs                   of the step with 0, 1, ... draft rows
    proposal_cost           model seconds of planning, which backoff would save
    """
    ranked = sorted(
        requests, key=lambda r: (r.num_pending_rows > FEW_PENDING_ROWS, r.base_tokens - r.expected_tokens(4))
    )
    base_cost = costs[base_rows] + (proposal_cost if base_rows else 0.0)
    min_rate = MIN_SPEEDUP * base_tokens / base_cost
    plans: list[DraftModelPlan] = []
    for count in _group_sizes(len(ranked)):
        group = _RequestGroup(ranked[:count])
        longest = len(group.expected_tokens)
        if not longest:
            continue
        best = 0.0
        for length in (*(each for each in DRAFT_LENGTHS if each < longest), longest):
            draft_rows = base_rows - group.base_rows + count * length
            if draft_rows >= len(costs):
                break
            tokens = base_tokens + group.expected_tokens[length - 1] - group.base_tokens
            plan = group.make_plan(length, tokens, costs[draft_rows], draft_cost_fn, proposal_cost)
            if plan.rate > min_rate:
                plans.append(plan)
            if plan.rate < EARLY_STOP_RATIO * best:
                break
            best = max(best, plan.rate)
    return sorted(plans, key=lambda plan: -plan.rate)


class _RequestGroup:
    """Requests that draft together."""

    def __init__(self, requests: Sequence[DraftModelRequest]) -> None:
        self.requests = requests
        self.base_tokens = sum(r.base_tokens for r in requests)
        self.base_rows = sum(r.base_rows for r in requests)
        by_position = zip(*(r.prefix_probs for r in requests), strict=False)
        self.expected_tokens = list(accumulate(map(sum, by_position)))  # by draft length
        self._num_pending_rows = sum(r.num_pending_rows for r in requests)
        self._remaining_steps = sum(r.remaining_steps for r in requests) / len(requests)

    def make_plan(
        self,
        draft_len: int,
        tokens: float,
        verify_cost: float,
        draft_cost_fn: DraftCostFn,
        proposal_cost: float,
    ) -> DraftModelPlan:
        count = len(self.requests)
        draft_cost = draft_cost_fn(count, count, draft_len)
        catch_up = 0.0
        if self._num_pending_rows != count:  # more than one row of each request, as in every step
            catch_up = draft_cost_fn(self._num_pending_rows, count, draft_len) - draft_cost
        rate = tokens / (verify_cost + draft_cost + proposal_cost + catch_up / self._remaining_steps)
        return DraftModelPlan(self.requests, draft_len, rate, draft_cost, catch_up, verify_cost)


def _group_sizes(num_requests: int) -> list[int]:
    """1, 2, 4, ... and all."""
    powers = accumulate(range(num_requests.bit_length()), lambda count, _: 2 * count, initial=1)
    return [*(count for count in powers if count < num_requests), num_requests]
