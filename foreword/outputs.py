"""Outputs of `LLM`."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from foreword.chat_formats.events import AnswerContent, ChatEvent, ToolCall
from foreword.core.outputs import TokenLogprob
from foreword.metrics.recorder import MetricsRecorder
from foreword.metrics.request_stats import AnswerMetrics
from foreword.tokenizer.output_processor import ChoiceOutput, OutputDelta, TokenPiece


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


def make_output(
    prompt: str | None,
    choices: Sequence[ChoiceOutput],
    hashes: Mapping[str, Sequence[int]],  # logits' hashes by request id
    recorder: MetricsRecorder,
) -> RequestOutput:
    """The output of a prompt whose choices are finished."""
    first, ids = choices[0], [choice.request.id for choice in choices]
    return RequestOutput(
        request_id=first.request.id.rsplit("-", 1)[0],
        prompt=prompt,
        prompt_token_ids=first.request.prompt_ids,
        outputs=tuple(
            _make_choice(index, choice, hashes[choice.request.id], recorder)
            for index, choice in enumerate(choices)
        ),
        prompt_logprobs=first.prompt_logprobs or None,
        metrics=recorder.answer_metrics(*ids),
    )


def _make_choice(
    index: int, choice: ChoiceOutput, hashes: Sequence[int], recorder: MetricsRecorder
) -> CompletionOutput:
    assert choice.finish_reason is not None
    has_logprobs = choice.request.params.logprobs is not None
    content = AnswerContent.from_events(choice.events)
    return CompletionOutput(
        index=index,
        text=content.text,
        token_ids=tuple(choice.token_ids),
        finish_reason=choice.finish_reason,
        stop_reason=choice.stop_reason,
        logprobs=tuple(entry.logprob for entry in choice.logprobs) if has_logprobs else None,
        seed=choice.request.seed,
        metrics=recorder.answer_metrics(choice.request.id),
        logits_hashes=tuple(hashes),
        reasoning=content.reasoning,
        tool_calls=content.calls,
    )


def stream_pieces(delta: OutputDelta, with_events: bool) -> Iterator[StreamPiece]:
    """The tokens of a delta; with events, an event without a token has a piece without text."""
    by_event = delta.pieces_by_event() if with_events else [(None, delta.pieces)]
    for event, pieces in by_event:
        for piece in pieces or ([] if event is None else [TokenPiece("")]):
            yield StreamPiece(
                piece.text, piece.is_draft, event=event, drafter=piece.drafter, confidence=piece.confidence
            )
