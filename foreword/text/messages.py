"""The messages of a conversation, as callers write them: texts, or lists of texts and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from foreword.errors import InvalidRequest, Unsupported

__all__ = ["IMAGE", "PicturePart", "check_texts", "listed_messages", "plain_messages", "take_pictures"]

IMAGE: Final[Mapping[str, str]] = MappingProxyType({"type": "image"})  # as templates know a picture
DETAILS = ("auto", "low", "high")
FRAMES = "a video is sent as its frames, each a part of type 'image_url'"
HINTS: Mapping[str, str] = MappingProxyType(
    {
        "video_url": FRAMES,
        "video": FRAMES,
        "input_audio": "sound is not taken",
        "audio_url": "sound is not taken",
        "input_image": "a picture is a part of type 'image_url'",
        "image": "a picture is a part of type 'image_url'",
    }
)


@dataclass(frozen=True, slots=True)
class PicturePart:
    """A picture of a message.

    where  field of the request, as errors name it
    url    data:, http:, https: or file:
    image  what a caller in this process gives instead: a file's path, its bytes, or a picture of PIL's
    """

    where: str
    url: str | None = field(default=None, repr=False)
    image: object = field(default=None, repr=False)


def take_pictures(
    messages: Sequence[Mapping[str, Any]], local: bool = False
) -> tuple[list[Mapping[str, Any]], list[PicturePart]]:
    """The messages with IMAGE in the place of each picture, and the pictures, in order.

    local  from this process, whose pictures may also be parts {"type": "image", "image": ...}
    Raises InvalidRequest for pictures of others than the user, and for parts that are malformed.
    """
    pictures: list[PicturePart] = []
    bare: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list | tuple):
            where = f"messages[{index}].content"
            parts = [_taken(part, f"{where}[{i}]", pictures, local) for i, part in enumerate(content)]
            if IMAGE in parts and message.get("role") != "user":
                raise InvalidRequest(f"{where} must not hold pictures: only messages of the user do", where)
            message = {**message, "content": parts}
        bare.append(message)
    return bare, pictures


def _taken(part: object, where: str, pictures: list[PicturePart], local: bool) -> object:
    """The part, or IMAGE if it is a picture, which joins the others."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image_url":
        assert isinstance(part, Mapping)
        pictures.append(_at_url(part, where))
    elif kind == "image" and local:
        assert isinstance(part, Mapping)
        pictures.append(PicturePart(f"{where}.image", image=part.get("image")))
    elif kind == "image":
        raise Unsupported(f"{where}: {HINTS['image']}", where)
    else:
        return part
    return IMAGE


def _at_url(part: Mapping[str, Any], where: str) -> PicturePart:
    """Of a part as OpenAI has it, or with the URL alone. `detail` is looked at and not used: a model has one way to see."""
    given, where = part.get("image_url"), f"{where}.image_url"
    if isinstance(given, Mapping):
        detail = given.get("detail")
        if detail is not None and detail not in DETAILS:
            raise InvalidRequest(f"{where}.detail must be one of {', '.join(DETAILS)}, got {detail!r:.80}", f"{where}.detail")
        given, where = given.get("url"), f"{where}.url"
    if not isinstance(given, str):
        raise InvalidRequest(f"{where} must be a URL, got {given!r:.80}", where)
    return PicturePart(where, given)


def plain_messages(messages: Sequence[Mapping[str, Any]], placeholder: str | None = None) -> list[dict[str, Any]]:
    """Messages whose content is one text: parts are joined by line breaks.

    placeholder  what stands for a picture; None: there can be none
    Raises InvalidRequest for malformed content, Unsupported for other parts, and for pictures where there can be none.
    """
    listed = listed_messages(messages, placeholder is not None)
    for message in listed:
        message["content"] = "\n".join(part.get("text", placeholder) for part in message["content"])
    return listed


def listed_messages(messages: Sequence[Mapping[str, Any]], pictures: bool = True) -> list[dict[str, Any]]:
    """Messages whose content is a list of IMAGE and {"type": "text", "text": ...}. Raises as plain_messages().

    pictures  there may be some
    """
    if not messages:
        raise InvalidRequest("messages must hold at least one message", "messages")
    return [{**message, "content": _parts(message, f"messages[{i}]", pictures)} for i, message in enumerate(messages)]


def check_texts(messages: Sequence[Mapping[str, Any]], placeholder: str) -> None:
    """Raises InvalidRequest where a text of listed messages has in it what stands for a picture."""
    for index, message in enumerate(messages):
        if any(placeholder in part.get("text", "") for part in message["content"]):
            where = f"messages[{index}].content"
            raise InvalidRequest(f"{where} has {placeholder!r} in its text, which stands for a picture in the prompt", where)


def _parts(message: Mapping[str, Any], where: str, pictures: bool) -> list[Mapping[str, Any]]:
    content = message.get("content")
    if isinstance(content, str):
        return [_text(content)]
    if content is None and message.get("role") == "assistant":
        return [_text("")]
    if not isinstance(content, list | tuple):
        raise InvalidRequest(f"{where}.content must be a text or a list of parts, got {content!r:.80}", f"{where}.content")
    return [_part(part, f"{where}.content[{i}]", pictures) for i, part in enumerate(content)]


def _part(part: object, where: str, pictures: bool) -> Mapping[str, Any]:
    if isinstance(part, str):
        return _text(part)
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{where} must be an object with a type, got {part!r:.80}", where)
    kind: str = part["type"]
    if pictures and kind == "image":
        return dict(IMAGE)  # templates may write it out, as JSON too
    if kind in ("image", "image_url"):
        raise Unsupported(f"{where} is a picture, and this model takes none: parts must be of type 'text'", where)
    if kind != "text":
        hint = (
            f": {HINTS[kind]}" if pictures and kind in HINTS else f"; only {'texts and pictures are' if pictures else 'text is'}"
        )
        raise Unsupported(f"{where}: parts of type {kind!r:.40} are not supported{hint}", where)
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text must be a text, got {part.get('text')!r:.80}", f"{where}.text")
    return _text(part["text"])


def _text(text: str) -> Mapping[str, Any]:
    return {"type": "text", "text": text}
