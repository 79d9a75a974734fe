"""Selection of draft tokens to verify, and of requests for the draft model: most expected tokens per cost."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import truediv

from foreword.core.outputs import Draft
from foreword.speculation.control.fairness import BaseStep, TrackedRequest

MIN_SPEEDUP = 1.01  # a smaller gain is noise
# Of the best rate: the shortest such step is chosen, for prompts that arrive during it; it may have no drafts
NEAR_BEST = 0.98
MIN_PROBE_GAIN = 1.1  # expected tokens of a probe, relative to none
MAX_DELAY_SHARE = 0.5  # of its expected gain that a request may always be delayed by
SHRINK_FACTOR = 0.75  # of the rows, until each request can bear their cost
DRAFT_LENGTHS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 24)  # that plans consider
MAX_DRAFT_LEN = DRAFT_LENGTHS[-1]
FEW_PENDING_ROWS = 8  # requests with more come last
MAX_PLANS_CHECKED = 12  # for one within the delay budgets
EARLY_STOP_RATIO = 0.97  # of the best rate so far; below it longer drafts are not better

DraftCostFn = Callable[[int, int, int], float]  # (pending rows, requests, draft length) -> model seconds


@dataclass(slots=True)
class Candidate:
    """The best draft of a proposal."""

    index: int  # of the proposal
    request: TrackedRequest
    draft: Draft
    prefix_probs: Sequence[float]  # acceptance probability of each token
    gains: Sequence[float]  # the same minus the request's own cost per row, in tokens
    expected_tokens: Sequence[float] = field(init=False)  # accepted of the first 0, 1, ... tokens

    def __post_init__(self) -> None:
        self.expected_tokens = list(accumulate(self.prefix_probs, initial=0.0))


@dataclass(frozen=True, slots=True)
class Selection:
    """Draft lengths of all candidates."""

    lengths: Sequence[int]
    rate: float = 0.0  # expected tokens per model second of the step
    limited_by_budget: bool = False  # delay budgets forbid the best selection


def select_rows(
    candidates: Sequence[Candidate],
    base_step: BaseStep,
    costs: Sequence[float],
    draft_cost: float,
    proposal_cost: float = 0.0,
) -> Selection:
    """The rows with the most expected tokens per cost, within all delay budgets.

    costs          of the step with 0, 1, ... draft rows
    draft_cost     model seconds of the drafts: already spent, but part of the cost of the tokens
    proposal_cost  model seconds of proposing, which backoff would save
    """
    num_sampled, plain_cost = base_step.shape.num_sampled, base_step.plain_cost
    gains = [candidate.gains for candidate in candidates]
    spent = draft_cost + proposal_cost
    rated = [costs[0] + draft_cost, *(cost + spent for cost in costs[1:])] if spent else costs
    max_cost = plain_cost + base_step.max_delay(candidate.request for candidate in candidates)
    min_rate = MIN_SPEEDUP * num_sampled / rated[0]
    count = best_count = best_num_rows(gains, num_sampled, rated, max_cost + spent)
    slacks = [candidate.request.delay_budget.allowance(plain_cost) for candidate in candidates]
    while count:
        lengths = distribute(candidates, slacks, count, costs[count] - plain_cost, plain_cost)
        if lengths:
            expected = sum(c.expected_tokens[n] for c, n in zip(candidates, lengths, strict=True))
            rate = (num_sampled + expected) / rated[count]
            if rate > min_rate:
                return Selection(lengths, rate, limited_by_budget=count < best_count)
        count = int(count * SHRINK_FACTOR)
    return Selection([0] * len(candidates), limited_by_budget=best_count > 0)


def distribute(
    candidates: Sequence[Candidate], slacks: Sequence[float], num_rows: int, delay: float, plain_cost: float
) -> list[int]:
    """Split `num_rows` over the candidates; empty if a candidate cannot regain its delay.

    slacks  delay that each candidate can bear

    Candidates beyond their delay budget come first, with the rows that compensate them; the other rows go by
    gain. By gain alone, a few long drafts would take all rows, and other requests only the delay.
    """
    needed = [
        _min_rows(candidate, slack, delay, plain_cost)
        for candidate, slack in zip(candidates, slacks, strict=True)
    ]
    spare = num_rows - sum(needed)
    if spare < 0 or any(rows > len(c.gains) for c, rows in zip(candidates, needed, strict=True)):
        return []
    if not spare:
        return needed
    more = split_by_gain([c.gains[rows:] for c, rows in zip(candidates, needed, strict=True)], spare)
    return [rows + added for rows, added in zip(needed, more, strict=True)]


def _min_rows(candidate: Candidate, slack: float, delay: float, plain_cost: float) -> int:
    """The shortest draft that compensates the delay; longer than the candidate's if none does."""
    if delay <= max(slack, 0.0):
        return 0
    min_tokens = min(delay - slack, delay / MAX_DELAY_SHARE) / plain_cost
    return max(bisect_left(candidate.expected_tokens, min_tokens), 1)


