"""Where an answer may end: the ids that say so, in masks and in drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from foreword.grammar.tokens import Tokens

__all__ = ["Ends"]


class Ends:
    """The ids that end one request's answer. llguidance knows those of the vocabulary only.

    ids  in the request's own order
    """

    __slots__ = ("_added", "_end_id", "_removed", "ids")

    def __init__(self, tokens: Tokens, ids: Iterable[int]) -> None:
        self.ids = tuple(dict.fromkeys(i for i in ids if i < tokens.vocab_size))
        self._end_id = tokens.end_id
        self._added = tuple(i for i in self.ids if i not in tokens.eos_ids)
        self._removed = tuple(i for i in tokens.eos_ids if i not in self.ids)

    def split(self, token_ids: Sequence[int]) -> tuple[tuple[int, ...], bool]:
        """The tokens before the first that ends the answer, and whether there is one."""
        for index, token_id in enumerate(token_ids):
            if token_id in self.ids:
                return tuple(token_ids[:index]), True
        return tuple(token_ids), False

    def known(self, text: Sequence[int]) -> list[int]:
        """The tokens before the first that ends answers, only not this one: it spells nothing."""
        return next((list(text[:i]) for i, token_id in enumerate(text) if token_id in self._removed), list(text))

    def mark(self, masks: Tensor) -> None:
        """Make the request's own ids legal exactly where the answer may end; masks int32 [rows, W]."""
        if not self._added and not self._removed:
            return
        word, bit = _place(self._end_id)
        may_end = (masks[:, word] & bit) != 0
        for token_id in (*self._removed, *self._added):
            word, bit = _place(token_id)
            masks[:, word] &= ~bit
            if token_id in self._added:
                masks[:, word] |= may_end * bit


def _place(token_id: int) -> tuple[int, int]:
    """The word of an id, and its bit as int32 has it."""
    bit = 1 << token_id % 32
    return token_id // 32, bit - (1 << 32) if bit >> 31 else bit
