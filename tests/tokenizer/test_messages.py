"""Image parts of messages."""

from typing import Any

import pytest

from foreword.errors import InvalidRequest, Unsupported
from foreword.tokenizer.messages import IMAGE_PART, ImagePart, extract_images

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
