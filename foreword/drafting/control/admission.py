"""Which drafted rows are worth verifying: the prefix of all, by expected gain, with the most tokens for its cost."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import truediv

from foreword.core.draft import Draft
from foreword.drafting.control.frame import Frame, Tracked

__all__ = ["MARGIN", "Candidate", "Choice", "bearable", "best_count", "choose", "nearest", "shared", "split"]

MARGIN = 1.01  # what must be won: below it is noise
PROMISING = 1.1  # times the tokens without drafts
HALF = 0.5  # of what a request hopes for, it may be delayed by in any case
FEWER = 0.75  # times the rows, until everybody bears what they cost


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
    least = (MARGIN + asking) * frame.shape.sampled / rated[0]
    count = most = best_count(gains, frame.shape.sampled, rated, limit + drafting, MARGIN + asking)
    while count:
        lengths = shared(found, count, costs[count] - frame.plain, frame.plain)
        if lengths:
            tokens = frame.shape.sampled + sum(sum(c.chances[:n]) for c, n in zip(found, lengths, strict=True))
            if tokens / rated[count] > least:
                return Choice(lengths, tokens / rated[count], indebted=count < most)
        count = int(count * FEWER)
    return Choice([0] * len(found), indebted=most > 0)


def shared(found: Sequence[Candidate], count: int, delay: float, step: float) -> list[int]:
    """Rows for each candidate, `count` in all; empty if some would be delayed by more than they can hope to make up for.

    Those who could not bear the delay otherwise come first, with as many rows as make it worth their while; the others
    go where they gain most. By gain alone, a few with long drafts would take all rows, and the rest the delay.
    """
    needed = [_rows_needed(candidate, delay, step) for candidate in found]
    spare = count - sum(needed)
    if spare < 0 or any(rows > len(one.gains) for one, rows in zip(found, needed, strict=True)):
        return []
    rest = split([one.gains[rows:] for one, rows in zip(found, needed, strict=True)], spare) if spare else [0] * len(found)
    return [rows + more for rows, more in zip(needed, rest, strict=True)]


def _rows_needed(candidate: Candidate, delay: float, step: float) -> int:
    """The shortest draft with which the candidate bears the delay; beyond all it has if none will do."""
    slack = candidate.request.account.slack(step)
    if delay <= max(slack, 0.0):
        return 0
    return bisect_left(list(accumulate(candidate.chances)), min(delay - slack, delay / HALF) / step) + 1


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
