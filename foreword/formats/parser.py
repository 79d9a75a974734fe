"""The incremental parser of answers, derived from a format's record.

The answer is read as one text, in which each marker token stands as one lone surrogate: no decoded text
holds one, so a marker that is spelled in several tokens never looks like the token. The parser is a coroutine
that waits wherever its input ends. It holds back only what may still become a marker, and drops each
character once it is read, so the time is linear in the length of the answer.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from foreword.formats.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    ReasoningText,
    merge_events,
)
from foreword.formats.record import (
    BareArguments,
    BoundFormat,
    CallId,
    Header,
    JsonArguments,
    JsonCall,
    Name,
    NameInId,
    Part,
    PythonArguments,
    Space,
    TaggedArguments,
    ToolFormat,
    bind_format,
)
from foreword.formats.tools import Tool, ToolUse
from foreword.formats.values import (
    ANY_TYPES,
    JSON_STRING,
    CustomInput,
    RawValue,
    Unescape,
    argument_types,
    decode_python_escape,
    escape,
    scalar_to_json,
)

__all__ = ["BoundFormat", "ChatParser", "bind_format", "parse_message", "starts_in_reasoning"]

MAX_HEADER_CHARS: Final = 128  # of names, keys and headers; longer ones are none
MAX_SPACE_CHARS: Final = 256  # between a spelled closer and the text that confirms it
FIRST_MARKER: Final = 0xD800
WHITESPACE: Final = " \t\r\n"

MARKER: Final = re.compile("[\ud800-\udfff]")
SPACES: Final = re.compile(r"[ \t\r\n]*+")
NAME: Final = re.compile(r"[\w.:/-]*+", re.ASCII)
JSON_STRUCTURE: Final = re.compile('["{}\\[\\]\ud800-\udfff]')
JSON_SCALAR: Final = re.compile('[^\\s,:"{}\\[\\]\ud800-\udfff]*+')
BARE_SCALAR: Final = re.compile("[^,{}\\[\\]\ud800-\udfff]*+")
PYTHON_ESCAPE: Final = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-7]{1,3}|.)?", re.DOTALL
)
PYTHON_STRINGS: Final = {quote: re.compile(rf"[^{quote}\\]*+") for quote in "'\""}
MAX_ESCAPE_CHARS: Final = 10
PYTHON_SCALAR: Final = re.compile("[^\\s,:=()\"'{}\\[\\]\ud800-\udfff]*+")


Wait = Generator[None, None, bool]  # a step of the parser; whether it found what it looked for


def parse_message(
    bound: BoundFormat,
    use: ToolUse,
    answer: str | Iterable[tuple[int, str]],
    starts_in_reasoning: bool = False,
) -> tuple[ChatEvent, ...]:
    """A whole answer as merged events; calls without an id of their own get `call_0`, `call_1` and so on.

    answer  a text, in which a marker's spelling is the marker, or (token id, text) of each token
    """
    parser = ChatParser(bound, use, starts_in_reasoning, "call_{}".format)
    if isinstance(answer, str):
        ids = bound.token_ids
        spelled = re.compile(
            "|".join(re.escape(text) for text in sorted(ids, key=len, reverse=True)) or "(?!)"
        )
        position, tokens = 0, []
        for match in spelled.finditer(answer):
            tokens += [(-1, answer[position : match.start()]), (ids[match[0]], match[0])]
            position = match.end()
        answer = [*tokens, (-1, answer[position:])]
    events = [event for token_id, text in answer for event in parser.feed(token_id, text)]
    return merge_events([*events, *parser.flush(ended_by_model=True)])


def starts_in_reasoning(bound: BoundFormat, prompt_ids: Sequence[int], text: str = "") -> bool:
    """Whether a rendered prompt ends inside of reasoning: after an opening marker of its last turn.

    text  the rendered prompt, for markers that are several tokens
    """
    reasoning = bound.format.reasoning
    if reasoning is None:
        return False
    begin, end = bound.token_ids.get(reasoning.begin), bound.token_ids.get(reasoning.end)
    if begin is not None:
        for token_id in reversed(prompt_ids):
            if token_id == begin:
                return True
            if token_id == end or token_id in bound.special_ids:
                return False
        return False
    _, marker, after = text.rpartition(reasoning.begin)
    return bool(marker) and reasoning.end not in after and "<|" not in after


class _Region(enum.Enum):
    CONTENT = enum.auto()
    REASONING = enum.auto()
    CALL = enum.auto()


@dataclass(frozen=True, slots=True)
class _Stops:
    """Texts to look for: `find` matches one of them, `start` an incomplete one at the end of a text."""

    find: re.Pattern[str]
    start: re.Pattern[str]
    max_chars: int

    @classmethod
    def of(cls, texts: Iterable[str], any_marker: bool = True) -> _Stops:
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


class _Syntax:
    """A bound format, with its texts as they stand in the parser's input."""

    def __init__(self, bound: BoundFormat) -> None:
        fmt = bound.format
        markers = sorted(bound.token_ids.items())
        self.chars = {token_id: chr(FIRST_MARKER + i) for i, (_, token_id) in enumerate(markers)}
        self.spelling = {FIRST_MARKER + i: text for i, (text, _) in enumerate(markers)}

        def encode(text: str) -> str:
            pieces = bound.pieces(text)
            return "".join(piece if isinstance(piece, str) else self.chars[piece] for piece in pieces)

        forms = [_encode_form(form, encode) for form in (fmt.tools, *fmt.also) if form is not None]
        self.opening = [form for form in forms if form.opens_answer]
        self.triggers: dict[str, list[ToolFormat]] = {}
        for form in forms:
            if not form.opens_answer:
                trigger = (form.begin + form.call)[0]
                assert isinstance(trigger, str), f"{fmt.name}: a call must begin with a text"
                self.triggers.setdefault(trigger, []).append(form)
        self.reasoning = None
        if fmt.reasoning is not None:
            begin, end = encode(fmt.reasoning.begin), encode(fmt.reasoning.end)
            self.reasoning = replace(fmt.reasoning, begin=begin, end=end)
        self.content = tuple(map(encode, fmt.content or ()))
        self.dropped = tuple(map(encode, fmt.dropped))
        # The last text of a call or section: one that follows a call directly is dropped.
        self.closers = {
            parts[-1]
            for form in forms
            for parts in (form.call, form.end)
            if parts and isinstance(parts[-1], str)
        }
        begins = [self.reasoning.begin] if self.reasoning else []
        texts = [*self.triggers, *begins, *self.content, *self.dropped]
        self.content_stops = _Stops.of([*texts, *(text for text in self.closers if len(text) > 1)])
        self.reasoning_stops = _Stops.of([])
        if self.reasoning:
            calls = self.triggers if self.reasoning.ended_by_call else ()
            self.reasoning_stops = _Stops.of([self.reasoning.end, *calls])

    def spell(self, text: str) -> str:
        """A text with its marker tokens spelled out."""
        return text if text.isascii() or not MARKER.search(text) else text.translate(self.spelling)


