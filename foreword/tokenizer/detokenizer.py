"""Streaming detokenization: token ids to whole characters."""

from __future__ import annotations

import codecs
from collections.abc import Collection

from foreword.tokenizer.tokenizer import Tokenizer


class Detokenizer:
    """Decodes a growing answer, each byte once.

    The results of `feed` and `flush` concatenate to `tokenizer.decode` of all ids. A character of several
    tokens comes with the last of them.
    """

    __slots__ = ("_decoder", "_kept_ids", "_skip_special", "_strip", "_tokenizer")

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special_tokens: bool = True,
        at_start: bool = False,
        kept_ids: Collection[int] = (),
    ) -> None:
        """at_start  drop the leading space of a text, as `decode` does; an answer continues its prompt
        kept_ids  special tokens that are not skipped: a parser reads them
        """
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._kept_ids = kept_ids
        self._strip = at_start and tokenizer.strips_leading_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """Characters that this token completes."""
        if self._skip_special and self._tokenizer.is_special(token_id) and token_id not in self._kept_ids:
            return ""
        raw = self._tokenizer.token_bytes(token_id)
        if self._strip and raw:
            raw = raw.removeprefix(b" ")
            self._strip = False
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """U+FFFD for an unfinished character at the end, or an empty text."""
        return self._decoder.decode(b"", final=True)