def nearest_paying(candidates: Sequence[Candidate], base_step: BaseStep, costs: Sequence[float]) -> Selection:
    """The best rows to probe where none pay; no rows if they would not pay even for free."""
    gains = [candidate.gains for candidate in candidates]
    tokens = float(base_step.shape.num_sampled)
    max_cost = base_step.plain_cost + base_step.max_delay(candidate.request for candidate in candidates)
    # compare from one row on: without drafts would win
    ordered = sorted(chain.from_iterable(gains), reverse=True)
    count = 1 + best_num_rows([ordered[1:]], tokens + ordered[0], costs[1:], max_cost, min_speedup=1.0)
    total = tokens + sum(ordered[:count])
    if total < MIN_PROBE_GAIN * tokens or costs[count] > max_cost:
        return Selection([0] * len(candidates))
    return Selection(split_by_gain(gains, count), total / costs[count])


def max_request_delay(allowance: float, expected_gain: float) -> float:
    """Longest delay of a request with this expected gain; one far behind must be able to catch up."""
    return max(allowance + expected_gain, MAX_DELAY_SHARE * expected_gain, 0.0)


def best_num_rows(
    gains: Sequence[Sequence[float]],
    tokens: float,
    costs: Sequence[float],
    max_cost: float,
    min_speedup: float = MIN_SPEEDUP,
) -> int:
    """The least number of rows, those with the highest gains, with about the most expected tokens per cost.

    gains        by request, decreasing
    tokens       expected without drafts
    costs        of the step with 0, 1, ... more rows; not convex, so every count is compared
    max_cost     of a step with drafts
    min_speedup  over the step without drafts
    """
    ordered = gains[0] if len(gains) == 1 else sorted(chain.from_iterable(gains), reverse=True)
    allowed = bisect_right(costs, max_cost)
    rates = list(map(truediv, accumulate(ordered, initial=tokens), costs[:allowed]))
    if len(rates) < 2:
        return 0
    best = max(rates)
    if best <= rates[0] * min_speedup:
        return 0
    return next(count for count, rate in enumerate(rates) if rate >= NEAR_BEST * best)


def split_by_gain(gains: Sequence[Sequence[float]], num_rows: int) -> list[int]:
    """The number of the `num_rows` highest gains in each request; ties go to the first requests."""
    if len(gains) == 1:
        return [num_rows]
    last = sorted(chain.from_iterable(gains), reverse=True)[num_rows - 1]
    lengths = [sum(gain > last for gain in request_gains) for request_gains in gains]
    spare = num_rows - sum(lengths)
    for index, request_gains in enumerate(gains):
        ties = min(request_gains.count(last), spare)
        lengths[index] += ties
        spare -= ties
    return lengths


@dataclass(frozen=True, slots=True)
class DraftModelRequest:
    """A request that the draft model could draft for."""

    index: int  # of its proposal
    request: TrackedRequest
    prefix_probs: Sequence[float]  # predicted acceptance
    base_tokens: float  # expected from other drafters' rows
    base_rows: int  # verified without this drafter
    num_pending_rows: int  # to compute before the first draft token
    remaining_steps: float  # that benefit from computing them

    def expected_tokens(self, draft_len: int) -> float:
        return sum(self.prefix_probs[:draft_len])


@dataclass(frozen=True, slots=True)
class DraftModelPlan:
    """Draft `draft_len` tokens for each request. Costs are model seconds."""

    requests: Sequence[DraftModelRequest]
    draft_len: int
    rate: float  # expected tokens per model second of the step, drafting included
    draft_cost: float  # of the recurring passes
    catch_up_cost: float  # of the pending rows, an investment for later steps
    verify_cost: float  # of the step that verifies the drafts


def affordable_plan(plans: Sequence[DraftModelPlan], base_step: BaseStep) -> DraftModelPlan | None:
    """The best plan that delays no other request beyond its budget.

    A prompt's first read is an investment of its own request, which `rate` accounts for.
    """
    for plan in plans[:MAX_PLANS_CHECKED]:
        delay = plan.draft_cost + plan.verify_cost + plan.catch_up_cost - base_step.plain_cost
        if delay <= base_step.max_delay(r.request for r in plan.requests):
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
        best = 0.0
        for length in DRAFT_LENGTHS:
            draft_rows = base_rows - group.base_rows + count * length
            if draft_rows >= len(costs) or length > len(group.expected_tokens):
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
        catch_up = draft_cost_fn(self._num_pending_rows, count, draft_len) - draft_cost
        rate = tokens / (verify_cost + draft_cost + proposal_cost + catch_up / self._remaining_steps)
        return DraftModelPlan(self.requests, draft_len, rate, draft_cost, catch_up, verify_cost)


def _group_sizes(num_requests: int) -> list[int]:
    """1, 2, 4, ... and all."""
    powers = accumulate(range(num_requests.bit_length()), lambda count, _: 2 * count, initial=1)
    return [*(count for count in powers if count < num_requests), num_requests]
