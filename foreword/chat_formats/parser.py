"""The incremental parser of answers, derived from a format's record.

The answer is read as one text, in which each marker token stands as one lone surrogate: no decoded text
holds one, so a marker that is spelled in several tokens never looks like the token. The parser is a coroutine
that waits wherever its input ends. It holds back only what may still become a marker, and drops each
character once it is read, so the time is linear in the length of the answer.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Final

from foreword.chat_formats.chat_format import BoundFormat, ToolFormat
from foreword.chat_formats.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    HeldSpace,
    ParserEvent,
    ReasoningText,
    merge_events,
)
from foreword.chat_formats.parts.json import JSON_STRING, Unescape
from foreword.chat_formats.parts.part import Part
from foreword.chat_formats.stream_reader import MARKER, WHITESPACE, CallReader, Stops, Wait
from foreword.chat_formats.tools import ToolUse

FIRST_MARKER: Final = 0xD800  # the character of the first marker token
MAX_HEAD_CHARS: Final = 160  # longest start of a custom tool's arguments before its input
NO_SPACE: Final = Stops(re.compile(f"[^{WHITESPACE}]"), re.compile(r"\Z"), 1)
INPUT_BEGIN: Final = re.compile(r'\s{0,33}\{\s{0,33}"input"\s{0,33}:\s{0,33}"')


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


class _Syntax:
    """A bound format, with its texts as they stand in the parser's input."""

    def __init__(self, bound: BoundFormat) -> None:
        fmt = bound.format
        markers = sorted(bound.token_ids.items())
        self.chars = {token_id: chr(FIRST_MARKER + i) for i, (_, token_id) in enumerate(markers)}
        self.spelling = {FIRST_MARKER + i: text for i, (text, _) in enumerate(markers)}
        # Special tokens are no text of an answer, not even where their marker has no meaning; nor are the
        # markers of reasoning, which models write where none is.
        hidden = () if fmt.reasoning is None else (fmt.reasoning.begin, fmt.reasoning.end)
        self.visible = {
            FIRST_MARKER + i: "" if token_id in bound.special_ids or text in hidden else text
            for i, (text, token_id) in enumerate(markers)
        }

        def encode(text: str) -> str:
            pieces = bound.pieces(text)
            return "".join(piece if isinstance(piece, str) else self.chars[piece] for piece in pieces)

        forms = [form.encode(encode) for form in (fmt.tools, *fmt.also) if form is not None]
        self.opening = [form for form in forms if form.opens_answer]
        self.triggers: dict[str, list[ToolFormat]] = {}
        for form in forms:
            if not form.opens_answer:
                trigger = form.first
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
            if parts and isinstance(parts[-1], str) and parts[-1].strip(WHITESPACE)
        }
        begins = [self.reasoning.begin] if self.reasoning else []
        texts = [*self.triggers, *begins, *self.content, *self.dropped]
        self.content_stops = Stops.of([*texts, *(text for text in self.closers if len(text) > 1)])
        self.reasoning_stops = Stops.of([])
        if self.reasoning:
            calls = self.triggers if self.reasoning.ended_by_call else ()
            self.reasoning_stops = Stops.of([self.reasoning.end, *calls])

    def spell(self, text: str) -> str:
        """A text with its marker tokens spelled out."""
        return text if text.isascii() or not MARKER.search(text) else text.translate(self.spelling)


_syntax = lru_cache(maxsize=16)(_Syntax)


