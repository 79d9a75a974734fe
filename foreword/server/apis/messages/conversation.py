"""Turns and blocks of Anthropic's API become messages in the form of chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from foreword.chat_formats.tool_validation import MAX_TOOLS, MAX_TOOLS_BYTES, check_tools
from foreword.chat_formats.tools import Tool
from foreword.errors import InvalidRequest, Unsupported, shown
from foreword.server.apis.conversation import (
    UNSEEN_IMAGE,
    ConversationBuilder,
    Part,
    decode_text,
    encode_text,
    make_call,
    text_field,
    text_part,
)

# Claude Code's first system block, which is another one in each request: it would hide every cached prefix.
BILLING_HEADER = "x-anthropic-billing-header:"
REMINDER = "<system-reminder>"  # starts the texts that Claude Code itself adds to a user's turn
OMITTED_THINKING = "text:"  # starts the signature that holds the text of omitted thinking
ERROR_WORD_CHARS = 40  # length of the start of a failed result that may say "error"
ROLES = ("user", "assistant", "system")
# Blocks that Anthropic's own servers add to an assistant's message, also in a history of theirs.
SERVER_BLOCKS = ("server_tool_use", "mcp_tool_use", "container_upload", "fallback", "redacted_thinking")
SERVER_RESULT = "_tool_result"  # ends the types of results of their tools

Block = Mapping[str, Any]


class MessagesConversation(ConversationBuilder):
    """Builds a conversation from the turns of Anthropic's API."""

    def __init__(
        self, takes_images: bool, deferred: Mapping[str, tuple[str, Callable[[str], Tool]]] | None = None
    ) -> None:
        """
        deferred  tools that the prompt's head leaves out, by name: the field, and the tool's reader
        """
        super().__init__(takes_images, "messages")
        self.referenced: dict[str, int] = {}  # bytes of the definition of each deferred tool in a result
        self.continues = False  # the last message is the beginning of the answer
        self._deferred = deferred or {}

    def add_head(self, system: Any) -> None:
        """The body's `system`. Raises InvalidRequest."""
        parts = [part for part in _texts(system, "system") if not part["text"].startswith(BILLING_HEADER)]
        self.add_system(parts, "system")

    def add_turn(self, role: str, content: Any, origin: str) -> None:
        """Raises InvalidRequest and Unsupported, which name the block."""
        name = f"{origin}.content"
        if role == "system":
            self.add_system(_texts(content, name), origin)
        elif role == "user":
            for i, block in enumerate(_blocks(content, name)):
                self._add_user_block(block, f"{name}[{i}]", origin)
        elif role == "assistant":
            self._add_answer(_blocks(content, name), name, origin)
        else:
            raise InvalidRequest(
                f"{origin}.role must be one of {', '.join(ROLES)}, got {shown(role)}", f"{origin}.role"
            )

    def finish(self) -> None:
        """Set `continues`. Raises InvalidRequest for a call without its result."""
        if self.last_role == "assistant":
            last, origin = self.messages[-1], self.origins[-1]
            if last.get("tool_calls"):
                raise InvalidRequest(
                    f"{origin} ends with tool_use, which must be followed by its tool_result", origin
                )
            self.continues = any(part["text"] for part in last["content"])
            if not self.continues:
                self.messages.pop()
                self.origins.pop()
        super().finish()

    def _add_user_block(self, block: Block, name: str, origin: str) -> None:
        if block["type"] == "tool_result":
            self._add_tool_result(block, name, origin)
            return
        parts = self._parts(block, name)
        # A reminder after a result belongs to it: a turn of the user would end the loop of calls, and
        # templates would drop the reasoning before it.
        is_reminder = block["type"] == "text" and block["text"].lstrip().startswith(REMINDER)
        if is_reminder and self.last_role == "tool":
            self.add_to_result(parts)
        else:
            self.add_user(parts, origin)

    def _add_tool_result(self, block: Block, name: str, origin: str) -> None:
        call_id = text_field(block, "tool_use_id", name)
        parts: list[Part] = []
        for i, inner in enumerate(_blocks(block.get("content") or "", f"{name}.content")):
            field_name = f"{name}.content[{i}]"
            if inner["type"] == "tool_reference":
                parts.append(text_part(self._refer(text_field(inner, "tool_name", field_name))))
            elif inner["type"] == "image" and not self.takes_images:
                parts.append(text_part(UNSEEN_IMAGE))
            else:
                parts += self._parts(inner, field_name)
        if block.get("is_error"):
            start = parts[0].get("text", "")[:ERROR_WORD_CHARS].lower() if parts else ""
            parts = parts if "error" in start else [text_part("Error:"), *parts]
        self.add_result(call_id, parts, origin)

    def _refer(self, tool_name: str) -> str:
        """The definition of a deferred tool, in place of the reference: the prompt's head stays as it was."""
        deferred, referenced = self._deferred, self.referenced
        if tool_name not in deferred or tool_name in referenced:  # defined once: later by its name
            return tool_name
        name, read_tool = deferred[tool_name]
        tool = check_tools([(name, read_tool(name))], schema_field="input_schema").tools[0]
        function = {"name": tool_name, "description": tool.description, "parameters": tool.parameters}
        text = json.dumps({"type": "function", "function": function}, ensure_ascii=False)
        referenced[tool_name] = len(text)
        if len(referenced) > MAX_TOOLS or sum(referenced.values()) > MAX_TOOLS_BYTES:
            raise InvalidRequest(
                f"tool_reference names more than {MAX_TOOLS} tools or {MAX_TOOLS_BYTES} bytes of them",
                "tools",
            )
        return text

    def _parts(self, block: Block, name: str) -> list[Part]:
        """list[Part] of a text, image, document or search result."""
        kind = block["type"]
        if kind == "text":
            return [text_part(block["text"])] if block["text"] else []
        if kind == "image":
            return [_image(block, name)]
        if kind == "document":
            return self._document(block, name)
        if kind == "search_result":
            texts = _texts(block.get("content"), f"{name}.content")
            heading = f"{block.get('title') or ''} ({block.get('source') or ''})"
            return [text_part(heading), *texts]
        raise Unsupported(
            f"{name}: blocks of type {shown(kind, 40)} are not supported in a user's turn", name
        )

    def _document(self, block: Block, name: str) -> list[Part]:
        name = f"{name}.source"
        source = block.get("source")
        kind = source.get("type") if isinstance(source, Mapping) else None
        title = block.get("title")
        parts = [text_part(title)] if isinstance(title, str) and title else []
        if kind == "text":
            assert isinstance(source, Mapping)
            return [*parts, text_part(text_field(source, "data", name))]
        if kind == "content":
            assert isinstance(source, Mapping)
            for i, inner in enumerate(_blocks(source.get("content"), f"{name}.content")):
                if inner["type"] not in ("text", "image"):
                    field_name = f"{name}.content[{i}]"
                    raise Unsupported(f"{field_name} must be a text or an image", field_name)
                parts += self._parts(inner, f"{name}.content[{i}]")
            return parts
        raise Unsupported(
            f"{name} must be of type text or content: send the text of a PDF or of an uploaded file", name
        )

    def _add_answer(self, blocks: Sequence[Block], name: str, origin: str) -> None:
        parts: list[Part] = []
        thinking: list[str] = []
        calls: list[dict[str, Any]] = []
        for i, block in enumerate(blocks):
            kind, field_name = block["type"], f"{name}[{i}]"
            if kind == "text":
                parts += [text_part(block["text"])] if block["text"] else []
            elif kind == "thinking":
                thinking.append(text_field(block, "thinking", field_name) or _omitted_text(block))
            elif kind == "tool_use":
                calls.append(_call(block, field_name))
            elif kind not in SERVER_BLOCKS and not kind.endswith(SERVER_RESULT):
                raise Unsupported(
                    f"{field_name}: blocks of type {shown(kind, 40)} are not supported in an "
                    "assistant's turn",
                    field_name,
                )
        message = self.open_answer(origin)
        message["content"] += parts
        if text := "\n".join(filter(None, (message.get("reasoning_content"), *thinking))):
            message["reasoning_content"] = text
        if calls:
            message.setdefault("tool_calls", []).extend(calls)


