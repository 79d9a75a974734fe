"""A model's vocabulary for llguidance."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NoReturn, cast

from llguidance import LLTokenizer, TokenizerWrapper

from foreword.core.structured_output import Vocabulary

# Token sets that a mask often allows as a whole. llguidance's own are those of JSON strings; these add words
# and names.
SLICES: Final = (*LLTokenizer.general_slices(), "[a-zA-Z]+", "[a-zA-Z0-9]+")
# Pretokenization as in most BPE tokenizers: a space belongs to the word after it. A newline is a piece of its
# own or the end of the punctuation before it; in some tokenizers it is plain whitespace.
WORD_PATTERN: Final = rb" ?[A-Za-z\x80-\xff]+| ?[0-9]+| ?[^\sA-Za-z0-9\x80-\xff]+"
PRETOKENIZE_SEPARATE_NEWLINES: Final = re.compile(WORD_PATTERN + rb"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s")
PRETOKENIZE_MERGED_NEWLINES: Final = re.compile(WORD_PATTERN + rb"|\s+(?!\S)|\s")


class _TokenBytes:
    """The tokenizer interface of LLTokenizer: the bytes of each token, no tokenization."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], special_ids: Sequence[int], eos_id: int | None) -> None:
        self.tokens = tokens
        self.special_token_ids = special_ids
        self.eos_token_id = eos_id

    def __call__(self, text: object) -> NoReturn:
        raise AssertionError("the option no_forcing excludes tokenization")


class GrammarVocab:
    """A vocabulary padded or cut to the size of the model's logits, with a trie for masks."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int) -> None:
        tokens = list(vocabulary.tokens[:vocab_size])
        tokens += [b""] * (vocab_size - len(tokens))
        self.vocab_size = vocab_size
        self.eos_ids = tuple(i for i in vocabulary.eos_ids if i < vocab_size)
        # EOS ids have no bytes: their spelling inside a text consists of other tokens.
        special = sorted({i for i in (*vocabulary.special_ids, *self.eos_ids) if i < vocab_size})
        self.spelled = tuple(tokens)
        self.marker_ids = tuple(i for i in vocabulary.marker_ids if i < vocab_size)
        self._special_ids = {False: tuple(special), True: tuple(sorted({*special, *self.marker_ids}))}
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}  # special ids -> tokenizer
        self._lock = threading.Lock()
        # llguidance's end of sequence. Its bit in a mask: the output may end.
        self.end_id = self.eos_ids[0] if self.eos_ids else vocab_size
        for token_id in special:
            tokens[token_id] = b""
        self.token_bytes = tuple(tokens)  # empty for special tokens
        self._ids = {token: i for i, token in reversed(list(enumerate(tokens))) if token}
        self._pretokenize_pattern = (
            PRETOKENIZE_MERGED_NEWLINES if b"\n " in self._ids else PRETOKENIZE_SEPARATE_NEWLINES
        )

    def tokenizer(self, for_tools: bool) -> LLTokenizer:
        """The tokens of a grammar; in those of tools, markers are special. The first call builds a trie."""
        special_ids = self._special_ids[for_tools]
        with self._lock:
            if special_ids not in self._tokenizers:
                self._tokenizers[special_ids] = self._make_tokenizer(special_ids)
            return self._tokenizers[special_ids]

    def _make_tokenizer(self, special_ids: Sequence[int]) -> LLTokenizer:
        token_bytes = _TokenBytes(self.spelled, special_ids, self.eos_ids[0] if self.eos_ids else None)
        ll_tokenizer = LLTokenizer(
            cast(TokenizerWrapper, token_bytes),
            eos_token=list(self.eos_ids) or None,
            slices=list(SLICES),
        )
        assert ll_tokenizer.eos_token == self.end_id, "masks have another bit for the end"
        return ll_tokenizer

    @property
    def num_mask_words(self) -> int:
        """Length W of a mask in int32 words."""
        return (max(self.vocab_size, self.end_id + 1) + 31) // 32

    def id_of(self, text: bytes) -> int | None:
        """The token with exactly these bytes."""
        return self._ids.get(text)

    def tokenize(self, text: bytes, max_tokens: int) -> tuple[int, ...]:
        """Tokens of the start of `text`, most likely those of the model's tokenizer.

        Most vocabularies list tokens in the order of their merges, so the lowest id is the first merge.
        """
        ids: list[int] = []
        for piece in self._pretokenize_pattern.findall(text):
            for part in self._bpe_merge(piece):
                if part not in self._ids or len(ids) == max_tokens:
                    return tuple(ids)
                ids.append(self._ids[part])
        return tuple(ids)

    def _bpe_merge(self, piece: bytes) -> list[bytes]:
        """Byte-pair encoding: joins the adjacent pair with the lowest id, until none is a token."""
        parts = [piece[index : index + 1] for index in range(len(piece))]
        while True:
            pairs = [
                (self._ids.get(left + right), index) for index, (left, right) in enumerate(pairwise(parts))
            ]
            best = min(((token_id, index) for token_id, index in pairs if token_id is not None), default=None)
            if best is None:
                return parts
            parts[best[1] : best[1] + 2] = [parts[best[1]] + parts[best[1] + 1]]
