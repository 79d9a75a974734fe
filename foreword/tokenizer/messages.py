"""Messages of a conversation as callers write them: texts, or lists of text and image parts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from types import MappingProxyType
from typing import Any, Final

from foreword.chat_formats.tools import WrittenCall
from foreword.errors import InvalidRequest, Unsupported, shown
from foreword.multimodal.image_source import ImageSource, read_image

TEXT_PARTS = ("text", "refusal")  # types of parts with a text, in the field of that name
IMAGE_PART: Final[Mapping[str, str]] = MappingProxyType({"type": "image"})  # an image for chat templates
IMAGE_DETAILS = ("auto", "low", "high")
# Fields of content parts, by type. Others are ignored, such as the cache_control of some clients.
PART_FIELDS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "text": frozenset({"type", "text"}),
        "refusal": frozenset({"type", "refusal"}),
        "image_url": frozenset({"type", "image_url"}),
    }
)
IMAGE_URL_FIELDS = frozenset({"url", "detail"})
VIDEO_HINT = "send a video as its frames, each a part of type 'image_url'"
AUDIO_HINT = "audio is not supported"
IMAGE_HINT = "send an image as a part of type 'image_url'"
UNSUPPORTED_PART_HINTS: Mapping[str, str] = MappingProxyType(
    {
        "video_url": VIDEO_HINT,
        "video": VIDEO_HINT,
        "input_audio": AUDIO_HINT,
        "audio_url": AUDIO_HINT,
        "input_image": IMAGE_HINT,
        "image": IMAGE_HINT,
    }
)


def extract_images(
    messages: Sequence[Mapping[str, Any]], allow_local: bool = False
) -> tuple[list[Mapping[str, Any]], list[ImageSource]]:
    """The messages with IMAGE_PART for each image, and the images, in order.

    allow_local  accept parts {"type": "image", "image": ...} of a Python caller
    Raises InvalidRequest for images outside user messages and for malformed parts.
    """
    images: list[ImageSource] = []
    bare: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list | tuple):
            name = f"messages[{index}].content"
            parts = [
                _extract_image(part, f"{name}[{i}]", images, allow_local) for i, part in enumerate(content)
            ]
            if IMAGE_PART in parts and message.get("role") != "user":
                raise InvalidRequest(f"{name} must not hold images: only user messages may", name)
            message = {**message, "content": parts}
        bare.append(message)
    return bare, images


def _extract_image(part: object, field_name: str, images: list[ImageSource], allow_local: bool) -> object:
    """Append the image of a part to `images` and return IMAGE_PART; return other parts unchanged."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "image_url":
        assert isinstance(part, Mapping)
        images.append(_parse_image_url(part, field_name))
    elif kind == "image" and allow_local:
        assert isinstance(part, Mapping)
        images.append(read_image(part.get("image"), f"{field_name}.image"))
    elif kind == "image":
        raise Unsupported(f"{field_name}: {IMAGE_HINT}", field_name)
    else:
        return part
    return IMAGE_PART


def _parse_image_url(part: Mapping[str, Any], field_name: str) -> ImageSource:
    """OpenAI's form, or the URL alone. `detail` is validated and ignored."""
    value, field_name = part.get("image_url"), f"{field_name}.image_url"
    if isinstance(value, Mapping):
        detail = value.get("detail")
        if detail is not None and detail not in IMAGE_DETAILS:
            raise InvalidRequest(
                f"{field_name}.detail must be one of {', '.join(IMAGE_DETAILS)}, got {shown(detail)}",
                f"{field_name}.detail",
            )
        value, field_name = value.get("url"), f"{field_name}.url"
    if not isinstance(value, str):
        raise InvalidRequest(f"{field_name} must be a URL, got {shown(value)}", field_name)
    return ImageSource(field_name, value)


def num_unknown_fields(content: object) -> int:
    """Fields of content parts that are ignored; nulls do not count."""
    count = 0
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in PART_FIELDS:
            continue  # a text, or refused later
        for value, known in ((part, PART_FIELDS[kind]), (part.get("image_url"), IMAGE_URL_FIELDS)):
            if isinstance(value, Mapping):
                count += sum(item is not None for name, item in value.items() if name not in known)
    return count


