"""Which drafted rows are worth verifying: the prefix of all, by expected gain, with the most tokens for its cost.

For whom, and how far, a drafter that runs a model should guess on top of what the others found.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import truediv

from foreword.core.outputs import Draft
from foreword.speculation.control.fairness import BaseStep, TrackedRequest

__all__ = [
    "FEW_PENDING_ROWS",
    "MAX_DRAFT_LEN",
    "MIN_SPEEDUP",
    "Candidate",
    "DraftModelGate",
    "DraftModelPlan",
    "DraftModelRequest",
    "Selection",
    "best_num_rows",
    "distribute",
    "max_request_delay",
    "nearest_paying",
    "rank_plans",
    "select_rows",
    "split_by_gain",
]

MIN_SPEEDUP = 1.01  # what must be won: below it is noise
MIN_PROBE_GAIN = 1.1  # times the tokens without drafts
MAX_DELAY_SHARE = 0.5  # of what a request hopes for, it may be delayed by in any case
SHRINK_FACTOR = 0.75  # times the rows, until everybody bears what they cost


@dataclass(frozen=True, slots=True)
class Candidate:
    """The best draft of an offer.

    chances  of each guess; gains: the same less what its row costs beyond any row, in tokens
    """

    index: int
    request: TrackedRequest
    draft: Draft
    prefix_probs: Sequence[float]
    gains: Sequence[float]


@dataclass(frozen=True, slots=True)
class Selection:
    """How many tokens of each candidate are verified.

    rate      expected tokens by model second of the step
    indebted  more would have paid, but not everybody may be delayed by it
    """

    lengths: Sequence[int]
    rate: float = 0.0
    limited_by_budget: bool = False


def select_rows(
    candidates: Sequence[Candidate],
    base_step: BaseStep,
    costs: Sequence[float],
    draft_cost: float,
    proposal_overhead: float = 0.0,
) -> Selection:
    """The rows with the most expected tokens by cost, such that nobody is delayed by more than the ledger allows.

    costs     of the step with 0, 1, ... drafted rows
    drafting  model seconds that went into the drafts: spent already, but part of what the tokens cost
    asking    share of a step that asking for drafts takes, and that could be saved if they gained nothing
    """
    gains = [candidate.gains for candidate in candidates]
    rated = [cost + draft_cost for cost in costs] if draft_cost else costs
    limit = base_step.plain_cost + base_step.max_delay(candidate.request for candidate in candidates)
    least = (MIN_SPEEDUP + proposal_overhead) * base_step.shape.num_sampled / rated[0]
    count = most = best_num_rows(
        gains, base_step.shape.num_sampled, rated, limit + draft_cost, MIN_SPEEDUP + proposal_overhead
    )
    while count:
        lengths = distribute(candidates, count, costs[count] - base_step.plain_cost, base_step.plain_cost)
        if lengths:
            tokens = base_step.shape.num_sampled + sum(
                sum(c.prefix_probs[:n]) for c, n in zip(candidates, lengths, strict=True)
            )
            if tokens / rated[count] > least:
                return Selection(lengths, tokens / rated[count], limited_by_budget=count < most)
        count = int(count * SHRINK_FACTOR)
    return Selection([0] * len(candidates), limited_by_budget=most > 0)


def distribute(candidates: Sequence[Candidate], num_rows: int, delay: float, plain_cost: float) -> list[int]:
    """Rows for each candidate, `count` in all; empty if some would be delayed by more than they can hope to make up for.

    Those who could not bear the delay otherwise come first, with as many rows as make it worth their while; the others
    go where they gain most. By gain alone, a few with long drafts would take all rows, and the rest the delay.
    """
    needed = [_min_rows(candidate, delay, plain_cost) for candidate in candidates]
    spare = num_rows - sum(needed)
    if spare < 0 or any(rows > len(one.gains) for one, rows in zip(candidates, needed, strict=True)):
        return []
    rest = (
        split_by_gain([one.gains[rows:] for one, rows in zip(candidates, needed, strict=True)], spare)
        if spare
        else [0] * len(candidates)
    )
    return [rows + more for rows, more in zip(needed, rest, strict=True)]


def _min_rows(candidate: Candidate, delay: float, plain_cost: float) -> int:
    """The shortest draft with which the candidate bears the delay; beyond all it has if none will do."""
    slack = candidate.request.delay_budget.allowance(plain_cost)
    if delay <= max(slack, 0.0):
        return 0
    return (
        bisect_left(
            list(accumulate(candidate.prefix_probs)), min(delay - slack, delay / MAX_DELAY_SHARE) / plain_cost
        )
        + 1
    )


def nearest_paying(candidates: Sequence[Candidate], base_step: BaseStep, costs: Sequence[float]) -> Selection:
    """The rows that come closest to paying where none pay, though they would if rows were free."""
    gains = [candidate.gains for candidate in candidates]
    tokens = float(base_step.shape.num_sampled)
    limit = base_step.plain_cost + base_step.max_delay(candidate.request for candidate in candidates)
    # Left out of the comparison, no draft at all cannot win it.
    ordered = sorted(chain.from_iterable(gains), reverse=True)
    count = 1 + best_num_rows([ordered[1:]], tokens + ordered[0], costs[1:], limit, min_speedup=1.0)
    total = tokens + sum(ordered[:count])
    if total < MIN_PROBE_GAIN * tokens or costs[count] > limit:
        return Selection([0] * len(candidates))
    return Selection(split_by_gain(gains, count), total / costs[count])


def max_request_delay(allowance: float, expected_gain: float) -> float:
    """How much a request may be delayed that hopes to gain so much: one far behind would never catch up without drafts."""
    return max(allowance + expected_gain, MAX_DELAY_SHARE * expected_gain, 0.0)


def best_num_rows(
    gains: Sequence[Sequence[float]],
    tokens: float,
    costs: Sequence[float],
    max_cost: float,
    min_speedup: float = MIN_SPEEDUP,
) -> int:
    """How many rows to verify, of those with the highest gains.

    gains   of the guesses of each request, falling
    tokens  expected without any draft
    costs   of the step with 0, 1, ... rows more; it has steps of its own, so every count is looked at
    limit   no step may cost more; without drafts any may
    margin  by what factor no draft at all must be beaten
    """
    ordered = gains[0] if len(gains) == 1 else sorted(chain.from_iterable(gains), reverse=True)
    allowed = bisect_right(costs, max_cost)
    rates = list(map(truediv, accumulate(ordered, initial=tokens), costs[:allowed]))
    if len(rates) < 2:
        return 0
    best = max(rates)
    return rates.index(best) if best > rates[0] * min_speedup else 0


def split_by_gain(gains: Sequence[Sequence[float]], num_rows: int) -> list[int]:
    """How many of the `count` highest gains are whose; of equal ones, the first request's come first."""
    if len(gains) == 1:
        return [num_rows]
    last = sorted(chain.from_iterable(gains), reverse=True)[num_rows - 1]
    lengths = [sum(gain > last for gain in own) for own in gains]
    spare = num_rows - sum(lengths)
    for index, own in enumerate(gains):
        ties = min(own.count(last), spare)
        lengths[index] += ties
        spare -= ties
    return lengths


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

    def select(
        self, paying_plans: Sequence[DraftModelPlan], base_step: BaseStep, is_proven: bool
    ) -> DraftModelPlan | None:
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
        if (
            len(base_step.delay_budgets) > 1
            and plan.catch_up_cost > MAX_CATCH_UP_STEPS * base_step.plain_cost
        ):
            return False
        delay = plan.draft_cost + plan.verify_cost - base_step.plain_cost
        if delay + plan.catch_up_cost - trial_cost > base_step.max_delay(
            member.request for member in plan.requests
        ):
            return False
        return all(_pays_off(plan, member, delay, base_step.plain_cost) for member in plan.requests)

    def _charge(self, plan: DraftModelPlan, trial_cost: float, base_step: BaseStep) -> None:
        self._trial_spent += trial_cost
        readers = [member.request for member in plan.requests if not member.request.prompt_read]
        for account in (
            base_step.delay_budgets if trial_cost else [request.delay_budget for request in readers]
        ):
            account.ahead_s += plan.catch_up_cost
        for request in readers:
            request.prompt_read = True


