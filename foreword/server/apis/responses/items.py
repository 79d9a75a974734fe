"""Items of the Responses API: read from a body, as the store keeps them and a GET returns them.

ItemConversation makes them messages in the form of chat templates.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from foreword.errors import InvalidRequest, Unsupported, shown
from foreword.server.apis.body import TABLES, StrictModel, check_arguments
from foreword.server.apis.chat.body import MessageContent
from foreword.server.apis.conversation import (
    ConversationBuilder,
    Part,
    decode_text,
    encode_text,
    make_call,
    text_field,
    text_part,
)

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
RESULTS = ("function_call_output", "custom_tool_call_output")
# Items of tools that only other servers run. A history of theirs is taken without them.
HOSTED_ITEMS = (
    *("apply_patch_call", "apply_patch_call_output", "code_interpreter_call", "computer_call"),
    *("computer_call_output", "file_search_call", "image_generation_call", "local_shell_call"),
    *("local_shell_call_output", "mcp_approval_request", "mcp_approval_response", "mcp_call"),
    *("mcp_list_tools", "shell_call", "shell_call_output", "tool_search_call", "tool_search_output"),
    "web_search_call",
)
ID_PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
}
REASONING_VERSION = "foreword-1:"  # starts the base64 of a reasoning

Item = dict[str, Any]
NamedItem = tuple[str, Item]  # (field in the body, item)


class InputItem(StrictModel):
    """One item of `input`; which fields it needs depends on its type."""

    is_lenient: ClassVar[bool] = True
    peer_fields = TABLES["response_item"]
    type: str | None = None  # default: message, with a role
    id: str | None = None
    role: str | None = None
    content: MessageContent = None  # a message's, or a list of reasoning_text parts
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: str | None = None
    output: Any = None
    summary: Any = None
    encrypted_content: str | None = None


def new_id(item_type: str) -> str:
    return f"{ID_PREFIXES[item_type]}_{uuid.uuid4().hex}"


def read_item(item: InputItem, name: str) -> Item:
    """An item as the store keeps it and GET returns it. Raises InvalidRequest, Unsupported."""
    kind = item.type or ("message" if item.role is not None else "item_reference" if item.id else "message")
    if kind == "item_reference":
        return {"type": kind, "id": required(item.id, "id", name)}
    if kind not in ID_PREFIXES:
        known = ", ".join((*ID_PREFIXES, "item_reference"))
        raise Unsupported(f"{name}.type must be one of {known}, got {shown(kind)}", f"{name}.type")
    read: Item = {"id": item.id or new_id(kind), "type": kind}
    if kind == "message":
        return read | _read_message(item, name) | {"status": "completed"}
    if kind == "reasoning":
        return read | _read_reasoning(item, name)
    read["call_id"] = required(item.call_id, "call_id", name)
    if kind in RESULTS:
        return read | {"output": _read_output(item.output, f"{name}.output"), "status": "completed"}
    read["name"] = required(item.name, "name", name)
    if item.namespace is not None:
        read["namespace"] = item.namespace
    if kind == "custom_tool_call":
        check_arguments(item.input, f"{name}.input")
        return read | {"input": item.input or "", "status": "completed"}
    arguments = "{}" if item.arguments is None else item.arguments
    if not isinstance(arguments, str):
        raise InvalidRequest(
            f"{name}.arguments must be a JSON text, got {shown(arguments)}", f"{name}.arguments"
        )
    check_arguments(arguments, f"{name}.arguments")
    _check_json(arguments or "{}", f"{name}.arguments")
    return read | {"arguments": arguments, "status": "completed"}


def _read_message(item: InputItem, name: str) -> Item:
    if item.role not in ROLES:
        raise InvalidRequest(
            f"{name}.role must be one of {', '.join(ROLES)}, got {shown(item.role)}", f"{name}.role"
        )
    parts = _read_parts(item.content, f"{name}.content", allow_images=item.role == "user")
    if item.role == "assistant":
        parts = [part if part["type"] == "refusal" else _output_text(part["text"]) for part in parts]
    return {"role": item.role, "content": parts}


def _output_text(text: str) -> Part:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _read_parts(content: Any, name: str, allow_images: bool) -> list[Part]:
    """Parts of types input_text, input_image and refusal."""
    if content is None or isinstance(content, str):
        return [{"type": "input_text", "text": content or ""}]
    if not isinstance(content, list):
        raise InvalidRequest(f"{name} must be a text or a list of parts, got {shown(content)}", name)
    return [_read_part(part, f"{name}[{i}]", allow_images) for i, part in enumerate(content)]


def _read_part(part: Any, name: str, allow_images: bool) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidRequest(f"{name} must be an object with a type, got {shown(part)}", name)
    if kind in TEXT_PARTS:
        return {"type": "input_text", "text": text_field(part, "text", name)}
    if kind == "refusal":
        return {"type": "refusal", "refusal": text_field(part, "refusal", name)}
    if kind == "input_image" and allow_images:
        if part.get("image_url") is None:
            raise Unsupported(f"{name}.image_url is required: files are not stored here", f"{name}.image_url")
        detail = part.get("detail") or "auto"
        if detail not in ("auto", "low", "high", "original"):
            raise InvalidRequest(
                f"{name}.detail must be auto, low, high or original, got {shown(detail)}", f"{name}.detail"
            )
        return {"type": kind, "image_url": text_field(part, "image_url", name), "detail": detail}
    known = "input_text and input_image" if allow_images else "text, without images"
    raise Unsupported(f"{name}: parts of type {shown(kind, 40)} are not supported here; only {known}", name)


def _read_reasoning(item: InputItem, name: str) -> Item:
    content = _reasoning_parts(item.content, "reasoning_text", f"{name}.content")
    read: Item = {"summary": _reasoning_parts(item.summary, "summary_text", f"{name}.summary")}
    if content:
        read["content"] = content
    if item.encrypted_content is not None:
        read["encrypted_content"] = item.encrypted_content
        decode_reasoning(item.encrypted_content, f"{name}.encrypted_content")
    return read | {"status": "completed"}


def _reasoning_parts(given: Any, kind: str, name: str) -> list[Part]:
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(part, dict) for part in given):
        raise InvalidRequest(f"{name} must be a list of parts, got {shown(given)}", name)
    return [{"type": kind, "text": text_field(part, "text", f"{name}[{i}]")} for i, part in enumerate(given)]


def _read_output(output: Any, name: str) -> str | list[Part]:
    if isinstance(output, str):
        return output
    return _read_parts([] if output is None else output, name, allow_images=True)


def _check_json(text: str, name: str) -> None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} is not the text of a JSON object: {error}", name) from None
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be the text of a JSON object, got {shown(text)}", name)


def required(value: str | None, key: str, name: str) -> str:
    if value is None:
        raise InvalidRequest(f"{name}.{key} is required", f"{name}.{key}")
    return value


def join_namespace(namespace: str, name: str) -> str:
    """The name of a tool for the model."""
    return f"{namespace}.{name}" if namespace else name


def encode_reasoning(text: str) -> str:
    """`encrypted_content` of a reasoning."""
    return encode_text(REASONING_VERSION, text)


def decode_reasoning(content: str, field_name: str) -> str:
    """The text; "" if another server wrote it. Raises InvalidRequest for a damaged one."""
    text = decode_text(REASONING_VERSION, content)
    if text is None:
        raise InvalidRequest(f"{field_name} is damaged: send it as it was received", field_name)
    return text


class ItemConversation(ConversationBuilder):
    """Builds a conversation from items."""

    def __init__(self, takes_images: bool) -> None:
        super().__init__(takes_images, "input")
        self._last_type = ""  # type of the item before

    def add_instructions(self, text: str) -> None:
        self.add_system([text_part(text)], "instructions")

    def add(self, items: Iterable[NamedItem]) -> None:
        """Raises InvalidRequest for damaged reasoning."""
        for origin, item in items:
            self._add_item(item, origin)
            self._last_type = item["type"]

    def finish(self) -> None:
        """Add an empty message of the user if there is none: Codex probes with an empty input."""
        if self.last_role in (None, "system"):
            self.add_user([text_part("")], "input")
        super().finish()

    def _add_item(self, item: Item, origin: str) -> None:
        kind = item["type"]
        if kind in RESULTS:
            output = item["output"]
            given = [{"type": "input_text", "text": output}] if isinstance(output, str) else output
            self.add_result(item["call_id"], map(_template_part, given), origin)
        elif kind == "message" and item["role"] == "user":
            self.add_user(list(map(_template_part, item["content"])), origin)
        elif kind == "message" and item["role"] != "assistant":
            self.add_system(list(map(_template_part, item["content"])), origin)
        else:
            self._add_to_answer(item, origin)

    def _add_to_answer(self, item: Item, origin: str) -> None:
        """Reasoning, text or a call."""
        message = self.open_answer(origin)
        if item["type"] == "reasoning":
            reasoning = message.get("reasoning_content", "") + _reasoning_text(item, origin)
            message["reasoning_content"] = reasoning
        elif item["type"] == "message":
            # Texts around a call are one text, as in chat; messages of a client are lines.
            text = "\n".join(_template_part(part)["text"] for part in item["content"])
            if not message["content"]:
                message["content"] += [text_part(text)] if text else []
            else:
                message["content"][0]["text"] += ("\n" if self._last_type == "message" else "") + text
        else:
            name = join_namespace(item.get("namespace", ""), item["name"])
            is_custom = item["type"] == "custom_tool_call"
            arguments = {"input": item["input"]} if is_custom else item["arguments"]
            message.setdefault("tool_calls", []).append(make_call(item["call_id"], name, arguments))


def _template_part(part: Part) -> Part:
    if part["type"] == "input_image":
        detail = "high" if part["detail"] == "original" else part["detail"]
        return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": detail}}
    return text_part(part["refusal"] if part["type"] == "refusal" else part["text"])


def _reasoning_text(item: Item, origin: str) -> str:
    """The reasoning; a summary only in its absence, as other servers send it."""
    texts = [part["text"] for part in item.get("content", ())]
    if not texts and (text := decode_reasoning(item.get("encrypted_content", ""), origin)):
        texts = [text]
    return "".join(texts) or "\n\n".join(part["text"] for part in item["summary"])
