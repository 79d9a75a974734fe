"""Bodies of /v1/messages and /v1/messages/count_tokens, and their conversations in the form of templates."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import Field

from foreword.chat_formats.tool_validation import MAX_TOOLS, MAX_TOOLS_BYTES, Choice, check_tools
from foreword.chat_formats.tools import ReasoningOptions, Tool, ToolUse
from foreword.core.params import SamplingParams
from foreword.core.structured_output import StructuredOutput
from foreword.errors import InvalidRequest, Unsupported
from foreword.server.apis.body import RequestBody, StrictModel
from foreword.server.apis.chat.body import MessageContent
from foreword.server.apis.ignored_fields import MESSAGES_API, IgnoredField
from foreword.server.apis.sampling import NO_DEFAULTS, SamplingBody
from foreword.server.apis.structured import Constraint, SchemaHolder
from foreword.server.apis.tools import check_tool_form
from foreword.server.http.errors import rename_field

# Claude Code's first system block, which is another one in each request: it would hide every cached prefix.
BILLING_HEADER = "x-anthropic-billing-header:"
REMINDER = "<system-reminder>"  # starts the texts that Claude Code itself adds to a user's turn
HIDDEN_THINKING = "text:"  # starts the signature that holds the text of hidden thinking
UNSEEN_IMAGE = "(an image, which this model cannot see)"
IMAGE_BELOW = "(an image, see below)"
ERROR_WORD_CHARS = 40  # at the start of a failed result, in which it calls itself an error
MESSAGE_FIELD = re.compile(r"messages\[(\d+)\]")  # starts the name of a field
ROLES = ("user", "assistant", "system")
# What Anthropic's own servers add to an assistant's message, also in a history of theirs.
SERVER_BLOCKS = ("server_tool_use", "mcp_tool_use", "container_upload", "fallback", "redacted_thinking")
SERVER_RESULT = "_tool_result"  # ends the types of results of their tools
OWN_TOOLS = (None, "custom", "function")  # types of tools that the client runs
CHOICES: Mapping[str, Choice] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}

Schema = dict[str, Any]
Parts = list[dict[str, Any]]


class MessageBody(StrictModel):
    """One turn; `content` is a text or a list of blocks, whose other fields (cache_control) are hints."""

    is_lenient: ClassVar[bool] = True
    role: str
    content: MessageContent = None


class ThinkingBody(StrictModel):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None  # of type "enabled"
    display: Literal["summarized", "omitted"] | None = None  # omitted: the signature holds the text


class OutputFormatBody(SchemaHolder):
    schema_form: ClassVar[str] = '{"type": "json_schema", "schema": ...}'
    type: Literal["json_schema"]
    schema_: Schema = Field(alias="schema")


class OutputConfigBody(StrictModel):
    is_lenient: ClassVar[bool] = True
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: OutputFormatBody | None = None


class ToolChoiceBody(StrictModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None  # of type "tool"
    disable_parallel_tool_use: bool | None = None


class ToolBody(StrictModel):
    """A tool of the client, or with another type than "custom" one that only Anthropic's servers know."""

    is_lenient: ClassVar[bool] = True
    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: Schema | None = None
    strict: bool | None = None
    defer_loading: bool | None = None  # not a part of the prompt until a tool_reference names it

    def tool(self, path: str) -> Tool:
        """Raises InvalidRequest without a name or a schema; `path` is the field of this tool."""
        if self.name is None or self.input_schema is None:
            missing = f"{path}.{'name' if self.name is None else 'input_schema'}"
            raise InvalidRequest(f"{missing} is required", missing)
        return Tool(
            self.name,
            self.description or "",
            self.input_schema,
            bool(self.strict),
            is_deferred=bool(self.defer_loading),
        )