def _pays_off(plan: DraftModelPlan, request: DraftModelRequest, delay: float, plain_cost: float) -> bool:
    """Whether the delay is likely to pay for a member."""
    hoped = plain_cost * request.expected_tokens(plan.draft_len)
    allowed = max_request_delay(request.request.delay_budget.allowance(plain_cost), hoped)
    if request.request.prompt_read:
        return delay + plan.catch_up_cost <= allowed
    return delay <= allowed and plan.catch_up_cost <= PAYBACK_SHARE * request.remaining_steps * (
        hoped - delay
    )


def rank_plans(
    requests: Sequence[DraftModelRequest],
    base_tokens: float,
    base_rows: int,
    costs: Sequence[float],
    draft_cost_fn: DraftCostFn,
) -> list[DraftModelPlan]:
    """What pays, the best first: the most promising members, so many of them and so far.

    tokens  expected from the step without the drafter; rows: how many drafted rows it has
    costs   of the step with 0, 1, ... drafted rows
    passes  seconds of drafting, by (rows to compute first, requests, length)
    """
    ranked = sorted(
        requests,
        key=lambda member: (
            member.num_pending_rows > FEW_PENDING_ROWS,
            member.base_tokens - member.expected_tokens(4),
        ),
    )
    least = MIN_SPEEDUP * base_tokens / costs[base_rows]
    found: list[DraftModelPlan] = []
    for count in _group_sizes(len(ranked)):
        group = _RequestGroup(ranked[:count])
        best = 0.0
        for length in DRAFT_LENGTHS:
            drafted = base_rows - group.base_rows + count * length
            if drafted >= len(costs) or length > len(group.expected_tokens):
                break
            plan = group.make_plan(
                length,
                base_tokens + group.expected_tokens[length - 1] - group.base_tokens,
                costs[drafted],
                draft_cost_fn,
            )
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
        self.expected_tokens = list(
            accumulate(map(sum, zip(*(member.prefix_probs for member in requests), strict=False)))
        )
        self._num_pending_rows = sum(member.num_pending_rows for member in requests)
        self._remaining_steps = sum(member.remaining_steps for member in requests) / len(requests)

    def make_plan(
        self, draft_len: int, tokens: float, verify_cost: float, draft_cost_fn: DraftCostFn
    ) -> DraftModelPlan:
        count = len(self.requests)
        seconds = draft_cost_fn(count, count, draft_len)
        invested = draft_cost_fn(self._num_pending_rows, count, draft_len) - seconds
        rate = tokens / (verify_cost + seconds + invested / self._remaining_steps)
        return DraftModelPlan(self.requests, draft_len, rate, seconds, invested, verify_cost)


def _group_sizes(num_requests: int) -> list[int]:
    """1, 2, 4, ... and all."""
    powers = accumulate(range(num_requests.bit_length()), lambda count, _: 2 * count, initial=1)
    return [*(count for count in powers if count < num_requests), num_requests]
