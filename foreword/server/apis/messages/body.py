"""Bodies of /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from foreword.chat_formats.tool_validation import Choice, check_num_tools, check_tools
from foreword.chat_formats.tools import ReasoningOptions, Tool, ToolUse
from foreword.core.params import SamplingParams
from foreword.core.structured_output import StructuredOutput
from foreword.errors import InvalidRequest
from foreword.server.apis.body import TABLES, RequestBody, StrictModel, check_tool_form, count_parts
from foreword.server.apis.chat.body import MessageContent
from foreword.server.apis.messages.conversation import MessagesConversation
from foreword.server.apis.sampling import NO_DEFAULTS, SamplingBody
from foreword.server.apis.structured import Constraint, SchemaHolder, StructuredOutputsBody
from foreword.server.http.errors import rename_field

OWN_TOOLS = (None, "custom", "function")  # types of tools that the client runs
CHOICES: Mapping[str, Choice] = {"auto": "auto", "any": "required", "tool": "required", "none": "none"}

Schema = dict[str, Any]


class MessageBody(StrictModel):
    """One turn; `content` is a text or a list of blocks, whose other fields (cache_control) are hints."""

    is_lenient: ClassVar[bool] = True
    role: str
    content: MessageContent = None


class ThinkingBody(StrictModel):
    type: Literal["enabled", "adaptive", "between_tools", "disabled"]
    budget_tokens: int | None = None  # required with type "enabled"
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
    name: str | None = None  # required with type "tool"
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

    def num_parts(self) -> tuple[int, str]:
        return count_parts(self.messages), "messages"

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
        """The constraint on the answer's text. Raises InvalidRequest for two."""
        config = self.output_config
        newer, older = config.format if config else None, self.output_format
        if newer is not None and older is not None:
            raise InvalidRequest(
                "output_format is the older name of output_config.format: only one of them may be given",
                "output_format",
            )
        given, name = (newer, "output_config.format") if newer is not None else (older, "output_format")
        return None if given is None else StructuredOutput.json_schema(given.schema_, field=f"{name}.schema")

    def conversation(self, takes_images: bool) -> MessagesConversation:
        """The messages for a template. Raises InvalidRequest and Unsupported, which name the block.

        takes_images  as of ConversationBuilder
        """
        deferred = {
            tool.name: (f"tools[{i}]", tool.tool)
            for i, tool in enumerate(self.tools or ())
            if tool.name and tool.defer_loading and tool.type in OWN_TOOLS
        }
        conversation = MessagesConversation(takes_images, deferred)
        conversation.add_head(self.system)
        for index, message in enumerate(self.messages):
            conversation.add_turn(message.role, message.content, f"messages[{index}]")
        conversation.finish()
        return conversation

    def tool_use(self, referenced: Container[str]) -> tuple[ToolUse, tuple[str, ...]]:
        """The tools, and the fields of those that are skipped: Anthropic's servers would run them.

        referenced  names of deferred tools that the conversation refers to: the others cannot be called
        Raises InvalidRequest.
        """
        tools: list[tuple[str, Tool]] = []
        skipped: list[str] = []
        server_tools: set[str | None] = set()  # names
        check_num_tools(sum(not tool.defer_loading for tool in self.tools or ()))
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

    peer_fields = TABLES["messages_api"]
    aliases: ClassVar[Mapping[str, str]] = RequestBody.aliases
    stop: str | list[str] | None = Field(default=None, alias="stop_sequences")

    @property
    def prompt_only(self) -> bool:
        """max_tokens: 0 computes the prompt alone, for the prefix cache."""
        return self.max_tokens == 0

    def params(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
        """The parameters, and `defaults` of others. Raises InvalidRequest, which names the body's field."""
        changes = {"max_tokens": 1} if self.prompt_only else {}
        with rename_field({"stop": "stop_sequences"}):
            return self.params_with(defaults, {}, **changes)

    def _constraints(self, options: StructuredOutputsBody) -> list[Constraint]:
        return [self.constraint(), *super()._constraints(options)]


class CountTokensBody(RequestBody, ConversationBody):
    peer_fields = TABLES["messages_api"]

    def check_constraints(self) -> None:
        super().check_constraints()
        self.constraint()
