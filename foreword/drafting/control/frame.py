"""Requests as the controller knows them, and the step that comes next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foreword.core.request import RequestState
from foreword.drafting.control.acceptance import Record
from foreword.drafting.control.costs import Shape, sampling_class
from foreword.drafting.control.ledger import ALLOWANCE, Account

__all__ = ["Frame", "Tracked"]


class Tracked:
    """What the controller knows of a request.

    bound    longest draft of use: the request's own bound, or the server's
    kind     its sampling class
    records  how each drafter does on it
    missed   asks in a row without a draft that paid
    wakes    round of asks until which it is left alone
    read     a drafter's model has read its text once
    context  tokens that its next row reads
    guessed  the first guess of a draft that it was offered last was right
    tried    seconds of a pass whose only use was to learn
    """

    __slots__ = ("account", "bound", "context", "guessed", "kind", "missed", "read", "records", "state", "tried", "wakes")

    def __init__(self, state: RequestState, bound: int, account: Account) -> None:
        own = state.params.speculation.max_tokens
        self.state = state
        self.account = account
        self.bound = bound if own is None else min(own, bound)
        self.kind = sampling_class(state.params)
        self.records: defaultdict[str, Record] = defaultdict(Record)
        self.missed = self.wakes = self.context = 0
        self.read = self.guessed = False
        self.tried = 0.0


@dataclass(frozen=True, slots=True)
class Frame:
    """The next step without drafts.

    cost      of it, in model seconds
    plain     what plain decoding would take for it, ghosts among its requests
    accounts  of all requests that it serves
    prompts   some of its rows are those of prompts
    """

    shape: Shape
    cost: float
    plain: float
    accounts: Sequence[Account]
    prompts: bool

    def patience(self, drafted_for: Iterable[Tracked]) -> float:
        """How much the step may be delayed for the sake of some of its requests, as the others see it."""
        served = {id(request.account) for request in drafted_for}
        slacks = [account.slack(self.plain) for account in self.accounts if id(account) not in served]
        if self.prompts:
            slacks.append(ALLOWANCE * self.plain)
        return max(min(slacks, default=float("inf")), 0.0)
