"""Which drafted rows are worth verifying: the prefix of all, by expected gain, with the most tokens for its cost."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import truediv

from foreword.core.draft import Draft
from foreword.drafting.frame import Frame, Tracked

__all__ = ["MARGIN", "Candidate", "Choice", "bearable", "best_count", "choose", "nearest", "split"]

MARGIN = 1.01  # what must be won: below it is noise
PROMISING = 1.1  # times the tokens without drafts
HALF = 0.5  # of what a request hopes for, it may be delayed by in any case
FITTINGS = 4  # of a choice into the ledger, the last two without any delay beyond plain decoding


@dataclass(frozen=True, slots=True)
class Candidate:
    """The best draft of an offer.

    chances  of each guess; gains: the same less what its row costs beyond any row, in tokens
    """

    index: int
    request: Tracked
    draft: Draft
    chances: Sequence[float]
    gains: Sequence[float]


@dataclass(frozen=True, slots=True)
class Choice:
    """How many tokens of each candidate are verified.

    rate      expected tokens by model second of the step
    indebted  more would have paid, but not everybody may be delayed by it
    """

    lengths: Sequence[int]
    rate: float = 0.0
    indebted: bool = False


def choose(found: Sequence[Candidate], frame: Frame, costs: Sequence[float], drafting: float, asking: float = 0.0) -> Choice:
    """The rows with the most expected tokens by cost, such that nobody is delayed by more than the ledger allows.

    costs     of the step with 0, 1, ... drafted rows
    drafting  model seconds that went into the drafts: spent already, but part of what the tokens cost
    asking    share of a step that asking for drafts takes, and that could be saved if they gained nothing
    """
    gains = [candidate.gains for candidate in found]
    rated = [cost + drafting for cost in costs] if drafting else costs
    limit = frame.plain + frame.patience(candidate.request for candidate in found)
    tried = 0
    while count := best_count(gains, frame.shape.sampled, rated, limit + drafting, MARGIN + asking):
        lengths = split(gains, count)
        allowed = frame.plain + _least_patience(found, lengths, frame)
        if costs[count] <= allowed:
            tokens = frame.shape.sampled + sum(sum(c.chances[:n]) for c, n in zip(found, lengths, strict=True))
            return Choice(lengths, tokens / rated[count], indebted=tried > 0)
        tried += 1
        if tried == FITTINGS:
            break
        limit = allowed if tried < FITTINGS - 1 else frame.plain
    return Choice([0] * len(found), indebted=tried > 0)


def nearest(found: Sequence[Candidate], frame: Frame, costs: Sequence[float]) -> Choice:
    """The rows that come closest to paying where none pay, though they would if rows were free."""
    gains = [candidate.gains for candidate in found]
    tokens = float(frame.shape.sampled)
    limit = frame.plain + frame.patience(candidate.request for candidate in found)
    # Left out of the comparison, no draft at all cannot win it.
    ordered = sorted(chain.from_iterable(gains), reverse=True)
    count = 1 + best_count([ordered[1:]], tokens + ordered[0], costs[1:], limit, margin=1.0)
    total = tokens + sum(ordered[:count])
    if total < PROMISING * tokens or costs[count] > limit:
        return Choice([0] * len(found))
    return Choice(split(gains, count), total / costs[count])


def _least_patience(found: Sequence[Candidate], lengths: Sequence[int], frame: Frame) -> float:
    """How much the requests drafted for bear to be delayed, each in view of what it expects."""
    step = frame.plain
    return min(
        bearable(candidate.request.account.slack(step), step * sum(candidate.chances[:length]))
        for candidate, length in zip(found, lengths, strict=True)
    )


def bearable(slack: float, hoped: float) -> float:
    """How much a request may be delayed that hopes to gain so much: one far behind would never catch up without drafts."""
    return max(slack + hoped, HALF * hoped, 0.0)


def best_count(
    gains: Sequence[Sequence[float]], tokens: float, costs: Sequence[float], limit: float, margin: float = MARGIN
) -> int:
    """How many rows to verify, of those with the highest gains.

    gains   of the guesses of each request, falling
    tokens  expected without any draft
    costs   of the step with 0, 1, ... rows more; it has steps of its own, so every count is looked at
    limit   no step may cost more; without drafts any may
    margin  by what factor no draft at all must be beaten
    """
    ordered = gains[0] if len(gains) == 1 else sorted(chain.from_iterable(gains), reverse=True)
    allowed = bisect_right(costs, limit)
    rates = list(map(truediv, accumulate(ordered, initial=tokens), costs[:allowed]))
    if len(rates) < 2:
        return 0
    best = max(rates)
    return rates.index(best) if best > rates[0] * margin else 0


def split(gains: Sequence[Sequence[float]], count: int) -> list[int]:
    """How many of the `count` highest gains are whose; of equal ones, the first request's come first."""
    if len(gains) == 1:
        return [count]
    last = sorted(chain.from_iterable(gains), reverse=True)[count - 1]
    lengths = [sum(gain > last for gain in own) for own in gains]
    spare = count - sum(lengths)
    for index, own in enumerate(gains):
        ties = min(own.count(last), spare)
        lengths[index] += ties
        spare -= ties
    return lengths