class ChatParser(CallReader):
    """One choice's answer, token by token, to events. Model output never raises."""

    def __init__(
        self,
        bound: BoundFormat,
        use: ToolUse,
        starts_in_reasoning: bool,
        new_call_id: Callable[[int], str],
        drops_space: bool | None = None,
    ) -> None:
        """
        use          without any tool, or where content is constrained, a marker without a meaning is text.
                     It is dropped where the prompt describes tools: models call even if they may not
        new_call_id  id of the call with this index, unless the model wrote one
        drops_space  of constrained content: whether whitespace before it is a separator, or a part of it;
                     None: content is free, and whitespace behind a marker is a separator
        """
        syntax = _syntax(bound)
        super().__init__(use, syntax.spell, syntax.closers)
        self.num_calls = 0  # started calls
        self.num_reasoning_tokens = 0  # markers included
        self.num_call_tokens = 0  # markers included
        # Tokens that looked like a call and are content; they stand directly before the one that decided.
        self.num_returned_tokens = 0
        self._num_fed = 0  # tokens before the current one
        self._syntax = syntax
        self.marker_ids: Collection[int] = syntax.chars.keys()
        is_text = not use.tools or (drops_space is not None and not self.tools)
        self._spelling: Mapping[int, str] = syntax.visible if is_text else dict.fromkeys(syntax.visible, "")
        self._new_call_id = new_call_id
        self._events: list[ParserEvent] = []

        self._region = _Region.REASONING if starts_in_reasoning else _Region.CONTENT
        self._region_before = self._region  # region before the current token
        self._space: list[str] = []  # whitespace at the end of a text, which belongs to it if it goes on
        self._num_announced = 0  # pieces of it that the stop string search has seen
        self._has_separators = drops_space is not False
        self._drops_space = bool(drops_space)  # whitespace at the begin of a text is no part of it
        # Without calls, whitespace within content is sent at once.
        self._keeps_space = not self.tools and not syntax.content
        self._has_content = False  # since the last call or reasoning
        self._is_at_start = True  # no text since the begin or the reasoning

        self._used_ids: set[str] = set()
        self._input: CustomInput | None = None
        self._run = self._read_answer()
        next(self._run)

    def feed(self, token_id: int, text: str) -> list[ParserEvent]:
        """Read one token.

        token_id  negative: a text that no token has, which is not counted
        text      characters that this token completes, a marker's text included. A special token that is no
                  marker of the format is text like any other: pass "" for one that the user shall not see.
        """
        assert not self._ended, "the answer has ended"
        char = self._syntax.chars.get(token_id)
        if not text.isascii() and MARKER.search(text):
            text = MARKER.sub("\ufffd", text)
        if char is not None:
            text = text.removesuffix(self._syntax.spelling[ord(char)]) + char
        self._region_before = self._region
        if text:
            self.buffer += text
            next(self._run)
        if token_id >= 0:
            self._num_fed += 1
            regions = self._region_before, self._region
            if _Region.CALL in regions:
                self.num_call_tokens += 1
            elif _Region.REASONING in regions:
                self.num_reasoning_tokens += 1
        return self._take_events()

    def flush(self, ended_by_model: bool = False) -> list[ParserEvent]:
        """Release the text that is held back, at the end of the answer.

        ended_by_model  a call that lacks nothing but closing markers is complete. Else the answer is cut:
                        what is held back of a call, or may be the begin of a marker, is dropped if there are
                        tools to call
        """
        if not self._ended:
            self._ended = True
            is_cut = bool(self.tools) and not ended_by_model
            if is_cut:
                self.buffer = self.buffer[: self.position]
                if not self._has_content:
                    self._clear_space()
            if is_cut and self._region is _Region.CALL:
                self._run.close()
            for _ in self._run:
                raise AssertionError("the parser waits for more than the answer")
        return self._take_events()

    @property
    def is_undecided(self) -> bool:
        """Whether the last tokens look like a call, and may yet be something else."""
        return self._region is _Region.CALL and self._raw is not None

    def _take_events(self) -> list[ParserEvent]:
        events, self._events = self._events, []
        return events

    # Texts and calls, as events.

    def _pass_text(self, text: str) -> None:
        """Pass on more reasoning or content. Whitespace beside markers and calls is not part of it."""
        if self._drops_space:
            text = text.lstrip(WHITESPACE)
        body = text.rstrip(WHITESPACE)
        if self._keeps_space and self._region is _Region.CONTENT and (body or self._has_content):
            body = text  # `_has_content`: whitespace before the first text may be followed by reasoning
        if body:
            self._drops_space = self._is_at_start = False
            if self._space:
                self._space.append(body)
                body_and_space = "".join(self._space)
                self._space.clear()
                self._num_announced = 0
            else:
                body_and_space = body
            if self._region is _Region.REASONING:
                self._events.append(ReasoningText(body_and_space))
            else:
                self._has_content = True
                self._events.append(ContentText(body_and_space))
        if len(body) < len(text):
            self._hold_space(text[len(body) :])

    def _hold_space(self, text: str) -> None:
        """Keep whitespace until text or a marker follows. A stop string may end in it.

        Whitespace behind a call is not searched: it separates calls unless text follows.
        """
        is_searched = self._region is _Region.CONTENT and (self._has_content or not self.num_calls)
        if is_searched and self._num_announced == len(self._space):
            self._num_announced += 1
            self._events.append(HeldSpace(text))
        self._space.append(text)

    def _clear_space(self) -> None:
        if self._num_announced:
            self._events.append(HeldSpace(""))
        self._space.clear()
        self._num_announced = 0

    def _drop_space(self) -> None:
        """A marker follows, or has been read: the whitespace beside it is no text."""
        self._clear_space()
        self._drops_space = self._has_separators or self._region is not _Region.CONTENT

    def start_call(self) -> None:
        assert self.tool is not None
        call_id = self.call_id
        if call_id is None or call_id in self._used_ids:
            call_id = self._new_call_id(self.num_calls)
        self._used_ids.add(call_id)
        self._input = CustomInput() if self.tool.is_custom else None
        self._raw = None
        self._clear_space()
        self._drops_space, self._has_content, self._is_at_start = False, False, True
        self.is_in_call = True
        self._events.append(CallStart(self.num_calls, call_id, self.tool.name))
        self.num_calls += 1

    def emit(self, text: str) -> None:
        """More of the call's arguments."""
        if self._input is not None:
            text = self._input.feed(text)
        if text:
            self._events.append(CallArguments(self.num_calls - 1, text))

    def end_call(self) -> None:
        if self._input is not None and (text := self._input.flush()):
            self._events.append(CallArguments(self.num_calls - 1, text))
        self.is_in_call = False
        self._events.append(CallEnd(self.num_calls - 1))

    # The answer.

    def _read_answer(self) -> Generator[None, None, None]:
        syntax = self._syntax
        if self._region is _Region.REASONING:
            yield from self._read_reasoning()
        while True:
            if self._is_at_start and self.tools and syntax.opening:
                yield from self.pass_until(NO_SPACE, self._pass_text)
                self._is_at_start = False
                if (yield from self._read_section(syntax.opening)):
                    continue
            stop = yield from self.pass_until(syntax.content_stops, self._pass_text)
            if stop is None:
                break
            yield from self._read_marker(stop)
        space = "".join(self._space)
        if space and not space.strip(WHITESPACE) and (self._has_content or not self.num_calls):
            self._events.append(ContentText(space))

    def _read_marker(self, stop: str) -> Generator[None, None, None]:
        """Read a marker within content."""
        syntax = self._syntax
        reasoning = syntax.reasoning
        is_token = MARKER.match(stop[0]) is not None or MARKER.match(stop[-1]) is not None
        forms = syntax.triggers.get(stop)
        if forms is not None and self.tools:
            yield from self._read_section(forms)
            return
        self.position += len(stop)
        if reasoning is not None and stop == reasoning.begin and (is_token or not self._has_content):
            self._drop_space()
            self._region = _Region.REASONING
            yield from self._read_reasoning()
        elif stop in syntax.content[:1] and (is_token or not self._has_content):
            self._drop_space()
            self._is_at_start = True
        elif stop in syntax.dropped:
            self._drop_space()
        elif stop in syntax.content[1:] and not is_token:
            self._space.append(stop)  # text only if more text follows
        elif stop in syntax.closers and not is_token and not self._has_content and self.num_calls:
            pass
        elif stop not in syntax.content or not is_token:
            self._pass_text(stop.translate(self._spelling))

    def _read_reasoning(self) -> Generator[None, None, None]:
        """Read reasoning, its opening marker excluded, up to its end or a call that ends it."""
        syntax = self._syntax
        reasoning = syntax.reasoning
        assert reasoning is not None
        self._drop_space()
        while True:
            stop = yield from self.pass_until(syntax.reasoning_stops, self._pass_text)
            if stop is None:
                self._clear_space()
                return
            forms = syntax.triggers.get(stop) if reasoning.ended_by_call else None
            if stop == reasoning.end:
                self.position += len(stop)
                break
            if forms is None or not self.tools:
                self.position += len(stop)
                if not reasoning.begin.startswith(stop):  # prompt and model may both open the reasoning
                    self._pass_text(stop.translate(self._spelling))
            elif (yield from self._read_section(forms)):
                return
        self._region = _Region.CONTENT
        self._drop_space()
        self._has_content, self._is_at_start = False, True

    # Calls.

    def _read_section(self, forms: Sequence[ToolFormat]) -> Wait:
        """Read calls by the first form that fits. Else what none of them can be is text."""
        region, num_read, first = self._region, 0, self._num_fed
        is_in_last = self._region_before is _Region.CALL
        self._region = _Region.CALL
        for form in forms:
            self._raw, self._mark = [], self.position
            if (yield from self._read_calls(form)):
                if self.is_in_call:  # the answer is cut here
                    self.position = len(self.buffer)
                self._raw = None
                self._region = _Region.CONTENT
                return True
            text = self._take_raw()
            num_read = max(num_read, len(text))
            self.buffer = text + self.buffer[self.position :]
            self.position = 0
        self._region = region
        self._return_tokens(first, is_in_last)
        self.position = num_read
        self._fail(self.buffer[:num_read], is_error=not forms[0].opens_answer)
        return False

    def _return_tokens(self, first: int, is_in_last: bool) -> None:
        """Count the tokens from `first` up to the current one, excluded, for this region, not for calls.

        is_in_last  the first token is of the call before
        """
        num_returned = max(self._num_fed - first - is_in_last, 0)
        self.num_call_tokens -= num_returned
        if self._region is _Region.REASONING:
            self.num_reasoning_tokens += num_returned
        else:
            self.num_returned_tokens += num_returned
        if self._num_fed > first:  # the current one begins behind the call before
            self._region_before = self._region

    def _take_raw(self) -> str:
        """The text of a call that has not started."""
        assert self._raw is not None
        text = "".join(self._raw) + self.buffer[self._mark : self.position]
        self._raw = None
        return text

    def _fail(self, text: str, is_error: bool = True) -> None:
        """Pass a text that looked like a call on, without its marker tokens."""
        self.num_parse_errors += is_error
        if text:
            self._pass_text(MARKER.sub("", text))

    def _read_calls(self, form: ToolFormat) -> Wait:
        """Read a section. False if it has no call."""
        for part in form.begin:
            if isinstance(part, str) and part.strip(WHITESPACE) and not (yield from self.read_text(part)):
                return False
        is_first, first = True, 0
        while (yield from self._read_call(form)):
            is_first = False
            if self.is_in_call or (form.separator is None and not form.end):
                return True
            self._raw, self._mark, first = [], self.position, self._num_fed
            if (yield from self._read_any(form.end)):
                return True
            if form.separator is None or not (yield from self.skip_space()):
                break
            yield from self._read_any(form.separator)
        if not is_first:
            self._region = _Region.CONTENT
            text = self._take_raw()
            if text.strip(WHITESPACE):
                self._return_tokens(first, is_in_last=True)
                self._fail(text)
            else:
                self._space.append(text)
        return not is_first

    def _read_any(self, parts: tuple[Part, ...]) -> Wait:
        """Read what is there of some texts. Whether one was."""
        is_found = False
        for part in parts:
            if isinstance(part, str) and part.strip(WHITESPACE):
                is_found |= yield from self.read_text(part)
        return is_found

    def _read_call(self, form: ToolFormat) -> Wait:
        """Read one call. False if it is none."""
        self.tool = self.call_id = None
        self.is_whole_answer = form.opens_answer
        num_calls = self.num_calls
        for i, part in enumerate(form.call):
            if isinstance(part, str):
                is_read = not part.strip(WHITESPACE) or (yield from self.read_text(part))
                is_read = is_read or self.num_calls > num_calls  # closers may be missing
            else:
                is_read = yield from part.read(self, _closer((*form.call[i + 1 :], *form.end)))
            if not is_read:
                return False
        return True


