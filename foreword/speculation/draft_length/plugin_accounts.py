"""Time accounts of plugged-in drafters: their drafts must save the time that proposing takes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from foreword.speculation.draft_length.cost_model import StepSummary
from foreword.speculation.draft_length.exploration import EXPLORATION_SHARE
from foreword.speculation.draft_length.step_record import RequestStep

TRIAL_STEPS = 5.0  # plain steps that a plug-in may take before its drafts have saved any
MAX_SAVED_CALLS = 16.0  # calls that savings can pay for in advance: enough for a few bad drafts in a row
CALL_COST_ALPHA = 1 / 8


class DrafterAccount:
    """Time that a plugged-in drafter may take, in model seconds: it may spend what it earns.

    It earns the time that its drafts save, and EXPLORATION_SHARE of all time. So a drafter that does not pay
    takes that share at most, after a trial of TRIAL_STEPS.
    """

    __slots__ = ("_call_cost", "_trial_cost", "balance")

    def __init__(self, plain_cost: float) -> None:
        self.balance = self._trial_cost = TRIAL_STEPS * plain_cost
        self._call_cost = 0.0  # mean of recent calls

    @property
    def can_afford_call(self) -> bool:
        """Whether it has saved up for a call, or as much as a trial takes."""
        return self.balance >= min(self._call_cost, self._trial_cost)

    def charge(self, cost: float) -> None:
        """The drafter was called."""
        self.balance -= cost
        self._call_cost += (cost - self._call_cost) * (CALL_COST_ALPHA if self._call_cost else 1.0)

    def earn(self, saved: float, elapsed: float, plain_cost: float) -> None:
        """Its drafts saved `saved`, which may be negative, while `elapsed` passed."""
        self._trial_cost = TRIAL_STEPS * plain_cost
        if self.balance < self._trial_cost:
            self.balance = min(self.balance + EXPLORATION_SHARE * elapsed, self._trial_cost)
        self.balance = min(self.balance + saved, max(self._trial_cost, MAX_SAVED_CALLS * self._call_cost))


class PluginAccounts:
    """The accounts of all plugged-in drafters, and what they take and propose in this step."""

    def __init__(self, drafters: Collection[str], step_cost: float) -> None:
        """step_cost  model seconds of a plain step"""
        self.by_drafter = {drafter: DrafterAccount(step_cost) for drafter in drafters}
        self.cost = 0.0  # cost of proposing in this step
        self.drafters: dict[str, str] = {}  # plug-ins whose drafts this step verifies, by request id

    def charge(self, drafter: str, cost: float) -> None:
        """A plug-in was called."""
        self.by_drafter[drafter].charge(cost)
        self.cost += cost

    def record_skipped(self, num_steps: int, plain_cost: float) -> None:
        """Steps of `plain_cost` without proposals are over."""
        for account in self.by_drafter.values():
            account.earn(0.0, num_steps * plain_cost, plain_cost)

    def record_step(
        self,
        requests: Sequence[RequestStep],
        summary: StepSummary,
        cost: float,
        elapsed: float,
        plain_cost: float,
        decode_cost: float,
    ) -> None:
        """Credit plug-ins with what their drafts saved in a step.

        cost, elapsed            of the step without drafting, and with it
        plain_cost, decode_cost  of the step without drafts, and without prefill
        """
        saved = dict.fromkeys(self.by_drafter, 0.0)
        num_sampling = summary.num_sampling_requests
        for request in requests:
            drafter = self.drafters.get(request.state.id)
            if drafter is not None and request.num_draft_tokens:
                saved[drafter] += (request.num_emitted - 1) * decode_cost / num_sampling
                saved[drafter] -= (cost - plain_cost) * request.num_draft_tokens / summary.num_draft_rows
        for drafter, account in self.by_drafter.items():
            account.earn(saved[drafter], elapsed, decode_cost)