_syntax = lru_cache(maxsize=16)(_Syntax)


@lru_cache(maxsize=64)
def _stops(*texts: str) -> _Stops:
    return _Stops.of(texts)


@lru_cache(maxsize=16)
def _quote_stops(quote: str) -> _Stops:
    return _Stops.of([quote], any_marker=False)


def _encode_form(form: ToolFormat, encode: Callable[[str], str]) -> ToolFormat:
    def encode_parts(parts: tuple[Part, ...]) -> tuple[Part, ...]:
        return tuple(map(encode_part, parts))

    def encode_part(part: Part) -> Part:
        match part:
            case str():
                return encode(part)
            case TaggedArguments():
                return replace(
                    part,
                    key_begin=encode(part.key_begin),
                    key_end=encode(part.key_end),
                    value_begin=encode(part.value_begin),
                    value_end=encode(part.value_end),
                )
            case BareArguments():
                return BareArguments(encode(part.quote))
            case _:
                return part

    separator = None if form.separator is None else encode_parts(form.separator)
    return ToolFormat(
        encode_parts(form.call),
        encode_parts(form.begin),
        separator,
        encode_parts(form.end),
        form.opens_answer,
    )


class ChatParser:
    """One choice's answer, token by token, to events. Model output never raises."""

    def __init__(
        self,
        bound: BoundFormat,
        use: ToolUse,
        starts_in_reasoning: bool,
        new_call_id: Callable[[int], str],
    ) -> None:
        """new_call_id  id of the call with this index, unless the model wrote one"""
        self.num_calls = 0  # started
        self.num_reasoning_tokens = 0  # markers included
        self.num_call_tokens = 0  # markers included
        self.num_parse_errors = 0  # what began like a call and was none, or ended before its arguments did
        self._syntax = _syntax(bound)
        self.marker_ids: Collection[int] = self._syntax.chars.keys()
        self._tools = {tool.name: tool for tool in use.callable_tools}
        self._names = sorted(self._tools, key=len, reverse=True)
        self._new_call_id = new_call_id
        self._events: list[ChatEvent] = []

        self._buffer = ""  # input that is not dropped yet
        self._position = 0  # in it: what is read
        self._raw: list[str] | None = None  # what is read of a call that is not certain yet: before _mark,
        self._mark = 0  # and from this position in the buffer on
        self._ended = False
        self._ended_by_model = False

        self._region = _Region.REASONING if starts_in_reasoning else _Region.CONTENT
        self._space: list[str] = []  # whitespace at the end of a text, which belongs to it if it goes on
        self._drops_space = False  # whitespace at the begin of a text belongs to the marker before it
        self._says = False  # content since the last call or reasoning
        self._opens = True  # no text yet since the begin or since the reasoning

        self._is_in_call = False  # it has started and not ended
        self._tool: Tool | None = None  # of the call that is read
        self._id: str | None = None  # as the model wrote it
        self._used_ids: set[str] = set()
        self._input: CustomInput | None = None
        self._run = self._read_answer()
        next(self._run)

    def feed(self, token_id: int, text: str) -> list[ChatEvent]:
        """Read one token.

        text  characters that this token completes, a marker's text included. A special token that is no
              marker of the format is text like any other: pass "" for one that the user shall not see.
        """
        assert not self._ended, "the answer has ended"
        char = self._syntax.chars.get(token_id)
        if not text.isascii() and MARKER.search(text):
            text = MARKER.sub("\ufffd", text)
        if char is not None:
            text = text.removesuffix(self._syntax.spelling[ord(char)]) + char
        before = self._region
        if text:
            self._buffer += text
            next(self._run)
        if before is _Region.CALL or self._region is _Region.CALL:
            self.num_call_tokens += 1
        elif before is _Region.REASONING or self._region is _Region.REASONING:
            self.num_reasoning_tokens += 1
        return self._take_events()

    def flush(self, ended_by_model: bool = False) -> list[ChatEvent]:
        """Release the text that is held back, at the end of the answer.

        ended_by_model  a call that lacks nothing but closing markers is complete; else the answer may be cut
        """
        if not self._ended:
            self._ended, self._ended_by_model = True, ended_by_model
            for _ in self._run:
                raise AssertionError("the parser waits for more than the answer")
        return self._take_events()

    def _take_events(self) -> list[ChatEvent]:
        events, self._events = self._events, []
        return events

    def _is_cut(self) -> bool:
        """The answer has ended within a call, not by the model: what is not certain there is dropped."""
        return self._ended and self._is_in_call and not self._ended_by_model

    # Input. These methods leave the position behind what they have read.

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

    def _pass_until(self, stops: _Stops, emit: Callable[[str], None]) -> Generator[None, None, str | None]:
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
            if not (yield from self._wait()) and (self._is_cut() or self._position == len(self._buffer)):
                return None

    # Texts and calls, as events.

    def _say(self, text: str) -> None:
        """More reasoning or content. Whitespace beside markers and calls is not part of it."""
        if self._drops_space:
            text = text.lstrip(WHITESPACE)
        body = text.rstrip(WHITESPACE)
        if body:
            self._drops_space = self._opens = False
            if self._space:
                self._space.append(body)
                body_and_space = "".join(self._space)
                self._space.clear()
            else:
                body_and_space = body
            if self._region is _Region.REASONING:
                self._events.append(ReasoningText(body_and_space))
            else:
                self._says = True
                self._events.append(ContentText(body_and_space))
        if len(body) < len(text):
            self._space.append(text[len(body) :])

    def _drop_space(self) -> None:
        """A marker follows, or has been read: the whitespace beside it is no text."""
        self._space.clear()
        self._drops_space = True

    def _start_call(self) -> None:
        assert self._tool is not None
        call_id = self._id
        if call_id is None or call_id in self._used_ids:
            call_id = self._new_call_id(self.num_calls)
        self._used_ids.add(call_id)
        self._input = CustomInput() if self._tool.is_custom else None
        self._raw = None
        self._space.clear()
        self._drops_space, self._says, self._opens = False, False, True
        self._is_in_call = True
        self._events.append(CallStart(self.num_calls, call_id, self._tool.name))
        self.num_calls += 1

    def _emit(self, text: str) -> None:
        """More of the call's arguments."""
        if self._input is not None:
            text = self._input.feed(text)
        if text:
            self._events.append(CallArguments(self.num_calls - 1, text))

    def _end_call(self) -> None:
        if self._input is not None and (text := self._input.flush()):
            self._events.append(CallArguments(self.num_calls - 1, text))
        self._is_in_call = False
        self._events.append(CallEnd(self.num_calls - 1))

    # The answer.

    def _read_answer(self) -> Generator[None, None, None]:
        syntax = self._syntax
        if self._region is _Region.REASONING:
            yield from self._read_reasoning()
        while True:
            if self._opens and self._tools and syntax.opening:
                self._say((yield from self._read_run(SPACES)))
                self._opens = False
                if (yield from self._read_section(syntax.opening)):
                    continue
            stop = yield from self._pass_until(syntax.content_stops, self._say)
            if stop is None:
                break
            yield from self._read_marker(stop)
        space = "".join(self._space)
        if space and not space.strip(WHITESPACE) and (self._says or not self.num_calls):
            self._events.append(ContentText(space))

    def _read_marker(self, stop: str) -> Generator[None, None, None]:
        """Read a marker within content."""
        syntax = self._syntax
        reasoning = syntax.reasoning
        is_token = MARKER.match(stop[0]) is not None or MARKER.match(stop[-1]) is not None
        forms = syntax.triggers.get(stop)
        if forms is not None and self._tools:
            yield from self._read_section(forms)
            return
        self._position += len(stop)
        if reasoning is not None and stop == reasoning.begin and (is_token or not self._says):
            self._drop_space()
            self._region = _Region.REASONING
            yield from self._read_reasoning()
        elif stop in syntax.content[:1] and (is_token or not self._says):
            self._drop_space()
            self._opens = True
        elif stop in syntax.dropped:
            self._drop_space()
        elif stop in syntax.content[1:] and not is_token:
            self._space.append(stop)  # text only if more text follows
        elif stop in syntax.closers and not is_token and not self._says and self.num_calls:
            pass
        else:
            self._say(MARKER.sub("", stop))

    def _read_reasoning(self) -> Generator[None, None, None]:
        """Read reasoning, its opening marker excluded, up to its end or a call that ends it."""
        syntax = self._syntax
        reasoning = syntax.reasoning
        assert reasoning is not None
        self._drop_space()
        while True:
            stop = yield from self._pass_until(syntax.reasoning_stops, self._say)
            if stop is None:
                self._space.clear()
                return
            forms = syntax.triggers.get(stop) if reasoning.ended_by_call else None
            if stop == reasoning.end:
                self._position += len(stop)
                break
            if forms is None or not self._tools:
                self._position += len(stop)
                self._say(MARKER.sub("", stop))
            elif (yield from self._read_section(forms)):
                return
        self._region = _Region.CONTENT
        self._drop_space()
        self._says, self._opens = False, True

    # Calls.

    def _read_section(self, forms: Sequence[ToolFormat]) -> Wait:
        """Read calls by the first form that fits. Else what none of them can be is text."""
        region, num_read, num_call_tokens = self._region, 0, self.num_call_tokens
        self._region = _Region.CALL
        for form in forms:
            self._raw, self._mark = [], self._position
            if (yield from self._read_calls(form)):
                if self._is_in_call:  # the answer is cut here
                    self._position = len(self._buffer)
                self._raw = None
                self._region = _Region.CONTENT
                return True
            text = self._take_raw()
            num_read = max(num_read, len(text))
            self._buffer = text + self._buffer[self._position :]
            self._position = 0
        self._region, self.num_call_tokens = region, num_call_tokens
        self._position = num_read
        self._fail(self._buffer[:num_read], is_error=not forms[0].opens_answer)
        return False

    def _take_raw(self) -> str:
        """The text of a call that has not started."""
        assert self._raw is not None
        text = "".join(self._raw) + self._buffer[self._mark : self._position]
        self._raw = None
        return text

    def _fail(self, text: str, is_error: bool = True) -> None:
        """What looked like a call is text; its marker tokens are not."""
        self.num_parse_errors += is_error
        if text:
            self._say(MARKER.sub("", text))

    def _read_calls(self, form: ToolFormat) -> Wait:
        """Read a section. False if it has no call."""
        for part in form.begin:
            if isinstance(part, str) and not (yield from self._read_text(part)):
                return False
        is_first = True
        while (yield from self._read_call(form)):
            is_first = False
            if self._is_in_call or (form.separator is None and not form.end):
                return True
            self._raw, self._mark = [], self._position
            if (yield from self._read_any(form.end)):
                return True
            if form.separator is None or not (yield from self._skip_space()):
                break
            yield from self._read_any(form.separator)
        if not is_first:
            self._region = _Region.CONTENT
            text = self._take_raw()
            if text.strip(WHITESPACE):
                self._fail(text)
            else:
                self._space.append(text)
        return not is_first

    def _read_any(self, parts: tuple[Part, ...]) -> Wait:
        """Read what is there of some texts. Whether one was."""
        is_found = False
        for part in parts:
            if isinstance(part, str) and part.strip(WHITESPACE):
                is_found |= yield from self._read_text(part)
        return is_found

    def _read_call(self, form: ToolFormat) -> Wait:
        """Read one call. False if it is none."""
        self._tool = self._id = None
        parts = form.call
        num_calls = self.num_calls
        for i, part in enumerate(parts):
            texts = [text for text in (*parts[i + 1 :], *form.end) if isinstance(text, str)]
            match part:
                case str():
                    is_read = not part.strip(WHITESPACE) or (yield from self._read_text(part))
                    if not is_read and self.num_calls == num_calls:
                        return False
                case Space():
                    pass
                case Header():
                    if (yield from self._read_header(texts[0])) is None:
                        return False
                case Name() | CallId() | NameInId():
                    yield from self._read_name(part)
                    if self._tool is None:
                        return False
                case JsonCall():
                    if not (yield from self._read_json_call(part, form.opens_answer)):
                        return False
                case JsonArguments():
                    if (yield from self._skip_space()) != "{":
                        return False
                    self._start_call()
                    if (yield from self._pass_json(self._emit)):
                        self._end_call()
                case TaggedArguments():
                    if not (yield from self._read_tagged(part, texts[0])):
                        return False
                case PythonArguments() | BareArguments():
                    if not (yield from self._read_keywords(part, texts[0])):
                        return False
        return True

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
                emit(self._syntax.spell(self._buffer[self._position : end]))
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
            if self._is_cut():
                return True
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
                types = argument_types(tool, key)
                if part.types_in_tag:
                    header = yield from self._read_header(">")
                    if self._is_cut():
                        return True
                    self._position += header is not None
                    types = frozenset({"string"}) if 'string="true"' in (header or "") else types - {"string"}
                elif part.value_begin:
                    yield from self._read_text(part.value_begin)
                self._emit((", " if num_arguments else "") + _quoted(key) + ": ")
                num_arguments += 1
                if not (yield from self._read_value(part, closer, types or ANY_TYPES)):
                    return True
            elif is_closed or (MARKER.match(char) if char else self._ended_by_model):
                self._emit("}")
                self._end_call()
                return True
            elif not char:
                return True
            else:  # no argument: skip it
                self.num_parse_errors += 1
                yield from self._pass_until(_stops(part.key_begin, closer), _ignore)

    def _read_value(self, part: TaggedArguments, closer: str, types: frozenset[str]) -> Wait:
        """Read a value and its closing tag. False if the answer ends before.

        A tag that is spelled closes a value only where the arguments go on or end behind it.
        """
        value = RawValue(types, part.padding, self._emit)
        stops = _stops(part.value_end, closer)
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
                is_end = stop == closer or stop in self._syntax.closers
                num_read = 0
            if is_end:
                value.close()
                self._position += num_read
                return True
            if self._is_cut():
                return False
            self._position += len(stop)
            value.feed(self._syntax.spell(stop))
        return False

    def _is_followed(self, num_chars: int, texts: tuple[str, ...]) -> Wait:
        """Whether one of some texts, a marker token or the end follows these characters and whitespace.

        Nothing is read. False where the answer is cut: see `_is_cut`.
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
                return is_at_end and not self._is_cut()

    # Keyword arguments of Python's and of a bare syntax.

    def _read_keywords(self, part: PythonArguments | BareArguments, closer: str) -> Wait:
        """Read arguments up to the closer, which is not read. False if they are none."""
        tool, num_arguments, is_started = self._tool, 0, False
        assert tool is not None
        quote = part.quote if isinstance(part, BareArguments) else ""
        keys = list((tool.parameters or {}).get("properties") or ())  # of arguments by position
        while True:
            char = yield from self._skip_space()
            if self._is_cut():
                return True
            is_closed = char == closer or (not char and is_started and self._ended_by_model)
            if is_closed or (is_started and char and char != quote and MARKER.match(char)):
                if not is_started:
                    self._start_call()
                self._emit("}" if num_arguments else "{}")
                self._end_call()
                self.num_parse_errors += bool(char) and not is_closed
                return True
            if not char:
                return is_started
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
            if not char and not (is_started and self._ended_by_model):
                return is_started
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
            types = argument_types(tool, key)
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
        while (char := (yield from self._skip_space())) and not self._is_cut():
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
                    if self._is_cut():
                        return False
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
            stop = yield from self._pass_until(_quote_stops(quote), lambda text: emit(self._escape(text)))
            if stop is None:
                return False
            self._position += len(quote)
            emit('"')
            return True
        return (yield from self._convert_python_string(char, emit))

    def _escape(self, text: str) -> str:
        return escape(self._syntax.spell(text))

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
                if self._is_cut() and self._position == len(self._buffer):
                    return False
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
                if self._is_cut():
                    return False
                emit(self._escape(quote))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _ignore(_: str) -> None:
    pass
