"""Bodies of completion responses, whole and streamed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from foreword.server.answering.generation import Generation
from foreword.server.apis.choices_writer import ChoicesWriter, ResponseHeader, ResponseOptions
from foreword.server.apis.logprobs import completion_logprobs, prompt_tokens
from foreword.server.loaded_model import LoadedModel
from foreword.tokenizer.output_processor import ChoiceOutput, OutputDelta, TokenLogprobText


class CompletionWriter(ChoicesWriter):
    object_type: ClassVar[str] = "text_completion"
    chunk_object_type: ClassVar[str] = "text_completion"

    def __init__(
        self,
        server: LoadedModel,
        generation: Generation,
        choices_per_prompt: int,
        header: ResponseHeader,
        options: ResponseOptions,
        echo: Sequence[str] | None,  # text of each prompt, if it is echoed
        num_returned: int,  # best choices returned per prompt
    ) -> None:
        super().__init__(server, generation, choices_per_prompt, header, options)
        self._num_returned = num_returned
        self._echo = None if echo is None else [text for text in echo for _ in range(choices_per_prompt)]

    def returned_choices(self) -> Sequence[int]:
        """The best choices of each prompt by mean logprob, best first unless all are returned."""
        count = self.choices_per_prompt
        if self._num_returned == count:
            return super().returned_choices()
        returned: list[int] = []
        for first in range(0, len(self.outputs), count):
            ranked = sorted(
                range(first, first + count), key=lambda i: _rank_key(self.outputs[i]), reverse=True
            )
            returned += ranked[: self._num_returned]
        return returned

    def full_choice(self, index: int, output: ChoiceOutput) -> dict[str, Any]:
        return {
            "text": self._prefix(index) + output.text,
            "logprobs": self._logprobs(index, output.logprobs, prompt=True),
            **self.prompt_ids(output),
            **self.prompt_logprobs(output),
        }

    def chunk_choice(self, index: int, delta: OutputDelta, is_first: bool) -> dict[str, Any]:
        prefix = self._prefix(index) if is_first else ""
        return {
            "text": prefix + delta.text,
            "logprobs": self._logprobs(index, delta.logprobs, prompt=is_first),
            **(self.prompt_ids(self.outputs[index]) if is_first else {}),
        }

    def _prefix(self, index: int) -> str:
        return "" if self._echo is None else self._echo[index]

    def _logprobs(
        self, index: int, output_tokens: Sequence[TokenLogprobText], prompt: bool
    ) -> dict[str, Any] | None:
        """Logprobs of the output tokens; with `prompt` and echo, after those of the prompt."""
        if not self.options.logprobs:
            return None
        tokens = [
            (self.names.name(token.logprob.token_id, token.text), token.offset, token.logprob)
            for token in output_tokens
        ]
        logprobs = completion_logprobs(tokens, self.names, len(self._prefix(index)))
        if self._echo is None or not prompt:
            return logprobs
        output = self.outputs[index]
        echoed = prompt_tokens(output.request.prompt_ids, output.prompt_logprobs, self.names)
        return {
            key: values + logprobs[key] for key, values in completion_logprobs(echoed, self.names).items()
        }


def _rank_key(output: ChoiceOutput) -> tuple[bool, float]:
    """Mean logprob, 0 without a token. An answer ended as a repetition ranks last, since loops are likely."""
    mean = sum(token.logprob.logprob for token in output.logprobs) / max(len(output.logprobs), 1)
    return output.finish_reason != "repetition", mean
