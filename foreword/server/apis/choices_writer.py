"""Bodies of responses with choices, whole and streamed, for chat and completions.

Log-probabilities have three forms: of chat and Responses, of completions, and vLLM's `prompt_logprobs`.
"""

from __future__ import annotations

import time
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from foreword.core.outputs import TokenLogprob
from foreword.core.params import SamplingParams
from foreword.errors import ForewordError
from foreword.server.answering.generation import Generation
from foreword.server.answering.streaming import ResponseWriter, is_large
from foreword.server.apis.chat.body import ReasoningBody
from foreword.server.apis.sampling import SamplingBody
from foreword.server.http.errors import error_body
from foreword.server.http.responses import DONE_EVENT, json_bytes, sse_event
from foreword.server.loaded_model import LoadedModel
from foreword.tokenizer.detokenizer import Detokenizer
from foreword.tokenizer.output_processor import ChoiceOutput, OutputDelta, TokenLogprobText, TokenPiece
from foreword.tokenizer.tokenizer import Tokenizer

TEXT_MARK = "\0text\0"  # placeholder for the text in a cached chunk
MIN_LOGPROB = -9999.0  # JSON has no minus infinity
CompletionToken = tuple[str, int, TokenLogprob | None]  # text, offset, logprob


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """Fields that every chunk repeats."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    seed: int  # first choice's; the same request with it gives the same answer


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """Optional fields that the request asks for."""

    logprobs: bool = False
    prompt_logprobs: bool = False
    metrics: bool = False
    token_ids: bool = False
    tokens_as_ids: bool = False  # logprobs name tokens by id
    usage: bool = False  # a last chunk with usage, in a stream
    continuous_usage: bool = False  # usage of a chunk's choice so far, in every chunk
    prediction: bool = False  # accepted and rejected prediction tokens, in usage
    reasoning: bool = True  # chat shows the reasoning


def response_header(server: LoadedModel, prefix: str, params: SamplingParams) -> ResponseHeader:
    assert params.seed is not None, "the seed must be resolved first"
    return ResponseHeader(
        id=f"{prefix}-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=server.served.name,
        system_fingerprint=server.served.fingerprint(server.info().fingerprint),
        seed=params.seed,
    )


def response_options(body: SamplingBody, params: SamplingParams) -> ResponseOptions:
    return ResponseOptions(
        logprobs=params.logprobs is not None,
        prompt_logprobs=body.prompt_logprobs is not None,
        metrics=bool(body.metrics),
        token_ids=bool(body.return_token_ids),
        tokens_as_ids=bool(body.return_tokens_as_token_ids),
        usage=body.wants_usage,
        continuous_usage=body.wants_continuous_usage,
        prediction=params.prediction is not None,
        reasoning=not isinstance(body, ReasoningBody) or body.include_reasoning is not False,
    )


class ChoicesWriter(ResponseWriter):
    """Writes choices in prompt order, `choices_per_prompt` for each prompt: see ResponseWriter."""

    object_type: ClassVar[str]  # `object` of a whole response
    chunk_object_type: ClassVar[str]  # `object` of a chunk

    def __init__(
        self,
        server: LoadedModel,
        generation: Generation,
        choices_per_prompt: int,
        header: ResponseHeader,
        options: ResponseOptions,
    ) -> None:
        super().__init__(server, generation, options.metrics)
        self._prediction_stats = generation.prediction_stats
        self.options = options
        self.choices_per_prompt = choices_per_prompt
        self._header = header
        self.names = TokenNames(server.tokenizer, options.tokens_as_ids)
        self._num_running = len(self.outputs)  # choices whose last chunk is not written
        self._num_streamed: Counter[int] = Counter()  # tokens of the chunks so far, by choice
        self._started: set[int] = set()
        self._accepted_drafts: Counter[int] = Counter()  # number not yet in a chunk, by choice
        per_token = (options.logprobs, options.token_ids, options.metrics, options.continuous_usage)
        self._has_repeated_events = not any(per_token)
        self._event_parts: dict[Hashable, list[bytes]] = {}  # around a text, by choice and kind of text

    @abstractmethod
    def full_choice(self, index: int, output: ChoiceOutput) -> dict[str, Any]:
        """The fields of this endpoint in a choice of a whole response."""

    @abstractmethod
    def chunk_choice(self, index: int, delta: OutputDelta, is_first: bool) -> dict[str, Any]:
        """The fields of this endpoint in a choice of a chunk."""

    def first_chunks(self) -> Iterable[dict[str, Any]]:
        """Chunks before the first token."""
        return ()

    def first_events(self) -> Iterable[bytes]:
        return map(sse_event, self.first_chunks())

    def last_events(self) -> Iterable[bytes]:
        """Usage, if the request asks for it, and [DONE]."""
        if self.options.usage:
            chunk = {**self.header(self.chunk_object_type), "choices": [], "usage": self.usage()}
            yield sse_event(chunk)
        yield DONE_EVENT

    def error_event(self, error: ForewordError) -> bytes:
        return sse_event(error_body(error)) + DONE_EVENT

    @property
    def num_returned(self) -> int:
        return len(self.returned_choices())

    def returned_choices(self) -> Sequence[int]:
        """Indices of the returned choices, in order."""
        return range(len(self.outputs))

    def full(self) -> dict[str, Any]:
        """The body of a whole response."""
        choices = [
            {**self._full_choice(i, self.outputs[i]), "index": index}
            for index, i in enumerate(self.returned_choices())
        ]
        return {
            **self.header(self.object_type),
            "choices": choices,
            **self.prompt_fields(),
            "usage": self.usage(),
            **self.metrics(*self.outputs),
        }

    def event(self, index: int, delta: OutputDelta) -> bytes | None:
        """The server-sent event of one delta, or None if it is empty for this request.

        Most events differ in nothing but a text: the rest is written once for each choice.
        """
        is_repeated = self._has_repeated_events and index in self._started and not delta.finish_reason
        repeated = self.repeated_text(delta) if is_repeated else None
        if repeated is None:
            has_long_prompt = index not in self._started and is_large([self.outputs[index]])
            chunk = self.chunk(index, delta)
            return None if chunk is None else sse_event(chunk, in_pieces=has_long_prompt)
        kind, text = repeated
        parts = self._event_parts.get((index, kind))
        if parts is None:
            chunk = self.chunk(index, self.mark_text(delta))
            parts = self._event_parts[index, kind] = sse_event(chunk).split(json_bytes(TEXT_MARK))
        return json_bytes(text).join(parts)

    def repeated_text(self, delta: OutputDelta) -> tuple[Hashable, str] | None:
        """(kind, text) of a delta that is one text; None for others."""
        return ("", delta.text) if delta.text else None

    def mark_text(self, delta: OutputDelta) -> OutputDelta:
        """The delta with TEXT_MARK for its text."""
        return replace(delta, text=TEXT_MARK)

    def is_empty(self, delta: OutputDelta) -> bool:
        """Whether the endpoint shows no text or call of the delta."""
        return not delta.text

    def chunk(self, index: int, delta: OutputDelta) -> dict[str, Any] | None:
        """The chunk of one delta, or None if it is empty for this request."""
        is_first = index not in self._started
        self._accepted_drafts[index] += delta.event.draft.num_accepted if delta.event.draft else 0
        self._num_streamed[index] += len(delta.event.token_ids)
        needs_ids = self.options.logprobs or self.options.token_ids
        if self.is_empty(delta) and not (delta.finish_reason or (delta.event.token_ids and needs_ids)):
            return None
        self._started.add(index)
        choice = {
            "index": index,
            **self.chunk_choice(index, delta, is_first),
            "finish_reason": self.finish_reason(delta.finish_reason),
            "stop_reason": delta.stop_reason,
            **self._chunk_extras(index, delta, is_first),
        }
        return {**self.make_chunk(choice), **self._final_metrics(delta)}

    def usage(self) -> dict[str, Any]:
        """Delivered tokens. A prompt counts once for all its choices; rejected draft tokens do not count."""
        firsts = self.outputs[:: self.choices_per_prompt]
        usage = _usage(firsts, sum(output.num_tokens for output in self.outputs))
        details: dict[str, int] = {}
        if any(output.parser is not None for output in self.outputs):
            details["reasoning_tokens"] = sum(output.num_reasoning_tokens for output in self.outputs)
        if self.options.prediction:
            accepted, drafted = self._prediction_stats.num_accepted, self._prediction_stats.num_drafted
            details |= {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            }
        return {**usage, "completion_tokens_details": details} if details else usage

    def finish_reason(self, reason: str | None) -> str | None:
        """The finish reason of a choice under this endpoint's name."""
        return reason

    def header(self, object_type: str) -> dict[str, Any]:
        head = self._header
        return {
            "id": head.id,
            "object": object_type,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
            "seed": head.seed,
        }

    def make_chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage: dict[str, Any] = {"usage": None} if self.options.usage else {}
        if self.options.continuous_usage:
            index = choice["index"]
            usage = {"usage": _usage(self.outputs[index : index + 1], self._num_streamed[index])}
        return {**self.header(self.chunk_object_type), "choices": [choice], **usage}

    def _full_choice(self, index: int, output: ChoiceOutput) -> dict[str, Any]:
        choice = {
            "index": index,
            **self.full_choice(index, output),
            "finish_reason": self.finish_reason(output.finish_reason),
            "stop_reason": output.stop_reason,
            **self.metrics(output),
        }
        if self.options.token_ids:
            choice["token_ids"] = output.token_ids
        return choice

    def prompt_fields(self) -> dict[str, Any]:
        """Facts of the only prompt, in the answer itself."""
        return {}

    def prompt_ids(self, output: ChoiceOutput) -> dict[str, Any]:
        """`prompt_token_ids`, if the request asks for them."""
        return {"prompt_token_ids": list(output.request.prompt_ids)} if self.options.token_ids else {}

    def prompt_logprobs(self, output: ChoiceOutput) -> dict[str, Any]:
        """`prompt_logprobs`, if the request asks for them."""
        if not self.options.prompt_logprobs:
            return {}
        return {
            "prompt_logprobs": [
                format_prompt_logprob(token, self.server.tokenizer) for token in output.prompt_logprobs
            ]
        }

    def _chunk_extras(self, index: int, delta: OutputDelta, is_first: bool) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.options.token_ids:
            extras["token_ids"] = list(delta.event.token_ids)
        if self.options.metrics:
            extras["accepted_draft_tokens"] = self._accepted_drafts.pop(index)
            extras["tokens"] = [_token_entry(piece) for piece in delta.pieces]
            extras |= self.metrics(self.outputs[index]) if delta.finish_reason else {}
        return extras

    def _final_metrics(self, delta: OutputDelta) -> dict[str, Any]:
        """Metrics of all choices, in the chunk that ends the last of them."""
        self._num_running -= delta.finish_reason is not None
        return self.metrics(*self.outputs) if delta.finish_reason and not self._num_running else {}


