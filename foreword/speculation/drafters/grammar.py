"""Drafts from text that the request's grammar forces."""

from __future__ import annotations

from collections.abc import Sequence

from foreword.core.outputs import GRAMMAR, Draft
from foreword.core.request import RequestState
from foreword.speculation.engine_drafter import DraftRequest, EngineDrafter


class GrammarDrafter(EngineDrafter):
    """Proposes the forced text. Its tokenization is the model's choice, so a draft may be wrong.

    Stateless: the grammar belongs to the request.
    """

    name = GRAMMAR

    def start(self, state: RequestState) -> bool:
        return state.grammar is not None

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        drafts: list[Draft | None] = []
        for request in requests:
            grammar = request.state.grammar
            forced = () if grammar is None else grammar.forced(request.max_draft_tokens)
            drafts.append(Draft(forced, self.name) if forced else None)
        return drafts
