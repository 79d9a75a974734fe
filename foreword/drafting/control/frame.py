"""Requests as the controller knows them, and the step that comes next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foreword.core.request import RequestState
from foreword.drafting.control.acceptance import RequestAcceptance
from foreword.drafting.control.costs import StepShape, classify_sampling
from foreword.drafting.control.ledger import MAX_SLOWDOWN, DelayBudget

__all__ = ["BaseStep", "TrackedRequest"]


class TrackedRequest:
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

    __slots__ = ("delay_budget", "max_draft_len", "context_len", "first_hit", "sampler_class", "misses", "prompt_read", "acceptance", "state", "probe_cost", "skip_until")

    def __init__(self, state: RequestState, max_draft_len: int, delay_budget: DelayBudget) -> None:
        own = state.params.speculation.max_tokens
        self.state = state
        self.delay_budget = delay_budget
        self.max_draft_len = max_draft_len if own is None else min(own, max_draft_len)
        self.sampler_class = classify_sampling(state.params)
        self.acceptance: defaultdict[str, RequestAcceptance] = defaultdict(RequestAcceptance)
        self.misses = self.skip_until = self.context_len = 0
        self.prompt_read = self.first_hit = False
        self.probe_cost = 0.0


@dataclass(frozen=True, slots=True)
class BaseStep:
    """The next step without drafts.

    cost      of it, in model seconds
    plain     what plain decoding would take for it, ghosts among its requests
    accounts  of all requests that it serves
    prompts   some of its rows are those of prompts
    """

    shape: StepShape
    cost: float
    plain_cost: float
    delay_budgets: Sequence[DelayBudget]
    has_prefill: bool

    def max_delay(self, drafted_for: Iterable[TrackedRequest]) -> float:
        """How much the step may be delayed for the sake of some of its requests, as the others see it."""
        served = {id(request.delay_budget) for request in drafted_for}
        slacks = [account.allowance(self.plain_cost) for account in self.delay_budgets if id(account) not in served]
        if self.has_prefill:
            slacks.append(MAX_SLOWDOWN * self.plain_cost)
        return max(min(slacks, default=float("inf")), 0.0)
