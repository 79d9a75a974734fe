"""What a grammar forces: guesses that need no guessing."""

from __future__ import annotations

from collections.abc import Container, Sequence

from foreword.core.outputs import GRAMMAR, Draft
from foreword.core.request import RequestState
from foreword.speculation.base import DraftRequest

__all__ = ["GrammarDrafter"]


class GrammarDrafter:
    """Offers the text that must follow. The model still chooses how to cut it into tokens, so that a draft may be wrong.

    Keeps no state: the grammar belongs to the request.
    """

    name = GRAMMAR

    def start(self, state: RequestState) -> None: ...

    def finish(self, request_id: str, output: Sequence[int] = ()) -> None: ...

    def check(self, live: Container[str]) -> None: ...

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        return [self._propose(ask) for ask in requests]

    def _propose(self, request: DraftRequest) -> Draft | None:
        grammar = request.state.grammar
        forced = () if grammar is None else grammar.forced(request.max_tokens)
        return Draft(forced, self.name) if forced else None
