"""Token ids to text as they come, whole characters only."""

from __future__ import annotations

import codecs

from foreword.tokenizer.tokenizer import Tokenizer

__all__ = ["Detokenizer"]


class Detokenizer:
    """The text of a growing answer.

    The pieces of `feed` and the end of `flush` concatenate to `tokenizer.decode` of all ids. A character
    whose bytes are spread over several tokens comes with the last of them; each byte is decoded once.

    at_start  the ids begin a text, so that a tokenizer's leading space is dropped, as `decode` does;
              an answer continues its prompt and keeps it
    """

    __slots__ = ("_decoder", "_skip_special", "_strip", "_tokenizer")

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, at_start: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._strip = at_start and tokenizer.strips_leading_space
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_id: int) -> str:
        """The characters that this token completes."""
        if self._skip_special and self._tokenizer.is_special(token_id):
            return ""
        raw = self._tokenizer.token_bytes(token_id)
        if self._strip and raw:
            raw = raw.removeprefix(b" ")
            self._strip = False
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """What an unfinished character at the end becomes: U+FFFD, or nothing."""
        return self._decoder.decode(b"", final=True)
