"""Properties of the parser for every family: grouping, round trip, truncation, any input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from foreword.chat_formats.chat_format import BoundFormat, bind_format
from foreword.chat_formats.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    ReasoningText,
    merge_events,
)
from foreword.chat_formats.families import FORMATS
from foreword.chat_formats.parser import ChatParser, parse_message
from foreword.chat_formats.tools import NO_TOOLS, Tool, ToolUse
from tests.support.budget import examples, some_of
from tests.support.chat_writers import FAMILIES, Family, Token, tokens_of, write_answer
from tests.support.parsed_answers import collect

NAMES = ("get_weather", "get", "files.read-all")
KEYS = st.sampled_from(["city", "text", "n", "content_2"])
# Spellings of markers, and what closes strings, values and calls in some format.
SALT = st.sampled_from(
    [
        *sorted({text for fmt in FORMATS.values() for text in fmt.template_markers}),
        "<think>",
        "</think>",
        "<tool_call>\n",
        "</tool_call>",
        '{"name": "get", "arguments": {',
        '"parameters": ',
        "<function=get>\n",
        "<parameter=city>\n",
        "\n</parameter>\n",
        "</function>",
        '<invoke name="get">',
        "</invoke>",
        "[get(",
        "city='",
        "call:get{",
        "functions.get:0",
        "[ARGS]",
        "[TOOL_CALLS]",
        "<|call|>",
        "to=functions.get",
        "```json",
        "</response>",
        '\\"',
        "\\",
        "\\u00e9",
        "'",
        '"',
        "}]",
        ")]",
        "\n",
        " ",
        "\ud83d\ude00".encode("utf-16", "surrogatepass").decode("utf-16"),
        "é▁",
        "null",
    ]
)
# No surrogate, and none of the control characters around markers in written answers.
CHARS = st.characters(exclude_categories=["Cs"], exclude_characters="\x00\x01")
TEXTS = st.lists(st.one_of(SALT, st.text(CHARS, max_size=6)), max_size=6).map("".join)
STRIPPED_TEXTS = TEXTS.map(lambda text: text.strip(" \t\r\n"))
OTHER_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=False, allow_infinity=False),
)
VALUES = st.recursive(
    OTHER_SCALARS | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=6,
)
OTHER_VALUES = OTHER_SCALARS | st.lists(VALUES, max_size=3) | st.dictionaries(KEYS, VALUES, max_size=3)
# Each argument is always a text, or never: its schema says which.
ARGUMENTS = st.fixed_dictionaries(
    {}, optional={"city": TEXTS, "text": TEXTS, "n": OTHER_VALUES, "content_2": OTHER_VALUES}
)
CALLS = st.lists(st.tuples(st.sampled_from(NAMES), ARGUMENTS), min_size=1, max_size=3)
CUTS = st.lists(st.integers(1, 12), min_size=1, max_size=12)
WITH_FAMILY = pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)


def _strings(value: Any) -> list[str]:
    match value:
        case str():
            return [value]
        case dict():
            return [text for item in (*value, *value.values()) for text in _strings(item)]
        case list():
            return [text for item in value for text in _strings(item)]
    return []


STRING = {"type": "string"}
OTHER = {"type": ["number", "boolean", "null", "object", "array"]}
SCHEMA = {
    "type": "object",
    "properties": {"city": STRING, "text": STRING, "n": OTHER, "content_2": OTHER},
}
USE = ToolUse(tuple(Tool(name, parameters=SCHEMA) for name in NAMES))


def _cut(text: str, sizes: Sequence[int]) -> list[str]:
    """The text in pieces of these sizes, over and over."""
    pieces, i = [], 0
    while text:
        size = sizes[i % len(sizes)]
        pieces.append(text[:size])
        text, i = text[size:], i + 1
    return pieces


def _feed(
    bound: BoundFormat,
    use: ToolUse,
    tokens: Sequence[Token],
    ended_by_model: bool = True,
    start: bool = False,
) -> tuple[tuple[ChatEvent, ...], ChatParser]:
    parser = ChatParser(bound, use, start, "call_{}".format)
    events = [event for token_id, text in tokens for event in parser.feed(token_id, text)]
    events += parser.flush(ended_by_model)
    return merge_events(events), parser


def _check_shape(events: Sequence[ChatEvent]) -> None:
    """Calls are numbered in order and do not overlap; arguments lie inside of their call."""
    index, is_open = -1, False
    for event in events:
        match event:
            case CallStart():
                index += 1
                assert event.index == index
                assert event.name in NAMES
                is_open = True
            case CallArguments() | CallEnd():
                assert event.index == index
                assert is_open
                is_open = not isinstance(event, CallEnd)
            case ReasoningText() | ContentText():
                assert not is_open
                assert event.text
                assert not any("\ud800" <= c < "\ue000" for c in event.text)


@WITH_FAMILY
@settings(max_examples=examples(250))
@given(reasoning=STRIPPED_TEXTS, content=STRIPPED_TEXTS, calls=st.one_of(st.just([]), CALLS), sizes=CUTS)
def test_grouping_and_round_trip(
    family: Family, reasoning: str, content: str, calls: list[Any], sizes: list[int]
) -> None:
    """Markers are tokens: their spelling anywhere is text. Every grouping gives what was written."""
    reasoning = reasoning if family.reasoning else ""
    content = "" if family.calls_alone and calls else content
    strings = _strings([dict(arguments) for _, arguments in calls])
    answer = write_answer(family, reasoning, content, calls)
    tokens, ids = tokens_of(answer, lambda text: [text] if text else [])
    bound = bind_format(FORMATS[family.name], ids.get)
    for text in (*strings, reasoning, content):  # what is spelled as text in this family cannot be told
        assume(not any(spelled in text for spelled in _spelled(family, bound)))
    if family.calls_alone:  # no marker tells a call from a text that looks like one
        assume(not content.startswith(("{", "[")))
    events, _ = _feed(bound, USE, tokens)
    _check_shape(events)
    parsed = collect(events)
    assert parsed.json_calls == [(name, dict(arguments)) for name, arguments in calls]
    assert (parsed.reasoning, parsed.content) == (reasoning, content)

    pieces, _ = tokens_of(answer, lambda text: _cut(text, sizes))
    assert _feed(bound, USE, pieces)[0] == events
    assert _feed(bound, USE, tokens_of(answer, list)[0])[0] == events
    assert parse_message(bound, USE, tokens) == events


def _spelled(family: Family, bound: BoundFormat) -> list[str]:
    """Texts with a meaning that this family's vocabulary does not have as tokens."""
    fmt = bound.format
    texts = [family.value_end, *(fmt.content or ()), *fmt.dropped]
    if fmt.reasoning:
        texts += [fmt.reasoning.begin, fmt.reasoning.end]
    for form in (fmt.tools, *fmt.also):
        assert form is not None
        heads = (form.begin + form.call)[:1] + form.call[-1:] + form.end[-1:]
        texts += [text for text in heads if isinstance(text, str) and len(text) > 1]
    return [text for text in texts if text and all(isinstance(piece, str) for piece in bound.pieces(text))]


