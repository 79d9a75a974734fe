"""One builder of conversations for the APIs whose bodies are no messages of chat: Messages and Responses."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from foreword.errors import InvalidRequest, shown

IMAGE_BELOW = "(an image, see below)"
UNSEEN_IMAGE = "(an image, which this model cannot see)"
MESSAGE_FIELD = re.compile(r"messages\[(\d+)\]")  # starts the name of a field

Part = dict[str, Any]


class ConversationBuilder:
    """Builds messages in the form of chat templates.

    * Leading system messages are one. Later ones become a part of the turn that they follow: at the top they
      would change the prefix of all that follows.
    * Neighbouring messages of the user are one turn, since some templates insist that roles alternate.
    * Reasoning, text and calls of one answer are one message of the assistant.
    * Images in results of tools follow the results as the user's; without vision they become a text.
    * Errors name the field of the body that a message comes from.
    """

    def __init__(self, takes_images: bool, field: str) -> None:
        """
        takes_images  False: the model sees no images; those outside of results are refused later
        field         of the conversation in the body
        """
        self.takes_images = takes_images
        self.messages: list[dict[str, Any]] = []  # their contents are lists of parts until finish()
        self.origins: list[str] = []  # the field that errors name, for each message
        self._field = field
        self._images: list[Part] = []  # results' images, not yet in a message

    @property
    def last_role(self) -> str | None:
        return self.messages[-1]["role"] if self.messages else None

    def add_system(self, parts: list[Part], origin: str) -> None:
        self._flush_images()
        if self.last_role in (None, "system"):
            self._extend("system", parts, origin)
        else:
            self._extend("tool" if self.last_role == "tool" else "user", parts, origin)

    def add_user(self, parts: list[Part], origin: str) -> None:
        self._flush_images()
        self._extend("user", parts, origin)

    def add_result(self, call_id: str, parts: Iterable[Part], origin: str) -> None:
        """The result of a call; its images are parts of type image_url."""
        texts: list[Part] = []
        for part in parts:
            if part["type"] == "image_url":
                if self.takes_images:
                    self._images.append(part)
                part = text_part(IMAGE_BELOW if self.takes_images else UNSEEN_IMAGE)
            texts.append(part)
        self._add("tool", texts or [text_part("")], origin, tool_call_id=call_id)

    def add_to_result(self, parts: list[Part]) -> None:
        """More texts of the last result."""
        assert self.last_role == "tool", "there is no result"
        self.messages[-1]["content"] += parts

    def open_answer(self, origin: str) -> dict[str, Any]:
        """The assistant's last message if nothing came after it, else a new one."""
        self._flush_images()
        if self.last_role != "assistant":
            self._add("assistant", [], origin)
        return self.messages[-1]

    def finish(self) -> None:
        """Write the last images, and contents of one text as this text."""
        self._flush_images()
        for message in self.messages:
            if [part["type"] for part in message["content"]] in ([], ["text"]):
                message["content"] = "".join(part["text"] for part in message["content"])

    @contextmanager
    def rename_fields(self) -> Iterator[None]:
        """Name the body's field in errors, not the message that it became."""
        try:
            yield
        except InvalidRequest as error:
            found = MESSAGE_FIELD.match(error.param or "")
            if error.param is None or (found is None and error.param != "messages"):
                raise
            name = self._field if found is None else self.origins[int(found[1])]
            rest = error.message.removeprefix(error.param)
            raise type(error)(error.message if rest == error.message else name + rest, name) from None

    def _flush_images(self) -> None:
        images, self._images = self._images, []
        if images:
            self._extend("user", images, self.origins[-1])

    def _extend(self, role: str, parts: list[Part], origin: str) -> None:
        """Add parts to the last message if it has this role, else as a new one."""
        if self.last_role == role:
            self.messages[-1]["content"] += parts
        elif parts:
            self._add(role, parts, origin)

    def _add(self, role: str, parts: list[Part], origin: str, **fields: Any) -> None:
        self.messages.append({"role": role, "content": parts, **fields})
        self.origins.append(origin)


def text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def make_call(call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """A call in the form of chat templates."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_field(given: Mapping[str, Any], key: str, name: str) -> str:
    """A text of an object whose field is `name`. Raises InvalidRequest."""
    value = given.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}.{key} must be a text, got {shown(value)}", f"{name}.{key}")
    return value


def encode_text(prefix: str, text: str) -> str:
    """A text that clients send back as it is: no secret, but opaque to them."""
    return prefix + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def decode_text(prefix: str, value: str) -> str | None:
    """The text of encode_text(); "" with another prefix, None if it is damaged."""
    if not value.startswith(prefix):
        return ""
    try:
        return base64.b64decode(value.removeprefix(prefix), validate=True).decode()
    except (binascii.Error, ValueError):
        return None
