"""Image parts of messages."""

from typing import Any

import pytest

from foreword.chat_formats.chat_format import ToolFormat, write_calls
from foreword.chat_formats.parts.json import JsonCall
from foreword.errors import InvalidRequest, Unsupported
from foreword.multimodal.image_source import ImageSource
from foreword.tokenizer.messages import (
    IMAGE_PART,
    extract_images,
    num_unknown_fields,
    one_call_per_turn,
    read_tool_history,
    to_content_lists,
    to_plain_tool_messages,
    to_text_messages,
)

TEXT = {"type": "text", "text": "What is it?"}
URL = "data:image/png;base64,AAAA"


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_images_are_extracted_in_order() -> None:
    first = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
    second = {"type": "image_url", "image_url": "file:///a.png"}
    messages = [{"role": "system", "content": "S"}, *user(first, TEXT, second)]
    bare, images = extract_images(messages)
    assert bare == [{"role": "system", "content": "S"}, *user(IMAGE_PART, TEXT, IMAGE_PART)]
    assert images == [
        ImageSource("messages[1].content[0].image_url.url", URL),
        ImageSource("messages[1].content[2].image_url", "file:///a.png"),
    ]
    assert messages[1]["content"] == [first, TEXT, second], "the input is not modified"
    assert URL not in repr(images), "no pixels in logs"


def test_local_images_need_allow_local() -> None:
    bare, images = extract_images(user({"type": "image", "image": b"PNG"}), allow_local=True)
    assert bare == user(IMAGE_PART) and images == [ImageSource("messages[0].content[0].image", data=b"PNG")]
    with pytest.raises(Unsupported, match="send an image as a part of type 'image_url'"):
        extract_images(user({"type": "image", "image": "/etc/passwd"}))


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_images_outside_user_messages_are_refused(role: str) -> None:
    with pytest.raises(InvalidRequest, match="only user messages may") as caught:
        extract_images([{"role": role, "content": [{"type": "image_url", "image_url": URL}]}])
    assert caught.value.param == "messages[0].content"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({}, "image_url"),
        ({"image_url": 3}, "image_url"),
        ({"image_url": None}, "image_url"),
        ({"image_url": {}}, "image_url.url"),
        ({"image_url": {"url": ["x"]}}, "image_url.url"),
        ({"image_url": {"url": URL, "detail": "huge"}}, "image_url.detail"),
    ],
)
def test_malformed_image_part_names_the_field(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        extract_images(user(TEXT, {"type": "image_url", **given}))
    assert caught.value.param == f"messages[0].content[1].{param}"


@pytest.mark.parametrize(
    ("content", "count"),
    [
        ("text", 0),
        (None, 0),
        ([TEXT, "text", {"type": "refusal", "refusal": "No."}], 0),
        ([{**TEXT, "cache_control": {}, "uuid": None}], 1),
        ([{"type": "image_url", "image_url": {"url": URL, "fidelity": 1, "detail": None}, "uuid": "a"}], 2),
        ([{"type": ["text"], "a": 1}, {"type": "video", "a": 1}, 5], 0),
    ],
)
def test_unknown_fields_of_parts_are_counted(content: Any, count: int) -> None:
    assert num_unknown_fields(content) == count


def test_refusal_part_is_text() -> None:
    part = {"type": "refusal", "refusal": "No."}
    assert (
        to_text_messages([{"role": "assistant", "content": [TEXT, part]}])[0]["content"] == "What is it?\nNo."
    )
    with pytest.raises(InvalidRequest) as caught:
        to_text_messages([{"role": "assistant", "content": [{"type": "refusal", "text": "No."}]}])
    assert caught.value.param == "messages[0].content[0].refusal"


def call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize("as_lists", [False, True])
def test_tool_messages_as_plain_text(as_lists: bool) -> None:
    """No text of a call or result is lost, and results of one turn are one message."""
    messages = read_tool_history(
        [
            {"role": "user", "content": "U"},
            {"role": "assistant", "content": "Wait.", "tool_calls": [call("a", "f", '{"x": "é"}')]},
            {"role": "tool", "content": "one", "tool_call_id": "a"},
            {"role": "tool", "content": [TEXT], "tool_call_id": "a"},
            {"role": "assistant", "content": "A"},
        ]
    )
    converted = to_content_lists(messages) if as_lists else to_text_messages(messages)
    plain = to_plain_tool_messages(converted, lambda calls: write_calls(ToolFormat((JsonCall(),)), calls))
    texts = [
        "\n".join(part["text"] for part in message["content"]) if as_lists else message["content"]
        for message in plain
    ]
    assert [set(message) for message in plain] == [{"role", "content"}] * 4
    assert list(zip([message["role"] for message in plain], texts, strict=True)) == [
        ("user", "U"),
        ("assistant", 'Wait.\n{"name": "f", "arguments": {"x": "é"}}'),
        ("user", "Result of f:\none\nResult of f:\nWhat is it?"),
        ("assistant", "A"),
    ]


def test_history_of_tools_is_completed() -> None:
    """Arguments become mappings; calls and results without ids belong together in their order."""
    history = read_tool_history(
        [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f"}}, call("", "g", "")],
            },
            {"role": "tool", "content": "1"},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "A", "tool_calls": []},
        ]
    )
    calls = history[0]["tool_calls"]
    assert [made["function"] for made in calls] == [
        {"name": "f", "arguments": {}},
        {"name": "g", "arguments": {}},
    ]
    assert [(result["tool_call_id"], result["name"]) for result in history[1:3]] == [
        (calls[0]["id"], "f"),
        (calls[1]["id"], "g"),
    ]
    assert "tool_calls" not in history[3]


