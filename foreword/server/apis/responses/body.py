"""Bodies of /v1/responses and /v1/responses/input_tokens: items, tools, and a conversation for templates."""

from __future__ import annotations

import base64
import binascii
import json
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import Field

from foreword.chat_formats.tool_validation import check_tools, parse_choice
from foreword.chat_formats.tools import ReasoningOptions, Tool, ToolUse
from foreword.core.params import SamplingParams
from foreword.core.structured_output import StructuredOutput
from foreword.errors import InvalidRequest, Unsupported
from foreword.server.apis.body import RequestBody, StrictModel
from foreword.server.apis.chat.body import MessageContent, reasoning_options
from foreword.server.apis.ignored_fields import (
    RESPONSE_ITEM,
    RESPONSE_REASONING,
    RESPONSES,
    IgnoredField,
)
from foreword.server.apis.sampling import NO_DEFAULTS, SamplingBody
from foreword.server.apis.structured import Constraint, Schema, SchemaHolder, StructuredOutputsBody
from foreword.server.apis.tools import check_arguments, check_tool_form, custom_input_grammar

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
OWN_TOOLS = ("function", "custom")
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
INCLUDABLE = (
    *("reasoning.encrypted_content", "message.output_text.logprobs"),
    # What belongs to tools of other servers, and images of the input, which are always included.
    *("message.input_image.image_url", "code_interpreter_call.outputs", "file_search_call.results"),
    *("computer_call_output.output.image_url", "web_search_call.results", "web_search_call.action.sources"),
)
REASONING_VERSION = "foreword-1:"  # starts the base64 of a reasoning
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # pairs, characters, characters
IMAGE_BELOW, UNSEEN_IMAGE = "(an image, see below)", "(an image, which this model cannot see)"
MESSAGE_FIELD = re.compile(r"messages\[(\d+)\]")

Item = dict[str, Any]
NamedItem = tuple[str, Item]  # with its field in the body
Part = dict[str, Any]


class InputItem(StrictModel):
    """One item of `input`; which fields it needs depends on its type."""

    is_lenient: ClassVar[bool] = True
    peer_fields: ClassVar[Mapping[str, IgnoredField]] = RESPONSE_ITEM
    type: str | None = None  # default: message, with a role
    id: str | None = None
    role: str | None = None
    content: MessageContent = None  # of a message, or a list of reasoning_text parts
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: Any = None
    input: str | None = None
    output: Any = None
    summary: Any = None
    encrypted_content: str | None = None


class FlatTool(StrictModel):
    """A function, a custom tool, or a namespace of both; other types are tools that other servers run."""

    is_lenient: ClassVar[bool] = True
    type: str | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # true refuses what cannot be enforced; many clients leave it out
    format: dict[str, Any] | None = None  # of a custom tool's input
    tools: list[FlatTool] | None = None  # of a namespace

    def tool(self, field_name: str, namespace: str = "") -> tuple[str, Tool]:
        """The tool and its field. Raises InvalidRequest, Unsupported."""
        check_tool_form(self, "Responses", field_name)
        if self.type not in OWN_TOOLS:
            raise Unsupported(
                f"{field_name}.type must be function or custom, got {self.type!r:.80}", f"{field_name}.type"
            )
        name = join_namespace(namespace, _required(self.name, "name", field_name))
        if self.type == "custom":
            grammar = custom_input_grammar(self.format, f"{field_name}.format")
            return field_name, Tool(name, self.description or "", is_custom=True, input_grammar=grammar)
        strict = self.strict is True
        return field_name, Tool(name, self.description or "", self.parameters or None, strict)

    def to_response(self) -> dict[str, Any]:
        """The tool as the response repeats it."""
        fields = {"type": self.type, "name": self.name}
        if self.type == "function":
            strict = self.strict is True
            described = {"description": self.description, "parameters": self.parameters, "strict": strict}
            return {**fields, **described}
        if self.type == "namespace":
            tools = [tool.to_response() for tool in self.tools or ()]
            return {**fields, "description": self.description or "", "tools": tools}
        described = {} if self.description is None else {"description": self.description}
        format_ = self.format or {}
        kept = {"type": "text"}
        if format_.get("type") == "grammar":
            kept = {name: format_.get("grammar", format_)[name] for name in ("syntax", "definition")}
        return {**fields, **described, "format": {**kept, "type": format_.get("type") or "text"}}


