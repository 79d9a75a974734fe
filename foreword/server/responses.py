"""How answers are written: what chat and completions have in common.

Log-probabilities in the three shapes in which clients know them.

Bodies of /v1/chat/completions.

Bodies of /v1/completions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from foreword.core.outputs import TokenLogprob
from foreword.server.context import ServerContext
from foreword.server.generation import Generation
from foreword.tokenizer.detokenizer import Detokenizer
from foreword.tokenizer.output_processor import ChoiceOutput, OutputDelta, TokenLogprobText
from foreword.tokenizer.tokenizer import Tokenizer

__all__ = [
    "ChatResponseBuilder",
    "CompletionResponseBuilder",
    "ResponseBuilder",
    "ResponseHeader",
    "ResponseOptions",
    "chat_logprobs",
    "completion_logprobs",
    "prompt_logprobs",
    "prompt_tokens",
]

MIN_LOGPROB = -9999.0  # JSON has no minus infinity


def chat_logprobs(tokens: Iterable[TokenLogprobText], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    return {"content": [_chat_token(token, tokenizer) for token in tokens], "refusal": None}


def _chat_token(token: TokenLogprobText, tokenizer: Tokenizer) -> dict[str, Any]:
    top = [
        _chat_entry(tokenizer.token_bytes(token_id), logprob)
        for token_id, logprob in _top_and_requested(token.logprob)
    ]
    return {**_chat_entry(token.raw, token.logprob.logprob), "top_logprobs": top}


def _top_and_requested(token: TokenLogprob) -> Iterable[tuple[int, float]]:
    """The likeliest, and those of the ids that were asked for by themselves."""
    return (dict(token.top) | dict(token.requested)).items()


def _chat_entry(raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, MIN_LOGPROB), "bytes": list(raw)}


def completion_logprobs(
    tokens: Sequence[tuple[str, int, TokenLogprob | None]], tokenizer: Tokenizer, base_offset: int = 0
) -> dict[str, Any]:
    """`logprobs` of a completion's choice, from (text, offset, logprob).

    The first token of a prompt has no logprob. `shift` is added to the offsets.
    """
    return {
        "tokens": [text for text, _, _ in tokens],
        "token_logprobs": [
            None if found is None else max(found.logprob, MIN_LOGPROB) for _, _, found in tokens
        ],
        "top_logprobs": [
            None if found is None else _top_logprobs(text, found, tokenizer) for text, _, found in tokens
        ],
        "text_offset": [base_offset + offset for _, offset, _ in tokens],
    }


def _top_logprobs(text: str, token: TokenLogprob, tokenizer: Tokenizer) -> dict[str, float]:
    """Logprobs by text, the token itself among them; of tokens with the same text the likeliest counts."""
    top: dict[str, float] = {}
    for token_id, logprob in _top_and_requested(token):
        top.setdefault(tokenizer.token_text(token_id), max(logprob, MIN_LOGPROB))
    top.setdefault(text, max(token.logprob, MIN_LOGPROB))
    return top


def prompt_logprobs(
    prompt: Sequence[TokenLogprob | None], tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """`prompt_logprobs` as vLLM gives them: by token id, None for the first token."""
    return [None if found is None else _prompt_entry(found, tokenizer) for found in prompt]


def _prompt_entry(token: TokenLogprob, tokenizer: Tokenizer) -> dict[str, Any]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(token.top, 1)]
    entries = {token.token_id: (token.logprob, token.rank)}
    entries |= {token_id: (logprob, rank) for token_id, logprob, rank in ranked if token_id != token.token_id}
    return {
        str(token_id): {
            "logprob": max(logprob, MIN_LOGPROB),
            "rank": rank,
            "decoded_token": tokenizer.token_text(token_id),
        }
        for token_id, (logprob, rank) in entries.items()
    }


def prompt_tokens(
    prompt_ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], tokenizer: Tokenizer
) -> list[tuple[str, int, TokenLogprob | None]]:
    """The tokens of an echoed prompt: (text, offset, logprob)."""
    detokenizer, offset = Detokenizer(tokenizer, at_start=True), 0
    tokens: list[tuple[str, int, TokenLogprob | None]] = []
    for token_id, logprob in zip(prompt_ids, logprobs, strict=True):
        tokens.append((tokenizer.token_text(token_id), offset, logprob))
        offset += len(detokenizer.feed(token_id))
    return tokens


@dataclass(frozen=True, slots=True)
class ResponseHeader:
    """What every chunk of an answer repeats.

    seed  of the first choice; with it the same request gives the same answer again
    """

    id: str
    created: int
    model: str
    system_fingerprint: str
    seed: int


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """What the caller asked to be told beside the text.

    usage       a chunk of usage at the end of a stream
    prediction  usage tells what became of it
    """

    logprobs: bool = False
    prompt_logprobs: bool = False
    metrics: bool = False
    token_ids: bool = False
    usage: bool = False
    prediction: bool = False


class ResponseBuilder(ABC):
    """Builds response bodies. Choices stand in order of prompt, `per_prompt` for each.

    kind, chunk_kind  `object` of a whole answer and of a chunk
    """

    object_type: ClassVar[str]
    chunk_object_type: ClassVar[str]

    def __init__(
        self,
        server: ServerContext,
        generation: Generation,
        choices_per_prompt: int,
        header: ResponseHeader,
        options: ResponseOptions,
    ) -> None:
        self.server = server
        self.outputs: Sequence[ChoiceOutput] = generation.outputs
        self._prediction_stats = generation.prediction_stats
        self.options = options
        self.choices_per_prompt = choices_per_prompt
        self._header = header
        self._num_running = len(self.outputs)  # choices whose last chunk was not written yet
        self._started: set[int] = set()
        self._accepted_drafts: Counter[int] = Counter()  # by choice, not yet told

    @abstractmethod
    def full_choice(self, index: int, output: ChoiceOutput) -> dict[str, Any]:
        """What is the endpoint's own in a choice of a whole answer."""

    @abstractmethod
    def chunk_choice(self, index: int, delta: OutputDelta, is_first: bool) -> dict[str, Any]:
        """What is the endpoint's own in a choice of a chunk; `first` of this choice."""

    def first_chunks(self) -> Iterable[dict[str, Any]]:
        """Chunks before anything was generated."""
        return ()

    def returned_choices(self) -> Sequence[int]:
        """The answers that are returned, in order."""
        return range(len(self.outputs))

    def full(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [
            {**self._full_choice(i, self.outputs[i]), "index": index}
            for index, i in enumerate(self.returned_choices())
        ]
        return {
            **self.header(self.object_type),
            "choices": choices,
            "usage": self.usage(),
            **self._metrics(*self.outputs),
        }

    def chunk(self, index: int, delta: OutputDelta) -> dict[str, Any] | None:
        """The chunk of one delta, or None if it holds nothing for the caller."""
        first = index not in self._started
        self._accepted_drafts[index] += delta.event.draft.num_accepted if delta.event.draft else 0
        carries = (
            delta.text
            or delta.finish_reason
            or (delta.event.token_ids and (self.options.logprobs or self.options.token_ids))
        )
        if not carries:
            return None
        self._started.add(index)
        choice = {
            "index": index,
            **self.chunk_choice(index, delta, first),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **self._chunk_extras(index, delta, first),
        }
        return {**self.make_chunk(choice), **self._final_metrics(delta)}

    def usage_chunk(self) -> dict[str, Any] | None:
        """The last chunk, if it was asked for: usage and no choices."""
        return (
            {**self.header(self.chunk_object_type), "choices": [], "usage": self.usage()}
            if self.options.usage
            else None
        )

    def usage(self) -> dict[str, Any]:
        """What was delivered. A prompt counts once, however many choices it has; drafted tokens count nowhere else."""
        firsts = self.outputs[:: self.choices_per_prompt]
        prompt = sum(len(answer.request.prompt_ids) for answer in firsts)
        completion = sum(answer.num_tokens for answer in self.outputs)
        cached = sum(answer.num_cached for answer in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached, **self._image_usage(firsts)},
            **self._prediction_usage(),
        }

    def _image_usage(self, first_outputs: Sequence[ChoiceOutput]) -> dict[str, int]:
        """How many of the prompts' tokens stand for pictures, where there are some."""
        pictures = [picture for answer in first_outputs for picture in answer.request.images]
        return {"image_tokens": sum(picture.num_tokens for picture in pictures)} if pictures else {}

    def _prediction_usage(self) -> dict[str, Any]:
        """What became of the drafts out of the caller's prediction, if there was one."""
        if not self.options.prediction:
            return {}
        accepted, drafted = self._prediction_stats.num_accepted, self._prediction_stats.num_drafted
        return {
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            }
        }

    def record_returned(self, num_choices: int) -> None:
        """So many choices were sent to their ends."""
        self.server.recorder.on_response(num_choices)

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
        usage = {"usage": None} if self.options.usage else {}
        return {**self.header(self.chunk_object_type), "choices": [choice], **usage}

    def _full_choice(self, index: int, output: ChoiceOutput) -> dict[str, Any]:
        choice = {
            "index": index,
            **self.full_choice(index, output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            **self._metrics(output),
        }
        if self.options.token_ids:
            choice |= {"prompt_token_ids": list(output.request.prompt_ids), "token_ids": output.token_ids}
        if self.options.prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs, self.server.tokenizer)
        return choice

    def _chunk_extras(self, index: int, delta: OutputDelta, is_first: bool) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.options.token_ids:
            prompt = {"prompt_token_ids": list(self.outputs[index].request.prompt_ids)} if is_first else {}
            extras |= {**prompt, "token_ids": list(delta.event.token_ids)}
        if self.options.metrics:
            extras["accepted_draft_tokens"] = self._accepted_drafts.pop(index)
            extras["tokens"] = [list(piece) for piece in delta.pieces]
            extras |= self._metrics(self.outputs[index]) if delta.finish_reason else {}
        return extras

    def _metrics(self, *outputs: ChoiceOutput) -> dict[str, Any]:
        """Figures of one choice, or of several together."""
        if not self.options.metrics:
            return {}
        found = self.server.recorder.answer_metrics(*(answer.request.id for answer in outputs))
        return {} if found is None else {"metrics": found.as_dict()}

    def _final_metrics(self, delta: OutputDelta) -> dict[str, Any]:
        """In a stream the figures of all choices stand beside the end of the last."""
        self._num_running -= delta.finish_reason is not None
        return self._metrics(*self.outputs) if delta.finish_reason and not self._num_running else {}