def to_text_messages(
    messages: Sequence[Mapping[str, Any]], placeholder: str | None = None
) -> list[dict[str, Any]]:
    """Messages whose content is one text, with line breaks between parts.

    placeholder  text of an image; None: the model takes no images
    Raises InvalidRequest for malformed content, Unsupported for other types of parts.
    """
    converted = to_content_lists(messages, placeholder is not None)
    for message in converted:
        message["content"] = "\n".join(part.get("text", placeholder) for part in message["content"])
    return converted


def to_content_lists(
    messages: Sequence[Mapping[str, Any]], allow_images: bool = True
) -> list[dict[str, Any]]:
    """Messages whose content is a list of {"type": "image"} and {"type": "text", "text": ...}.

    Raises as to_text_messages().
    """
    if not messages:
        raise InvalidRequest("messages must hold at least one message", "messages")
    return [
        {**message, "content": _parse_content(message, f"messages[{i}].content", allow_images)}
        for i, message in enumerate(messages)
    ]


def read_tool_history(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with each call's id, arguments as a mapping, and each result's id and name.

    A call or result without an id gets one. Raises InvalidRequest for arguments that are no JSON object, and
    for a result that belongs to no call before it; the error names the field.
    """
    names: dict[str, str] = {}  # called functions by the id of the call
    open_ids: dict[str, None] = {}  # calls without a result so far, in order
    converted: list[dict[str, Any]] = []
    for index, given in enumerate(messages):
        message = dict(given)
        where = f"messages[{index}]"
        if message.get("tool_calls"):
            if not isinstance(message["tool_calls"], list | tuple):
                raise InvalidRequest(f"{where}.tool_calls must be a list of calls", f"{where}.tool_calls")
            calls = [
                _read_call(call, f"{where}.tool_calls[{i}]", len(names) + i)
                for i, call in enumerate(message["tool_calls"])
            ]
            message["tool_calls"] = calls
            names |= {call["id"]: call["function"]["name"] for call in calls}
            open_ids = dict.fromkeys(call["id"] for call in calls)
        elif "tool_calls" in message:
            del message["tool_calls"]  # templates ask whether there are any by the key
        if message.get("role") == "tool":
            call_id = str(message.get("tool_call_id") or next(iter(open_ids), ""))
            if call_id not in names:
                field_name = f"{where}.tool_call_id"
                known = f"the calls are {', '.join(list(names)[-8:])}" if names else "there is none"
                raise InvalidRequest(
                    f"{field_name} {shown(call_id)} is the id of no call before this message; {known}",
                    field_name,
                )
            open_ids.pop(call_id, None)
            message |= {"tool_call_id": call_id, "name": message.get("name") or names[call_id]}
        converted.append(message)
    return converted


def _read_call(call: object, field_name: str, number: int) -> dict[str, Any]:
    given = call if isinstance(call, Mapping) else {}
    function = given.get("function", given)
    if not given or not isinstance(function, Mapping):
        raise InvalidRequest(f"{field_name} must be a call of a function, got {shown(call)}", field_name)
    arguments, name = function.get("arguments"), function.get("name")
    if not isinstance(name, str) or not name:
        raise InvalidRequest(
            f"{field_name}.function.name must be a text, got {shown(name)}", f"{field_name}.function.name"
        )
    if isinstance(arguments, str) and arguments.strip():
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise InvalidRequest(
                f"{field_name}.function.arguments is not JSON: {error}", f"{field_name}.function.arguments"
            ) from None
    arguments = arguments or {}
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(
            f"{field_name}.function.arguments must be a JSON object, got {shown(arguments)}",
            f"{field_name}.function.arguments",
        )
    call_id = str(given.get("id") or f"call{number:05}")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def one_call_per_turn(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages of which none has several calls, or a text and a call: each becomes a turn, with its result.

    For templates that take one call alone. Reasoning stays with the first turn.
    """
    split: list[dict[str, Any]] = []
    results: dict[str, dict[str, Any]] = {}  # results of the last turn's calls, moved behind them
    for index, message in enumerate(messages):
        if message.get("role") == "tool":
            split += [] if message["tool_call_id"] in results else [dict(message)]
            continue
        results = {}
        calls = message.get("tool_calls") or ()
        if not calls:
            split.append(dict(message))
            continue
        later = (messages[i] for i in range(index + 1, len(messages)))
        following = takewhile(lambda other: other.get("role") == "tool", later)
        results = {result["tool_call_id"]: dict(result) for result in following}
        whole = {name: value for name, value in message.items() if name != "tool_calls"}
        if message["content"]:
            split.append(whole)
            whole = {"role": message["role"]}
        for call in calls:
            split.append({**whole, "content": "", "tool_calls": [call]})
            split += [results[call["id"]]] if call["id"] in results else []
            whole = {"role": message["role"]}
    return split


def to_plain_tool_messages(
    messages: Sequence[Mapping[str, Any]],
    write: Callable[[Sequence[WrittenCall]], str],
    keep_results: bool = False,
) -> list[dict[str, Any]]:
    """Messages of read_tool_history() without calls, for a template that does not render them.

    write         text of calls, at the end of the assistant's content
    keep_results  the template renders results; otherwise they become messages of the user
    """
    plain: list[dict[str, Any]] = []
    contents: list[list[str | list[Any]]] = []  # contents of each message; several results in a row share one
    follows_result, num_calls = False, 0
    for message in messages:
        calls = [
            WrittenCall(call["function"]["name"], call["function"]["arguments"], call["id"], num_calls + i)
            for i, call in enumerate(message.get("tool_calls") or ())
        ]
        num_calls += len(calls)
        is_result = message.get("role") == "tool" and not keep_results
        dropped = ("tool_calls", "tool_call_id", "name") if is_result or calls else ()
        bare = {name: value for name, value in message.items() if name not in dropped}
        if calls:
            bare["content"] = join_content(bare["content"], write(calls))
        if is_result:
            heading = f"Result of {message['name']}:"
            bare = {"role": "user", "content": join_content("", heading, message["content"])}
        if is_result and follows_result:
            contents[-1].append(bare["content"])
        else:
            plain.append(bare)
            contents.append([bare["content"]])
        follows_result = is_result
    return [
        {**message, "content": join_content(*joined)} if len(joined) > 1 else message
        for message, joined in zip(plain, contents, strict=True)
    ]


def join_content(first: str | list[Any], *more: str | list[Any]) -> str | list[Any]:
    """Texts with line breaks between them; a list of parts if one of them is a list."""
    contents = [first, *more]
    if all(isinstance(content, str) for content in contents):
        return "\n".join(str(content) for content in contents if content)
    lists = (
        [_text_part(content)] if isinstance(content, str) else content for content in contents if content
    )
    return [part for parts in lists for part in parts]


def check_no_placeholder(messages: Sequence[Mapping[str, Any]], placeholder: str) -> None:
    """Raises InvalidRequest if a text of to_content_lists() contains the placeholder of images."""
    for index, message in enumerate(messages):
        if any(placeholder in part.get("text", "") for part in message["content"]):
            name = f"messages[{index}].content"
            raise InvalidRequest(
                f"{name} contains {placeholder!r}, which represents an image in the prompt", name
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
            f"{field_name} must be a text or a list of parts, got {shown(content)}", field_name
        )
    parts = [_parse_part(part, f"{field_name}[{i}]", allow_images) for i, part in enumerate(content)]
    # An empty text beside others would be a line break in one API and nothing in another.
    return [part for part in parts if part.get("text", part)] or parts[:1]


def _parse_part(part: object, field_name: str, allow_images: bool) -> Mapping[str, Any]:
    if isinstance(part, str):
        return _text_part(part)
    if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{field_name} must be an object with a type, got {shown(part)}", field_name)
    kind: str = part["type"]
    if allow_images and kind == "image":
        return dict(IMAGE_PART)  # templates may write it as JSON
    if kind in ("image", "image_url"):
        raise Unsupported(
            f"{field_name} is an image, and this model takes none: parts must be of type 'text'", field_name
        )
    if kind not in TEXT_PARTS:
        hint = "; only text is"
        if allow_images:
            known = UNSUPPORTED_PART_HINTS.get(kind)
            hint = "; only texts and images are" if known is None else f": {known}"
        raise Unsupported(
            f"{field_name}: parts of type {shown(kind, 40)} are not supported{hint}", field_name
        )
    name = f"{field_name}.{kind}"
    text = part.get(kind)
    if not isinstance(text, str):
        raise InvalidRequest(f"{name} must be a text, got {shown(text)}", name)
    return _text_part(text)


def _text_part(text: str) -> Mapping[str, Any]:
    return {"type": "text", "text": text}