def _call(block: Block, name: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{name}.input must be an object, got {shown(arguments)}", f"{name}.input")
    return make_call(text_field(block, "id", name), text_field(block, "name", name), arguments)


def omit_text(text: str) -> str:
    """The signature that holds the text of thinking with display "omitted"."""
    return encode_text(OMITTED_THINKING, text)


def _omitted_text(block: Block) -> str:
    """The text in a signature; "" for any other signature."""
    signature = block.get("signature")
    return (decode_text(OMITTED_THINKING, signature) if isinstance(signature, str) else None) or ""


def _image(block: Block, name: str) -> dict[str, Any]:
    """An image part of chat. Raises InvalidRequest, Unsupported."""
    source, name = block.get("source"), f"{name}.source"
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind not in ("base64", "url"):
        raise Unsupported(f"{name} must be of type base64 or url, got {shown(kind, 40)}", name)
    assert isinstance(source, Mapping)
    if kind == "url":
        url = text_field(source, "url", name)
    else:
        media_type = text_field(source, "media_type", name)
        url = f"data:{media_type};base64,{text_field(source, 'data', name)}"
    return {"type": "image_url", "image_url": {"url": url}}


def _texts(content: Any, name: str) -> list[Part]:
    """Text parts of a text, or of a list of text blocks. Raises InvalidRequest for others."""
    blocks = [] if content is None else _blocks(content, name)
    for i, block in enumerate(blocks):
        if block["type"] != "text":
            raise InvalidRequest(
                f"{name}[{i}] must be a text block, got type {shown(block['type'], 40)}", f"{name}[{i}]"
            )
    return [text_part(block["text"]) for block in blocks if block["text"]]


def _blocks(content: Any, name: str) -> Sequence[Block]:
    """Blocks of a content, each with a type, and texts with a text. Raises InvalidRequest."""
    if isinstance(content, str):
        return [text_part(content)]
    if not isinstance(content, list):
        raise InvalidRequest(f"{name} must be a text or a list of blocks, got {shown(content)}", name)
    for i, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise InvalidRequest(
                f"{name}[{i}] must be an object with a type, got {shown(block)}", f"{name}[{i}]"
            )
        if block["type"] == "text":
            text_field(block, "text", f"{name}[{i}]")
    return content
