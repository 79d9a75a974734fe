"""Image parts of messages."""

from typing import Any

import pytest

from foreword.errors import InvalidRequest, Unsupported
from foreword.tokenizer.messages import (
    IMAGE_PART,
    ImagePart,
    extract_images,
    num_unknown_fields,
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
        ImagePart("messages[1].content[0].image_url.url", URL),
        ImagePart("messages[1].content[2].image_url", "file:///a.png"),
    ]
    assert messages[1]["content"] == [first, TEXT, second], "the input is not modified"
    assert URL not in repr(images), "no pixels in logs"


def test_local_images_need_allow_local() -> None:
    bare, images = extract_images(user({"type": "image", "image": b"PNG"}), allow_local=True)
    assert bare == user(IMAGE_PART) and images == [ImagePart("messages[0].content[0].image", image=b"PNG")]
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


@pytest.mark.parametrize("as_lists", [False, True])
def test_tool_messages_as_plain_text(as_lists: bool) -> None:
    """No text of a call or result is lost, and results of one turn are one message."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
    messages = [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "Wait.", "tool_calls": [call]},
        {"role": "tool", "content": "one", "tool_call_id": "a"},
        {"role": "tool", "content": [TEXT], "tool_call_id": "?"},
        {"role": "assistant", "content": "A"},
    ]
    converted = to_content_lists(messages) if as_lists else to_text_messages(messages)
    plain = to_plain_tool_messages(converted)
    texts = [
        "\n".join(part["text"] for part in message["content"]) if as_lists else message["content"]
        for message in plain
    ]
    assert [set(message) for message in plain] == [{"role", "content"}] * 4
    assert list(zip([message["role"] for message in plain], texts, strict=True)) == [
        ("user", "U"),
        ("assistant", 'Wait.\n{"name": "f", "arguments": {"x": "é"}}'),
        ("user", "Result of f:\none\nResult:\nWhat is it?"),
        ("assistant", "A"),
    ]
