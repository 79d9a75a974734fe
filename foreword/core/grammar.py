"""What the engine sees of the grammar of one request. Implemented in foreword/grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # whoever only submits requests needs no torch
    from torch import Tensor

__all__ = ["RequestGrammar"]


class RequestGrammar(Protocol):
    """The constraint on one request's output, at the end of its committed output.

    It never raises because of its grammar: where the automaton gives up (a limit on its size is reached), `error` says why,
    and from then on everything is masked.
    """

    error: str | None

    def accept(self, token_ids: Sequence[int]) -> None:
        """Output tokens were committed. Tokens behind the end of the answer are none of its business."""

    def num_legal(self, draft: Sequence[int]) -> int:
        """How many tokens of a draft may follow the output: 0..len(draft). Ending tokens count where the answer may end."""

    def forced(self, max_tokens: int) -> tuple[int, ...]:
        """Tokens that must follow, most likely in this spelling, and the id that ends the answer where only that is left."""

    def mask(self, draft: tuple[int, ...]) -> Tensor | None:
        """The ids that may follow output and draft: int32 [ceil(V / 32)], bit i % 32 of word i // 32 for id i.

        None: nothing is constrained there (the model still reasons, or the answer is over). `draft` is legal.
        """

    def reset(self) -> None:
        """Begin again from the committed output: a step was interrupted, and nobody knows where."""

    def must_end(self, draft: tuple[int, ...]) -> bool:
        """Nothing but the end of the answer may follow output and draft."""
