"""The tokens of a model as llguidance wants them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, cast

from llguidance import LLTokenizer, TokenizerWrapper

from foreword.core.vocabulary import Vocabulary

__all__ = ["Tokens"]


class _Spelled:
    """What LLTokenizer asks of a tokenizer: the bytes of each token. Text is never cut into tokens here."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_id: int | None) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_id

    def __call__(self, text: object) -> NoReturn:
        raise AssertionError("no grammar forces tokens")


class Tokens:
    """A vocabulary prepared for masks, padded or cut to the model's own size.

    llg          llguidance's form of it: a trie over all tokens
    end_id       stands for all ids that end an answer: its bit in a mask says that the answer may end
    eos_ids      ids whose bits llguidance sets where the answer may end
    vocab_size   of the model
    """

    __slots__ = ("_ids", "_longest", "end_id", "eos_ids", "llg", "vocab_size")

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, slices: Sequence[str] | None = None) -> None:
        tokens = list(vocabulary.tokens[:vocab_size])
        tokens += [b""] * (vocab_size - len(tokens))
        self.vocab_size = vocab_size
        self.eos_ids = tuple(i for i in vocabulary.eos_ids if i < vocab_size)
        # An id that ends the answer spells nothing: the same characters within a text are others.
        special = sorted({i for i in (*vocabulary.special_ids, *self.eos_ids) if i < vocab_size})
        spelled = _Spelled(tokens, special, self.eos_ids[0] if self.eos_ids else None)
        self.llg = LLTokenizer(
            cast(TokenizerWrapper, spelled), eos_token=list(self.eos_ids) or None, slices=None if slices is None else list(slices)
        )
        self.end_id = self.llg.eos_token  # one more than the vocabulary has, where no id ends an answer
        spells = set(special)
        self._ids = {token: i for i, token in reversed(list(enumerate(tokens))) if token and i not in spells}
        self._longest = max(map(len, self._ids), default=0)

    @property
    def num_words(self) -> int:
        """int32 words of one mask."""
        return (self.llg.vocab_size + 31) // 32

    def cut(self, text: bytes, max_tokens: int) -> tuple[int, ...]:
        """Tokens that spell the beginning of `text`, each the longest that fits."""
        ids: list[int] = []
        begin = 0
        while begin < len(text) and len(ids) < max_tokens:
            end = next((e for e in range(min(len(text), begin + self._longest), begin, -1) if text[begin:e] in self._ids), begin)
            if end == begin:
                break
            ids.append(self._ids[text[begin:end]])
            begin = end
        return tuple(ids)
