"""All drafters of an engine behind one door: whom to ask, how much, and what if one fails."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
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
        self._live: dict[str, tuple[Drafter, ...]] = {}

    def start(self, state: RequestState) -> None:
        """A request begins; a drafter that cannot start it is not asked about it again."""
        chosen = self._chosen(state)
        self._live[state.id] = tuple(
            drafter
            for drafter in chosen
            if self._guarded(drafter, lambda d=drafter: d.start(state) or True)  # type: ignore[misc]
        )

    def finish(self, request_id: str) -> None:
        """A request is over."""
        for drafter in self._live.pop(request_id, ()):
            self._guarded(drafter, lambda d=drafter: d.finish(request_id))  # type: ignore[misc]

    def propose(self, asks: Sequence[Ask | None]) -> tuple[Draft | None, ...]:
        """A draft, or None, for each ask; None in, None out."""
        drafts: list[Draft | None] = [None] * len(asks)
        open_asks = self._sized(asks)
        for drafter in self.drafters:
            mine = {i: ask for i, ask in open_asks.items() if drafter in self._live[ask.state.id]}
            if not mine:
                continue
            found = self._guarded(drafter, lambda d=drafter, m=mine: self._ask(d, list(m.values())))  # type: ignore[misc]
            for index, draft in zip(mine, found or (), strict=False):
                if draft is not None:
                    drafts[index] = draft
                    del open_asks[index]
        return tuple(drafts)

    def check(self) -> None:
        """Assert that drafters keep state of live requests alone."""
        for drafter in self.drafters:
            drafter.check(self._live)

    def _ask(self, drafter: Drafter, asks: list[Ask]) -> list[Draft | None]:
        """What one drafter says, up to the first id that cannot be right. Raises whatever is wrong with it."""
        drafts = drafter.propose(asks)
        return [_legal(ask, drafter, draft, self.vocab_size) for ask, draft in zip(asks, drafts, strict=True)]

    def _sized(self, asks: Sequence[Ask | None]) -> dict[int, Ask]:
        """The asks that may draft at all, by index, each with the longest draft of use."""
        sized: dict[int, Ask] = {}
        for index, ask in enumerate(asks):
            if ask is not None and self._live[ask.state.id]:
                room = ask.state.limit - ask.length - 1
                length = min(self.policy.length(ask.state), room)
                if length > 0:
                    sized[index] = Ask(ask.state, ask.run, length)
        return sized

    def _chosen(self, state: RequestState) -> tuple[Drafter, ...]:
        """The drafters that the request lets guess for it."""
        method = state.params.speculation.method
        if method == "auto":
            return self.drafters
        return tuple(drafter for drafter in self.drafters if drafter.name == method)

    def _guarded(self, drafter: Drafter, call: Callable[[], Result]) -> Result | None:
        try:
            return call()
        except Exception:
            self.errors[drafter.name] += 1
            logger.exception("drafter %s failed; its drafts of this step are dropped", drafter.name)
            return None


def _legal(ask: Ask, drafter: Drafter, draft: Draft | None, vocab_size: int) -> Draft | None:
    """The draft up to its first id that is not in the vocabulary, and not longer than asked for."""
    if draft is None:
        return None
    legal: list[int] = []
    for token_id in draft.token_ids[: ask.max_tokens]:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            break
        legal.append(token_id)
    return Draft(tuple(legal), drafter.name, draft.confidence) if legal else None
