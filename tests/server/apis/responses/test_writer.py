"""Chat events become output items and the stream's events, whatever their cut."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.chat_formats.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    ReasoningText,
)
from foreword.chat_formats.tools import NO_TOOLS, Tool, ToolUse
from foreword.core.outputs import TokenLogprob
from foreword.server.apis.choices_writer import TokenNames
from foreword.server.apis.responses.writer import ResponseItems
from foreword.tokenizer.output_processor import TokenLogprobText
from tests.support.budget import examples
from tests.support.fakes import byte_tokenizer
from tests.support.responses_events import apply_events, check_event

TOOLS = ToolUse((Tool("f"), Tool("patch", is_custom=True), Tool("docs.find")))
NAMESPACES = {"docs.find": ("docs", "find")}
TEXTS = st.text(alphabet='ab "\\\né😀', min_size=1, max_size=6)


def new_items(includes_reasoning: bool = False, names: TokenNames | None = None) -> ResponseItems:
    return ResponseItems(TOOLS, NAMESPACES, includes_reasoning, names)


def events_of(written: Sequence[bytes]) -> list[dict[str, Any]]:
    """Parsed events; the line `event:` must agree with their type."""
    events = []
    for block in b"".join(written).decode().split("\n\n")[:-1]:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def write(events: Sequence[ChatEvent], is_complete: bool = True, **options: Any) -> list[dict[str, Any]]:
    items = new_items(**options)
    written = [*items.feed(events, ()), *items.finish(is_complete)]
    return events_of(written)


def types(events: Sequence[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def without_ids(items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in item.items() if name != "id"} for item in items]


@st.composite
def answers(draw: st.DrawFn) -> list[ChatEvent]:
    """Merged events of an answer; the last call may be cut off."""
    events: list[ChatEvent] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from(["reasoning", "content", "call"]), max_size=6)):
        if kind == "reasoning" and not (events and isinstance(events[-1], ReasoningText)):
            events.append(ReasoningText(draw(TEXTS)))
        elif kind == "content" and not (events and isinstance(events[-1], ContentText)):
            events.append(ContentText(draw(TEXTS)))
        elif kind == "call":
            name = draw(st.sampled_from(["f", "patch", "docs.find"]))
            events += [CallStart(num_calls, f"call_{num_calls}", name), CallArguments(num_calls, draw(TEXTS))]
            events.append(CallEnd(num_calls))
            num_calls += 1
    if events and isinstance(events[-1], CallEnd) and draw(st.booleans()):
        events.pop()
    return events


@st.composite
def cut(draw: st.DrawFn, events: Sequence[ChatEvent]) -> list[list[ChatEvent]]:
    """The same events in groups, with their texts cut anywhere."""
    pieces: list[ChatEvent] = []
    for event in events:
        if isinstance(event, CallStart | CallEnd):
            pieces.append(event)
            continue
        at = draw(st.integers(0, len(event.text)))
        for text in filter(None, (event.text[:at], event.text[at:])):
            kind = type(event)
            pieces.append(kind(event.index, text) if isinstance(event, CallArguments) else kind(text))  # type: ignore[arg-type,call-arg]
    groups: list[list[ChatEvent]] = []
    while pieces:
        size = draw(st.integers(1, len(pieces)))
        groups.append(pieces[:size])
        pieces = pieces[size:]
    return groups


@given(st.data(), answers(), st.booleans())
@settings(max_examples=examples(150))
def test_every_cut_gives_the_same_items(
    data: st.DataObject, events: list[ChatEvent], is_complete: bool
) -> None:
    whole, items = new_items(), new_items()
    for _ in (*whole.feed(events, ()), *whole.finish(is_complete)):
        pass
    written = [event for group in data.draw(cut(events)) for event in items.feed(group, ())]
    stream = events_of([*written, *items.finish(is_complete)])
    assert without_ids(items.items) == without_ids(whole.items)
    assert [event["sequence_number"] for event in stream] == list(range(len(stream)))
    for event in stream:
        check_event(event)
    assert apply_events(stream) == items.items
    contents = [event.text for event in events if isinstance(event, ContentText)]
    texts = [item["content"][0]["text"] for item in items.items if item["type"] == "message"]
    assert "".join("".join(texts).split()) == "".join("".join(contents).split())  # spaces beside calls go


def test_events_of_a_message() -> None:
    events = write([ContentText("Hello")])
    assert types(events) == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    item = events[-1]["item"]
    assert item["id"].startswith("msg_") and item["status"] == "completed"
    assert item["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    assert {event.get("item_id", item["id"]) for event in events} == {item["id"]}


def test_items_have_the_order_of_their_first_event() -> None:
    events = write(
        [
            ContentText("Let me think. "),
            ReasoningText("hm"),
            CallStart(0, "call_0", "f"),
            CallArguments(0, '{"x"'),
            CallArguments(0, ": 1}"),
            CallEnd(0),
            CallStart(1, "call_1", "patch"),
            CallArguments(1, "*** Begin"),
            CallEnd(1),
            ContentText("Done."),
        ]
    )
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["id"].split("_")[0] for item in done] == ["msg", "rs", "fc", "ctc", "msg"]
    assert done[1]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert (done[2]["call_id"], done[2]["name"], done[2]["arguments"]) == ("call_0", "f", '{"x": 1}')
    assert (done[3]["call_id"], done[3]["name"], done[3]["input"]) == ("call_1", "patch", "*** Begin")
    assert [event["delta"] for event in events if event["type"].endswith("arguments.delta")] == [
        '{"x"',
        ": 1}",
    ]
    assert [event["output_index"] for event in events] == sorted(event["output_index"] for event in events)


def test_tool_of_a_namespace_is_called_by_its_own_name() -> None:
    (*_, done) = write([CallStart(0, "call_0", "docs.find"), CallArguments(0, "{}"), CallEnd(0)])
    assert (done["item"]["namespace"], done["item"]["name"]) == ("docs", "find")


def test_whitespace_between_reasoning_and_calls_is_no_message() -> None:
    call = [CallStart(0, "call_0", "f"), CallArguments(0, "{}"), CallEnd(0)]
    events = write([ReasoningText("hm"), ContentText("\n\n"), *call, ContentText("\n")])
    assert [item["type"] for item in apply_events(events)] == ["reasoning", "function_call"]
    kept = apply_events(write([ReasoningText("hm"), ContentText("\n"), ContentText("\nHi")]))
    assert kept[-1]["content"][0]["text"] == "\n\nHi"


def test_answer_without_text_has_an_empty_message() -> None:
    assert [item["type"] for item in apply_events(write([]))] == ["message"]
    assert apply_events(write([], is_complete=False)) == []
    assert [item["type"] for item in apply_events(write([ReasoningText("a")]))] == ["reasoning", "message"]
    assert [item["type"] for item in apply_events(write([ReasoningText("a")], False))] == ["reasoning"]


def test_item_that_is_cut_off_is_incomplete() -> None:
    start = [CallStart(0, "call_0", "f"), CallArguments(0, '{"x')]
    for is_complete in (True, False):
        (item,) = apply_events(write(start, is_complete))
        assert (item["status"], item["arguments"]) == ("incomplete", '{"x')
    assert [item["status"] for item in apply_events(write([ContentText("a")], False))] == ["incomplete"]


def test_encrypted_content_only_where_asked() -> None:
    events = [ReasoningText("hm")]
    assert "encrypted_content" not in apply_events(write(events))[0]
    assert apply_events(write(events, includes_reasoning=True))[0]["encrypted_content"].startswith(
        "foreword-1:"
    )


def logprobs_of(*tokens: tuple[str, int | None]) -> list[TokenLogprobText]:
    logprobs, offset = [], 0
    for text, group in tokens:
        logprob = TokenLogprob(ord(text[-1]), -0.5, 1, ())
        logprobs.append(TokenLogprobText(text, text.encode(), offset, logprob, group))
        offset += len(text)
    return logprobs


def test_logprobs_belong_to_their_message_whatever_the_cut() -> None:
    names = TokenNames(byte_tokenizer(), as_ids=False)
    tokens = logprobs_of(
        ("<", None), ("\n", 1), ("a", 1), ("b", 1), ("{", None), ("\n", 2), (" ", 3), ("c", 3)
    )
    call = [CallStart(0, "call_0", "f"), CallArguments(0, "{}"), CallEnd(0)]
    groups: list[tuple[list[ChatEvent], list[TokenLogprobText]]] = [
        ([ReasoningText("t")], tokens[:1]),
        ([ContentText("\n")], tokens[1:2]),
        ([ContentText("a")], tokens[2:3]),
        ([], tokens[3:4]),
        ([ContentText("b"), *call], tokens[4:6]),
        ([ContentText("\n"), CallStart(1, "call_1", "f"), CallEnd(1), ContentText(" c")], tokens[6:]),
    ]
    whole = [event for events, _ in groups for event in events]
    for cuts in (groups, [(whole, tokens)]):
        items = new_items(names=names)
        written = [piece for events, given in cuts for piece in items.feed(events, given)]
        stream = events_of([*written, *items.finish(True)])
        messages = [item for item in apply_events(stream) if item["type"] == "message"]
        texts = [[entry["token"] for entry in message["content"][0]["logprobs"]] for message in messages]
        assert texts == [["\n", "a", "b"], [" ", "c"]]
        for event in stream:
            check_event(event)


def test_no_tools() -> None:
    items = ResponseItems(NO_TOOLS, {}, False, None)
    assert [*items.feed([ContentText("a")], ())] and items.items[0]["type"] == "message"
