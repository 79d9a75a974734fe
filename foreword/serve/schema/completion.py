"""The body of /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema

from foreword.core.params import MAX_N, SamplingParams
from foreword.errors import InvalidRequest
from foreword.serve.schema.sampling import SamplingBody

__all__ = ["CompletionBody", "Prompt"]

DEFAULT_MAX_TOKENS = 16
_TEXT = {"type": "string"}
_IDS = {"type": "array", "items": {"type": "integer"}}
Prompt = str | Sequence[int]
AnyPrompt = Annotated[
    Any, WithJsonSchema({"anyOf": [_TEXT, _IDS, {"type": "array", "items": _TEXT}, {"type": "array", "items": _IDS}]})
]


class CompletionBody(SamplingBody):
    """OpenAI's fields, vLLM's, and `speculation` and `metrics`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {**SamplingBody.unsupported, "suffix": (), "prompt_embeds": ()}
    prompt: AnyPrompt
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    @property
    def prompt_only(self) -> bool:
        """With echo and max_tokens 0 only the prompt is scored."""
        return self.max_tokens == 0 and bool(self.echo)

    def params(self) -> SamplingParams:
        """Raises InvalidRequest, which names the field as it stands in this body."""
        echoed = self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
        max_tokens = DEFAULT_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        if self.max_tokens is None and self.min_tokens is not None:
            max_tokens = max(max_tokens, self.min_tokens)
        changes = {"logprobs": self.logprobs, "max_tokens": 1 if self.prompt_only else max_tokens, "prompt_logprobs": echoed}
        if self.best_of is not None:
            changes |= {"n": self._generated(self.best_of), "logprobs": self.logprobs or 0}
        return self.params_with({"prompt_logprobs": "logprobs"} if self.prompt_logprobs is None else {}, **changes)

    @property
    def wants_logprobs(self) -> bool:
        """With best_of the engine scores answers in any case."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def returned(self) -> int:
        """Choices to return for each prompt."""
        return 1 if self.n is None else self.n

    def _generated(self, best_of: int) -> int:
        """Choices to generate for each prompt, of which the best are returned."""
        if self.returned < 1:
            raise InvalidRequest(f"n must be at least 1, got {self.returned}", "n")
        if best_of < self.returned:
            raise InvalidRequest(f"best_of must be at least n, which is {self.returned}, got {best_of}", "best_of")
        if best_of > MAX_N:
            raise InvalidRequest(f"best_of must be at most {MAX_N}, got {best_of}", "best_of")
        if self.stream and best_of != self.returned:
            raise InvalidRequest(
                f"best_of must equal n in a stream, got {best_of}: which are best is known at the end", "best_of"
            )
        return best_of

    def prompts(self) -> list[Prompt]:
        """One prompt each. Raises InvalidRequest for what is neither text nor ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise _not_a_prompt(prompt)
        if _is_ids(prompt):
            return [prompt]
        if all(isinstance(item, str) or (_is_ids(item) and item) for item in prompt):
            return prompt
        raise _not_a_prompt(prompt)


def _is_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _not_a_prompt(value: object) -> InvalidRequest:
    return InvalidRequest(f"prompt must be a text, token ids, or a list of either, none empty, got {value!r:.80}", "prompt")
