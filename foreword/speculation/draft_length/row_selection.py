"""Selection of the draft tokens to verify: the rows with the most expected tokens per cost."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from operator import truediv

from foreword.core.outputs import Draft
from foreword.speculation.draft_length.next_step import BaseStep, TrackedRequest

MIN_SPEEDUP = 1.01  # a smaller gain is noise
# The shortest step within this share of the best rate is chosen, for prompts that arrive during it
NEAR_BEST = 0.98
MAX_DELAY_SHARE = 0.5  # share of its expected gain that a request may always be delayed by
SHRINK_FACTOR = 0.75  # reduces the rows until each request can bear their cost


@dataclass(slots=True)
class Candidate:
    """The best draft of a proposal."""

    index: int  # index of the proposal
    request: TrackedRequest
    draft: Draft
    prefix_probs: Sequence[float]  # acceptance probability of each token
    gains: Sequence[float]  # the same minus row_cost, in tokens
    row_cost: float = 0.0  # model seconds of the context and the sampling of a row of this request
    surplus: float = 1.0  # share of the expected tokens that no draft of another drafter has
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
            own_cost = sum(c.row_cost * n for c, n in zip(candidates, lengths, strict=True))
            rate = (num_sampled + expected) / (rated[count] + own_cost)
            if rate > min_rate:
                return Selection(lengths, rate, limited_by_budget=count < best_count)
        count = int(count * SHRINK_FACTOR)
    is_limited = best_count > 0 or (
        len(costs) > 1
        and costs[1] > max_cost + spent
        and best_num_rows(gains, num_sampled, rated, math.inf) > 0
    )
    return Selection([0] * len(candidates), limited_by_budget=is_limited)


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
