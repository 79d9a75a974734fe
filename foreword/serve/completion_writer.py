"""Bodies of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from foreword.serve.generation import Generation
from foreword.serve.logprobs import completion_logprobs, prompt_tokens
from foreword.serve.state import Server
from foreword.serve.writer import Head, Wanted, Writer
from foreword.text.answer import Answer, Delta, ShownToken

__all__ = ["CompletionWriter"]


class CompletionWriter(Writer):
    """Of `per_prompt` answers to a prompt the `returned` likeliest are returned.

    echo  the text of each prompt, to stand before its answers; None where it was not asked for
    """

    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"

    def __init__(
        self,
        server: Server,
        generation: Generation,
        per_prompt: int,
        head: Head,
        wanted: Wanted,
        echo: Sequence[str] | None,
        returned: int,
    ) -> None:
        super().__init__(server, generation, per_prompt, head, wanted)
        self._returned = returned
        self._echo = None if echo is None else [text for text in echo for _ in range(per_prompt)]

    def chosen(self) -> Sequence[int]:
        """For each prompt the best by mean log-probability, the best first where not all are returned.

        What was ended as a repetition comes last: nothing is likelier than a loop that has begun.
        """
        if self._returned == self.per_prompt:
            return super().chosen()
        groups = [range(first, first + self.per_prompt) for first in range(0, len(self.answers), self.per_prompt)]
        ranked = [sorted(group, key=lambda i: _worth(self.answers[i]), reverse=True) for group in groups]
        return [i for group in ranked for i in group[: self._returned]]

    def whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        return {"text": self._prefix(index) + answer.text, "logprobs": self._logprobs(index, answer.logprobs, prompt=True)}

    def chunk_choice(self, index: int, delta: Delta, first: bool) -> dict[str, Any]:
        prefix = self._prefix(index) if first else ""
        return {"text": prefix + delta.text, "logprobs": self._logprobs(index, delta.logprobs, prompt=first)}

    def _prefix(self, index: int) -> str:
        return "" if self._echo is None else self._echo[index]

    def _logprobs(self, index: int, shown: Sequence[ShownToken], prompt: bool) -> dict[str, Any] | None:
        """Of the answer's tokens; with `prompt` and echo, those of the prompt before them."""
        if not self.wanted.logprobs:
            return None
        tokenizer, shift = self.server.tokenizer, len(self._prefix(index))
        body = completion_logprobs([(token.text, token.offset, token.logprob) for token in shown], tokenizer, shift)
        if self._echo is None or not prompt:
            return body
        answer = self.answers[index]
        tokens = prompt_tokens(answer.request.prompt_ids, answer.prompt_logprobs, tokenizer)
        return {key: values + body[key] for key, values in completion_logprobs(tokens, tokenizer).items()}


def _worth(answer: Answer) -> tuple[bool, float]:
    """Whether it came to an end of its own, and its mean log-probability; that is 0 for an answer without a token."""
    mean = sum(token.logprob.logprob for token in answer.logprobs) / max(len(answer.logprobs), 1)
    return answer.finish_reason != "repetition", mean
