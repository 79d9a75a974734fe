"""Bodies of /v1/responses and /v1/responses/input_tokens: items, tools, and fields that responses repeat."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from foreword.chat_formats.tool_validation import check_num_tools, check_tools, parse_choice
from foreword.chat_formats.tools import ReasoningOptions, Tool, ToolUse
from foreword.core.params import SamplingParams
from foreword.core.structured_output import StructuredOutput
from foreword.errors import InvalidRequest, Unsupported, shown
from foreword.server.apis.body import (
    TABLES,
    RequestBody,
    StrictModel,
    check_tool_form,
    count_parts,
    custom_input_grammar,
)
from foreword.server.apis.chat.body import reasoning_options
from foreword.server.apis.responses.items import (
    HOSTED_ITEMS,
    InputItem,
    NamedItem,
    join_namespace,
    read_item,
    required,
)
from foreword.server.apis.sampling import NO_DEFAULTS, SamplingBody
from foreword.server.apis.structured import Constraint, Schema, SchemaHolder, StructuredOutputsBody

OWN_TOOLS = ("function", "custom")
INCLUDABLE = (
    *("reasoning.encrypted_content", "message.output_text.logprobs"),
    # What belongs to tools of other servers, and images of the input, which are always included.
    *("message.input_image.image_url", "code_interpreter_call.outputs", "file_search_call.results"),
    *("computer_call_output.output.image_url", "web_search_call.results", "web_search_call.action.sources"),
)
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512  # pairs, characters, characters


class FlatTool(StrictModel):
    """A function, a custom tool, or a namespace of both; other types are tools that other servers run."""

    is_lenient: ClassVar[bool] = True
    type: str | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # true refuses what cannot be enforced; many clients leave it out
    format: dict[str, Any] | None = None  # grammar of a custom tool's input
    tools: list[FlatTool] | None = None  # members of a namespace

    def tool(self, field_name: str, namespace: str = "") -> tuple[str, Tool]:
        """The tool and its field. Raises InvalidRequest, Unsupported."""
        check_tool_form(self, "Responses", field_name)
        if self.type not in OWN_TOOLS:
            raise Unsupported(
                f"{field_name}.type must be function or custom, got {shown(self.type)}", f"{field_name}.type"
            )
        name = join_namespace(namespace, required(self.name, "name", field_name))
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
    peer_fields = TABLES["response_reasoning"]
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

    def num_parts(self) -> tuple[int, str]:
        """Parts of an input that is not cut to the context, and its field."""
        items = self.input if isinstance(self.input, list) and self.truncation != "auto" else ()
        return count_parts(items), "input"

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
                items.append((name, read_item(item, name)))
        return items, skipped

    def tool_use(self) -> tuple[ToolUse, list[str]]:
        """The tools, and the fields of those that are skipped. Raises InvalidRequest, Unsupported."""
        tools: list[tuple[str, Tool]] = []
        skipped: list[str] = []
        check_num_tools(sum(len(tool.tools or (tool,)) for tool in self.tools or ()))
        for index, tool in enumerate(self.tools or ()):
            name = f"tools[{index}]"
            if tool.type == "namespace":
                space = required(tool.name, "name", name)
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

    def constraint(self) -> Constraint:
        """The constraint on the answer's text. Raises InvalidRequest."""
        return self.text.format.constraint() if self.text and self.text.format else None

    def reasoning_options(self) -> ReasoningOptions:
        """Raises Unsupported for an effort that is not OpenAI's, InvalidRequest for a negative budget."""
        given = self.reasoning or ReasoningFields()
        if given.max_tokens is not None and given.max_tokens < 0:
            name = "reasoning.max_tokens"
            raise InvalidRequest(f"{name} must be at least 0, got {given.max_tokens}", name)
        return reasoning_options(given.enabled, given.effort, given.max_tokens, "reasoning.effort")


class InputTokensBody(ItemsBody, RequestBody):
    peer_fields = TABLES["responses"]

    def check_constraints(self) -> None:
        self.constraint()


class ResponsesBody(SamplingBody, ItemsBody):
    """OpenAI's fields, and the sampling fields of the other routes."""

    peer_fields = TABLES["responses"]
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # no effect: it limits tools that a server runs
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
        return [self.constraint(), *super()._constraints(options)]

    def _check_fields(self) -> None:
        try:
            json.dumps(self.tool_choice, allow_nan=False)  # the response repeats it
        except ValueError as error:
            raise InvalidRequest(f"tool_choice cannot be written as JSON: {error}", "tool_choice") from None
        for index, name in enumerate(self.include or ()):
            if name not in INCLUDABLE:
                field = f"include[{index}]"
                raise InvalidRequest(
                    f"{field} must be one of {', '.join(INCLUDABLE)}, got {shown(name)}", field
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
