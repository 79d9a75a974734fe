"""What `LLM` returns."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from foreword.core.outputs import TokenLogprob
from foreword.metrics.request_stats import AnswerMetrics

__all__ = ["CompletionOutput", "EmbeddingOutput", "RequestOutput", "StreamPiece"]


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice.

    logprobs  one per token if asked for, else None
    seed      with it, the n = 1 request gives this choice again
    metrics   what `"metrics": true` returns from the server
    hashes    of the raw logits, one per token, in test mode
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[TokenLogprob, ...] | None
    seed: int
    metrics: AnswerMetrics | None
    logits_hashes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt: `params.n` choices, and shortcuts to the first.

    metrics  of all choices together; each has its own as well
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None
    metrics: AnswerMetrics | None = None

    @property
    def text(self) -> str:
        return self.outputs[0].text

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
    """The vector of one input, float32 values."""

    vector: array[float]
    prompt_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StreamPiece:
    """A piece of streamed text, and whether a drafter had guessed it. The last has no text, but the reason of the end."""

    text: str
    is_draft: bool
    finish_reason: str | None = None
