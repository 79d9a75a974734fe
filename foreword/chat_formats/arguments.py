"""Readers of a call's name and arguments, in each of the forms that models write."""

from __future__ import annotations

import abc
import json
import re
from collections.abc import Callable, Collection, Generator
from typing import Final

from foreword.chat_formats.reader import MARKER, Reader, Wait, stops_of
from foreword.chat_formats.record import (
    BareArguments,
    CallId,
    JsonCall,
    Name,
    NameInId,
    PythonArguments,
    TaggedArguments,
)
from foreword.chat_formats.tools import Tool, ToolUse
from foreword.chat_formats.values import (
    ANY_TYPES,
    JSON_STRING,
    RawValue,
    Unescape,
    decode_python_escape,
    escape,
    scalar_to_json,
)

JSON_STRUCTURE: Final = re.compile('["{}\\[\\]\ud800-\udfff]')
JSON_SCALAR: Final = re.compile('[^\\s,:"{}\\[\\]\ud800-\udfff]*+')
BARE_SCALAR: Final = re.compile("[^,{}\\[\\]\ud800-\udfff]*+")
PYTHON_SCALAR: Final = re.compile("[^\\s,:=()\"'{}\\[\\]\ud800-\udfff]*+")
PYTHON_STRINGS: Final = {quote: re.compile(rf"[^{quote}\\]*+") for quote in "'\""}
PYTHON_ESCAPE: Final = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)?", re.DOTALL
)
MAX_ESCAPE_CHARS: Final = 10


