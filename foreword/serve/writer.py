"""How answers are written: what chat and completions have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from foreword.serve.generation import Generation
from foreword.serve.logprobs import prompt_logprobs
from foreword.serve.state import Server
from foreword.text.answer import Answer, Delta

__all__ = ["Head", "Wanted", "Writer"]


@dataclass(frozen=True, slots=True)
class Head:
    """What every chunk of an answer repeats.

    seed  of the first choice; with it the same request gives the same answer again
    """

    id: str
    created: int
    model: str
    system_fingerprint: str
    seed: int


@dataclass(frozen=True, slots=True)
class Wanted:
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


class Writer(ABC):
    """Builds response bodies. Choices stand in order of prompt, `per_prompt` for each.

    kind, chunk_kind  `object` of a whole answer and of a chunk
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, server: Server, generation: Generation, per_prompt: int, head: Head, wanted: Wanted) -> None:
        self.server = server
        self.answers: Sequence[Answer] = generation.answers
        self._predicted = generation.predicted
        self.wanted = wanted
        self.per_prompt = per_prompt
        self._head = head
        self._running = len(self.answers)  # choices whose last chunk was not written yet
        self._begun: set[int] = set()
        self._accepted: Counter[int] = Counter()  # by choice, not yet told

    @abstractmethod
    def whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """What is the endpoint's own in a choice of a whole answer."""

    @abstractmethod
    def chunk_choice(self, index: int, delta: Delta, first: bool) -> dict[str, Any]:
        """What is the endpoint's own in a choice of a chunk; `first` of this choice."""

    def opening(self) -> Iterable[dict[str, Any]]:
        """Chunks before anything was generated."""
        return ()

    def chosen(self) -> Sequence[int]:
        """The answers that are returned, in order."""
        return range(len(self.answers))

    def whole(self) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [{**self._whole_choice(i, self.answers[i]), "index": index} for index, i in enumerate(self.chosen())]
        return {**self.head(self.kind), "choices": choices, "usage": self.usage(), **self._metrics(*self.answers)}

    def chunk(self, index: int, delta: Delta) -> dict[str, Any] | None:
        """The chunk of one delta, or None if it holds nothing for the caller."""
        first = index not in self._begun
        self._accepted[index] += delta.event.draft.accepted if delta.event.draft else 0
        carries = delta.text or delta.finish_reason or (delta.event.token_ids and (self.wanted.logprobs or self.wanted.token_ids))
        if not carries:
            return None
        self._begun.add(index)
        choice = {
            "index": index,
            **self.chunk_choice(index, delta, first),
            "finish_reason": delta.finish_reason,
            "stop_reason": delta.stop_reason,
            **self._chunk_extras(index, delta, first),
        }
        return {**self.chunk_of(choice), **self._together(delta)}

    def usage_chunk(self) -> dict[str, Any] | None:
        """The last chunk, if it was asked for: usage and no choices."""
        return {**self.head(self.chunk_kind), "choices": [], "usage": self.usage()} if self.wanted.usage else None

    def usage(self) -> dict[str, Any]:
        """What was delivered. A prompt counts once, however many choices it has; drafted tokens count nowhere else."""
        firsts = self.answers[:: self.per_prompt]
        prompt = sum(len(answer.request.prompt_ids) for answer in firsts)
        completion = sum(answer.num_tokens for answer in self.answers)
        cached = sum(answer.num_cached for answer in firsts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached, **self._seen(firsts)},
            **self._prediction(),
        }

    def _seen(self, firsts: Sequence[Answer]) -> dict[str, int]:
        """How many of the prompts' tokens stand for pictures, where there are some."""
        pictures = [picture for answer in firsts for picture in answer.request.pictures]
        return {"image_tokens": sum(picture.num_tokens for picture in pictures)} if pictures else {}

    def _prediction(self) -> dict[str, Any]:
        """What became of the drafts out of the caller's prediction, if there was one."""
        if not self.wanted.prediction:
            return {}
        accepted, drafted = self._predicted.accepted, self._predicted.drafted
        return {
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            }
        }

    def returned(self, num_choices: int) -> None:
        """So many choices were sent to their ends."""
        self.server.recorder.returned(num_choices)

    def head(self, kind: str) -> dict[str, Any]:
        head = self._head
        return {
            "id": head.id,
            "object": kind,
            "created": head.created,
            "model": head.model,
            "system_fingerprint": head.system_fingerprint,
            "seed": head.seed,
        }

    def chunk_of(self, choice: dict[str, Any]) -> dict[str, Any]:
        usage = {"usage": None} if self.wanted.usage else {}
        return {**self.head(self.chunk_kind), "choices": [choice], **usage}

    def _whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        choice = {
            "index": index,
            **self.whole_choice(index, answer),
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            **self._metrics(answer),
        }
        if self.wanted.token_ids:
            choice |= {"prompt_token_ids": list(answer.request.prompt_ids), "token_ids": answer.token_ids}
        if self.wanted.prompt_logprobs:
            choice["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs, self.server.tokenizer)
        return choice

    def _chunk_extras(self, index: int, delta: Delta, first: bool) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.wanted.token_ids:
            prompt = {"prompt_token_ids": list(self.answers[index].request.prompt_ids)} if first else {}
            extras |= {**prompt, "token_ids": list(delta.event.token_ids)}
        if self.wanted.metrics:
            extras["accepted_draft_tokens"] = self._accepted.pop(index)
            extras["tokens"] = [list(piece) for piece in delta.pieces]
            extras |= self._metrics(self.answers[index]) if delta.finish_reason else {}
        return extras

    def _metrics(self, *answers: Answer) -> dict[str, Any]:
        """Figures of one choice, or of several together."""
        if not self.wanted.metrics:
            return {}
        found = self.server.recorder.answer_metrics(*(answer.request.id for answer in answers))
        return {} if found is None else {"metrics": found.as_dict()}

    def _together(self, delta: Delta) -> dict[str, Any]:
        """In a stream the figures of all choices stand beside the end of the last."""
        self._running -= delta.finish_reason is not None
        return self._metrics(*self.answers) if delta.finish_reason and not self._running else {}
