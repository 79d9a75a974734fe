"""The body of /v1/chat/completions, and the messages that /tokenize shares with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema

from foreword.chat_formats.tool_validation import check_num_tools, check_tools, parse_choice
from foreword.chat_formats.tools import NO_TOOLS, ReasoningOptions, Tool, ToolUse
from foreword.core.params import SamplingParams
from foreword.errors import InvalidRequest, Unsupported, shown
from foreword.server.apis.body import (
    TABLES,
    StrictModel,
    check_arguments,
    check_tool_form,
    count_parts,
    custom_input_grammar,
)
from foreword.server.apis.sampling import NO_DEFAULTS, SamplingBody
from foreword.tokenizer.messages import num_unknown_fields

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # OpenAI's and Anthropic's
NO_BUDGET = -1  # a thinking budget without a limit
SPLIT_FORMATS = ("auto", "deepseek")  # llama-server's `reasoning_format` of reasoning in a field of its own
MessageContent = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


class CalledFunction(StrictModel):
    is_lenient: ClassVar[bool] = True
    name: str
    arguments: str | dict[str, Any] | None = None  # OpenAI's is a JSON text


class CalledCustom(StrictModel):
    is_lenient: ClassVar[bool] = True
    name: str
    input: str = ""


class ToolCallBody(StrictModel):
    is_lenient: ClassVar[bool] = True
    id: str | None = None
    type: str | None = None
    function: CalledFunction | None = None
    custom: CalledCustom | None = None

    def to_template(self, field: str) -> dict[str, Any]:
        """The call for chat templates, with the arguments as an object where their JSON is one.

        Raises InvalidRequest for a call without a name, or with arguments that are too long.
        """
        if self.custom is not None:
            name, given = self.custom.name, {"input": self.custom.input}
            check_arguments(self.custom.input, f"{field}.custom.input")
        elif self.function is not None:
            name = self.function.name
            check_arguments(self.function.arguments, f"{field}.function.arguments")
            given = _parse_arguments(self.function.arguments)
        else:
            raise InvalidRequest(f"{field}.function is required", f"{field}.function")
        call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": given}}
        return call if self.id is None else {**call, "id": self.id}


def _parse_arguments(arguments: str | dict[str, Any] | None) -> Any:
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


class Message(StrictModel):
    """One message; `content` is a text or a list of text parts, for a user also of image_url parts."""

    is_lenient: ClassVar[bool] = True
    peer_fields = TABLES["message"]
    role: str
    content: MessageContent = None
    name: str | None = None
    refusal: str | None = None  # replaces the content
    reasoning: str | None = None  # precedes the assistant's content: vLLM, Ollama, OpenRouter
    reasoning_content: str | None = None  # its other name; the first that is not empty counts
    thinking: str | None = None
    tool_calls: list[ToolCallBody] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None  # OpenAI's older form of one tool call

    def num_unknown(self) -> int:
        """Unknown fields of the message, and of the parts of its content."""
        return super().num_unknown() + num_unknown_fields(self.content)

    def to_template(self, field: str) -> dict[str, Any]:
        """The message for chat templates; `developer` is OpenAI's newer name of `system`."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        content = self.content or self.refusal or self.content
        calls = [call.to_template(f"{field}.tool_calls[{i}]") for i, call in enumerate(self.tool_calls or ())]
        if self.function_call is not None:
            older = ToolCallBody(id=self.function_call.name, function=self.function_call)
            calls.append(older.to_template(f"{field}.function_call"))
        given = {
            "name": self.name,
            "reasoning_content": self.reasoning or self.reasoning_content or self.thinking,
            "tool_call_id": self.name if self.role == "function" else self.tool_call_id,
            "tool_calls": calls or None,
        }
        return {"role": role, "content": content} | {k: v for k, v in given.items() if v is not None}


class TemplateOptions(StrictModel):
    """How the chat template renders a conversation."""

    add_generation_prompt: bool | None = None  # default: unless the final message is continued
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def template_kwargs(self) -> dict[str, Any]:
        """Arguments of ChatTemplate.render besides the messages."""
        continues = bool(self.continue_final_message)
        begins = not continues if self.add_generation_prompt is None else self.add_generation_prompt
        return {
            "add_generation_prompt": begins,
            "continue_final_message": continues,
            "options": self.chat_template_kwargs,
        }