def _token_entry(piece: TokenPiece) -> list[Any]:
    """A token of a chunk's `tokens`: text, whether it was drafted, then by whom and with which confidence."""
    if not piece.is_draft:
        return [piece.text, False]
    confidence = piece.confidence
    return [piece.text, True, piece.drafter, None if confidence is None else round(confidence, 3)]


def _usage(prompts: Sequence[ChoiceOutput], completion: int) -> dict[str, Any]:
    """Tokens of prompts, each given by one of its choices, and of their completions."""
    prompt = sum(len(output.request.prompt_ids) for output in prompts)
    prompt_details = {"cached_tokens": sum(output.num_cached for output in prompts)}
    if images := [image for output in prompts for image in output.request.images]:
        prompt_details["image_tokens"] = sum(image.num_tokens for image in images)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": prompt_details,
    }


class TokenNames:
    """How logprobs write tokens: as texts, or with return_tokens_as_token_ids as "token_id:42"."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool) -> None:
        self.tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int, text: str | None = None) -> str:
        """`text` is the token's, where it is known."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self.tokenizer.token_text(token_id) if text is None else text


def chat_logprobs(tokens: Iterable[TokenLogprobText], names: TokenNames) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    return {"content": [chat_logprob(token, names) for token in tokens], "refusal": None}


