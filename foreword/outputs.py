"""Outputs of `LLM`."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from foreword.chat_formats.events import ChatEvent, ToolCall
from foreword.core.outputs import TokenLogprob
from foreword.metrics.request_stats import AnswerMetrics


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice."""

    index: int
    text: str  # chat: the content, without reasoning and calls
    token_ids: tuple[int, ...]
    finish_reason: str  # "stop", "length", "repetition", or "tool_calls" of an answer with complete calls
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprob, ...] | None  # one per token if requested
    seed: int  # a request with n = 1 and this seed reproduces the choice
    metrics: AnswerMetrics | None  # the fields that `"metrics": true` returns over HTTP
    logits_hashes: tuple[int, ...] = ()  # hash of the raw logits per token, in test mode
    reasoning: str = ""  # chat only
    tool_calls: tuple[ToolCall, ...] = ()  # chat only


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Output of one prompt: `params.n` choices, and shortcuts to the first."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    metrics: AnswerMetrics | None = None  # all choices together

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def reasoning(self) -> str:
        return self.outputs[0].reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.outputs[0].tool_calls

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.outputs[0].logprobs


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The float32 vector of one input."""

    vector: array[float]
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """A piece of streamed text."""

    text: str
    is_draft: bool  # a drafter proposed it
    finish_reason: str | None = None  # last piece only, which has no text
    metrics: AnswerMetrics | None = None  # last piece only
    event: ChatEvent | None = None  # tools only: the event that the piece belongs to
    drafter: str = ""  # drafter of a draft token
    confidence: float | None = None  # the drafter's probability of the token, if it has one
