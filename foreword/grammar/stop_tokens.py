"""Where an answer may end: the ids that say so, in masks and in drafts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from foreword.grammar.vocab import GrammarVocab

__all__ = ["StopTokens"]


class StopTokens:
    """The ids that end one request's answer. llguidance knows those of the vocabulary only.

    ids  in the request's own order
    """

    __slots__ = ("_end_id", "_extra_ids", "_foreign_eos_ids", "ids")

    def __init__(self, vocab: GrammarVocab, ids: Iterable[int]) -> None:
        self.ids = tuple(dict.fromkeys(i for i in ids if i < vocab.vocab_size))
        self._end_id = vocab.end_id
        self._extra_ids = tuple(i for i in self.ids if i not in vocab.eos_ids)
        self._foreign_eos_ids = tuple(i for i in vocab.eos_ids if i not in self.ids)

    def split_at_stop(self, token_ids: Sequence[int]) -> tuple[tuple[int, ...], bool]:
        """The tokens before the first that ends the answer, and whether there is one."""
        for index, token_id in enumerate(token_ids):
            if token_id in self.ids:
                return tuple(token_ids[:index]), True
        return tuple(token_ids), False

    def strip_foreign_eos(self, token_ids: Sequence[int]) -> list[int]:
        """The tokens before the first that ends answers, only not this one: it spells nothing."""
        return next(
            (
                list(token_ids[:i])
                for i, token_id in enumerate(token_ids)
                if token_id in self._foreign_eos_ids
            ),
            list(token_ids),
        )

    def apply_to_masks(self, masks: Tensor) -> None:
        """Make the request's own ids legal exactly where the answer may end; masks int32 [rows, W]."""
        if not self._extra_ids and not self._foreign_eos_ids:
            return
        word, bit = _word_and_bit(self._end_id)
        may_end = (masks[:, word] & bit) != 0
        for token_id in (*self._foreign_eos_ids, *self._extra_ids):
            word, bit = _word_and_bit(token_id)
            masks[:, word] &= ~bit
            if token_id in self._extra_ids:
                masks[:, word] |= may_end * bit


def _word_and_bit(token_id: int) -> tuple[int, int]:
    """The word of an id, and its bit as int32 has it."""
    bit = 1 << token_id % 32
    return token_id // 32, bit - (1 << 32) if bit >> 31 else bit
