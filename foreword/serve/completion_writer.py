"""Bodies of /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from foreword.serve.generation import Generation
from foreword.serve.logprobs import completion_logprobs, prompt_tokens
from foreword.serve.state import ServerContext
from foreword.serve.writer import ResponseHeader, ResponseOptions, ResponseBuilder
from foreword.text.answer import ChoiceOutput, OutputDelta, TokenLogprobText

__all__ = ["CompletionResponseBuilder"]


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
        groups = [range(first, first + self.choices_per_prompt) for first in range(0, len(self.outputs), self.choices_per_prompt)]
        ranked = [sorted(group, key=lambda i: _rank_key(self.outputs[i]), reverse=True) for group in groups]
        return [i for group in ranked for i in group[: self._num_returned]]

    def full_choice(self, index: int, output: ChoiceOutput) -> dict[str, Any]:
        return {"text": self._prefix(index) + output.text, "logprobs": self._logprobs(index, output.logprobs, prompt=True)}

    def chunk_choice(self, index: int, delta: OutputDelta, is_first: bool) -> dict[str, Any]:
        prefix = self._prefix(index) if is_first else ""
        return {"text": prefix + delta.text, "logprobs": self._logprobs(index, delta.logprobs, prompt=is_first)}

    def _prefix(self, index: int) -> str:
        return "" if self._echo is None else self._echo[index]

    def _logprobs(self, index: int, output_tokens: Sequence[TokenLogprobText], prompt: bool) -> dict[str, Any] | None:
        """Of the answer's tokens; with `prompt` and echo, those of the prompt before them."""
        if not self.options.logprobs:
            return None
        tokenizer, shift = self.server.tokenizer, len(self._prefix(index))
        body = completion_logprobs([(token.text, token.offset, token.logprob) for token in output_tokens], tokenizer, shift)
        if self._echo is None or not prompt:
            return body
        answer = self.outputs[index]
        tokens = prompt_tokens(answer.request.prompt_ids, answer.prompt_logprobs, tokenizer)
        return {key: values + body[key] for key, values in completion_logprobs(tokens, tokenizer).items()}


def _rank_key(output: ChoiceOutput) -> tuple[bool, float]:
    """Whether it came to an end of its own, and its mean log-probability; that is 0 for an answer without a token."""
    mean = sum(token.logprob.logprob for token in output.logprobs) / max(len(output.logprobs), 1)
    return output.finish_reason != "repetition", mean
