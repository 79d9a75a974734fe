"""The rules by which Messages and Responses become conversations, without either's body."""

from __future__ import annotations

from typing import Any

import pytest

from foreword.errors import InvalidRequest
from foreword.server.apis.conversation import (
    IMAGE_BELOW,
    UNSEEN_IMAGE,
    ConversationBuilder,
    decode_text,
    encode_text,
    text_part,
)

IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


def texts(*items: str) -> list[dict[str, Any]]:
    return [text_part(item) for item in items]


def outline(builder: ConversationBuilder) -> list[tuple[str, Any]]:
    builder.finish()
    return [(message["role"], message["content"]) for message in builder.messages]


def answered(builder: ConversationBuilder, text: str) -> None:
    builder.open_answer("a")["content"] += texts(text)


def test_system_messages_lead_or_stay_in_the_turn_before_them() -> None:
    builder = ConversationBuilder(False, "input")
    builder.add_system(texts("I"), "instructions")
    builder.add_system(texts("D"), "input[0]")
    builder.add_user(texts("U"), "input[1]")
    builder.add_system(texts("late"), "input[2]")
    answered(builder, "A")
    builder.add_system(texts("before"), "input[4]")
    builder.add_user(texts("V"), "input[5]")
    builder.add_result("c", texts("R"), "input[6]")
    builder.add_system(texts("after"), "input[7]")
    builder.add_to_result(texts("more"))
    assert outline(builder) == [
        ("system", texts("I", "D")),
        ("user", texts("U", "late")),
        ("assistant", "A"),
        ("user", texts("before", "V")),
        ("tool", texts("R", "after", "more")),
    ]


def test_parts_of_one_turn_are_one_message() -> None:
    builder = ConversationBuilder(False, "input")
    for text in ("U", "V"):
        builder.add_user(texts(text), text)
    builder.add_user([], "empty")
    for text in ("A", "B"):
        answered(builder, text)
    builder.add_user([], "empty")
    assert outline(builder) == [("user", texts("U", "V")), ("assistant", texts("A", "B"))]
    assert builder.origins == ["U", "a"]


@pytest.mark.parametrize("follow", ["user", "answer", "end"])
def test_images_of_results_follow_all_of_them(follow: str) -> None:
    builder = ConversationBuilder(True, "input")
    builder.add_result("c", [*texts("R"), IMAGE], "input[0]")
    builder.add_result("d", [], "input[1]")
    expected: list[tuple[str, Any]] = [("tool", texts("R", IMAGE_BELOW)), ("tool", ""), ("user", [IMAGE])]
    if follow == "user":
        builder.add_user(texts("U"), "input[2]")
        expected[-1] = ("user", [IMAGE, *texts("U")])
    elif follow == "answer":
        answered(builder, "A")
        expected.append(("assistant", "A"))
    assert outline(builder) == expected and builder.origins[2] == "input[1]"


def test_unseen_images_of_results_are_a_text() -> None:
    builder = ConversationBuilder(False, "input")
    builder.add_result("c", [IMAGE], "input[0]")
    assert outline(builder) == [("tool", UNSEEN_IMAGE)]


@pytest.mark.parametrize(
    ("param", "named"),
    [
        ("messages[0].content", "instructions"),
        ("messages[1].content[0]", "input[3]"),
        ("messages", "input"),
        ("other", "other"),
    ],
)
def test_errors_name_the_field_of_the_body(param: str, named: str) -> None:
    builder = ConversationBuilder(False, "input")
    builder.add_system(texts("I"), "instructions")
    builder.add_user(texts("U"), "input[3]")
    with pytest.raises(InvalidRequest) as caught, builder.rename_fields():
        raise InvalidRequest(f"{param} is wrong", param)
    assert (caught.value.param, caught.value.message) == (named, f"{named} is wrong")


def test_texts_that_clients_keep() -> None:
    assert decode_text("v1:", encode_text("v1:", "Hm, ö")) == "Hm, ö"
    assert (decode_text("v1:", "gAAA"), decode_text("v1:", "v1:?")) == ("", None)