@WITH_FAMILY
@settings(max_examples=examples(250))
@given(data=st.data(), sizes=CUTS)
def test_no_input_raises(family: Family, data: st.DataObject, sizes: list[int]) -> None:
    """Random text salted with markers, as tokens and spelled out, gives the same events in every grouping."""
    fmt = FORMATS[family.name]
    sample = write_answer(family, "a" if family.reasoning else "", "b", [("get", {"city": "x", "n": [1]})])
    _, ids = tokens_of(sample, lambda text: [text])
    salt = st.sampled_from([f"\x00{text}\x01" for text in ids] or [""])
    parts = st.lists(
        st.one_of(salt, SALT, st.text(max_size=5), st.sampled_from(_fragments(sample))), max_size=12
    )
    answer = "".join(part for part in data.draw(parts))
    has_tokens, start = data.draw(st.booleans()), data.draw(st.booleans()) and fmt.reasoning is not None
    bound = bind_format(fmt, ids.get if has_tokens else lambda _: None)
    use = data.draw(st.sampled_from([NO_TOOLS, USE]))
    by_char, _ = tokens_of(answer, list)
    events, parser = _feed(bound, use, by_char, start=start)
    _check_shape(events)
    whole, _ = tokens_of(answer, lambda text: [text])
    assert _feed(bound, use, whole, start=start)[0] == events
    assert _feed(bound, use, tokens_of(answer, lambda text: _cut(text, sizes))[0], start=start)[0] == events
    assert parser.num_calls == sum(isinstance(event, CallStart) for event in events)
    if use is NO_TOOLS:
        assert parser.num_calls == 0


