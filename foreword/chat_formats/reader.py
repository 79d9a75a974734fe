"""Text that arrives in pieces, read by generators that wait where it ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

MAX_HEADER_CHARS: Final = 128  # of names, keys and headers; longer ones are none
MAX_SPACE_CHARS: Final = 256  # between a spelled closer and the text that confirms it
WHITESPACE: Final = " \t\r\n"
MARKER: Final = re.compile("[\ud800-\udfff]")
SPACES: Final = re.compile(r"[ \t\r\n]*+")
NAME: Final = re.compile(r"[\w.:/-]*+", re.ASCII)

Wait = Generator[None, None, bool]  # a step of the parser; whether it found what it looked for


@dataclass(frozen=True, slots=True)
class Stops:
    """Texts to look for: `find` matches one of them, `start` an incomplete one at the end of a text."""

    find: re.Pattern[str]
    start: re.Pattern[str]
    max_chars: int

    @classmethod
    def of(cls, texts: Iterable[str], any_marker: bool = True) -> Stops:
        texts = sorted({text for text in texts if text}, key=len, reverse=True)
        alternatives = [re.escape(text) for text in texts] + (["[\ud800-\udfff]"] if any_marker else [])
        starts: dict[str, Any] = {}
        for text in texts:
            node = starts
            for char in text[:-1]:
                node = node.setdefault(char, {})
        start = f"(?:{_trie_pattern(starts)})\\Z" if starts else "\\Z"
        return cls(re.compile("|".join(alternatives)), re.compile(start), max(map(len, texts), default=1))


def _trie_pattern(node: Mapping[str, Any]) -> str:
    """All non-empty paths from a node that end anywhere in the tree."""
    branches = (
        re.escape(char) + (f"(?:{_trie_pattern(child)})?" if child else "") for char, child in node.items()
    )
    return "|".join(branches)


@lru_cache(maxsize=64)
def stops_of(*texts: str, any_marker: bool = True) -> Stops:
    return Stops.of(texts, any_marker)


class Reader:
    """Input that is read once, from front to end. A marker token in it is one lone surrogate.

    The methods leave the position behind what they have read; `_wait` drops it.
    """

    def __init__(self) -> None:
        self._buffer = ""  # input that is not dropped yet
        self._position = 0  # in it: what is read
        self._raw: list[str] | None = None  # what is read of a call that is not certain yet: before _mark,
        self._mark = 0  # and from this position in the buffer on
        self._ended = False
        self._is_in_call = False  # it has started and not ended

    def _wait(self) -> Wait:
        """Wait for more input, and drop what is read. False at the end of the answer."""
        if self._ended:
            return False
        if self._raw is not None:
            self._raw.append(self._buffer[self._mark : self._position])
            self._mark = 0
        self._buffer = self._buffer[self._position :]
        self._position = 0
        size = len(self._buffer)
        yield
        return len(self._buffer) > size

    def _peek(self) -> Generator[None, None, str]:
        """The next character, "" at the end."""
        while self._position == len(self._buffer):
            if not (yield from self._wait()):
                return ""
        return self._buffer[self._position]

    def _skip_space(self) -> Generator[None, None, str]:
        """Skip whitespace. Returns the next character, "" at the end."""
        while True:
            self._position = SPACES.match(self._buffer, self._position).end()  # type: ignore[union-attr]
            if self._position < len(self._buffer):
                return self._buffer[self._position]
            if not (yield from self._wait()):
                return ""

    def _at(self, text: str) -> Wait:
        """Whether this text is next; it is not read."""
        while not self._buffer.startswith(text, self._position):
            size = len(self._buffer) - self._position
            if size >= len(text) or not text.startswith(self._buffer[self._position :]):
                return False
            if not (yield from self._wait()):
                return False
        return True

    def _read_text(self, text: str) -> Wait:
        """Read this text, after whitespace, if it is next."""
        if not (yield from self._skip_space()) or not (yield from self._at(text.strip(WHITESPACE))):
            return False
        self._position += len(text.strip(WHITESPACE))
        return True

    def _read_run(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Read all characters of a class."""
        pieces = []
        while True:
            end = pattern.match(self._buffer, self._position).end()  # type: ignore[union-attr]
            pieces.append(self._buffer[self._position : end])
            self._position = end
            if end < len(self._buffer) or not (yield from self._wait()):
                return "".join(pieces)

    def _peek_word(self) -> Generator[None, None, str]:
        """The characters of a name that are next, after whitespace; they are not read."""
        yield from self._skip_space()
        while True:
            end = NAME.match(self._buffer, self._position).end()  # type: ignore[union-attr]
            word = self._buffer[self._position : end]
            if end < len(self._buffer) or len(word) > 2 * MAX_HEADER_CHARS or not (yield from self._wait()):
                return word

    def _read_header(self, text: str) -> Generator[None, None, str | None]:
        """Read a short text up to this one. None if there is none."""
        while (start := self._buffer.find(text, self._position)) < 0:
            if len(self._buffer) - self._position > MAX_HEADER_CHARS or not (yield from self._wait()):
                return None
        if start - self._position > MAX_HEADER_CHARS:
            return None
        header = self._buffer[self._position : start]
        self._position = start
        return header

    def _pass_until(self, stops: Stops, emit: Callable[[str], None]) -> Generator[None, None, str | None]:
        """Pass text on up to the next stop, which is not read. Returns it, None at the end of the answer."""
        while True:
            buffer, position = self._buffer, self._position
            stop = stops.find.search(buffer, position)
            tail = None
            if not self._ended:
                tail = stops.start.search(buffer, max(position, len(buffer) - stops.max_chars + 1))
            end = len(buffer) if tail is None else tail.start()
            is_whole = stop is not None and (tail is None or stop.start() < end)
            if stop is not None and is_whole:
                end = stop.start()
            if end > position:
                emit(buffer[position:end])
                self._position = end
            if stop is not None and is_whole:
                return stop[0]
            if not (yield from self._wait()) and self._position == len(self._buffer):
                return None

    def _is_followed(self, num_chars: int, texts: tuple[str, ...]) -> Wait:
        """Whether one of some texts, a marker token or the end follows these characters and whitespace.

        Nothing is read.
        """
        while True:
            begin = self._position + num_chars
            end = SPACES.match(self._buffer, begin).end()  # type: ignore[union-attr]
            if end - begin > MAX_SPACE_CHARS:
                return True
            if end < len(self._buffer):
                if MARKER.match(self._buffer, end) or self._buffer.startswith(texts, end):
                    return True
                rest = self._buffer[end : end + MAX_HEADER_CHARS]
                if not any(text.startswith(rest) for text in texts):
                    return False
            is_at_end = end == len(self._buffer)
            if not (yield from self._wait()):
                return is_at_end
