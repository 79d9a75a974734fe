"""How answers are written: what chat and completions have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from foreword.serve.generation import Generation
from foreword.serve.logprobs import prompt_logprobs
from foreword.serve.state import ServerContext
from foreword.text.answer import ChoiceOutput, OutputDelta

__all__ = ["ResponseHeader", "ResponseOptions", "ResponseBuilder"]


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

    def __init__(self, server: ServerContext, generation: Generation, choices_per_prompt: int, header: ResponseHeader, options: ResponseOptions) -> None:
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
        choices = [{**self._full_choice(i, self.outputs[i]), "index": index} for index, i in enumerate(self.returned_choices())]
        return {**self.header(self.object_type), "choices": choices, "usage": self.usage(), **self._metrics(*self.outputs)}

    def chunk(self, index: int, delta: OutputDelta) -> dict[str, Any] | None:
        """The chunk of one delta, or None if it holds nothing for the caller."""
        first = index not in self._started
        self._accepted_drafts[index] += delta.event.draft.num_accepted if delta.event.draft else 0
        carries = delta.text or delta.finish_reason or (delta.event.token_ids and (self.options.logprobs or self.options.token_ids))
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
        return {**self.header(self.chunk_object_type), "choices": [], "usage": self.usage()} if self.options.usage else None

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
