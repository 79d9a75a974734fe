"""Whose turn it is among accounts: start-time fair queueing (Goyal, Vin, Cheng 1996), in tokens.

Each request that waits has a turn: the later of the moment at which it came and of the end of what its account has had
before it. The smallest turn starts first, and moves the clock. So accounts that want more than there is get equal shares,
whoever sends more; an account that wants little is served at once; and within an account nobody overtakes.

What a request costs is estimated when it comes; what it turns out to have cost changes the turns of those behind it, the less
often the more there are.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from foreword.core.request import RequestState

__all__ = ["FairQueue"]

DEFAULT_OUTPUT_TOKENS: Final = 256  # tokens that an answer is thought to have, if it may have so many
MAX_TAG_UPDATES: Final = 256  # turns that a plan may correct; of more, in so many plans as it takes


@dataclass(slots=True)
class _Entry:
    """A live request: the clock when it came, and its cost in tokens."""

    virtual_arrival: int
    cost: int


@dataclass(slots=True)
class _Flow:
    """live: its requests. used: where what has started of them ends; end: the same of all of them."""

    num_live: int = 0
    served_tag: int = 0
    finish_tag: int = 0


class FairQueue:
    """Gives each request its turn. Accounts that have neither requests nor debts are forgotten."""

    def __init__(self) -> None:
        self._virtual_time = 0
        self._steps_since_update = 0  # since turns were corrected
        self._stale_flows: set[str] = set()
        self._entries: dict[str, _Entry] = {}
        self._flows: dict[str, _Flow] = {}

    def __len__(self) -> int:
        """Accounts that are known."""
        return len(self._flows)

    def add(self, state: RequestState) -> None:
        """A request waits."""
        account = self._flows.setdefault(state.request.fairness_key, _Flow())
        account.num_live += 1
        entry = self._entries[state.id] = _Entry(self._virtual_time, _estimate_cost(state))
        state.virtual_start = max(entry.virtual_arrival, account.finish_tag)
        account.finish_tag = state.virtual_start + entry.cost

    def on_start(self, state: RequestState) -> None:
        """It runs for the first time."""
        account = self._flows[state.request.fairness_key]
        account.served_tag = max(account.served_tag, state.virtual_start) + self._entries[state.id].cost
        account.finish_tag = max(account.finish_tag, account.served_tag)
        if state.virtual_start > self._virtual_time:
            self._virtual_time = state.virtual_start
            self._prune()

    def on_finish(self, state: RequestState) -> None:
        """It is over."""
        entry = self._entries.pop(state.id)
        name = state.request.fairness_key
        account = self._flows[name]
        account.num_live -= 1
        if state.scheduled_s is not None:
            account.served_tag += len(state.tokens) - state.num_cached - entry.cost
        self._stale_flows.add(name)
        self._prune()

    def update_tags(self, waiting: Collection[RequestState]) -> bool:
        """Called with each plan. Returns whether turns have changed: of some that wait, which are in `waiting` by rank."""
        self._steps_since_update += 1
        if self._steps_since_update * MAX_TAG_UPDATES < len(waiting) or not self._stale_flows or len(self._flows) < 2:
            return False
        self._steps_since_update = 0
        for name in self._stale_flows & self._flows.keys():
            self._flows[name].finish_tag = self._flows[name].served_tag
        for state in waiting:
            name = state.request.fairness_key
            if name in self._stale_flows and state.scheduled_s is None:
                entry, account = self._entries[state.id], self._flows[name]
                state.virtual_start = max(entry.virtual_arrival, account.finish_tag)
                account.finish_tag = state.virtual_start + entry.cost
        self._stale_flows.clear()
        return True

    def _prune(self) -> None:
        """Whoever has nothing here and owes nothing begins anew when it comes again."""
        if not self._entries:
            self._flows.clear()
            self._stale_flows.clear()
            self._virtual_time = 0
        elif len(self._flows) > 1:
            self._flows = {name: one for name, one in self._flows.items() if one.num_live or one.served_tag > self._virtual_time}


def _estimate_cost(state: RequestState) -> int:
    return len(state.tokens) + min(state.max_len - len(state.tokens), DEFAULT_OUTPUT_TOKENS)