class ChatResponseBuilder(ResponseBuilder):
    object_type: ClassVar[str] = "chat.completion"
    chunk_object_type: ClassVar[str] = "chat.completion.chunk"

    def first_chunks(self) -> Iterable[dict[str, Any]]:
        for index in range(len(self.outputs)):
            delta = {"role": "assistant", "content": ""}
            yield self.make_chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def full_choice(self, index: int, output: ChoiceOutput) -> dict[str, Any]:
        logprobs = chat_logprobs(output.logprobs, self.server.tokenizer) if self.options.logprobs else None
        return {
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": logprobs,
        }

    def chunk_choice(self, index: int, delta: OutputDelta, is_first: bool) -> dict[str, Any]:
        logprobs = chat_logprobs(delta.logprobs, self.server.tokenizer) if self.options.logprobs else None
        return {"delta": {"content": delta.text} if delta.text else {}, "logprobs": logprobs}


class CompletionResponseBuilder(ResponseBuilder):
    """Of `per_prompt` answers to a prompt the `returned` likeliest are returned.

    echo  the text of each prompt, to stand before its answers; None where it was not asked for
    """

    object_type: ClassVar[str] = "text_completion"
    chunk_object_type: ClassVar[str] = "text_completion"

    def __init__(
        self,
        server: ServerContext,
        generation: Generation,
        choices_per_prompt: int,
        header: ResponseHeader,
        options: ResponseOptions,
        echo: Sequence[str] | None,
        num_returned: int,
    ) -> None:
        super().__init__(server, generation, choices_per_prompt, header, options)
        self._num_returned = num_returned
        self._echo = None if echo is None else [text for text in echo for _ in range(choices_per_prompt)]

    def returned_choices(self) -> Sequence[int]:
        """For each prompt the best by mean log-probability, the best first where not all are returned.

        What was ended as a repetition comes last: nothing is likelier than a loop that has begun.
        """
        if self._num_returned == self.choices_per_prompt:
            return super().returned_choices()
        groups = [
            range(first, first + self.choices_per_prompt)
            for first in range(0, len(self.outputs), self.choices_per_prompt)
        ]
        ranked = [sorted(group, key=lambda i: _rank_key(self.outputs[i]), reverse=True) for group in groups]
        return [i for group in ranked for i in group[: self._num_returned]]

    def full_choice(self, index: int, output: ChoiceOutput) -> dict[str, Any]:
        return {
            "text": self._prefix(index) + output.text,
            "logprobs": self._logprobs(index, output.logprobs, prompt=True),
        }

    def chunk_choice(self, index: int, delta: OutputDelta, is_first: bool) -> dict[str, Any]:
        prefix = self._prefix(index) if is_first else ""
        return {
            "text": prefix + delta.text,
            "logprobs": self._logprobs(index, delta.logprobs, prompt=is_first),
        }

    def _prefix(self, index: int) -> str:
        return "" if self._echo is None else self._echo[index]

    def _logprobs(
        self, index: int, output_tokens: Sequence[TokenLogprobText], prompt: bool
    ) -> dict[str, Any] | None:
        """Of the answer's tokens; with `prompt` and echo, those of the prompt before them."""
        if not self.options.logprobs:
            return None
        tokenizer, shift = self.server.tokenizer, len(self._prefix(index))
        body = completion_logprobs(
            [(token.text, token.offset, token.logprob) for token in output_tokens], tokenizer, shift
        )
        if self._echo is None or not prompt:
            return body
        answer = self.outputs[index]
        tokens = prompt_tokens(answer.request.prompt_ids, answer.prompt_logprobs, tokenizer)
        return {key: values + body[key] for key, values in completion_logprobs(tokens, tokenizer).items()}


def _rank_key(output: ChoiceOutput) -> tuple[bool, float]:
    """Whether it came to an end of its own, and its mean log-probability; that is 0 for an answer without a token."""
    mean = sum(token.logprob.logprob for token in output.logprobs) / max(len(output.logprobs), 1)
    return output.finish_reason != "repetition", mean
