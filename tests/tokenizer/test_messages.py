"""What callers write into messages: which parts are pictures, and which are refused."""

from typing import Any

import pytest

from foreword.errors import InvalidRequest, Unsupported
from foreword.tokenizer.messages import IMAGE_PART, ImagePart, extract_images

TEXT = {"type": "text", "text": "What is it?"}
URL = "data:image/png;base64,AAAA"


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def test_pictures_leave_their_place() -> None:
    first = {"type": "image_url", "image_url": {"url": URL, "detail": "high"}}
    second = {"type": "image_url", "image_url": "file:///a.png"}
    messages = [{"role": "system", "content": "S"}, *user(first, TEXT, second)]
    bare, pictures = extract_images(messages)
    assert bare == [{"role": "system", "content": "S"}, *user(IMAGE_PART, TEXT, IMAGE_PART)]
    assert pictures == [
        ImagePart("messages[1].content[0].image_url.url", URL),
        ImagePart("messages[1].content[2].image_url", "file:///a.png"),
    ]
    assert messages[1]["content"] == [first, TEXT, second], "what was given stays as it is"
    assert URL not in repr(pictures), "pictures are not written into logs"


def test_a_caller_in_this_process_gives_pictures_themselves() -> None:
    bare, pictures = extract_images(user({"type": "image", "image": b"PNG"}), allow_local=True)
    assert bare == user(IMAGE_PART) and pictures == [ImagePart("messages[0].content[0].image", image=b"PNG")]
    with pytest.raises(Unsupported, match="a picture is a part of type 'image_url'"):
        extract_images(user({"type": "image", "image": "/etc/passwd"}))


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_the_user_shows_pictures(role: str) -> None:
    with pytest.raises(InvalidRequest, match="only messages of the user do") as caught:
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
def test_malformed_pictures_are_named(given: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        extract_images(user(TEXT, {"type": "image_url", **given}))
    assert caught.value.param == f"messages[0].content[1].{param}"