def chat_logprob(token: TokenLogprobText, names: TokenNames) -> dict[str, Any]:
    """Logprobs of one token, as chat and the Responses API write them."""
    top = [
        _chat_entry(names, token_id, names.tokenizer.token_bytes(token_id), value)
        for token_id, value in _top_logprobs(token.logprob)
    ]
    entry = _chat_entry(names, token.logprob.token_id, token.raw, token.logprob.logprob)
    return {**entry, "top_logprobs": top}


def _top_logprobs(token: TokenLogprob) -> Iterable[tuple[int, float]]:
    """The likeliest token ids; with `logprob_token_ids` the sampled token and those instead."""
    if token.requested:
        return ({token.token_id: token.logprob} | dict(token.requested)).items()
    return token.top


def _chat_entry(names: TokenNames, token_id: int, raw: bytes, logprob: float) -> dict[str, Any]:
    text = names.name(token_id, raw.decode("utf-8", "replace"))
    return {"token": text, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(raw)}


def completion_logprobs(
    tokens: Sequence[CompletionToken], names: TokenNames, base_offset: int = 0
) -> dict[str, Any]:
    """`logprobs` of a completion's choice; the first token of a prompt has none."""
    return {
        "tokens": [text for text, _, _ in tokens],
        "token_logprobs": [
            None if logprob is None else max(logprob.logprob, MIN_LOGPROB) for _, _, logprob in tokens
        ],
        "top_logprobs": [
            None if logprob is None else _top_by_name(text, logprob, names) for text, _, logprob in tokens
        ],
        "text_offset": [base_offset + offset for _, offset, _ in tokens],
    }


