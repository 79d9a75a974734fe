"""Delay budgets: each request's lead over plain decoding bounds how far drafts of others may delay it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.speculation.draft_length.policy import RequestStep

DEFAULT_MAX_SLOWDOWN = 0.02  # share of its time that a request may lose
MIN_OUTPUT_TOKENS = 32  # assumed length of an output, for the initial budget


@dataclass(slots=True)
class DelayBudget:
    """Delay budget of one request. Times are model seconds."""

    min_output_tokens: int  # assumed length of its output
    max_slowdown: float = DEFAULT_MAX_SLOWDOWN
    ahead_s: float = 0.0  # lead over plain decoding
    plain_s: float = 0.0  # duration of plain decoding so far
    context_len: int = 0  # tokens it last read

    def allowance(self, plain_cost: float) -> float:
        """Delay the request can still bear: its lead, and a share of its time."""
        return self.ahead_s + self.max_slowdown * max(self.plain_s, self.min_output_tokens * plain_cost)


class DelayLedger:
    """Delay budgets of live requests, by id."""

    def __init__(self, max_slowdown: float = DEFAULT_MAX_SLOWDOWN) -> None:
        self.max_slowdown = max_slowdown
        self.nonspeculative: dict[str, DelayBudget] = {}  # requests known only from recorded steps
        self._budgets: dict[str, DelayBudget] = {}

    def open(self, request_id: str, max_tokens: int | None) -> DelayBudget:
        """A request that may draft begins, with at most `max_tokens` output tokens."""
        budget = self._budgets[request_id] = self._new_budget(max_tokens)
        return budget

    def close(self, request_id: str) -> None:
        """A request that may draft ends."""
        del self._budgets[request_id]

    def record_step(
        self, requests: Sequence[RequestStep], plain_cost: float, decode_cost: float, actual_cost: float
    ) -> None:
        """A step took `actual_cost`.

        Plain decoding takes `plain_cost` for its tokens or prefill chunks, and `decode_cost` for each further
        token of a request.
        """
        for request_step in requests:
            state = request_step.state
            budget = self._budgets.get(state.id) or self.nonspeculative.get(state.id)
            if budget is None:
                budget = self.nonspeculative[state.id] = self._new_budget(state.params.max_tokens)
            earned = plain_cost + max(request_step.num_emitted - 1, 0) * decode_cost
            budget.plain_s += earned
            budget.ahead_s += earned - actual_cost
            budget.context_len = request_step.context_len
        if self.nonspeculative:  # those that did not run have ended, or do not delay
            served_ids = {request_step.state.id for request_step in requests}
            for id_ in self.nonspeculative.keys() - served_ids:
                del self.nonspeculative[id_]

    def _new_budget(self, max_tokens: int | None) -> DelayBudget:
        tokens = MIN_OUTPUT_TOKENS if max_tokens is None else min(MIN_OUTPUT_TOKENS, max_tokens)
        return DelayBudget(tokens, self.max_slowdown)
