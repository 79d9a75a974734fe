"""The body of /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import WithJsonSchema

from foreword.core.params import MAX_N, SamplingParams
from foreword.errors import InvalidRequest
from foreword.server.protocol.sampling import SamplingBody

__all__ = ["CompletionBody", "PromptInput"]

DEFAULT_MAX_TOKENS = 16
_TEXT_SCHEMA = {"type": "string"}
_IDS_SCHEMA = {"type": "array", "items": {"type": "integer"}}
PromptInput = str | Sequence[int]
PromptField = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT_SCHEMA,
                _IDS_SCHEMA,
                {"type": "array", "items": _TEXT_SCHEMA},
                {"type": "array", "items": _IDS_SCHEMA},
            ]
        }
    ),
]


class CompletionBody(SamplingBody):
    """OpenAI's fields, vLLM's, and `speculation` and `metrics`."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **SamplingBody.unsupported,
        "suffix": (),
        "prompt_embeds": (),
    }
    prompt: PromptField
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
        changes = {
            "logprobs": self.logprobs,
            "max_tokens": 1 if self.prompt_only else max_tokens,
            "prompt_logprobs": echoed,
        }
        if self.best_of is not None:
            changes |= {"n": self._num_generated(self.best_of), "logprobs": self.logprobs or 0}
        return self.params_with(
            {"prompt_logprobs": "logprobs"} if self.prompt_logprobs is None else {}, **changes
        )

    @property
    def wants_logprobs(self) -> bool:
        """With best_of the engine scores answers in any case."""
        return self.logprobs is not None or bool(self.logprob_token_ids)

    @property
    def num_returned(self) -> int:
        """Choices to return for each prompt."""
        return 1 if self.n is None else self.n

    def _num_generated(self, best_of: int) -> int:
        """Choices to generate for each prompt, of which the best are returned."""
        if self.num_returned < 1:
            raise InvalidRequest(f"n must be at least 1, got {self.num_returned}", "n")
        if best_of < self.num_returned:
            raise InvalidRequest(
                f"best_of must be at least n, which is {self.num_returned}, got {best_of}", "best_of"
            )
        if best_of > MAX_N:
            raise InvalidRequest(f"best_of must be at most {MAX_N}, got {best_of}", "best_of")
        if self.stream and best_of != self.num_returned:
            raise InvalidRequest(
                f"best_of must equal n in a stream, got {best_of}: which are best is known at the end",
                "best_of",
            )
        return best_of

    def prompts(self) -> list[PromptInput]:
        """One prompt each. Raises InvalidRequest for what is neither text nor ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise _invalid_prompt(prompt)
        if _is_token_ids(prompt):
            return [prompt]
        if all(isinstance(item, str) or (_is_token_ids(item) and item) for item in prompt):
            return prompt
        raise _invalid_prompt(prompt)


def _is_token_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _invalid_prompt(value: object) -> InvalidRequest:
    return InvalidRequest(
        f"prompt must be a text, token ids, or a list of either, none empty, got {value!r:.80}", "prompt"
    )
