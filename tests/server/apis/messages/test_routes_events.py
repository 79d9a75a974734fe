"""Chat events as Anthropic's content blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from foreword.chat_formats.events import (
    CallArguments,
    CallEnd,
    CallStart,
    ChatEvent,
    ContentText,
    ReasoningText,
    merge_events,
)
from foreword.server.apis.messages.routes import BlockEvents, join_blocks
from tests.support.wires import MESSAGE_EVENT

EVENTS = st.lists(
    st.one_of(
        st.builds(ContentText, st.text(" \na", min_size=1, max_size=4)),
        st.builds(ReasoningText, st.text(min_size=1, max_size=4)),
        st.lists(st.sampled_from(['{"a"', ': "b c', '"}']), max_size=2),  # arguments of a call
    ),
    max_size=6,
)


def chat_events(items: Sequence[Any]) -> list[ChatEvent]:
    events: list[ChatEvent] = []
    num_calls = 0
    for item in items:
        if isinstance(item, list):
            events.append(CallStart(num_calls, f"toolu_{num_calls}", "f"))
            events += [CallArguments(num_calls, text) for text in item]
            events.append(CallEnd(num_calls))
            num_calls += 1
        else:
            events.append(item)
    return events


def block_events(events: Sequence[ChatEvent], hides: bool) -> list[dict[str, Any]]:
    blocks = BlockEvents("msg_1", hides)
    found = [event for chat_event in events for event in blocks.write([chat_event])]
    return [*found, *blocks.finish()]


@given(EVENTS, st.booleans())
def test_blocks_are_the_same_however_events_are_cut(items: list[Any], hides: bool) -> None:
    events = chat_events(items)
    found = block_events(events, hides)
    blocks = join_blocks(found)
    assert blocks == join_blocks(block_events(merge_events(events), hides))
    check_block_order(found)
    for block in blocks:
        assert block["type"] != "text" or block["text"].strip(), "no blank text"
        assert block["type"] != "thinking" or (block["signature"] and bool(block["thinking"]) != hides)


def check_block_order(events: Sequence[Mapping[str, Any]]) -> None:
    """start (delta)* stop of each block, one after the other; a call's first delta is empty."""
    index, before = -1, "content_block_stop"
    for event in events:
        MESSAGE_EVENT.validate_python(event, strict=True)
        if event["type"] == "content_block_start":
            assert before == "content_block_stop"
            index += 1
        else:
            assert before != "content_block_stop"
        assert event["index"] == index
        before = event["type"]
    assert before == "content_block_stop"


def test_call_begins_with_an_empty_delta() -> None:
    """As of Anthropic: its SDKs read arguments from the deltas alone."""
    events = block_events(chat_events([['{"a"', ': "b c', '"}']]), False)
    assert events[0]["content_block"] == {"type": "tool_use", "id": "toolu_0", "name": "f", "input": {}}
    assert [event["delta"]["partial_json"] for event in events[1:-1]] == ["", '{"a"', ': "b c', '"}']


def test_call_that_is_cut_off_has_an_empty_input() -> None:
    cut = block_events(chat_events([['{"a"']])[:-1], False)
    assert cut[-1]["type"] == "content_block_delta", "as in a recording of Anthropic's API"
    assert join_blocks(cut) == [{"type": "tool_use", "id": "toolu_0", "name": "f", "input": {}}]
