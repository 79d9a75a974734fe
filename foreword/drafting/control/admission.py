"""Which drafted rows are worth verifying: the prefix of all, by expected gain, with the most tokens for its cost."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import truediv

from foreword.core.draft import Draft
from foreword.drafting.control.frame import BaseStep, TrackedRequest

__all__ = ["MIN_SPEEDUP", "Candidate", "Selection", "max_request_delay", "best_num_rows", "select_rows", "nearest_paying", "distribute", "split_by_gain"]

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


def select_rows(candidates: Sequence[Candidate], base_step: BaseStep, costs: Sequence[float], draft_cost: float, proposal_overhead: float = 0.0) -> Selection:
    """The rows with the most expected tokens by cost, such that nobody is delayed by more than the ledger allows.

    costs     of the step with 0, 1, ... drafted rows
    drafting  model seconds that went into the drafts: spent already, but part of what the tokens cost
    asking    share of a step that asking for drafts takes, and that could be saved if they gained nothing
    """
    gains = [candidate.gains for candidate in candidates]
    rated = [cost + draft_cost for cost in costs] if draft_cost else costs
    limit = base_step.plain_cost + base_step.max_delay(candidate.request for candidate in candidates)
    least = (MIN_SPEEDUP + proposal_overhead) * base_step.shape.num_sampled / rated[0]
    count = most = best_num_rows(gains, base_step.shape.num_sampled, rated, limit + draft_cost, MIN_SPEEDUP + proposal_overhead)
    while count:
        lengths = distribute(candidates, count, costs[count] - base_step.plain_cost, base_step.plain_cost)
        if lengths:
            tokens = base_step.shape.num_sampled + sum(sum(c.prefix_probs[:n]) for c, n in zip(candidates, lengths, strict=True))
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
    rest = split_by_gain([one.gains[rows:] for one, rows in zip(candidates, needed, strict=True)], spare) if spare else [0] * len(candidates)
    return [rows + more for rows, more in zip(needed, rest, strict=True)]


def _min_rows(candidate: Candidate, delay: float, plain_cost: float) -> int:
    """The shortest draft with which the candidate bears the delay; beyond all it has if none will do."""
    slack = candidate.request.delay_budget.allowance(plain_cost)
    if delay <= max(slack, 0.0):
        return 0
    return bisect_left(list(accumulate(candidate.prefix_probs)), min(delay - slack, delay / MAX_DELAY_SHARE) / plain_cost) + 1


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
    gains: Sequence[Sequence[float]], tokens: float, costs: Sequence[float], max_cost: float, min_speedup: float = MIN_SPEEDUP
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
