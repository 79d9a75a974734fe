"""Text that arrives in pieces, read by generators that wait where it ends: markers, names, calls."""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from foreword.chat_formats.tools import Tool, ToolUse

MAX_HEADER_CHARS: Final = 128  # longer texts are no names, keys or headers
MAX_SPACE_CHARS: Final = 256  # whitespace between a spelled closer and the text that confirms it
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


class StreamReader:
    """Input that is read once, from front to end. A marker token in it is one lone surrogate.

    The methods leave the position behind what they have read; `wait` drops it.
    """

    def __init__(self) -> None:
        self.buffer = ""  # input that is not dropped yet
        self.position = 0  # end of the text that is read
        self._raw: list[str] | None = None  # text of a call that is not certain yet: before the mark,
        self._mark = 0  # and from this position in the buffer on
        self._ended = False
        self.is_in_call = False  # it has started and not ended

    def wait(self) -> Wait:
        """Wait for more input, and drop what is read. False at the end of the answer."""
        if self._ended:
            return False
        if self._raw is not None:
            self._raw.append(self.buffer[self._mark : self.position])
            self._mark = 0
        self.buffer = self.buffer[self.position :]
        self.position = 0
        size = len(self.buffer)
        yield
        return len(self.buffer) > size

    def peek(self) -> Generator[None, None, str]:
        """The next character, "" at the end."""
        while self.position == len(self.buffer):
            if not (yield from self.wait()):
                return ""
        return self.buffer[self.position]

    def skip_space(self) -> Generator[None, None, str]:
        """Skip whitespace. Returns the next character, "" at the end."""
        while True:
            self.position = SPACES.match(self.buffer, self.position).end()  # type: ignore[union-attr]
            if self.position < len(self.buffer):
                return self.buffer[self.position]
            if not (yield from self.wait()):
                return ""

    def at(self, text: str) -> Wait:
        """Whether this text is next; it is not read."""
        while not self.buffer.startswith(text, self.position):
            size = len(self.buffer) - self.position
            if size >= len(text) or not text.startswith(self.buffer[self.position :]):
                return False
            if not (yield from self.wait()):
                return False
        return True

    def read_text(self, text: str) -> Wait:
        """Read this text, after whitespace, if it is next."""
        if not (yield from self.skip_space()) or not (yield from self.at(text.strip(WHITESPACE))):
            return False
        self.position += len(text.strip(WHITESPACE))
        return True

    def read_run(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Read all characters of a class."""
        pieces = []
        while True:
            end = pattern.match(self.buffer, self.position).end()  # type: ignore[union-attr]
            pieces.append(self.buffer[self.position : end])
            self.position = end
            if end < len(self.buffer) or not (yield from self.wait()):
                return "".join(pieces)

    def peek_word(self) -> Generator[None, None, str]:
        """The characters of a name that are next, after whitespace; they are not read."""
        yield from self.skip_space()
        while True:
            end = NAME.match(self.buffer, self.position).end()  # type: ignore[union-attr]
            word = self.buffer[self.position : end]
            if end < len(self.buffer) or len(word) > 2 * MAX_HEADER_CHARS or not (yield from self.wait()):
                return word

    def read_header(self, text: str) -> Generator[None, None, str | None]:
        """Read a short text up to this one. None if there is none."""
        while (start := self.buffer.find(text, self.position)) < 0:
            if len(self.buffer) - self.position > MAX_HEADER_CHARS or not (yield from self.wait()):
                return None
        if start - self.position > MAX_HEADER_CHARS:
            return None
        header = self.buffer[self.position : start]
        self.position = start
        return header

    def pass_until(self, stops: Stops, emit: Callable[[str], None]) -> Generator[None, None, str | None]:
        """Pass text on up to the next stop, which is not read. Returns it, None at the end of the answer."""
        while True:
            buffer, position = self.buffer, self.position
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
                self.position = end
            if stop is not None and is_whole:
                return stop[0]
            if not (yield from self.wait()) and self.position == len(self.buffer):
                return None

    def is_followed(self, num_chars: int, texts: tuple[str, ...]) -> Wait:
        """Whether one of some texts, a marker token or the end follows these characters and whitespace.

        Nothing is read.
        """
        while True:
            begin = self.position + num_chars
            end = SPACES.match(self.buffer, begin).end()  # type: ignore[union-attr]
            if end - begin > MAX_SPACE_CHARS:
                return True
            if end < len(self.buffer):
                if MARKER.match(self.buffer, end) or self.buffer.startswith(texts, end):
                    return True
                rest = self.buffer[end : end + MAX_HEADER_CHARS]
                if not any(text.startswith(rest) for text in texts):
                    return False
            is_at_end = end == len(self.buffer)
            if not (yield from self.wait()):
                return is_at_end


class CallReader(StreamReader, abc.ABC):
    """Reads calls, and passes their arguments on as JSON while they come."""

    def __init__(self, use: ToolUse, spell: Callable[[str], str], closers: Collection[str]) -> None:
        """
        spell    spells the marker tokens of a text out
        closers  texts that end calls
        """
        super().__init__()
        self.num_parse_errors = 0  # what began like a call and was none, or ended before its arguments did
        self.tools = {tool.name: tool for tool in use.callable_tools}
        self.names = sorted(self.tools, key=len, reverse=True)
        self.spell = spell
        self.closers = closers
        self.tool: Tool | None = None  # tool of the call that is read
        self.call_id: str | None = None  # id that the model wrote
        self.is_whole_answer = False  # no marker tells the call from other JSON

    @abc.abstractmethod
    def start_call(self) -> None:
        """The call of `tool` is certain."""

    @abc.abstractmethod
    def emit(self, text: str) -> None:
        """Pass more of the call's arguments on."""

    @abc.abstractmethod
    def end_call(self) -> None:
        """The call is complete."""
