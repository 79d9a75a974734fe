"""Requests as the controller knows them, and the step that comes next.

How far each request is ahead of plain decoding, so that nobody pays for drafts of others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from foreword.core.request import RequestState
from foreword.speculation.control.acceptance import RequestAcceptance
from foreword.speculation.control.cost_model import StepShape, classify_sampling
from foreword.speculation.policy import RequestStep

__all__ = ["BaseStep", "DelayBudget", "DelayLedger", "TrackedRequest"]

MAX_SLOWDOWN = 0.02  # of its time so far
MAX_EXPECTED_GAIN = 0.03  # of its time, at most, is credited for what others will save it
MIN_OUTPUT_TOKENS = 32
HIT_CREDIT_STEPS = 2.0  # plain steps that a request may be behind whose own guesses are right every time: it will soon be ahead
HIT_RATE_ALPHA = 1 / 8
MEAN_HIT_RATE_ALPHA = 1 / 64
VACANCY_ALPHA = 1 / 16


@dataclass(slots=True)
class DelayBudget:
    """One request, in model seconds.

    tokens   its answer is thought to have at least so many, for what it may fall behind at first
    lead     how far it is ahead of plain decoding
    plain    how long plain decoding would have taken so far
    context  tokens it last read
    promise  share of its next tokens that were guessed of late, verified or not
    advance  what it will gain when those who are ahead now leave early
    """

    min_output_tokens: int
    hit_rate: float = 0.0
    ahead_s: float = 0.0
    plain_s: float = 0.0
    context_len: int = 0
    expected_gain_s: float = 0.0

    def allowance(self, plain_cost: float) -> float:
        """How far it may still fall back, plain steps taking `step` each: 2 %, and what it can be expected to make up for."""
        time = max(self.plain_s, self.min_output_tokens * plain_cost)
        credit = HIT_CREDIT_STEPS * self.hit_rate * plain_cost * self.min_output_tokens / MIN_OUTPUT_TOKENS
        return (
            self.ahead_s + MAX_SLOWDOWN * time + min(self.expected_gain_s, MAX_EXPECTED_GAIN * time) + credit
        )


class DelayLedger:
    """Accounts of live requests, and of the *ghosts*: requests that ended early thanks to drafts.

    Plain decoding would still be serving a ghost, and its steps would cost more for it, until the lead it ended with
    is used up. Whoever arrives takes the place of a ghost: a client that waits for its answer sends its next request
    when the last one ends, so that plain decoding would never have both. What the ghosts of the future will save is
    credited in advance, as far as places were left empty of late.

    typical  promise of requests of late
    """

    def __init__(self) -> None:
        self.budgets: dict[str, DelayBudget] = {}
        self.departed: list[DelayBudget] = []
        self.mean_hit_rate = 0.5
        self._vacancy_share = 0.5

    @property
    def departed_context(self) -> int:
        return sum(ghost.context_len for ghost in self.departed)

    def open(self, request_id: str, max_tokens: int | None, is_speculative: bool = True) -> DelayBudget:
        """A request begins, whose answer has at most `bound` tokens; `drafting`: it may be drafted for."""
        if self.departed:
            self.departed.remove(max(self.departed, key=lambda ghost: ghost.ahead_s))
            self._vacancy_share -= self._vacancy_share * VACANCY_ALPHA
        tokens = MIN_OUTPUT_TOKENS if max_tokens is None else min(MIN_OUTPUT_TOKENS, max_tokens)
        account = DelayBudget(tokens, self.mean_hit_rate if is_speculative else 0.0)
        self.budgets[request_id] = account
        return account

    def close(self, request_id: str) -> None:
        """A request is over."""
        account = self.budgets.pop(request_id, None)
        if account is not None and account.ahead_s > 0.0:
            self.departed.append(account)

    def record_hit(self, budget: DelayBudget, is_hit: bool) -> None:
        """Whether a request's next token was guessed, the last time that it asked."""
        budget.hit_rate += (is_hit - budget.hit_rate) * HIT_RATE_ALPHA
        self.mean_hit_rate += (is_hit - self.mean_hit_rate) * MEAN_HIT_RATE_ALPHA

    def record_step(
        self,
        requests: Iterable[RequestStep],
        plain_cost: float,
        actual_cost: float,
        saving_per_request: float = 0.0,
    ) -> None:
        """A step took `actual`; plain decoding would have taken `plain` for each token, or piece of a prompt, of each request.

        saved  share of a step that is saved where one request less is served
        """
        for one in requests:
            account = self.budgets.get(one.state.id)
            if account is None:
                account = self.open(one.state.id, one.state.params.max_tokens, is_speculative=False)
            earned = one.num_emitted * plain_cost if one.is_sampled else plain_cost
            account.plain_s += earned
            account.ahead_s += earned - actual_cost
            account.context_len = one.context_len
        self._update_expected_gains(saving_per_request * self._vacancy_share)
        self.advance_time(actual_cost)

    def _update_expected_gains(self, share: float) -> None:
        """Who is ahead will be gone so much sooner, and the others' steps be shorter by `share` for as long."""
        ahead = sum(account.ahead_s for account in self.budgets.values() if account.ahead_s > 0.0)
        for account in self.budgets.values():
            account.expected_gain_s = share * (ahead - max(account.ahead_s, 0.0))

    def advance_time(self, seconds: float) -> None:
        """Time goes by; what happens in plain steps changes nobody's lead."""
        if self.departed:
            left = _drop_expired(self.departed, seconds)
            for _ in range(len(self.departed) - len(left)):
                self._vacancy_share += (1.0 - self._vacancy_share) * VACANCY_ALPHA
            self.departed = left


def _drop_expired(departed: Iterable[DelayBudget], seconds: float) -> list[DelayBudget]:
    for ghost in departed:
        ghost.ahead_s -= seconds
    return [ghost for ghost in departed if ghost.ahead_s > 0.0]


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

    __slots__ = (
        "acceptance",
        "context_len",
        "delay_budget",
        "first_hit",
        "max_draft_len",
        "misses",
        "probe_cost",
        "prompt_read",
        "sampler_class",
        "skip_until",
        "state",
    )

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
        slacks = [
            account.allowance(self.plain_cost) for account in self.delay_budgets if id(account) not in served
        ]
        if self.has_prefill:
            slacks.append(MAX_SLOWDOWN * self.plain_cost)
        return max(min(slacks, default=float("inf")), 0.0)