@dataclass(slots=True)
class MessagesConversation:
    """Messages in the form of chat templates.

    deferred    tools that are no part of the prompt's head, by name, each with its field
    origins     index in the body's messages for each of them; None: the body's `system`
    referenced  names of the deferred tools that results refer to, and the bytes of each definition
    continues   the last message is the beginning of the answer
    """

    deferred: Mapping[str, tuple[str, ToolBody]]
    messages: list[dict[str, Any]] = field(default_factory=list)
    origins: list[int | None] = field(default_factory=list)
    referenced: dict[str, int] = field(default_factory=dict)
    continues: bool = False

    @property
    def last_role(self) -> str | None:
        return self.messages[-1]["role"] if self.messages else None

    def add(self, origin: int | None, role: str, parts: Parts, **fields: Any) -> None:
        """A new message. Its content is a list of parts, which may grow."""
        self.messages.append({"role": role, "content": parts, **fields})
        self.origins.append(origin)

    def extend(self, origin: int, role: str, parts: Parts) -> None:
        """Parts of the last message if it has this role, as consecutive turns of one role are one turn."""
        if self.last_role == role:
            self.messages[-1]["content"] += parts
        elif parts:
            self.add(origin, role, parts)

    @contextmanager
    def rename_fields(self) -> Iterator[None]:
        """Name the body's message in errors, not the one of this conversation."""
        try:
            yield
        except InvalidRequest as error:
            found = MESSAGE_FIELD.match(error.param or "")
            if found is None or error.param is None:
                raise
            origin = self.origins[int(found[1])]
            name = "system" if origin is None else f"messages[{origin}]"
            rest = error.message.removeprefix(error.param)
            raise type(error)(error.message if rest == error.message else name + rest, name) from None


