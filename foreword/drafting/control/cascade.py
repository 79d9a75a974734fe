"""For whom, and how far, a drafter that runs a model should guess on top of what the others found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from foreword.drafting.control.admission import MIN_SPEEDUP, max_request_delay
from foreword.drafting.control.frame import BaseStep, TrackedRequest

__all__ = ["FEW_PENDING_ROWS", "MAX_DRAFT_LEN", "DraftModelGate", "DraftModelRequest", "DraftModelPlan", "rank_plans"]

DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 24)
MAX_DRAFT_LEN = DRAFT_LENGTHS[-1]
FEW_PENDING_ROWS = 8  # rows; whoever has more to compute first comes last
MAX_PLANS_CHECKED = 12  # plans, for one that the ledger allows
MAX_CATCH_UP_STEPS = 4.0  # plain steps of reading texts in one step that several requests wait for, and those that arrive meanwhile
MAX_TRIAL_STEPS = 5.0  # plain steps, once for each drafter
EARLY_STOP_RATIO = 0.97  # of the best rate so far: longer drafts bring no better one
PAYBACK_SHARE = 0.5  # what is invested must pay within this share of the steps that are left

DraftCostFn = Callable[[int, int, int], float]


@dataclass(frozen=True, slots=True)
class DraftModelRequest:
    """A request that the drafter could guess for.

    index    of its offer
    chances  of each guess, foreseen
    tokens   expected from the rows that it gets without this drafter, and the number of these rows
    backlog  rows that the model must compute before the first guess
    horizon  steps that computing them will have been of use for
    """

    index: int
    request: TrackedRequest
    prefix_probs: Sequence[float]
    base_tokens: float
    base_rows: int
    num_pending_rows: int
    remaining_steps: float

    def expected_tokens(self, draft_len: int) -> float:
        """Tokens expected from `length` guesses."""
        return sum(self.prefix_probs[:draft_len])


@dataclass(frozen=True, slots=True)
class DraftModelPlan:
    """Guess `length` tokens for each member. Costs in model seconds.

    rate      expected tokens by model second of the step, drafting included
    seconds   of the passes that recur
    invested  in computing backlogs, which later steps need not do again
    cost      of the step that verifies the draft
    """

    requests: Sequence[DraftModelRequest]
    draft_len: int
    rate: float
    draft_cost: float
    catch_up_cost: float
    verify_cost: float

    @property
    def is_first_read(self) -> bool:
        """Some members' texts are read for the first time."""
        return not all(member.request.prompt_read for member in self.requests)


class DraftModelGate:
    """One drafter's plans. What reading a text for the first time costs is an investment, outside of the ledger: it is
    made if it is likely to pay in time, and for a drafter of which nothing is known yet only up to STAKE."""

    def __init__(self) -> None:
        self._trial_spent = 0.0

    def select(self, paying_plans: Sequence[DraftModelPlan], base_step: BaseStep, is_proven: bool) -> DraftModelPlan | None:
        """The best of the plans that pay which nobody is delayed by too much; its investments are booked."""
        for plan in paying_plans[:MAX_PLANS_CHECKED]:
            stake = plan.catch_up_cost if plan.is_first_read and not is_proven else 0.0
            if self._is_affordable(plan, stake, base_step):
                self._charge(plan, stake, base_step)
                return plan
        return None

    def _is_affordable(self, plan: DraftModelPlan, trial_cost: float, base_step: BaseStep) -> bool:
        if trial_cost and self._trial_spent + trial_cost > MAX_TRIAL_STEPS * base_step.plain_cost:
            return False
        if len(base_step.delay_budgets) > 1 and plan.catch_up_cost > MAX_CATCH_UP_STEPS * base_step.plain_cost:
            return False
        delay = plan.draft_cost + plan.verify_cost - base_step.plain_cost
        if delay + plan.catch_up_cost - trial_cost > base_step.max_delay(member.request for member in plan.requests):
            return False
        return all(_pays_off(plan, member, delay, base_step.plain_cost) for member in plan.requests)

    def _charge(self, plan: DraftModelPlan, trial_cost: float, base_step: BaseStep) -> None:
        self._trial_spent += trial_cost
        readers = [member.request for member in plan.requests if not member.request.prompt_read]
        for account in base_step.delay_budgets if trial_cost else [request.delay_budget for request in readers]:
            account.ahead_s += plan.catch_up_cost
        for request in readers:
            request.prompt_read = True


