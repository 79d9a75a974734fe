"""For whom, and how far, a drafter that runs a model should guess on top of what the others found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from foreword.drafting.admission import MARGIN

__all__ = ["FEW", "Member", "Plan", "plans"]

FEW = 8  # rows; whoever has more to compute first comes last
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16)

Passes = Callable[[int, int, int], float]


@dataclass(frozen=True, slots=True)
class Member:
    """A request that the drafter could guess for.

    index    of its offer
    chances  of each guess, foreseen
    tokens   expected from the rows that it gets without this drafter, and the number of these rows
    backlog  rows that the model must compute before the first guess
    horizon  steps that computing them will have been of use for
    """

    index: int
    chances: Sequence[float]
    tokens: float
    rows: int
    backlog: int
    horizon: float

    def hoped(self, length: int) -> float:
        """Tokens expected from `length` guesses."""
        return sum(self.chances[:length])


@dataclass(frozen=True, slots=True)
class Plan:
    """Guess `length` tokens for each member.

    rate      expected tokens by model second of the step, drafting included
    seconds   of the passes that recur
    invested  seconds of computing backlogs, which later steps need not do again
    cost      of the step that verifies the draft
    """

    members: tuple[Member, ...]
    length: int
    rate: float
    seconds: float
    invested: float
    cost: float


def plans(members: Sequence[Member], tokens: float, rows: int, costs: Sequence[float], passes: Passes) -> list[Plan]:
    """What pays, the best first: the most promising members, so many of them and so far.

    tokens  expected from the step without the drafter; rows: how many drafted rows it has
    costs   of the step with 0, 1, ... drafted rows
    passes  seconds of drafting, by (rows to compute first, requests, length)
    """
    ranked = sorted(members, key=lambda member: (member.backlog > FEW, member.tokens - member.hoped(4)))
    least = MARGIN * tokens / costs[rows]
    found: list[Plan] = []
    for count in _counts(len(ranked)):
        chosen = tuple(ranked[:count])
        for length in LENGTHS:
            drafted = rows - sum(member.rows for member in chosen) + count * length
            if drafted >= len(costs) or length > len(chosen[0].chances):
                break
            gained = sum(member.hoped(length) - member.tokens for member in chosen)
            plan = _plan(chosen, length, tokens + gained, costs[drafted], passes)
            if plan.rate > least:
                found.append(plan)
    return sorted(found, key=lambda plan: -plan.rate)


def _plan(chosen: tuple[Member, ...], length: int, tokens: float, cost: float, passes: Passes) -> Plan:
    seconds = passes(len(chosen), len(chosen), length)
    invested = passes(sum(member.backlog for member in chosen), len(chosen), length) - seconds
    later = invested / (sum(member.horizon for member in chosen) / len(chosen))
    return Plan(chosen, length, tokens / (cost + seconds + later), seconds, invested, cost)


def _counts(limit: int) -> list[int]:
    """1, 2, 4, ... and all."""
    powers = accumulate(range(limit.bit_length()), lambda count, _: 2 * count, initial=1)
    return [*(count for count in powers if count < limit), limit]
