"""The body of /v1/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from foreword.core.params import MAX_N, SamplingParams
from foreword.errors import InvalidRequest
from foreword.server.apis.body import TextOrIds, TextsOrIds, is_token_ids
from foreword.server.apis.ignored_fields import COMPLETION, IgnoredField
from foreword.server.apis.sampling import NO_DEFAULTS, SamplingBody

DEFAULT_MAX_TOKENS = 16


class CompletionBody(SamplingBody):
    """OpenAI's fields, vLLM's, and `speculation` and `metrics`."""

    peer_fields: ClassVar[Mapping[str, IgnoredField]] = COMPLETION
    prompt: TextsOrIds
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    @property
    def prompt_only(self) -> bool:
        """echo with max_tokens 0 scores the prompt and generates nothing."""
        return self.max_tokens == 0 and bool(self.echo)

    def params(self, defaults: Mapping[str, Any] = NO_DEFAULTS) -> SamplingParams:
        """The parameters, and `defaults` of others. Raises InvalidRequest, which names the body's field."""
        echoed = self.logprobs if self.echo and self.prompt_logprobs is None else self.prompt_logprobs
        if self.logprob_token_ids and self.logprobs is None:
            raise InvalidRequest("logprob_token_ids needs logprobs", "logprob_token_ids")
        changes = {
            "logprobs": 0 if self.logprob_token_ids else self.logprobs,
            "max_tokens": 1 if self.prompt_only else self.max_tokens,
            "prompt_logprobs": echoed,
        }
        if self.best_of is not None:
            changes |= {"n": self._check_best_of(self.best_of), "logprobs": changes["logprobs"] or 0}
        names = {"prompt_logprobs": "logprobs"} if self.prompt_logprobs is None else {}
        return self.params_with({"max_tokens": DEFAULT_MAX_TOKENS, **defaults}, names, **changes)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the caller asked: best_of computes logprobs in any case."""
        return self.logprobs is not None

    @property
    def num_returned(self) -> int:
        """Choices returned per prompt."""
        return 1 if self.n is None else self.n

    def _check_best_of(self, best_of: int) -> int:
        """Choices generated per prompt, of which `num_returned` are returned."""
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
                f"best_of must equal n in a stream, got {best_of}: choices are ranked after the last token",
                "best_of",
            )
        return best_of

    def prompts(self) -> list[TextOrIds]:
        """The prompts. Raises InvalidRequest for a prompt that is neither text nor ids."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if isinstance(prompt, list) and prompt:
            if is_token_ids(prompt):
                return [prompt]
            if all(isinstance(item, str) or (is_token_ids(item) and item) for item in prompt):
                return prompt
        raise InvalidRequest(
            f"prompt must be a text, token ids, or a list of either, none empty, got {prompt!r:.80}", "prompt"
        )