class ConversationBody(StrictModel):
    """A conversation with tools, of Anthropic's API."""

    messages: list[MessageBody]
    system: MessageContent = None
    tools: list[ToolBody] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: ThinkingBody | None = None
    output_config: OutputConfigBody | None = None
    output_format: OutputFormatBody | None = None  # older name of output_config.format
    chat_template_kwargs: dict[str, Any] | None = None

    def reasoning(self) -> ReasoningOptions:
        """Thinking is off unless the request asks for it. Raises InvalidRequest."""
        effort = self.output_config.effort if self.output_config else None
        thinking = self.thinking
        if thinking is None or thinking.type == "disabled":
            return ReasoningOptions(enabled=False, effort=effort)
        budget, name = thinking.budget_tokens, "thinking.budget_tokens"
        if thinking.type == "enabled" and (budget is None or budget < 1):
            raise InvalidRequest(f"{name} must be at least 1 with this type, got {budget}", name)
        return ReasoningOptions(enabled=True, effort=effort, budget_tokens=budget)

    @property
    def omit_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.display == "omitted"

    def constraint(self) -> Constraint:
        """Of the answer's text. Raises InvalidRequest for two."""
        config = self.output_config
        newer, older = config.format if config else None, self.output_format
        if newer is not None and older is not None:
            raise InvalidRequest(
                "output_format is the older name of output_config.format: only one of them may be given",
                "output_format",
            )
        given, name = (newer, "output_config.format") if newer is not None else (older, "output_format")
        return None if given is None else StructuredOutput.json_schema(given.schema_, field=f"{name}.schema")

    def template_kwargs(self, continues: bool) -> dict[str, Any]:
        """Arguments of ChatTemplate.render besides the messages."""
        return {
            "add_generation_prompt": not continues,
            "continue_final_message": continues,
            "options": self.chat_template_kwargs,
        }

    def conversation(self, takes_images: bool) -> MessagesConversation:
        """The messages for a template.

        takes_images  False: images in results of tools become a text; others are refused later
        Raises InvalidRequest and Unsupported, which name the block.
        """
        deferred = {
            tool.name: (f"tools[{i}]", tool)
            for i, tool in enumerate(self.tools or ())
            if tool.name and tool.defer_loading and tool.type in OWN_TOOLS
        }
        conversation = MessagesConversation(deferred)
        parts = [part for part in _texts(self.system, "system") if not _is_billing_header(part)]
        # Leading system messages join the system prompt. Later ones stay where they are: at the top they
        # would change the prefix of all that follows.
        is_leading = True
        for index, message in enumerate(self.messages):
            name = f"messages[{index}]"
            is_leading = is_leading and message.role == "system"
            if is_leading:
                parts += _texts(message.content, f"{name}.content")
                continue
            if parts:
                conversation.add(None, "system", parts)
                parts = []
            self._add(conversation, index, message, takes_images)
        if parts:
            conversation.add(None, "system", parts)
        return self._finish(conversation)

    def _add(
        self, conversation: MessagesConversation, index: int, message: MessageBody, takes_images: bool
    ) -> None:
        name = f"messages[{index}].content"
        if message.role == "system":
            role = "tool" if conversation.last_role == "tool" else "user"
            conversation.extend(index, role, _texts(message.content, name))
        elif message.role == "user":
            _UserTurn(conversation, index, takes_images).add(_blocks(message.content, name), name)
        elif message.role == "assistant":
            _add_assistant_turn(conversation, index, _blocks(message.content, name), name)
        else:
            raise InvalidRequest(
                f"messages[{index}].role must be one of {', '.join(ROLES)}, got {message.role!r:.80}",
                f"messages[{index}].role",
            )

    def _finish(self, conversation: MessagesConversation) -> MessagesConversation:
        """Set `continues`, and make lone parts texts. Raises InvalidRequest for a call without its result."""
        if conversation.last_role == "assistant":
            last, index = conversation.messages[-1], conversation.origins[-1]
            if last.get("tool_calls"):
                raise InvalidRequest(
                    f"messages[{index}] ends with tool_use, which must be followed by its tool_result",
                    f"messages[{index}]",
                )
            conversation.continues = any(part["text"] for part in last["content"])
            if not conversation.continues:
                conversation.messages.pop()
                conversation.origins.pop()
        for message in conversation.messages:
            if "reasoning_content" in message:
                message["reasoning_content"] = "\n".join(message["reasoning_content"])
            if [part["type"] for part in message["content"]] in ([], ["text"]):
                message["content"] = "".join(part["text"] for part in message["content"])
        return conversation

    def tool_use(self, referenced: Container[str]) -> tuple[ToolUse, tuple[str, ...]]:
        """The tools, and the fields of those that are skipped: Anthropic's servers would run them.

        referenced  names of deferred tools that the conversation refers to: the others cannot be called
        Raises InvalidRequest.
        """
        tools: list[tuple[str, Tool]] = []
        skipped: list[str] = []
        server_tools: set[str | None] = set()  # names
        for index, tool in enumerate(self.tools or ()):
            name = f"tools[{index}]"
            if tool.type not in OWN_TOOLS:
                skipped.append(f"{name}.{tool.type}")
                server_tools.add(tool.name)
                continue
            check_tool_form(tool, "Messages", name)
            if not tool.defer_loading or tool.name in referenced:
                tools.append((name, tool.tool(name)))
        choice = self.tool_choice or ToolChoiceBody(type="auto")
        if (choice.name is None) == (choice.type == "tool"):
            raise InvalidRequest(
                "tool_choice.name belongs to type 'tool', which needs it", "tool_choice.name"
            )
        if (choice.type == "tool" and choice.name in server_tools) or (
            choice.type == "any" and skipped and not tools
        ):
            # Claude Code asks so for a search: the model answers without it.
            choice = choice.model_copy(update={"type": "auto", "name": None})
            skipped.append("tool_choice")
        return check_tools(
            tools,
            CHOICES[choice.type],
            () if choice.name is None else (choice.name,),
            not choice.disable_parallel_tool_use,
            schema_field="input_schema",
        ), tuple(skipped)