def _top_by_name(name: str, token: TokenLogprob, names: TokenNames) -> dict[str, float]:
    """Logprobs by name, the token itself first; of tokens with equal text the likeliest counts."""
    top = {name: max(token.logprob, MIN_LOGPROB)}
    for token_id, logprob in _top_logprobs(token):
        other = names.name(token_id)
        top[other] = max(top.get(other, MIN_LOGPROB), logprob)
    return top


def format_prompt_logprob(token: TokenLogprob | None, tokenizer: Tokenizer) -> dict[str, Any] | None:
    """One entry of vLLM's `prompt_logprobs`: by token id; None for the first token."""
    if token is None:
        return None
    entries = {token.token_id: (token.logprob, token.rank)}
    for rank, (token_id, logprob) in enumerate(token.top, 1):
        entries.setdefault(token_id, (logprob, rank))
    return {
        str(token_id): {
            "logprob": max(logprob, MIN_LOGPROB),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, (logprob, rank) in entries.items()
    }


def prompt_tokens(
    prompt_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], names: TokenNames
) -> list[CompletionToken]:
    """The tokens of an echoed prompt."""
    detokenizer, offset = Detokenizer(names.tokenizer, at_start=True), 0
    tokens: list[CompletionToken] = []
    for token_id, logprob in zip(prompt_ids, logprobs, strict=True):
        tokens.append((names.name(token_id), offset, logprob))
        offset += len(detokenizer.feed(token_id))
    return tokens
