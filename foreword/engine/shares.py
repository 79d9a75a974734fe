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

__all__ = ["Shares"]

USUAL_ANSWER: Final = 256  # tokens that an answer is thought to have, if it may have so many
AT_ONCE: Final = 256  # turns that a plan may correct; of more, in so many plans as it takes


@dataclass(slots=True)
class _Entry:
    """A live request: the clock when it came, and its cost in tokens."""

    came: int
    cost: int


@dataclass(slots=True)
class _Account:
    """live: its requests. used: where what has started of them ends; end: the same of all of them."""

    live: int = 0
    used: int = 0
    end: int = 0


class Shares:
    """Gives each request its turn. Accounts that have neither requests nor debts are forgotten."""

    def __init__(self) -> None:
        self._now = 0
        self._plans = 0  # since turns were corrected
        self._wrong: set[str] = set()
        self._entries: dict[str, _Entry] = {}
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        """Accounts that are known."""
        return len(self._accounts)

    def add(self, state: RequestState) -> None:
        """A request waits."""
        account = self._accounts.setdefault(state.request.account, _Account())
        account.live += 1
        entry = self._entries[state.id] = _Entry(self._now, _estimate(state))
        state.turn = max(entry.came, account.end)
        account.end = state.turn + entry.cost

    def started(self, state: RequestState) -> None:
        """It runs for the first time."""
        account = self._accounts[state.request.account]
        account.used = max(account.used, state.turn) + self._entries[state.id].cost
        account.end = max(account.end, account.used)
        if state.turn > self._now:
            self._now = state.turn
            self._forget()

    def ended(self, state: RequestState) -> None:
        """It is over."""
        entry = self._entries.pop(state.id)
        name = state.request.account
        account = self._accounts[name]
        account.live -= 1
        if state.scheduled_s is not None:
            account.used += len(state.tokens) - state.num_cached - entry.cost
        self._wrong.add(name)
        self._forget()

    def correct(self, waiting: Collection[RequestState]) -> bool:
        """Called with each plan. Returns whether turns have changed: of some that wait, which are in `waiting` by rank."""
        self._plans += 1
        if self._plans * AT_ONCE < len(waiting) or not self._wrong or len(self._accounts) < 2:
            return False
        self._plans = 0
        for name in self._wrong & self._accounts.keys():
            self._accounts[name].end = self._accounts[name].used
        for state in waiting:
            name = state.request.account
            if name in self._wrong and state.scheduled_s is None:
                entry, account = self._entries[state.id], self._accounts[name]
                state.turn = max(entry.came, account.end)
                account.end = state.turn + entry.cost
        self._wrong.clear()
        return True

    def _forget(self) -> None:
        """Whoever has nothing here and owes nothing begins anew when it comes again."""
        if not self._entries:
            self._accounts.clear()
            self._wrong.clear()
            self._now = 0
        elif len(self._accounts) > 1:
            self._accounts = {name: one for name, one in self._accounts.items() if one.live or one.used > self._now}


def _estimate(state: RequestState) -> int:
    return len(state.tokens) + min(state.limit - len(state.tokens), USUAL_ANSWER)