def _pays_off(plan: DraftModelPlan, request: DraftModelRequest, delay: float, plain_cost: float) -> bool:
    """Whether the delay is likely to pay for a member."""
    hoped = plain_cost * request.expected_tokens(plan.draft_len)
    allowed = max_request_delay(request.request.delay_budget.allowance(plain_cost), hoped)
    if request.request.prompt_read:
        return delay + plan.catch_up_cost <= allowed
    return delay <= allowed and plan.catch_up_cost <= PAYBACK_SHARE * request.remaining_steps * (hoped - delay)


def rank_plans(requests: Sequence[DraftModelRequest], base_tokens: float, base_rows: int, costs: Sequence[float], draft_cost_fn: DraftCostFn) -> list[DraftModelPlan]:
    """What pays, the best first: the most promising members, so many of them and so far.

    tokens  expected from the step without the drafter; rows: how many drafted rows it has
    costs   of the step with 0, 1, ... drafted rows
    passes  seconds of drafting, by (rows to compute first, requests, length)
    """
    ranked = sorted(requests, key=lambda member: (member.num_pending_rows > FEW_PENDING_ROWS, member.base_tokens - member.expected_tokens(4)))
    least = MIN_SPEEDUP * base_tokens / costs[base_rows]
    found: list[DraftModelPlan] = []
    for count in _group_sizes(len(ranked)):
        group = _RequestGroup(ranked[:count])
        best = 0.0
        for length in DRAFT_LENGTHS:
            drafted = base_rows - group.base_rows + count * length
            if drafted >= len(costs) or length > len(group.expected_tokens):
                break
            plan = group.make_plan(length, base_tokens + group.expected_tokens[length - 1] - group.base_tokens, costs[drafted], draft_cost_fn)
            if plan.rate > least:
                found.append(plan)
            if plan.rate < EARLY_STOP_RATIO * best:
                break
            best = max(best, plan.rate)
    return sorted(found, key=lambda plan: -plan.rate)


class _RequestGroup:
    """Members that draft together. hopes: tokens expected from 1, 2, ... guesses of each."""

    def __init__(self, requests: Sequence[DraftModelRequest]) -> None:
        self.requests = requests
        self.base_tokens = sum(member.base_tokens for member in requests)
        self.base_rows = sum(member.base_rows for member in requests)
        self.expected_tokens = list(accumulate(map(sum, zip(*(member.prefix_probs for member in requests), strict=False))))
        self._num_pending_rows = sum(member.num_pending_rows for member in requests)
        self._remaining_steps = sum(member.remaining_steps for member in requests) / len(requests)

    def make_plan(self, draft_len: int, tokens: float, verify_cost: float, draft_cost_fn: DraftCostFn) -> DraftModelPlan:
        count = len(self.requests)
        seconds = draft_cost_fn(count, count, draft_len)
        invested = draft_cost_fn(self._num_pending_rows, count, draft_len) - seconds
        rate = tokens / (verify_cost + seconds + invested / self._remaining_steps)
        return DraftModelPlan(self.requests, draft_len, rate, seconds, invested, verify_cost)


def _group_sizes(num_requests: int) -> list[int]:
    """1, 2, 4, ... and all."""
    powers = accumulate(range(num_requests.bit_length()), lambda count, _: 2 * count, initial=1)
    return [*(count for count in powers if count < num_requests), num_requests]
