"""POST /v1/completions: its body, and those of its answers"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from fastapi import APIRouter, Request, Response

from foreword.core.params import MAX_N, SamplingParams
from foreword.core.request import Request as EngineRequest
from foreword.errors import InvalidRequest, shown
from foreword.server.answering.generation import Generation, build_requests, encoding_bytes, longest_prompt
from foreword.server.answering.streaming import respond
from foreword.server.apis.body import TABLES, TextOrIds, TextsOrIds, is_token_ids
from foreword.server.apis.choices_writer import (
    ChoicesWriter,
    ResponseHeader,
    ResponseOptions,
    completion_logprobs,
    prompt_tokens,
    response_header,
    response_options,
)
from foreword.server.apis.sampling import NO_DEFAULTS, SamplingBody
from foreword.server.auth.keys import PermissionsDep
from foreword.server.intake import IntakeRoute
from foreword.server.loaded_model import LoadedModel
from foreword.server.registry import ModelsDep
from foreword.tokenizer.input_processor import SamplingDefaults, encode_params
from foreword.tokenizer.output_processor import ChoiceOutput, OutputDelta, TokenLogprobText

DEFAULT_MAX_TOKENS = 16
CHOICE_BYTES = 64  # bytes of text that take as long to tokenize as a choice takes to make
router = APIRouter(route_class=IntakeRoute)


class CompletionBody(SamplingBody):
    """OpenAI's fields, vLLM's, and `speculation` and `metrics`."""

    peer_fields = TABLES["completion"]
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
            f"prompt must be a text, token ids, or a list of either, none empty, got {shown(prompt)}",
            "prompt",
        )


@router.post("/v1/completions")
async def completions(
    body: CompletionBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Continue one or several prompts."""
    await models.check_fields(body, request)
    server = await models.acquire(body.model, permissions, request, body.stream)
    params = server.resolve_params(body.params(server.sampling_defaults))
    prompts = await server.intake.offload_if_large(request, body.prompts)
    options = replace(response_options(body, params), logprobs=body.wants_logprobs)
    header = response_header(server, "cmpl", params)
    context = server.request_context(permissions, body, body.timeout)
    num_choices = params.n * len(prompts)
    server.admission.check(num_choices, context.meter)
    if params.structured is not None:
        await server.intake.compile(request, partial(server.grammar_checker.check, params.structured))
    add_special_tokens = body.add_special_tokens is not False
    max_tokens = longest_prompt(server, params)

    def tokenize(prompt: TextOrIds) -> list[int]:
        if isinstance(prompt, str):
            return server.tokenizer.encode(prompt, add_special_tokens, max_tokens)
        return list(prompt)

    def build_all_requests() -> tuple[list[EngineRequest], list[str] | None]:
        """The choices of all prompts, and the prompts' texts if they are echoed."""
        token_ids = [tokenize(prompt) for prompt in prompts]
        vocab_size = min(server.tokenizer.vocab_size, server.info().vocab_size)
        defaults = SamplingDefaults.from_config(server.config, server.tokenizer)
        encoded = encode_params(params, server.tokenizer, server.max_model_len, vocab_size, defaults)
        requests = [
            engine_request
            for i, ids in enumerate(token_ids)
            for engine_request in build_requests(
                server, ids, params, f"{header.id}-{i}", context, encoded=encoded
            )
        ]
        return requests, list(map(echo_text, prompts, requests[:: params.n])) if body.echo else None

    def echo_text(prompt: TextOrIds, engine_request: EngineRequest) -> str:
        if isinstance(prompt, str) and engine_request.params.truncate_prompt_tokens is None:
            return prompt
        return server.tokenizer.decode(engine_request.prompt_ids)

    num_bytes = request.state.body_bytes + CHOICE_BYTES * num_choices + encoding_bytes(params)
    requests, echo = await server.intake.offload_if_large(request, build_all_requests, num_bytes)
    generation = Generation(server, requests, context, body.prompt_only)
    writer = CompletionWriter(server, generation, params.n, header, options, echo, body.num_returned)
    return respond(generation, writer, bool(body.stream))


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
