"""The body of /v1/chat/completions, and the messages that /tokenize shares with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema

from foreword.core.params import SamplingParams
from foreword.errors import InvalidRequest, Unsupported
from foreword.server.protocol.base import StrictModel
from foreword.server.protocol.sampling import SamplingBody

__all__ = ["ChatBody", "Message", "TemplateOptions", "to_template_messages"]

ROLES = ("system", "developer", "user", "assistant")
MessageContent = Annotated[
    Any,
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}]}),
]


class Message(StrictModel):
    """One message; `content` is a text or a list of text parts, for a user also of image_url parts."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {"refusal", "annotations", "reasoning_content", "reasoning"}
    )
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "tool_calls": ([],),
        "function_call": (),
        "audio": (),
        "tool_call_id": (),
    }
    role: str
    content: MessageContent = None
    name: str | None = None


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
    """Messages for a template; `developer` is OpenAI's newer name of `system`.

    Raises InvalidRequest for an unknown role.
    """
    rendered: list[Mapping[str, Any]] = []
    for index, message in enumerate(messages):
        field, role = f"messages[{index}].role", message.role
        if role in ("tool", "function"):
            raise Unsupported(f"{field}: tools are not supported yet", field)
        if role not in ROLES:
            raise InvalidRequest(f"{field} must be one of {', '.join(ROLES)}, got {role!r:.80}", field)
        name = {} if message.name is None else {"name": message.name}
        role = "system" if role == "developer" else role
        rendered.append({"role": role, "content": message.content, **name})
    return rendered


class ChatBody(SamplingBody, TemplateOptions):
    """OpenAI's fields, vLLM's, and `speculation` and `metrics`."""

    ignored: ClassVar[frozenset[str]] = SamplingBody.ignored | {"parallel_tool_calls"}
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **SamplingBody.unsupported,
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "modalities": (["text"],),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "web_search_options": (),
        "moderation": (),
        "documents": ([],),
        "chat_template": (),
        "echo": (False,),
        "best_of": (1,),
        "thinking_token_budget": (),
    }
    messages: list[Message]
    add_special_tokens: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def params(self) -> SamplingParams:
        """Raises InvalidRequest, which names the field as in this body."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", "top_logprobs")
        changes: dict[str, Any] = {"logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            changes["max_tokens"], names["max_tokens"] = self.max_completion_tokens, "max_completion_tokens"
        return self.params_with(names, **changes)