class ReasoningFields(StrictModel):
    peer_fields: ClassVar[Mapping[str, IgnoredField]] = RESPONSE_REASONING
    effort: str | None = None
    summary: str | None = None  # a hint: nothing is summarized here
    enabled: bool | None = None  # OpenRouter's, as the next one
    max_tokens: int | None = None  # thinking budget


class TextFormat(SchemaHolder):
    """OpenAI's `response_format` in flat form. Every schema is enforced, `strict` or not."""

    schema_form: ClassVar[str] = '{"type": "json_schema", "name": ..., "schema": ...}'
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Schema = Field(default=None, alias="schema")
    strict: bool | None = None

    def constraint(self) -> Constraint:
        """Raises InvalidRequest."""
        if self.type == "json_object":
            return StructuredOutput.json_object(field="text.format")
        if self.type == "text":
            return None
        if self.schema_ is None:
            raise InvalidRequest("text.format.schema is required with this type", "text.format.schema")
        return StructuredOutput.json_schema(self.schema_, field="text.format.schema")

    def to_response(self) -> dict[str, Any]:
        """The format as the response repeats it."""
        if self.type != "json_schema":
            return {"type": self.type}
        fields = {"name": self.name or "", "schema": self.schema_, "strict": self.strict is True}
        described = {} if self.description is None else {"description": self.description}
        return {"type": self.type, **fields, **described}


class TextBody(StrictModel):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None  # a hint without effect