def _closer(parts: Sequence[Part]) -> str:
    """The first text of some parts that is not whitespace."""
    return next((part for part in parts if isinstance(part, str) and part.strip(WHITESPACE)), "")


class CustomInput:
    """The input of a custom tool, out of its arguments: {"input": "..."}. Other arguments are the input."""

    def __init__(self) -> None:
        self._head = ""
        self._unescape: Unescape | None = None
        self._is_closed = False

    def feed(self, text: str) -> str:
        """text  more of the arguments, cut anywhere but between a backslash and what it escapes"""
        if self._unescape is None:
            if len(self._head) > MAX_HEAD_CHARS:
                return text
            self._head += text
            begin = INPUT_BEGIN.match(self._head)
            if begin is None:
                return self._head if len(self._head) > MAX_HEAD_CHARS else ""
            text, self._unescape = self._head[begin.end() :], Unescape()
        if self._is_closed:
            return ""
        end = JSON_STRING.match(text).end()  # type: ignore[union-attr]  # it matches the empty text
        piece = self._unescape.feed(text[:end])
        if end < len(text):
            self._is_closed = True
            piece += self._unescape.flush()
        return piece

    def flush(self) -> str:
        """The rest of the input, at the end of the arguments."""
        is_other = self._unescape is None and len(self._head) <= MAX_HEAD_CHARS and self._head != "{}"
        return self._head if is_other else ""
