"""All drafters of an engine behind one door: whom to ask, how much, and what if one fails."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from foreword.core.draft import Draft
from foreword.core.request import RequestState
from foreword.drafting.base import Ask, Drafter
from foreword.drafting.policy import LengthPolicy

__all__ = ["Drafting"]

Result = TypeVar("Result")

logger = logging.getLogger(__name__)


class Drafting:
    """Asks the drafters in order; the first that has a guess for a request drafts for it.

    errors  exceptions caught, by drafter
    """

    def __init__(self, drafters: Sequence[Drafter], vocab_size: int, policy: LengthPolicy) -> None:
        self.drafters = tuple(drafters)
        self.vocab_size = vocab_size
        self.policy = policy
        self.errors: Counter[str] = Counter()

    def start(self, state: RequestState) -> None:
        for drafter in self._of(state):
            self._guarded(drafter, lambda d=drafter: d.start(state))  # type: ignore[misc]

    def finish(self, state: RequestState) -> None:
        for drafter in self._of(state):
            self._guarded(drafter, lambda d=drafter: d.finish(state.id))  # type: ignore[misc]

    def propose(self, asks: Sequence[Ask | None]) -> tuple[Draft | None, ...]:
        """A draft, or None, for each ask; None in, None out."""
        drafts: list[Draft | None] = [None] * len(asks)
        open_asks = self._sized(asks)
        for drafter in self.drafters:
            mine = {i: ask for i, ask in open_asks.items() if drafter in self._of(ask.state)}
            if not mine:
                continue
            answers = self._guarded(drafter, lambda d=drafter, m=mine: d.propose(list(m.values())))  # type: ignore[misc]
            for (index, ask), draft in zip(mine.items(), answers or (), strict=False):
                drafts[index] = self._legal(ask, draft)
                if drafts[index] is not None:
                    del open_asks[index]
        return tuple(drafts)

    def _sized(self, asks: Sequence[Ask | None]) -> dict[int, Ask]:
        """The asks that may draft at all, by index, each with the longest draft of use."""
        sized: dict[int, Ask] = {}
        for index, ask in enumerate(asks):
            if ask is not None and self._of(ask.state):
                room = ask.state.limit - ask.length - 1
                length = min(self.policy.length(ask.state), room)
                if length > 0:
                    sized[index] = Ask(ask.state, ask.run, length)
        return sized

    def _of(self, state: RequestState) -> tuple[Drafter, ...]:
        """The drafters that the request lets guess for it."""
        method = state.params.speculation.method
        if method == "auto":
            return self.drafters
        return tuple(drafter for drafter in self.drafters if drafter.name == method)

    def _legal(self, ask: Ask, draft: Draft | None) -> Draft | None:
        """The draft up to its first id that is not in the vocabulary, and not longer than asked for."""
        if draft is None:
            return None
        legal = 0
        for token_id in draft.token_ids[: ask.max_tokens]:
            if not 0 <= token_id < self.vocab_size:
                break
            legal += 1
        return replace(draft, token_ids=draft.token_ids[:legal]) if legal else None

    def _guarded(self, drafter: Drafter, call: Callable[[], Result]) -> Result | None:
        try:
            return call()
        except Exception:
            self.errors[drafter.name] += 1
            logger.exception("drafter %s failed; its drafts of this step are dropped", drafter.name)
            return None
