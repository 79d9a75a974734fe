"""For whom, and how far, a drafter that runs a model should guess on top of what the others found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from foreword.drafting.control.admission import MARGIN, bearable
from foreword.drafting.control.frame import Frame, Tracked

__all__ = ["FEW", "LONGEST", "Cascade", "Member", "Plan", "plans"]

LENGTHS = (1, 2, 3, 4, 6, 8, 10, 12, 16, 24)
LONGEST = LENGTHS[-1]
FEW = 8  # rows; whoever has more to compute first comes last
LOOKED_AT = 12  # plans, for one that the ledger allows
MOST_AT_ONCE = 4.0  # plain steps of reading texts in one step that several requests wait for, and those that arrive meanwhile
STAKE = 5.0  # plain steps, once for each drafter
PAST_THE_BEST = 0.97  # of the best rate so far: longer drafts bring no better one
HASTE = 0.5  # what is invested must pay within this share of the steps that are left

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
    request: Tracked
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
    """Guess `length` tokens for each member. Costs in model seconds.

    rate      expected tokens by model second of the step, drafting included
    seconds   of the passes that recur
    invested  in computing backlogs, which later steps need not do again
    cost      of the step that verifies the draft
    """

    members: Sequence[Member]
    length: int
    rate: float
    seconds: float
    invested: float
    cost: float

    @property
    def first_look(self) -> bool:
        """Some members' texts are read for the first time."""
        return not all(member.request.read for member in self.members)


class Cascade:
    """One drafter's plans. What reading a text for the first time costs is an investment, outside of the ledger: it is
    made if it is likely to pay in time, and for a drafter of which nothing is known yet only up to STAKE."""

    def __init__(self) -> None:
        self._staked = 0.0

    def plan(self, paying: Sequence[Plan], frame: Frame, proven: bool) -> Plan | None:
        """The best of the plans that pay which nobody is delayed by too much; its investments are booked."""
        for plan in paying[:LOOKED_AT]:
            stake = plan.invested if plan.first_look and not proven else 0.0
            if self._bearable(plan, stake, frame):
                self._book(plan, stake, frame)
                return plan
        return None

    def _bearable(self, plan: Plan, stake: float, frame: Frame) -> bool:
        if stake and self._staked + stake > STAKE * frame.plain:
            return False
        if len(frame.accounts) > 1 and plan.invested > MOST_AT_ONCE * frame.plain:
            return False
        delay = plan.seconds + plan.cost - frame.plain
        if delay + plan.invested - stake > frame.patience(member.request for member in plan.members):
            return False
        return all(_bears(plan, member, delay, frame.plain) for member in plan.members)

    def _book(self, plan: Plan, stake: float, frame: Frame) -> None:
        self._staked += stake
        readers = [member.request for member in plan.members if not member.request.read]
        for account in frame.accounts if stake else [request.account for request in readers]:
            account.lead += plan.invested
        for request in readers:
            request.read = True


def _bears(plan: Plan, member: Member, delay: float, step: float) -> bool:
    """Whether the delay is likely to pay for a member."""
    hoped = step * member.hoped(plan.length)
    allowed = bearable(member.request.account.slack(step), hoped)
    if member.request.read:
        return delay + plan.invested <= allowed
    return delay <= allowed and plan.invested <= HASTE * member.horizon * (hoped - delay)


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
        group = _Group(ranked[:count])
        best = 0.0
        for length in LENGTHS:
            drafted = rows - group.rows + count * length
            if drafted >= len(costs) or length > len(group.hopes):
                break
            plan = group.plan(length, tokens + group.hopes[length - 1] - group.tokens, costs[drafted], passes)
            if plan.rate > least:
                found.append(plan)
            if plan.rate < PAST_THE_BEST * best:
                break
            best = max(best, plan.rate)
    return sorted(found, key=lambda plan: -plan.rate)


class _Group:
    """Members that draft together. hopes: tokens expected from 1, 2, ... guesses of each."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.tokens = sum(member.tokens for member in members)
        self.rows = sum(member.rows for member in members)
        self.hopes = list(accumulate(map(sum, zip(*(member.chances for member in members), strict=False))))
        self._backlog = sum(member.backlog for member in members)
        self._horizon = sum(member.horizon for member in members) / len(members)

    def plan(self, length: int, tokens: float, cost: float, passes: Passes) -> Plan:
        count = len(self.members)
        seconds = passes(count, count, length)
        invested = passes(self._backlog, count, length) - seconds
        rate = tokens / (cost + seconds + invested / self._horizon)
        return Plan(self.members, length, rate, seconds, invested, cost)


def _counts(limit: int) -> list[int]:
    """1, 2, 4, ... and all."""
    powers = accumulate(range(limit.bit_length()), lambda count, _: 2 * count, initial=1)
    return [*(count for count in powers if count < limit), limit]