class MessagesBody(SamplingBody, ConversationBody):
    """Anthropic's fields, and the sampling fields of the other routes."""

    peer_fields: ClassVar[Mapping[str, IgnoredField]] = MESSAGES_API
    aliases: ClassVar[Mapping[str, str]] = RequestBody.aliases
    stop: str | list[str] | None = Field(default=None, alias="stop_sequences")

    @property
    def prompt_only(self) -> bool:
        """max_tokens: 0 computes the prompt alone, for the prefix cache."""
        return self.max_tokens == 0

    def params(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
        """The parameters, and `defaults` of others. Raises InvalidRequest, which names the body's field."""
        changes: dict[str, Any] = {"max_tokens": 1} if self.prompt_only else {}
        if (constraint := self.constraint()) is not None:
            if (other := self.structured()) is not None:
                raise InvalidRequest(
                    f"{constraint.field} and {other.field} cannot both constrain the answer", other.field
                )
            changes["structured"] = constraint
        with rename_field({"stop": "stop_sequences"}):
            return self.params_with(defaults, {}, **changes)


class CountTokensBody(RequestBody, ConversationBody):
    peer_fields: ClassVar[Mapping[str, IgnoredField]] = MESSAGES_API


class _UserTurn:
    """Blocks of a user's turn: texts and images are a message, each result of a tool is one of its own."""

    def __init__(self, conversation: MessagesConversation, index: int, takes_images: bool) -> None:
        self._conversation = conversation
        self._index = index
        self._takes_images = takes_images
        self._images: Parts = []  # of results, which follow them in a message of the user

    def add(self, blocks: Sequence[Mapping[str, Any]], name: str) -> None:
        for i, block in enumerate(blocks):
            field_name = f"{name}[{i}]"
            if block["type"] == "tool_result":
                self._add_result(block, field_name)
                continue
            parts = self._parts(block, field_name)
            # A reminder after a result belongs to it: a turn of the user would end the loop of calls, and
            # templates would drop the reasoning before it.
            is_reminder = block["type"] == "text" and block["text"].lstrip().startswith(REMINDER)
            if is_reminder and self._conversation.last_role == "tool":
                self._conversation.extend(self._index, "tool", parts)
            else:
                self._flush_images()
                self._conversation.extend(self._index, "user", parts)
        self._flush_images()

    def _add_result(self, block: Mapping[str, Any], name: str) -> None:
        call_id = _text_field(block, "tool_use_id", name)
        parts: Parts = []
        for i, inner in enumerate(_blocks(block.get("content") or "", f"{name}.content")):
            field_name = f"{name}.content[{i}]"
            if inner["type"] == "tool_reference":
                parts.append(_text(self._refer(_text_field(inner, "tool_name", field_name))))
            elif inner["type"] != "image":
                parts += self._parts(inner, field_name)
            elif self._takes_images:
                self._images.append(_image(inner, field_name))
                parts.append(_text(IMAGE_BELOW))
            else:
                parts.append(_text(UNSEEN_IMAGE))
        if block.get("is_error"):
            start = parts[0]["text"][:ERROR_WORD_CHARS].lower() if parts else ""
            parts = parts if "error" in start else [_text("Error:"), *parts]
        self._conversation.add(self._index, "tool", parts or [_text("")], tool_call_id=call_id)

    def _refer(self, tool_name: str) -> str:
        """The definition of a deferred tool, in place of the reference: the prompt's head stays as it was."""
        deferred, referenced = self._conversation.deferred, self._conversation.referenced
        if tool_name not in deferred or tool_name in referenced:  # defined once: later by its name
            return tool_name
        name, body = deferred[tool_name]
        tool = check_tools([(name, body.tool(name))], schema_field="input_schema").tools[0]
        function = {"name": tool_name, "description": tool.description, "parameters": tool.parameters}
        text = json.dumps({"type": "function", "function": function}, ensure_ascii=False)
        referenced[tool_name] = len(text)
        if len(referenced) > MAX_TOOLS or sum(referenced.values()) > MAX_TOOLS_BYTES:
            raise InvalidRequest(
                f"tool_reference names more than {MAX_TOOLS} tools or {MAX_TOOLS_BYTES} bytes of them",
                "tools",
            )
        return text

    def _flush_images(self) -> None:
        images, self._images = self._images, []
        self._conversation.extend(self._index, "user", images)

    def _parts(self, block: Mapping[str, Any], name: str) -> Parts:
        """Parts of a text, image, document or search result."""
        kind = block["type"]
        if kind == "text":
            return [_text(block["text"])] if block["text"] else []
        if kind == "image":
            return [_image(block, name)]
        if kind == "document":
            return self._document(block, name)
        if kind == "search_result":
            texts = _texts(block.get("content"), f"{name}.content")
            heading = f"{block.get('title') or ''} ({block.get('source') or ''})"
            return [_text(heading), *texts]
        raise Unsupported(f"{name}: blocks of type {kind!r:.40} are not supported in a user's turn", name)

    def _document(self, block: Mapping[str, Any], name: str) -> Parts:
        name = f"{name}.source"
        source = block.get("source")
        kind = source.get("type") if isinstance(source, Mapping) else None
        title = block.get("title")
        parts = [_text(title)] if isinstance(title, str) and title else []
        if kind == "text":
            assert isinstance(source, Mapping)
            return [*parts, _text(_text_field(source, "data", name))]
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


def _add_assistant_turn(
    conversation: MessagesConversation, index: int, blocks: Sequence[Mapping[str, Any]], name: str
) -> None:
    parts: Parts = []
    thinking: list[str] = []
    calls: list[dict[str, Any]] = []
    for i, block in enumerate(blocks):
        kind, field_name = block["type"], f"{name}[{i}]"
        if kind == "text":
            parts += [_text(block["text"])] if block["text"] else []
        elif kind == "thinking":
            thinking.append(_text_field(block, "thinking", field_name) or _hidden_text(block))
        elif kind == "tool_use":
            calls.append(_call(block, field_name))
        elif kind not in SERVER_BLOCKS and not kind.endswith(SERVER_RESULT):
            raise Unsupported(
                f"{field_name}: blocks of type {kind!r:.40} are not supported in an assistant's turn",
                field_name,
            )
    if conversation.last_role != "assistant":
        conversation.add(index, "assistant", [])
    message = conversation.messages[-1]
    message["content"] += parts
    if text := "\n".join(filter(None, thinking)):
        message.setdefault("reasoning_content", []).append(text)
    if calls:
        message.setdefault("tool_calls", []).extend(calls)


def _call(block: Mapping[str, Any], name: str) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise InvalidRequest(f"{name}.input must be an object, got {arguments!r:.80}", f"{name}.input")
    function = {"name": _text_field(block, "name", name), "arguments": arguments}
    return {"id": _text_field(block, "id", name), "type": "function", "function": function}


def hide_thinking(text: str) -> str:
    """A signature that holds the text, for thinking with display "omitted"."""
    return HIDDEN_THINKING + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def _hidden_text(block: Mapping[str, Any]) -> str:
    """The text in a signature; "" for any other signature."""
    signature = block.get("signature")
    if not isinstance(signature, str) or not signature.startswith(HIDDEN_THINKING):
        return ""
    try:
        return base64.b64decode(signature.removeprefix(HIDDEN_THINKING), validate=True).decode()
    except (binascii.Error, ValueError):
        return ""


def _image(block: Mapping[str, Any], name: str) -> dict[str, Any]:
    """An image part of chat. Raises InvalidRequest, Unsupported."""
    source, name = block.get("source"), f"{name}.source"
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind not in ("base64", "url"):
        raise Unsupported(f"{name} must be of type base64 or url, got {kind!r:.40}", name)
    assert isinstance(source, Mapping)
    if kind == "url":
        url = _text_field(source, "url", name)
    else:
        media_type = _text_field(source, "media_type", name)
        url = f"data:{media_type};base64,{_text_field(source, 'data', name)}"
    return {"type": "image_url", "image_url": {"url": url}}


def _is_billing_header(part: Mapping[str, Any]) -> bool:
    return bool(part["text"].startswith(BILLING_HEADER))


def _texts(content: Any, name: str) -> Parts:
    """Text parts of a text, or of a list of text blocks. Raises InvalidRequest for others."""
    blocks = [] if content is None else _blocks(content, name)
    for i, block in enumerate(blocks):
        if block["type"] != "text":
            raise InvalidRequest(
                f"{name}[{i}] must be a text block, got type {block['type']!r:.40}", f"{name}[{i}]"
            )
    return [_text(block["text"]) for block in blocks if block["text"]]


def _blocks(content: Any, name: str) -> Sequence[Mapping[str, Any]]:
    """Blocks of a content, each with a type, and texts with a text. Raises InvalidRequest."""
    if isinstance(content, str):
        return [_text(content)]
    if not isinstance(content, list):
        raise InvalidRequest(f"{name} must be a text or a list of blocks, got {content!r:.80}", name)
    for i, block in enumerate(content):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise InvalidRequest(
                f"{name}[{i}] must be an object with a type, got {block!r:.80}", f"{name}[{i}]"
            )
        if block["type"] == "text":
            _text_field(block, "text", f"{name}[{i}]")
    return content


def _text_field(block: Mapping[str, Any], key: str, name: str) -> str:
    value = block.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}.{key} must be a text, got {value!r:.80}", f"{name}.{key}")
    return value


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}
