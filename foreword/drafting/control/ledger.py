"""How far each request is ahead of plain decoding, so that nobody pays for drafts of others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from foreword.drafting.policy import Served

__all__ = ["Account", "Ledger"]

ALLOWANCE = 0.02  # of its time so far
ADVANCE = 0.03  # of its time, at most, is credited for what others will save it
FLOOR_TOKENS = 32
CREDIT = 2.0  # plain steps that a request may be behind whose own guesses are right every time: it will soon be ahead
PROMISE_RATE = 1 / 8
TYPICAL_RATE = 1 / 64
EXPIRED_RATE = 1 / 16


@dataclass(slots=True)
class Account:
    """One request, in model seconds.

    tokens   its answer is thought to have at least so many, for what it may fall behind at first
    lead     how far it is ahead of plain decoding
    plain    how long plain decoding would have taken so far
    context  tokens it last read
    promise  share of its next tokens that were guessed of late, verified or not
    advance  what it will gain when those who are ahead now leave early
    """

    tokens: int
    promise: float = 0.0
    lead: float = 0.0
    plain: float = 0.0
    context: int = 0
    advance: float = 0.0

    def slack(self, step: float) -> float:
        """How far it may still fall back, plain steps taking `step` each: 2 %, and what it can be expected to make up for."""
        time = max(self.plain, self.tokens * step)
        credit = CREDIT * self.promise * step * self.tokens / FLOOR_TOKENS
        return self.lead + ALLOWANCE * time + min(self.advance, ADVANCE * time) + credit


class Ledger:
    """Accounts of live requests, and of the *ghosts*: requests that ended early thanks to drafts.

    Plain decoding would still be serving a ghost, and its steps would cost more for it, until the lead it ended with
    is used up. Whoever arrives takes the place of a ghost: a client that waits for its answer sends its next request
    when the last one ends, so that plain decoding would never have both. What the ghosts of the future will save is
    credited in advance, as far as places were left empty of late.

    typical  promise of requests of late
    """

    def __init__(self) -> None:
        self.accounts: dict[str, Account] = {}
        self.ghosts: list[Account] = []
        self.typical = 0.5
        self._left_empty = 0.5

    @property
    def ghost_context(self) -> int:
        return sum(ghost.context for ghost in self.ghosts)

    def open(self, request_id: str, bound: int | None, drafting: bool = True) -> Account:
        """A request begins, whose answer has at most `bound` tokens; `drafting`: it may be drafted for."""
        if self.ghosts:
            self.ghosts.remove(max(self.ghosts, key=lambda ghost: ghost.lead))
            self._left_empty -= self._left_empty * EXPIRED_RATE
        tokens = FLOOR_TOKENS if bound is None else min(FLOOR_TOKENS, bound)
        account = Account(tokens, self.typical if drafting else 0.0)
        self.accounts[request_id] = account
        return account

    def close(self, request_id: str) -> None:
        """A request is over."""
        account = self.accounts.pop(request_id, None)
        if account is not None and account.lead > 0.0:
            self.ghosts.append(account)

    def note(self, account: Account, guessed: bool) -> None:
        """Whether a request's next token was guessed, the last time that it asked."""
        account.promise += (guessed - account.promise) * PROMISE_RATE
        self.typical += (guessed - self.typical) * TYPICAL_RATE

    def settle(self, served: Iterable[Served], plain: float, actual: float, saved: float = 0.0) -> None:
        """A step took `actual`; plain decoding would have taken `plain` for each token, or piece of a prompt, of each request.

        saved  share of a step that is saved where one request less is served
        """
        for one in served:
            account = self.accounts.get(one.state.id)
            if account is None:
                account = self.open(one.state.id, one.state.params.max_tokens, drafting=False)
            earned = one.emitted * plain if one.samples else plain
            account.plain += earned
            account.lead += earned - actual
            account.context = one.context
        self._advance(saved * self._left_empty)
        self.wait(actual)

    def _advance(self, share: float) -> None:
        """Who is ahead will be gone so much sooner, and the others' steps be shorter by `share` for as long."""
        ahead = sum(account.lead for account in self.accounts.values() if account.lead > 0.0)
        for account in self.accounts.values():
            account.advance = share * (ahead - max(account.lead, 0.0))

    def wait(self, seconds: float) -> None:
        """Time goes by; what happens in plain steps changes nobody's lead."""
        if self.ghosts:
            left = _later(self.ghosts, seconds)
            for _ in range(len(self.ghosts) - len(left)):
                self._left_empty += (1.0 - self._left_empty) * EXPIRED_RATE
            self.ghosts = left


def _later(ghosts: Iterable[Account], seconds: float) -> list[Account]:
    for ghost in ghosts:
        ghost.lead -= seconds
    return [ghost for ghost in ghosts if ghost.lead > 0.0]
