"""How many tokens to draft for a request. The adaptive controller will take this place."""

from __future__ import annotations

from typing import Protocol

from foreword.core.request import RequestState

__all__ = ["FixedLength", "LengthPolicy"]


class LengthPolicy(Protocol):
    """Chooses the longest useful draft of each request at each step."""

    def length(self, state: RequestState) -> int:
        """Drafted tokens at most, 0 for none."""


class FixedLength:
    """The server's bound, lowered by the request's own."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def length(self, state: RequestState) -> int:
        own = state.params.speculation.max_tokens
        return self.max_tokens if own is None else min(self.max_tokens, own)