class ArgumentReader(Reader, abc.ABC):
    """Reads one call, and passes its arguments on as JSON while they come."""

    def __init__(self, use: ToolUse, spell: Callable[[str], str], closers: Collection[str]) -> None:
        """
        spell    spells the marker tokens of a text out
        closers  texts that end calls
        """
        super().__init__()
        self.num_parse_errors = 0  # what began like a call and was none, or ended before its arguments did
        self._tools = {tool.name: tool for tool in use.callable_tools}
        self._names = sorted(self._tools, key=len, reverse=True)
        self._spell = spell
        self._closers = closers
        self._tool: Tool | None = None  # of the call that is read
        self._id: str | None = None  # as the model wrote it

    @abc.abstractmethod
    def _start_call(self) -> None:
        """The call of `_tool` is certain."""

    @abc.abstractmethod
    def _emit(self, text: str) -> None:
        """More of the call's arguments."""

    @abc.abstractmethod
    def _end_call(self) -> None:
        """The call is complete."""

    def _read_name(self, part: Name | CallId | NameInId) -> Generator[None, None, None]:
        word = yield from self._peek_word()
        match part:
            case CallId():
                self._id = word if re.fullmatch(part.pattern, word) else None
            case NameInId():
                body = word.removeprefix(part.begin)
                name, _, number = body.rpartition(part.separator)
                if name in self._tools and re.fullmatch(part.pattern, number):
                    self._tool, self._id = self._tools[name], word
                else:
                    self._tool = self._tools.get(body)
            case Name():
                if word not in self._tools:
                    word = next((name for name in self._names if word.startswith(name)), "")
                self._tool = self._tools.get(word)
        self._position += len(word)

    # JSON.

    def _pass_string(self, emit: Callable[[str], None]) -> Wait:
        """Pass on the rest of a JSON string without its closing quote. Markers inside are text."""
        while True:
            end = JSON_STRING.match(self._buffer, self._position).end()  # type: ignore[union-attr]
            if end > self._position:
                emit(self._spell(self._buffer[self._position : end]))
                self._position = end
            if self._buffer.startswith('"', end):
                self._position += 1
                return True
            if not (yield from self._wait()):
                return False

    def _read_string(self) -> Generator[None, None, str | None]:
        """Read the rest of a JSON string, decoded; None if it does not end."""
        pieces: list[str] = []
        if not (yield from self._pass_string(pieces.append)):
            return None
        unescape = Unescape()
        return unescape.feed("".join(pieces)) + unescape.flush()

    def _pass_json(self, emit: Callable[[str], None]) -> Wait:
        """Pass on a JSON object or array, as the model writes it. Whether it ends.

        A marker token ends it too; missing brackets are added then.
        """
        closers: list[str] = []
        start = self._position
        while True:
            structure = JSON_STRUCTURE.search(self._buffer, self._position)
            if structure is None:
                emit(self._buffer[start:])
                self._position = len(self._buffer)
                if not (yield from self._wait()):
                    return False
                start = self._position
                continue
            char = structure[0]
            self._position = structure.end()
            if char == '"':
                emit(self._buffer[start : self._position])
                if not (yield from self._pass_string(emit)):
                    return False
                start = self._position - 1
            elif char in "{[":
                closers.append("}" if char == "{" else "]")
            elif char in "}]":
                closers.pop()
                if not closers:
                    emit(self._buffer[start : self._position])
                    return True
            else:
                self._position -= 1
                emit(self._buffer[start : self._position] + "".join(reversed(closers)))
                self.num_parse_errors += 1
                return True

    def _skip_value(self) -> Wait:
        """Skip a JSON value."""
        char = yield from self._skip_space()
        if not char:
            return False
        if char in "{[":
            return (yield from self._pass_json(_ignore))
        if char == '"':
            self._position += 1
            return (yield from self._pass_string(_ignore))
        return bool((yield from self._read_run(JSON_SCALAR)))

    def _read_json_call(self, part: JsonCall, is_whole_answer: bool) -> Wait:
        """Read a call as a JSON object, with its keys in any order."""
        if not (yield from self._read_text("{")):
            return False
        held: list[str] | None = None  # arguments that came before the name
        has_arguments = is_started = False
        while char := (yield from self._skip_space()):
            if char == ",":
                self._position += 1
                continue
            if char != '"':
                break
            self._position += 1
            key = yield from self._read_string()
            if key is None or not (yield from self._read_text(":")):
                break
            char = yield from self._skip_space()
            if key == part.name_key and self._tool is None and char == '"':
                self._position += 1
                self._tool = self._tools.get((yield from self._read_string()) or "")
                if self._tool is None:
                    return False
                if held is not None:
                    self._start_call()
                    is_started = True
                    self._emit("".join(held))
                    self._end_call()
            elif key in (part.arguments_key, "arguments", "parameters") and not has_arguments:
                has_arguments = True
                if self._tool is None:
                    held = []
                    if not (yield from self._read_json_arguments(held.append)):
                        return False
                elif not (yield from self._read_json_arguments(self._emit, self._start_call)):
                    return self._raw is None
                else:
                    is_started = True
                    self._end_call()
            elif key == part.id_key and char == '"':
                self._position += 1
                call_id = yield from self._read_string()
                if call_id and not part.id_is_local:
                    self._id = call_id
            elif is_whole_answer and not is_started and key not in ("type", "id"):
                return False
            elif not (yield from self._skip_value()):
                break
        is_closed = char == "}"
        if is_closed:
            self._position += 1
        if not is_started:
            if not is_closed or self._tool is None or has_arguments or is_whole_answer:
                return False
            self._start_call()
            self._emit("{}")
            self._end_call()
        while (yield from self._peek()) == "}":  # one too many
            self._position += 1
        return True

    def _read_json_arguments(
        self, emit: Callable[[str], None], start: Callable[[], None] = lambda: None
    ) -> Wait:
        """Read arguments: an object, one as a JSON string, or null. False if they are none or do not end.

        start  called once they are known to be arguments
        """
        char = yield from self._peek()
        if char == "{":
            start()
            return (yield from self._pass_json(emit))
        if char == '"':
            self._position += 1
            while (char := (yield from self._peek())) == "\\":
                if not (yield from self._at("\\n")):
                    return False
                self._position += 2
            if char == "{":
                start()
                unescape = Unescape()
                return (yield from self._pass_string(lambda text: emit(unescape.feed(text))))
            if char == '"':
                self._position += 1
                start()
                emit("{}")
                return True
            return False
        if (yield from self._at("null")):
            self._position += 4
            start()
            emit("{}")
            return True
        return False

    # Arguments between tags.

    def _read_tagged(self, part: TaggedArguments, closer: str) -> Wait:
        """Read arguments up to the closer. False if they are none."""
        tool, num_arguments, is_started = self._tool, 0, False
        assert tool is not None
        while True:
            char = yield from self._skip_space()
            is_next = bool(char) and (yield from self._at(part.key_begin))
            is_closed = bool(char) and not is_next and (yield from self._at(closer))
            if not is_started:
                if not (is_next or is_closed):
                    return False
                self._start_call()
                self._emit("{")
                is_started = True
            if is_next:
                self._position += len(part.key_begin)
                key = yield from self._read_header(part.key_end)
                if key is None or MARKER.search(key):
                    self.num_parse_errors += 1
                    continue
                self._position += len(part.key_end)
                types = tool.argument_types(key)
                if part.types_in_tag:
                    header = yield from self._read_header(">")
                    self._position += header is not None
                    types = frozenset({"string"}) if 'string="true"' in (header or "") else types - {"string"}
                elif part.value_begin:
                    yield from self._read_text(part.value_begin)
                self._emit((", " if num_arguments else "") + _quoted(key) + ": ")
                num_arguments += 1
                if not (yield from self._read_value(part, closer, types or ANY_TYPES)):
                    return True
            elif is_closed or not char or MARKER.match(char):
                self._emit("}")
                self._end_call()
                return True
            else:  # no argument: skip it
                self.num_parse_errors += 1
                yield from self._pass_until(stops_of(part.key_begin, closer), _ignore)

    def _read_value(self, part: TaggedArguments, closer: str, types: frozenset[str]) -> Wait:
        """Read a value and its closing tag. False if the answer ends before.

        A tag that is spelled closes a value only where the arguments go on or end behind it.
        """
        value = RawValue(types, part.padding, self._emit)
        stops = stops_of(part.value_end, closer)
        while (stop := (yield from self._pass_until(stops, value.feed))) is not None:
            if stop == part.value_end:
                is_end = MARKER.match(stop) is not None or (
                    yield from self._is_followed(len(stop), (part.key_begin, closer))
                )
                num_read = len(stop)
            elif stop == closer and len(stop) > 1:
                is_end = yield from self._is_followed(len(stop), ())
                num_read = 0
            else:
                is_end = stop == closer or stop in self._closers
                num_read = 0
            if is_end:
                value.close()
                self._position += num_read
                return True
            self._position += len(stop)
            value.feed(self._spell(stop))
        return False

    # Keyword arguments of Python's and of a bare syntax.

    def _read_keywords(self, part: PythonArguments | BareArguments, closer: str) -> Wait:
        """Read arguments up to the closer, which is not read. False if they are none."""
        tool, num_arguments, is_started = self._tool, 0, False
        assert tool is not None
        quote = part.quote if isinstance(part, BareArguments) else ""
        keys = list((tool.parameters or {}).get("properties") or ())  # of arguments by position
        while True:
            char = yield from self._skip_space()
            is_closed = char == closer or (not char and is_started)
            if is_closed or (is_started and char and char != quote and MARKER.match(char)):
                if not is_started:
                    self._start_call()
                self._emit("}" if num_arguments else "{}")
                self._end_call()
                self.num_parse_errors += bool(char) and not is_closed
                return True
            if not char:
                return False
            if char == "," and is_started:
                self._position += 1
                continue
            key: str | None = None
            word = ""
            if quote and (char == '"' or (yield from self._at(quote))):
                pieces: list[str] = []
                if not (yield from self._convert_string(char, quote, pieces.append)):
                    return is_started
                word = Unescape().feed("".join(pieces[1:-1]))
            else:
                word = yield from self._read_run(PYTHON_SCALAR)
            char = yield from self._skip_space()
            if not char and not is_started:
                return False
            if word and char == (":" if quote else "="):
                self._position += 1
                key, word = word, ""
            elif not quote and num_arguments < len(keys) and (not word or char in ",)"):
                key = str(keys[num_arguments])
            elif is_started:
                self.num_parse_errors += 1
                self._position += not word
                continue
            else:
                return False
            if not is_started:
                self._start_call()
                is_started = True
            self._emit((", " if num_arguments else "{") + _quoted(key) + ": ")
            num_arguments += 1
            types = tool.argument_types(key)
            if word:
                self._emit(scalar_to_json(word, types))
            elif not (yield from self._convert(quote, types)):
                return True

    def _convert(self, quote: str, types: frozenset[str]) -> Wait:
        """Pass on a value as JSON. False if the answer ends before it does.

        quote  around strings of a bare syntax; "": Python's syntax
        """
        closers: list[str] = []
        is_first, is_value = True, False
        while char := (yield from self._skip_space()):
            is_key = bool(closers) and closers[-1] == "}" and not is_value
            if char in ")]}" or (char == "," and not closers):
                if not closers:  # there is no value
                    self._emit("null")
                    return True
                self._position += 1
                self._emit(("null" if is_value else "") + closers.pop())
            elif char != quote and MARKER.match(char):
                self.num_parse_errors += 1
                self._emit(("" if closers and not is_value else "null") + "".join(reversed(closers)))
                return True
            elif char in ",:=" or (is_key and char in "([{") or (quote and char == "'"):
                self._position += 1
                continue
            else:
                if closers and not is_first and not is_value:
                    self._emit(", ")
                is_first = False
                if char in "([{":
                    self._position += 1
                    closers.append("}" if char == "{" else "]")
                    self._emit("{" if char == "{" else "[")
                    is_first, is_value = True, False
                    continue
                if char in "'\"" or (quote and (yield from self._at(quote))):
                    if not (yield from self._convert_string(char, quote, self._emit)):
                        return False
                else:
                    is_bare = bool(quote) and not is_key
                    word = (yield from self._read_run(BARE_SCALAR if is_bare else PYTHON_SCALAR)).rstrip()
                    self._emit(_quoted(word) if is_key else scalar_to_json(word, types))
                if is_key:
                    self._emit(": ")
                    is_value = True
                    continue
            is_first = is_value = False
            if not closers:
                return True
            types = ANY_TYPES
        return False

    def _convert_string(self, char: str, quote: str, emit: Callable[[str], None]) -> Wait:
        """Pass on a string, whose quote is next, as JSON. False if the answer ends before it does."""
        if quote and char == '"' and not (yield from self._at(quote)):
            self._position += 1
            emit('"')
            is_closed = yield from self._pass_string(emit)
            emit('"' if is_closed else "")
            return is_closed
        if quote:
            self._position += len(quote)
            emit('"')
            stop = yield from self._pass_until(
                stops_of(quote, any_marker=False), lambda text: emit(self._escape(text))
            )
            if stop is None:
                return False
            self._position += len(quote)
            emit('"')
            return True
        return (yield from self._convert_python_string(char, emit))

    def _escape(self, text: str) -> str:
        return escape(self._spell(text))

    def _convert_python_string(self, quote: str, emit: Callable[[str], None]) -> Wait:
        """A quote inside a string counts as its end only where a value may end."""
        is_long = yield from self._at(quote * 3)
        self._position += 3 if is_long else 1
        emit('"')
        while True:
            end = PYTHON_STRINGS[quote].match(self._buffer, self._position).end()  # type: ignore[union-attr]
            if end > self._position:
                emit(self._escape(self._buffer[self._position : end]))
                self._position = end
            char = yield from self._peek()
            if not char:
                return False
            if char == "\\":
                while len(self._buffer) - self._position < MAX_ESCAPE_CHARS and (yield from self._wait()):
                    pass
                sequence = PYTHON_ESCAPE.match(self._buffer, self._position)
                assert sequence is not None
                self._position = sequence.end()
                emit(self._escape(decode_python_escape(sequence[0])))
            elif char == quote:
                if is_long:
                    is_end = yield from self._at(quote * 3)
                else:
                    is_end = yield from self._is_followed(1, (",", ")", "]", "}", ":"))
                self._position += 3 if is_long and is_end else 1
                if is_end:
                    emit('"')
                    return True
                emit(self._escape(quote))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _ignore(_: str) -> None:
    pass