class ItemsBody(StrictModel):
    """A conversation with tools, of OpenAI's Responses API."""

    input: str | list[InputItem] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[FlatTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningFields | None = None
    text: TextBody | None = None
    truncation: Literal["auto", "disabled"] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def items(self) -> tuple[list[NamedItem], list[str]]:
        """The items with an id and the field of each, and the fields that are skipped.

        An item_reference stays one; the store resolves it. Raises InvalidRequest, Unsupported.
        """
        given = self.input or []
        if isinstance(given, str):
            given = [InputItem(role="user", content=given)]
        items: list[NamedItem] = []
        skipped: list[str] = []
        for index, item in enumerate(given):
            name = f"input[{index}]"
            if item.type in HOSTED_ITEMS:
                skipped.append(f"{name}.{item.type}")
            else:
                items.append((name, _read_item(item, name)))
        return items, skipped

    def tool_use(self) -> tuple[ToolUse, list[str]]:
        """The tools, and the fields of those that are skipped. Raises InvalidRequest, Unsupported."""
        tools: list[tuple[str, Tool]] = []
        skipped: list[str] = []
        for index, tool in enumerate(self.tools or ()):
            name = f"tools[{index}]"
            if tool.type == "namespace":
                space = _required(tool.name, "name", name)
                members = enumerate(tool.tools or ())
                tools += [member.tool(f"{name}.tools[{i}]", space) for i, member in members]
            elif tool.type in (None, *OWN_TOOLS):
                tools.append(tool.tool(name))
            else:
                skipped.append(f"{name}.{tool.type}")
        given = self._choice_of_own_tools()
        if given is None and self.tool_choice is not None:
            skipped.append("tool_choice")
        choice, allowed = parse_choice(given, "tool_choice")
        return check_tools(tools, choice, allowed, self.parallel_tool_calls is not False), skipped

    def _choice_of_own_tools(self) -> str | dict[str, Any] | None:
        """`tool_choice` without skipped tools: None if it asks for one, or for any of only such."""
        choice = self.tool_choice
        types = {tool.type for tool in self.tools or ()}
        hosted = types - {*OWN_TOOLS, "namespace"}
        if (isinstance(choice, dict) and str(choice.get("type")) in hosted) or (
            choice == "required" and types and types == hosted
        ):
            return None
        allowed = choice.get("tools") if isinstance(choice, dict) else None
        if not isinstance(choice, dict) or not isinstance(allowed, list):
            return choice
        kinds = [tool.get("type") if isinstance(tool, dict) else None for tool in allowed]
        own = [tool for tool, kind in zip(allowed, kinds, strict=True) if kind in (None, *OWN_TOOLS)]
        return {**choice, "tools": own} if own or not allowed else "none"

    @property
    def namespaces(self) -> dict[str, tuple[str, str]]:
        """(namespace, name) of the tools in namespaces, by the name that the model calls."""
        return {
            join_namespace(tool.name, member.name or ""): (tool.name, member.name or "")
            for tool in self.tools or ()
            if tool.type == "namespace" and tool.name
            for member in tool.tools or ()
        }

    def reasoning_options(self) -> ReasoningOptions:
        """Raises Unsupported for an effort that is not OpenAI's, InvalidRequest for a negative budget."""
        given = self.reasoning or ReasoningFields()
        if given.max_tokens is not None and given.max_tokens < 0:
            name = "reasoning.max_tokens"
            raise InvalidRequest(f"{name} must be at least 0, got {given.max_tokens}", name)
        return reasoning_options(given.enabled, given.effort, given.max_tokens, "reasoning.effort")

    def template_kwargs(self) -> dict[str, Any]:
        """Arguments of ChatTemplate.render besides the messages."""
        return {
            "add_generation_prompt": True,
            "continue_final_message": False,
            "options": self.chat_template_kwargs,
        }


class InputTokensBody(ItemsBody, RequestBody):
    peer_fields: ClassVar[Mapping[str, IgnoredField]] = RESPONSES


class ResponsesBody(SamplingBody, ItemsBody):
    """OpenAI's fields, and the sampling fields of the other routes."""

    peer_fields: ClassVar[Mapping[str, IgnoredField]] = RESPONSES
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # of tools that the server runs: there are none
    top_logprobs: int | None = None
    include: list[str] | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def includes(self, name: str) -> bool:
        return name in (self.include or ())

    def response_fields(self) -> dict[str, Any]:
        """Fields of the request that its response repeats."""
        text, reasoning = self.text or TextBody(), self.reasoning or ReasoningFields()
        format_ = text.format or TextFormat(type="text")
        fields = {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "max_tool_calls": self.max_tool_calls,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": {"effort": reasoning.effort, "summary": reasoning.summary},
            "safety_identifier": self.safety_identifier,
            "text": {"format": format_.to_response(), "verbosity": text.verbosity or "medium"},
            "tool_choice": "auto" if self.tool_choice is None else self.tool_choice,
            "tools": [
                tool.to_response() for tool in self.tools or () if tool.type in (*OWN_TOOLS, "namespace")
            ],
            "top_logprobs": self.top_logprobs or 0,
            "truncation": self.truncation or "disabled",
        }
        return fields if self.user is None else {**fields, "user": self.user}

    def params(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
        """The parameters, and `defaults` of others. Raises InvalidRequest, which names the body's field."""
        self._check_fields()
        wants_logprobs = self.includes("message.output_text.logprobs")
        if self.top_logprobs and not wants_logprobs:
            raise InvalidRequest(
                'top_logprobs needs include: ["message.output_text.logprobs"]', "top_logprobs"
            )
        changes: dict[str, Any] = {"logprobs": self.top_logprobs or 0 if wants_logprobs else None}
        names = {"logprobs": "top_logprobs"}
        if self.max_output_tokens is not None:
            changes["max_tokens"], names["max_tokens"] = self.max_output_tokens, "max_output_tokens"
        return self.params_with(defaults, names, **changes)

    def _constraints(self, options: StructuredOutputsBody) -> list[Constraint]:
        text = self.text.format.constraint() if self.text and self.text.format else None
        return [text, *super()._constraints(options)]

    def _check_fields(self) -> None:
        try:
            json.dumps(self.tool_choice, allow_nan=False)  # the response repeats it
        except ValueError as error:
            raise InvalidRequest(f"tool_choice cannot be written as JSON: {error}", "tool_choice") from None
        for index, name in enumerate(self.include or ()):
            if name not in INCLUDABLE:
                field = f"include[{index}]"
                raise InvalidRequest(
                    f"{field} must be one of {', '.join(INCLUDABLE)}, got {name!r:.80}", field
                )
        pairs = self.metadata or {}
        if (
            len(pairs) > MAX_METADATA
            or max(map(len, pairs), default=0) > MAX_METADATA_KEY
            or max(map(len, pairs.values()), default=0) > MAX_METADATA_VALUE
        ):
            raise InvalidRequest(
                f"metadata may hold {MAX_METADATA} pairs, with keys of {MAX_METADATA_KEY} and values of "
                f"{MAX_METADATA_VALUE} characters",
                "metadata",
            )


def new_id(item_type: str) -> str:
    return f"{ID_PREFIXES[item_type]}_{uuid.uuid4().hex}"


def _read_item(item: InputItem, name: str) -> Item:
    """An item as the store keeps it and GET returns it. Raises InvalidRequest, Unsupported."""
    kind = item.type or ("message" if item.role is not None else "item_reference" if item.id else "message")
    if kind == "item_reference":
        return {"type": kind, "id": _required(item.id, "id", name)}
    if kind not in ID_PREFIXES:
        known = ", ".join((*ID_PREFIXES, "item_reference"))
        raise Unsupported(f"{name}.type must be one of {known}, got {kind!r:.80}", f"{name}.type")
    read: Item = {"id": item.id or new_id(kind), "type": kind}
    if kind == "message":
        return read | _read_message(item, name) | {"status": "completed"}
    if kind == "reasoning":
        return read | _read_reasoning(item, name)
    read["call_id"] = _required(item.call_id, "call_id", name)
    if kind in RESULTS:
        return read | {"output": _read_output(item.output, f"{name}.output"), "status": "completed"}
    read["name"] = _required(item.name, "name", name)
    if item.namespace is not None:
        read["namespace"] = item.namespace
    if kind == "custom_tool_call":
        check_arguments(item.input, f"{name}.input")
        return read | {"input": item.input or "", "status": "completed"}
    arguments = "{}" if item.arguments is None else item.arguments
    if not isinstance(arguments, str):
        raise InvalidRequest(
            f"{name}.arguments must be a JSON text, got {arguments!r:.80}", f"{name}.arguments"
        )
    check_arguments(arguments, f"{name}.arguments")
    _check_json(arguments or "{}", f"{name}.arguments")
    return read | {"arguments": arguments, "status": "completed"}


def _read_message(item: InputItem, name: str) -> Item:
    if item.role not in ROLES:
        raise InvalidRequest(
            f"{name}.role must be one of {', '.join(ROLES)}, got {item.role!r:.80}", f"{name}.role"
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
        raise InvalidRequest(f"{name} must be a text or a list of parts, got {content!r:.80}", name)
    return [_read_part(part, f"{name}[{i}]", allow_images) for i, part in enumerate(content)]


def _read_part(part: Any, name: str, allow_images: bool) -> Part:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise InvalidRequest(f"{name} must be an object with a type, got {part!r:.80}", name)
    if kind in TEXT_PARTS:
        return {"type": "input_text", "text": _text_field(part, "text", name)}
    if kind == "refusal":
        return {"type": "refusal", "refusal": _text_field(part, "refusal", name)}
    if kind == "input_image" and allow_images:
        if part.get("image_url") is None:
            raise Unsupported(f"{name}.image_url is required: files are not stored here", f"{name}.image_url")
        detail = part.get("detail") or "auto"
        if detail not in ("auto", "low", "high", "original"):
            raise InvalidRequest(
                f"{name}.detail must be auto, low, high or original, got {detail!r:.80}", f"{name}.detail"
            )
        return {"type": kind, "image_url": _text_field(part, "image_url", name), "detail": detail}
    known = "input_text and input_image" if allow_images else "text, without images"
    raise Unsupported(f"{name}: parts of type {kind!r:.40} are not supported here; only {known}", name)


def _read_reasoning(item: InputItem, name: str) -> Item:
    content = _reasoning_parts(item.content, "reasoning_text", f"{name}.content")
    read: Item = {"summary": _reasoning_parts(item.summary, "summary_text", f"{name}.summary")}
    if content:
        read["content"] = content
    if item.encrypted_content is not None:
        read["encrypted_content"] = item.encrypted_content
        _decode_reasoning(item.encrypted_content, f"{name}.encrypted_content")
    return read | {"status": "completed"}


def _reasoning_parts(given: Any, kind: str, name: str) -> list[Part]:
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(part, dict) for part in given):
        raise InvalidRequest(f"{name} must be a list of parts, got {given!r:.80}", name)
    return [{"type": kind, "text": _text_field(part, "text", f"{name}[{i}]")} for i, part in enumerate(given)]


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
        raise InvalidRequest(f"{name} must be the text of a JSON object, got {text!r:.80}", name)


def _required(value: str | None, key: str, name: str) -> str:
    if value is None:
        raise InvalidRequest(f"{name}.{key} is required", f"{name}.{key}")
    return value


def _text_field(given: Mapping[str, Any], key: str, name: str) -> str:
    value = given.get(key)
    if not isinstance(value, str):
        raise InvalidRequest(f"{name}.{key} must be a text, got {value!r:.80}", f"{name}.{key}")
    return value


def join_namespace(namespace: str, name: str) -> str:
    """The name of a tool for the model."""
    return f"{namespace}.{name}" if namespace else name


def encode_reasoning(text: str) -> str:
    """`encrypted_content` of a reasoning: no secret, but opaque to clients, which send it back as it is."""
    return REASONING_VERSION + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def _decode_reasoning(content: str, field_name: str) -> str:
    """The text; "" if another server wrote it. Raises InvalidRequest for a damaged one."""
    if not content.startswith(REASONING_VERSION):
        return ""
    try:
        return base64.b64decode(content.removeprefix(REASONING_VERSION), validate=True).decode()
    except (binascii.Error, ValueError):
        raise InvalidRequest(f"{field_name} is damaged: send it as it was received", field_name) from None


@dataclass(slots=True)
class ItemConversation:
    """Items become messages in the form of chat templates.

    Neighbouring items of one role become one message: reasoning, text and calls of one answer, and the
    messages of one turn of the user, since some templates insist that roles alternate. Late system messages
    become a part of the turn that they follow: at the top they would change the prefix of all that follows.

    takes_images  False: images in results of tools become a text; others are refused later
    messages      those of the assistant hold lists of texts until finish()
    origins       the field that errors name, for each message
    """

    takes_images: bool
    messages: list[dict[str, Any]] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    _last_type: str = ""  # of the item before
    _images: list[Part] = field(default_factory=list)  # of results, which follow them as the user's

    def add_system(self, text: str, origin: str) -> None:
        """`instructions`, and leading messages of the roles system and developer."""
        last = self.messages[-1] if self.messages else None
        if last is None:
            self._add("system", [_text_part(text)], origin)
        elif last["role"] in ("system", "tool"):
            last["content"].append(_text_part(text))
        else:
            self._add_user([_text_part(text)], origin)

    def add(self, items: Iterable[NamedItem]) -> None:
        """Raises InvalidRequest for damaged reasoning."""
        for origin, item in items:
            self._add_item(item, origin)
            self._last_type = item["type"]

    def finish(self) -> list[dict[str, Any]]:
        """The messages; an empty one of the user if there is none, since Codex probes with an empty input."""
        self._flush_images()
        for message in self.messages:
            if message["role"] == "assistant":
                for name in ("content", "reasoning_content"):
                    message |= {name: "".join(message[name])} if name in message else {}
        if not any(message["role"] != "system" for message in self.messages):
            self._add("user", [_text_part("")], "input")
        return self.messages

    @contextmanager
    def rename_fields(self) -> Iterator[None]:
        """Name the item in errors, not the message that it became."""
        try:
            yield
        except InvalidRequest as error:
            found = MESSAGE_FIELD.match(error.param or "")
            if error.param is None or (found is None and error.param != "messages"):
                raise
            name = "input" if found is None else self.origins[int(found[1])]
            rest = error.message.removeprefix(error.param)
            raise type(error)(error.message if rest == error.message else name + rest, name) from None

    def _add_item(self, item: Item, origin: str) -> None:
        kind = item["type"]
        if kind in RESULTS:
            self._add_result(item, origin)
            return
        self._flush_images()
        if kind == "message" and item["role"] == "user":
            self._add_user(list(map(_template_part, item["content"])), origin)
        elif kind == "message" and item["role"] != "assistant":
            for part in item["content"]:
                self.add_system(_template_part(part)["text"], origin)
        else:
            self._add_to_answer(item, origin)

    def _add_user(self, parts: list[Part], origin: str) -> None:
        if self.messages and self.messages[-1]["role"] == "user":
            self.messages[-1]["content"] += parts
        else:
            self._add("user", parts, origin)

    def _add_to_answer(self, item: Item, origin: str) -> None:
        """Reasoning, text or a call, of the assistant's last message if nothing came between."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self._add("assistant", [], origin)
        message = self.messages[-1]
        if item["type"] == "reasoning":
            message.setdefault("reasoning_content", []).append(_reasoning_text(item, origin))
        elif item["type"] == "message":
            # Texts around a call are one text, as in chat; messages of a client are lines.
            texts = [_template_part(part)["text"] for part in item["content"]]
            separator = "\n" if message["content"] and self._last_type == "message" else ""
            message["content"] += filter(None, (separator, "\n".join(texts)))
        else:
            name = join_namespace(item.get("namespace", ""), item["name"])
            custom = item["type"] == "custom_tool_call"
            arguments = {"input": item["input"]} if custom else item["arguments"]
            function = {"name": name, "arguments": arguments}
            call = {"id": item["call_id"], "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)

    def _add_result(self, item: Item, origin: str) -> None:
        output = item["output"]
        given = [{"type": "input_text", "text": output}] if isinstance(output, str) else output
        parts = []
        for part in map(_template_part, given):
            if part["type"] == "image_url":
                if self.takes_images:
                    self._images.append(part)
                part = _text_part(IMAGE_BELOW if self.takes_images else UNSEEN_IMAGE)
            parts.append(part)
        self._add("tool", parts or [_text_part("")], origin, tool_call_id=item["call_id"])

    def _flush_images(self) -> None:
        images, self._images = self._images, []
        if images:
            self._add_user(images, self.origins[-1])

    def _add(self, role: str, content: list[Any], origin: str, **fields: Any) -> None:
        self.messages.append({"role": role, "content": content, **fields})
        self.origins.append(origin)


def _template_part(part: Part) -> Part:
    if part["type"] == "input_image":
        detail = "high" if part["detail"] == "original" else part["detail"]
        return {"type": "image_url", "image_url": {"url": part["image_url"], "detail": detail}}
    return _text_part(part["refusal"] if part["type"] == "refusal" else part["text"])


def _text_part(text: str) -> Part:
    return {"type": "text", "text": text}


def _reasoning_text(item: Item, origin: str) -> str:
    """The reasoning; a summary only in its absence, as other servers send it."""
    texts = [part["text"] for part in item.get("content", ())]
    if not texts and (text := _decode_reasoning(item.get("encrypted_content", ""), origin)):
        texts = [text]
    return "".join(texts) or "\n\n".join(part["text"] for part in item["summary"])
