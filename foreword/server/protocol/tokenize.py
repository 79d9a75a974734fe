"""The bodies of /tokenize and /detokenize, as vLLM's."""

from __future__ import annotations

from foreword.errors import InvalidRequest
from foreword.server.protocol.base import StrictModel
from foreword.server.protocol.chat import Message, TemplateOptions

__all__ = ["DetokenizeBody", "TokenizeBody"]


class TokenizeBody(TemplateOptions):
    """A prompt or a conversation.

    add_special_tokens  by default to a prompt, not to a conversation, whose template writes them
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self) -> None:
        """Raises InvalidRequest unless exactly one of the two is there."""
        if (self.prompt is None) == (self.messages is None):
            raise InvalidRequest("either prompt or messages is required, and not both", "prompt")


class DetokenizeBody(StrictModel):
    model: str | None = None
    tokens: list[int]
