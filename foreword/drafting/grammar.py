"""What a grammar forces: guesses that need no guessing."""

from __future__ import annotations

from collections.abc import Container, Sequence

from foreword.core.draft import Draft
from foreword.core.events import FORCED
from foreword.core.request import RequestState
from foreword.drafting.base import Ask

__all__ = ["GrammarDrafter"]


class GrammarDrafter:
    """Offers the text that must follow. The model still chooses how to cut it into tokens, so that a draft may be wrong.

    Keeps no state: the grammar belongs to the request.
    """

    name = FORCED

    def start(self, state: RequestState) -> None: ...

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None: ...

    def check(self, live: Container[str]) -> None: ...

    def propose(self, asks: Sequence[Ask]) -> list[Draft | None]:
        return [self._forced(ask) for ask in asks]

    def _forced(self, ask: Ask) -> Draft | None:
        grammar = ask.state.grammar
        forced = () if grammar is None else grammar.forced(ask.max_tokens)
        return Draft(forced, self.name) if forced else None