@pytest.mark.parametrize(
    ("calls", "result_id", "param"),
    [
        ([call("a", "f", "{}")], "b", "messages[1].tool_call_id"),
        (None, "a", "messages[1].tool_call_id"),
        (
            [call("a", "f", "{}"), call("b", "f", '{"x": ')],
            "a",
            "messages[0].tool_calls[1].function.arguments",
        ),
        ([call("a", "f", "[1]")], "a", "messages[0].tool_calls[0].function.arguments"),
        ([call("a", "f", 5)], "a", "messages[0].tool_calls[0].function.arguments"),
        ([call("a", "", {})], "a", "messages[0].tool_calls[0].function.name"),
        (["f"], "a", "messages[0].tool_calls[0]"),
        ({"id": "a"}, "a", "messages[0].tool_calls"),
    ],
)
def test_malformed_history_of_tools_names_the_field(calls: Any, result_id: str, param: str) -> None:
    messages = [
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "1", "tool_call_id": result_id},
    ]
    with pytest.raises(InvalidRequest) as caught:
        read_tool_history(messages)
    assert caught.value.param == param and str(caught.value).startswith(param)


def test_several_calls_become_turns_with_their_results() -> None:
    calls = [call("a", "f", {}), call("b", "g", {})]
    messages = [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "Wait.", "reasoning_content": "R", "tool_calls": calls},
        {"role": "tool", "content": "of b", "tool_call_id": "b"},
        {"role": "tool", "content": "of a", "tool_call_id": "a"},
        {"role": "assistant", "content": "", "tool_calls": [call("a", "h", {})]},
        {"role": "tool", "content": "of h", "tool_call_id": "a"},
    ]
    turns = one_call_per_turn(messages)
    assert [
        (turn["content"], turn.get("reasoning_content"), [made["id"] for made in turn.get("tool_calls", ())])
        for turn in turns
    ] == [
        ("U", None, []),
        ("Wait.", "R", []),
        ("", None, ["a"]),
        ("of a", None, []),
        ("", None, ["b"]),
        ("of b", None, []),
        ("", None, ["a"]),
        ("of h", None, []),
    ]
