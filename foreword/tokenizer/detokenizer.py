"""Streaming detokenization: token ids to whole characters, and the search for stop strings in them."""

from __future__ import annotations

import codecs
from collections.abc import Collection
from functools import lru_cache

from foreword.tokenizer.tokenizer import Tokenizer

MAX_COMPILED = 8  # sets of stop strings whose borders are kept: the choices of a request are made in a row


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


class StopStrings:
    """Finds stop strings in a stream and holds back only a possible beginning of one.

    The stop string that ends first wins; of several that end at the same character, the longest. Each
    character costs amortized constant time (Knuth, Morris and Pratt).
    """

    __slots__ = ("_ahead", "_held", "_include", "_num_searched", "_patterns", "_peeked")

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        """include: the stop string stays in the text, so nothing is held back."""
        self._patterns = [_Pattern(*pattern) for pattern in _compile(stops)]
        self._ahead = [_Pattern(*pattern) for pattern in _compile(stops)]  # behind what is peeked
        self._peeked: list[str] = []
        self._num_searched = 0  # characters of it
        self._include = include
        self._held = ""

    def feed(self, text: str, search: bool = True) -> tuple[str, str | None]:
        """(released text, stop string found or None); feed nothing after a stop string.

        search  False: ignore stop strings that end within `text`
        """
        if not self._patterns:
            return text, None
        num_searched = len(self._held) + self._num_searched
        self.drop_peeked()
        known = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            complete = [pattern.text for pattern in self._patterns if pattern.advance(char)]
            if complete and search and end > num_searched:
                self._held = ""
                return known[: end if self._include else end - len(complete[0])], complete[0]
        held = 0 if self._include else max(pattern.matched for pattern in self._patterns)
        self._held = known[len(known) - held :]
        return known[: len(known) - held], None

    def peek(self, text: str, search: bool = True) -> str:
        """Search text that is fed later or dropped.

        Returns all of it, which must be fed now, if a stop string ends in it. Text that is fed later begins
        with all that was peeked, unless `drop_peeked` comes before.
        """
        if not self._patterns:
            return ""
        if not self._peeked:
            for ahead, pattern in zip(self._ahead, self._patterns, strict=True):
                ahead.matched = pattern.matched
        complete = [char for char in text for pattern in self._ahead if pattern.advance(char)]
        self._peeked.append(text)
        if complete and search:
            return "".join(self._peeked)
        self._num_searched += len(text)
        return ""

    def drop_peeked(self) -> None:
        self._peeked.clear()
        self._num_searched = 0

    def flush(self) -> str:
        """The held-back text, at the end of a stream; the next text begins another one."""
        self.drop_peeked()
        held, self._held = self._held, ""
        for pattern in self._patterns:
            pattern.matched = 0
        return held


class _Pattern:
    """A stop string; `matched`: length of its prefix that the stream ends with."""

    __slots__ = ("_borders", "matched", "text")

    def __init__(self, text: str, borders: list[int]) -> None:
        self.text = text
        self.matched = 0
        self._borders = borders

    def advance(self, char: str) -> bool:
        """Take one character; True if the stop string is complete. It may overlap with itself."""
        while self.matched and self.text[self.matched] != char:
            self.matched = self._borders[self.matched]
        self.matched += self.text[self.matched] == char
        if self.matched < len(self.text):
            return False
        self.matched = self._borders[self.matched]
        return True


@lru_cache(MAX_COMPILED)
def _compile(stops: tuple[str, ...]) -> list[tuple[str, list[int]]]:
    """The stop strings, longest first, each with its borders, which all choices and prompts share."""
    return [(stop, _borders(stop)) for stop in sorted(set(stops), key=len, reverse=True)]


def _borders(text: str) -> list[int]:
    """borders[k]: length of the longest proper prefix of text[:k] that is also its suffix."""
    borders = [0, 0]
    for char in text[1:]:
        length = borders[-1]
        while length and text[length] != char:
            length = borders[length]
        borders.append(length + (text[length] == char))
    return borders
