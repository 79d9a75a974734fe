"""The messages of a conversation, as callers write them: texts, or lists of texts and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from foreword.errors import InvalidRequest, Unsupported

__all__ = [
    "IMAGE_PART",
    "ImagePart",
    "check_no_placeholder",
    "extract_images",
    "to_content_lists",
    "to_text_messages",
]

IMAGE_PART: Final[Mapping[str, str]] = MappingProxyType({"type": "image"})  # as templates know a picture
IMAGE_DETAILS = ("auto", "low", "high")
VIDEO_HINT = "a video is sent as its frames, each a part of type 'image_url'"
UNSUPPORTED_PART_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "video_url": VIDEO_HINT,
        "video": VIDEO_HINT,
        "input_audio": "sound is not taken",
        "audio_url": "sound is not taken",
        "input_image": "a picture is a part of type 'image_url'",
        "image": "a picture is a part of type 'image_url'",
    }
)


@dataclass(frozen=True, slots=True)
class ImagePart:
    """A picture of a message.

    where  field of the request, as errors name it
    url    data:, http:, https: or file:
    image  what a caller in this process gives instead: a file's path, its bytes, or a picture of PIL's
    """

    field_name: str
    url: str | None = field(default=None, repr=False)
    image: object = field(default=None, repr=False)


def extract_images(
    messages: Sequence[Mapping[str, Any]], allow_local: bool = False
) -> tuple[list[Mapping[str, Any]], list[ImagePart]]:
    """The messages with IMAGE in the place of each picture, and the pictures, in order.

    local  from this process, whose pictures may also be parts {"type": "image", "image": ...}
    Raises InvalidRequest for pictures of others than the user, and for parts that are malformed.
    """
    pictures: list[ImagePart] = []
    bare: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list | tuple):
            where = f"messages[{index}].content"
            parts = [
                _extract_image(part, f"{where}[{i}]", pictures, allow_local) for i, part in enumerate(content)
            ]
            if IMAGE_PART in parts and message.get("role") != "user":
                raise InvalidRequest(f"{where} must not hold pictures: only messages of the user do", where)
            message = {**message, "content": parts}
        bare.append(message)
    return bare, pictures


def _extract_image(part: object, field_name: str, images: list[ImagePart], allow_local: bool) -> object:
    """The part, or IMAGE if it is a picture, which joins the others."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image_url":
        assert isinstance(part, Mapping)
        images.append(_parse_image_url(part, field_name))
    elif kind == "image" and allow_local:
        assert isinstance(part, Mapping)
        images.append(ImagePart(f"{field_name}.image", image=part.get("image")))
    elif kind == "image":
        raise Unsupported(f"{field_name}: {UNSUPPORTED_PART_HINTS['image']}", field_name)
    else:
        return part
    return IMAGE_PART


def _parse_image_url(part: Mapping[str, Any], field_name: str) -> ImagePart:
    """Of a part as OpenAI has it, or with the URL alone. `detail` is looked at and not used: a model has one way to see."""
    given, field_name = part.get("image_url"), f"{field_name}.image_url"
    if isinstance(given, Mapping):
        detail = given.get("detail")
        if detail is not None and detail not in IMAGE_DETAILS:
            raise InvalidRequest(
                f"{field_name}.detail must be one of {', '.join(IMAGE_DETAILS)}, got {detail!r:.80}",
                f"{field_name}.detail",
            )
        given, field_name = given.get("url"), f"{field_name}.url"
    if not isinstance(given, str):
        raise InvalidRequest(f"{field_name} must be a URL, got {given!r:.80}", field_name)
    return ImagePart(field_name, given)


def to_text_messages(
    messages: Sequence[Mapping[str, Any]], placeholder: str | None = None
) -> list[dict[str, Any]]:
    """Messages whose content is one text: parts are joined by line breaks.

    placeholder  what stands for a picture; None: there can be none
    Raises InvalidRequest for malformed content, Unsupported for other parts, and for pictures where there can be none.
    """
    listed = to_content_lists(messages, placeholder is not None)
    for message in listed:
        message["content"] = "\n".join(part.get("text", placeholder) for part in message["content"])
    return listed


def to_content_lists(
    messages: Sequence[Mapping[str, Any]], allow_images: bool = True
) -> list[dict[str, Any]]:
    """Messages whose content is a list of IMAGE and {"type": "text", "text": ...}. Raises as plain_messages().

    pictures  there may be some
    """
    if not messages:
        raise InvalidRequest("messages must hold at least one message", "messages")
    return [
        {**message, "content": _parse_content(message, f"messages[{i}]", allow_images)}
        for i, message in enumerate(messages)
    ]


def check_no_placeholder(messages: Sequence[Mapping[str, Any]], placeholder: str) -> None:
    """Raises InvalidRequest where a text of listed messages has in it what stands for a picture."""
    for index, message in enumerate(messages):
        if any(placeholder in part.get("text", "") for part in message["content"]):
            where = f"messages[{index}].content"
            raise InvalidRequest(
                f"{where} has {placeholder!r} in its text, which stands for a picture in the prompt", where
            )


def _parse_content(
    message: Mapping[str, Any], field_name: str, allow_images: bool
) -> list[Mapping[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return [_text_part(content)]
    if content is None and message.get("role") == "assistant":
        return [_text_part("")]
    if not isinstance(content, list | tuple):
        raise InvalidRequest(
            f"{field_name}.content must be a text or a list of parts, got {content!r:.80}",
            f"{field_name}.content",
        )
    return [_parse_part(part, f"{field_name}.content[{i}]", allow_images) for i, part in enumerate(content)]


def _parse_part(part: object, field_name: str, allow_images: bool) -> Mapping[str, Any]:
    if isinstance(part, str):
        return _text_part(part)
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{field_name} must be an object with a type, got {part!r:.80}", field_name)
    kind: str = part["type"]
    if allow_images and kind == "image":
        return dict(IMAGE_PART)  # templates may write it out, as JSON too
    if kind in ("image", "image_url"):
        raise Unsupported(
            f"{field_name} is a picture, and this model takes none: parts must be of type 'text'", field_name
        )
    if kind != "text":
        hint = (
            f": {UNSUPPORTED_PART_HINTS[kind]}"
            if allow_images and kind in UNSUPPORTED_PART_HINTS
            else f"; only {'texts and pictures are' if allow_images else 'text is'}"
        )
        raise Unsupported(f"{field_name}: parts of type {kind!r:.40} are not supported{hint}", field_name)
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(
            f"{field_name}.text must be a text, got {part.get('text')!r:.80}", f"{field_name}.text"
        )
    return _text_part(part["text"])


def _text_part(text: str) -> Mapping[str, Any]:
    return {"type": "text", "text": text}