def _fragments(sample: str) -> list[str]:
    """Pieces of a written answer, each with whole marker tokens."""
    pieces = [
        piece for token in sample.split("\x00") for piece in token.replace("\x01", "\x01\x02").split("\x02")
    ]
    return [f"\x00{piece}" if piece.endswith("\x01") else piece for piece in pieces if piece]


@pytest.mark.parametrize(
    ("family", "as_tokens"),
    some_of([(f, (n + turn) % 2 == 0) for n, f in enumerate(FAMILIES.values()) for turn in (0, 1)], 2),
)
def test_truncation_never_invents_a_call_or_leaks_one(family: Family, as_tokens: bool) -> None:
    """Events of a cut answer are those of the whole one, up to the cut: no piece of a call is content."""
    calls = [("get_weather", {"city": 'a "b"\n</x>', "n": [1, {"text": None}]}), ("get", {"text": "true"})]
    content = "" if family.calls_alone else "I look it up."
    answer = write_answer(family, "Hm. I call." if family.reasoning else "", content, calls)
    tokens, ids = tokens_of(answer, list)
    bound = bind_format(FORMATS[family.name], ids.get if as_tokens else lambda _: None)
    if not as_tokens:
        tokens = [(-1, piece) for piece in _cut("".join(text for _, text in tokens), (1, 3, 2))]
    whole, _ = _feed(bound, USE, tokens)
    assert collect(whole).json_calls == calls
    for num_tokens in range(len(tokens)):
        events, _ = _feed(bound, USE, tokens[:num_tokens], ended_by_model=False)
        _check_shape(events)
        expected, actual = _texts(whole), _texts(events)
        for i, (kind, text) in enumerate(actual):
            assert kind == expected[i][0]
            is_last = i == len(actual) - 1
            if is_last and kind == "content":
                text = text.rstrip()  # whitespace that ends a cut text may be before a call
            assert expected[i][1].startswith(text) if is_last else expected[i][1] == text


def _texts(events: Sequence[ChatEvent]) -> list[tuple[str, str]]:
    texts = []
    for event in events:
        match event:
            case ReasoningText():
                texts.append(("reasoning", event.text))
            case ContentText():
                texts.append(("content", event.text))
            case CallStart():
                texts.append(("start", event.name))
            case CallArguments():
                texts.append(("arguments", event.text))
            case CallEnd():
                texts.append(("end", ""))
    return texts


LONG_PIECES = {
    "space": " ",
    "newlines": "\n",
    "name": "get",
    "brackets": "[",
    "braces": '{"a":',
    "closers": "</parameter>",
    "half_closers": "</",
    "quotes": "'",
    "backslashes": "\\",
    "digits": "1",
    "words": "null ",
    "begins": "<function=",
}


@WITH_FAMILY
def test_text_held_back_is_bounded(family: Family) -> None:
    """What is read is dropped, wherever a text without an end stands: the time is linear."""
    calls = [("get_weather", {"text": "some text", "n": [1, {"city": None}]})]
    answer = write_answer(family, "Hm." if family.reasoning else "", "", calls)
    tokens, ids = tokens_of(answer, list)
    bound = bind_format(FORMATS[family.name], ids.get)
    for piece in some_of(LONG_PIECES.values(), 3):
        for position in range(0, len(tokens), len(tokens) // 4):
            parser = ChatParser(bound, USE, False, "call_{}".format)
            for token_id, text in tokens[:position]:
                parser.feed(token_id, text)
            for _ in range(750 // len(piece)):
                parser.feed(1, piece)
                assert len(parser.buffer) < 600
            parser.flush()
