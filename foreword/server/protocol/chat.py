"""The body of /v1/chat/completions, and the messages that /tokenize shares with it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema

from foreword.core.params import SamplingParams
from foreword.errors import InvalidRequest, Unsupported
from foreword.server.protocol.base import StrictModel
from foreword.server.protocol.compat import CHAT, MESSAGE, PeerField
from foreword.server.protocol.sampling import NO_DEFAULTS, TO_THE_END, SamplingBody
from foreword.tokenizer.messages import num_unknown_fields

__all__ = ["ChatBody", "Message", "TemplateOptions", "to_template_messages"]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
NO_TOOLS = (
    'tool calls are not supported yet. Leave tools out or send tool_choice: "none"; for typed output '
    'use response_format with type json_schema. Open WebUI: set the model\'s function calling to "legacy"'
)
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")  # OpenAI's
MessageContent = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


class CalledFunction(StrictModel):
    is_lenient: ClassVar[bool] = True
    name: str
    arguments: str | dict[str, Any] | None = None  # OpenAI's is a JSON text


class ToolCall(StrictModel):
    is_lenient: ClassVar[bool] = True
    id: str | None = None
    type: str | None = None
    function: CalledFunction


class Message(StrictModel):
    """One message; `content` is a text or a list of text parts, for a user also of image_url parts."""

    is_lenient: ClassVar[bool] = True
    peer_fields: ClassVar[Mapping[str, PeerField]] = MESSAGE
    role: str
    content: MessageContent = None
    name: str | None = None
    refusal: str | None = None  # in place of the content
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    function_call: CalledFunction | None = None  # OpenAI's older form of one tool call

    def num_unknown(self) -> int:
        """Unknown fields of the message, and of the parts of its content."""
        return super().num_unknown() + num_unknown_fields(self.content)

    def to_template(self) -> dict[str, Any]:
        """The message for chat templates; `developer` is OpenAI's newer name of `system`."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        content = self.content or self.refusal or self.content
        calls = [*(self.tool_calls or ())]
        if self.function_call is not None:
            calls.append(ToolCall(id=self.function_call.name, function=self.function_call))
        given = {
            "name": self.name,
            "tool_call_id": self.name if self.role == "function" else self.tool_call_id,
            "tool_calls": list(map(_template_call, calls)) or None,
        }
        return {"role": role, "content": content} | {k: v for k, v in given.items() if v is not None}


def _template_call(call: ToolCall) -> dict[str, Any]:
    """A tool call as templates read it, with the arguments as an object where their JSON is one."""
    arguments = call.function.arguments or {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    function = {"name": call.function.name, "arguments": arguments}
    return {"type": "function", "function": function} | ({} if call.id is None else {"id": call.id})


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
                f"{field} must be one of {', '.join(ROLES)}, got {message.role!r:.80}", field
            )
    return [message.to_template() for message in messages]


class ChatBody(SamplingBody, TemplateOptions):
    """OpenAI's fields, vLLM's, and `speculation` and `metrics`."""

    peer_fields: ClassVar[Mapping[str, PeerField]] = CHAT
    aliases: ClassVar[Mapping[str, str]] = {**SamplingBody.aliases, "enable_thinking": "think"}  # Qwen
    messages: list[Message]
    add_special_tokens: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    functions: list[dict[str, Any]] | None = None  # OpenAI's older names of tools and tool_choice
    function_call: str | dict[str, Any] | None = None
    think: bool | None = None  # Ollama: `enable_thinking` of the chat template
    reasoning_effort: str | None = None  # "none" is think: false; OpenAI's others are hints without effect

    @property
    def runs_to_end(self) -> bool:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return limit == TO_THE_END

    def params(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
        """The parameters, and `defaults` of others. Raises InvalidRequest, which names the body's field."""
        self._check_tools()
        for field in ("top_logprobs", "logprob_token_ids"):
            if getattr(self, field) and not self.logprobs:
                raise InvalidRequest(f"{field} needs logprobs: true", field)
        count = 0 if self.logprob_token_ids else self.top_logprobs or 0
        changes: dict[str, Any] = {"logprobs": count if self.logprobs else None}
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            changes["max_tokens"], names["max_tokens"] = self.max_completion_tokens, "max_completion_tokens"
        return self.params_with(defaults, names, **changes)

    def template_kwargs(self) -> dict[str, Any]:
        """As of TemplateOptions. Raises Unsupported for a reasoning effort that is not OpenAI's."""
        effort = self.reasoning_effort
        if effort not in (None, *EFFORTS):
            raise Unsupported(
                f"reasoning_effort must be one of {', '.join(EFFORTS)}, got {effort!r:.80}; "
                "chat_template_kwargs sets other variables of the model's chat template",
                "reasoning_effort",
            )
        thinks = False if self.think is None and effort == "none" else self.think
        kwargs = super().template_kwargs()
        if thinks is not None:
            kwargs["options"] = {"enable_thinking": thinks, **(kwargs["options"] or {})}
        return kwargs

    def _check_tools(self) -> None:
        """Raises Unsupported if the answer could be a tool call."""
        choices = {"tool_choice": self.tool_choice, "function_call": self.function_call}
        for field, choice in choices.items():
            if choice not in (None, "none", "auto"):
                raise Unsupported(f"{field}: {NO_TOOLS}", field)
        for field in ("tools", "functions"):
            if getattr(self, field) and "none" not in choices.values():
                raise Unsupported(f"{field}: {NO_TOOLS}", field)
