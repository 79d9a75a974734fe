"""The tokens of a model as llguidance wants them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NoReturn, cast

from llguidance import LLTokenizer, TokenizerWrapper

from foreword.core.structured import Vocabulary

__all__ = ["GrammarVocab"]

# Sets of tokens that are legal as a whole in many places, so that a mask need not look at each. llguidance's own are those of
# texts in JSON; words and names stand in formats and expressions as well.
SLICES: Final = (*LLTokenizer.general_slices(), "[a-zA-Z]+", "[a-zA-Z0-9]+")
# How tokenizers cut text before they merge: a space belongs to what follows it. A line end is a piece of its own, or the end
# of the signs before it, with some; with others it is whitespace like all.
WORD_PATTERN: Final = rb" ?[A-Za-z\x80-\xff]+| ?[0-9]+| ?[^\sA-Za-z0-9\x80-\xff]+"
PRETOKENIZE_SEPARATE_NEWLINES: Final = re.compile(WORD_PATTERN + rb"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s")
PRETOKENIZE_MERGED_NEWLINES: Final = re.compile(WORD_PATTERN + rb"|\s+(?!\S)|\s")


class _TokenBytes:
    """What LLTokenizer asks of a tokenizer: the bytes of each token. Text is never cut into tokens here."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_id: int | None) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_id

    def __call__(self, text: object) -> NoReturn:
        raise AssertionError("no grammar forces tokens")


class GrammarVocab:
    """A vocabulary prepared for masks, padded or cut to the model's own size.

    llg          llguidance's form of it: a trie over all tokens
    end_id       stands for all ids that end an answer: its bit in a mask says that the answer may end
    eos_ids      ids whose bits llguidance sets where the answer may end
    spelled      bytes of each id; empty for what is no text
    vocab_size   of the model
    """

    __slots__ = (
        "_ids",
        "_pretokenize_pattern",
        "end_id",
        "eos_ids",
        "ll_tokenizer",
        "token_bytes",
        "vocab_size",
    )

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, slices: Sequence[str] = SLICES) -> None:
        tokens = list(vocabulary.tokens[:vocab_size])
        tokens += [b""] * (vocab_size - len(tokens))
        self.vocab_size = vocab_size
        self.eos_ids = tuple(i for i in vocabulary.eos_ids if i < vocab_size)
        # An id that ends the answer spells nothing: the same characters within a text are others.
        special = sorted({i for i in (*vocabulary.special_ids, *self.eos_ids) if i < vocab_size})
        spelled = _TokenBytes(tokens, special, self.eos_ids[0] if self.eos_ids else None)
        self.ll_tokenizer = LLTokenizer(
            cast(TokenizerWrapper, spelled), eos_token=list(self.eos_ids) or None, slices=list(slices)
        )
        self.end_id = (
            self.ll_tokenizer.eos_token
        )  # one more than the vocabulary has, where no id ends an answer
        for token_id in special:
            tokens[token_id] = b""
        self.token_bytes = tuple(tokens)
        self._ids = {token: i for i, token in reversed(list(enumerate(tokens))) if token}
        self._pretokenize_pattern = (
            PRETOKENIZE_MERGED_NEWLINES if b"\n " in self._ids else PRETOKENIZE_SEPARATE_NEWLINES
        )

    @property
    def num_mask_words(self) -> int:
        """int32 words of one mask."""
        return (self.ll_tokenizer.vocab_size + 31) // 32

    def id_of(self, text: bytes) -> int | None:
        """The token that spells exactly this."""
        return self._ids.get(text)

    def tokenize(self, text: bytes, max_tokens: int) -> tuple[int, ...]:
        """Tokens that spell the beginning of `text`, most likely those that a tokenizer would take.

        Words, numbers and signs are cut apart first, as tokenizers do it, and merged as byte-pair encoding does it: nearly
        every vocabulary lists its tokens in the order of their merges.
        """
        ids: list[int] = []
        for piece in self._pretokenize_pattern.findall(text):
            for part in self._bpe_merge(piece):
                if part not in self._ids or len(ids) == max_tokens:
                    return tuple(ids)
                ids.append(self._ids[part])
        return tuple(ids)

    def _bpe_merge(self, piece: bytes) -> list[bytes]:
        """Bytes, of which again and again the two neighbours are joined that make the lowest id."""
        parts = [piece[index : index + 1] for index in range(len(piece))]
        while True:
            pairs = [
                (self._ids.get(left + right), index) for index, (left, right) in enumerate(pairwise(parts))
            ]
            best = min(((token_id, index) for token_id, index in pairs if token_id is not None), default=None)
            if best is None:
                return parts
            parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