def to_template_messages(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """Messages for a template. Raises InvalidRequest for an unknown role, or two texts in one message."""
    for index, message in enumerate(messages):
        if message.content and message.refusal:
            field = f"messages[{index}].refusal"
            raise InvalidRequest(f"{field} stands in place of content: only one of them may be given", field)
        if message.role not in ROLES:
            field = f"messages[{index}].role"
            raise InvalidRequest(
                f"{field} must be one of {', '.join(ROLES)}, got {shown(message.role)}", field
            )
    return [message.to_template(f"messages[{i}]") for i, message in enumerate(messages)]


class ReasoningBody(StrictModel):
    """How the model may reason, and where its reasoning is answered."""

    aliases: ClassVar[Mapping[str, str]] = {
        "enable_thinking": "think",  # Qwen
        "thinking_budget": "thinking_token_budget",  # Qwen
        "thinking_budget_tokens": "thinking_token_budget",  # llama-server
        "reasoning_budget": "thinking_token_budget",
    }
    think: bool | None = None  # Ollama; also of a template's `enable_thinking`
    reasoning_effort: str | None = None  # OpenAI; "none" is think: false
    thinking_token_budget: int | None = None  # vLLM: tokens of reasoning; -1: no limit
    include_reasoning: bool | None = None  # vLLM: false leaves it out of the answer
    separate_reasoning: bool | None = None  # SGLang: false leaves it in the content, with its markers
    reasoning_format: str | None = None  # llama-server: "none" leaves it in the content

    def reasoning(self) -> ReasoningOptions:
        """Raises InvalidRequest, Unsupported."""
        budget = self.thinking_token_budget
        if budget is not None and budget < NO_BUDGET:
            raise InvalidRequest(
                f"thinking_token_budget must be at least 0, or -1 for no limit, got {budget}",
                "thinking_token_budget",
            )
        return reasoning_options(
            self.think, self.reasoning_effort, None if budget == NO_BUDGET else budget, "reasoning_effort"
        )

    @property
    def wants_separate_reasoning(self) -> bool:
        """Whether reasoning has a field of its own. Raises Unsupported for another `reasoning_format`."""
        if self.reasoning_format not in (None, "none", *SPLIT_FORMATS):
            raise Unsupported(
                f"reasoning_format must be one of none, {', '.join(SPLIT_FORMATS)}, "
                f"got {shown(self.reasoning_format)}",
                "reasoning_format",
            )
        return self.separate_reasoning is not False and self.reasoning_format != "none"


def reasoning_options(
    enabled: bool | None, effort: str | None, budget_tokens: int | None, effort_field: str
) -> ReasoningOptions:
    """An effort of "none" and a budget of 0 switch reasoning off, unless it is switched on.

    Raises Unsupported for an unknown effort.
    """
    if effort not in (None, *EFFORTS):
        raise Unsupported(
            f"{effort_field} must be one of {', '.join(EFFORTS)}, got {shown(effort)}; "
            "chat_template_kwargs sets other variables of the model's chat template",
            effort_field,
        )
    if enabled is None and (effort == "none" or budget_tokens == 0):
        enabled = False
    return ReasoningOptions(enabled, None if effort == "none" else effort, budget_tokens)


class FunctionBody(StrictModel):
    is_lenient: ClassVar[bool] = True
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> Tool:
        return Tool(self.name, self.description or "", self.parameters or None, bool(self.strict))


class CustomBody(StrictModel):
    """A tool whose input is a text, of a grammar if `format` has one."""

    is_lenient: ClassVar[bool] = True
    name: str
    description: str | None = None
    format: dict[str, Any] | None = None

    def tool(self, field: str) -> Tool:
        grammar = custom_input_grammar(self.format, f"{field}.format")
        return Tool(self.name, self.description or "", is_custom=True, input_grammar=grammar)


class ChatTool(StrictModel):
    is_lenient: ClassVar[bool] = True
    type: str | None = None  # "function" or "custom"
    function: FunctionBody | None = None
    custom: CustomBody | None = None

    def tool(self, field: str) -> tuple[str, Tool]:
        """The tool and its field. Raises InvalidRequest, Unsupported."""
        check_tool_form(self, "chat", field)
        kind = self.type or ("custom" if self.custom is not None else "function")
        if kind not in ("function", "custom"):
            raise Unsupported(
                f"{field}.type must be 'function' or 'custom': this server runs no tools, got {shown(kind)}",
                f"{field}.type",
            )
        path = f"{field}.{kind}"
        if kind == "custom" and self.custom is not None:
            return path, self.custom.tool(path)
        if kind == "function" and self.function is not None:
            return path, self.function.tool()
        raise InvalidRequest(f"{path} is required", path)


class ToolsBody(StrictModel):
    """Chat's fields of tools, and OpenAI's older `functions` and `function_call`."""

    tools: list[ChatTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[FunctionBody] | None = None
    function_call: str | dict[str, Any] | None = None

    @property
    def wants_function_call(self) -> bool:
        """Whether a call is answered in the older form."""
        return self.functions is not None

    def tool_use(self) -> ToolUse:
        """Raises InvalidRequest, Unsupported."""
        if self.tools is None and self.tool_choice is None and self.functions is None:
            return NO_TOOLS
        check_num_tools(len(self.tools or ()) + len(self.functions or ()))
        if self.functions is None:
            tools = [tool.tool(f"tools[{i}]") for i, tool in enumerate(self.tools or ())]
            choice, allowed = parse_choice(self.tool_choice, "tool_choice")
            return check_tools(tools, choice, allowed, self.parallel_tool_calls is not False)
        for field in ("tools", "tool_choice"):
            if getattr(self, field):
                raise InvalidRequest(f"functions is the older form of {field}: give one of them", field)
        tools = [(f"functions[{i}]", function.tool()) for i, function in enumerate(self.functions)]
        choice, allowed = parse_choice(self.function_call, "function_call")
        return check_tools(tools, choice, allowed, parallel=False, choice_field="function_call")


class ChatBody(ReasoningBody, ToolsBody, SamplingBody, TemplateOptions):
    """OpenAI's fields, vLLM's, and `speculation` and `metrics`."""

    peer_fields = TABLES["chat"]
    aliases: ClassVar[Mapping[str, str]] = {**SamplingBody.aliases, **ReasoningBody.aliases}
    messages: list[Message]
    add_special_tokens: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def num_parts(self) -> tuple[int, str]:
        return count_parts(self.messages), "messages"

    def params(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
        """The parameters, and `defaults` of others. Raises InvalidRequest, which names the body's field."""
        for field in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, field) and not self.logprobs:
                raise InvalidRequest(f"{field} needs logprobs: true", field)
        count = 0 if self.logprob_token_ids else self.top_logprobs or 0
        changes: dict[str, Any] = {"logprobs": count if self.logprobs else None}
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            changes["max_tokens"], names["max_tokens"] = self.max_completion_tokens, "max_completion_tokens"
        return self.params_with(defaults, names, **changes)
