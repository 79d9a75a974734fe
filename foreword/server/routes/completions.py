"""POST /v1/completions"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter, Request, Response

from foreword.core.request import Request as EngineRequest
from foreword.server.auth.keys import PermissionsDep
from foreword.server.context import ServerContext, ServerDep, offload_if_large
from foreword.server.generation import Generation
from foreword.server.protocol.completions import CompletionBody, PromptInput
from foreword.server.responses import CompletionResponseBuilder
from foreword.server.streaming import respond, response_header, response_options

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/completions")
async def completions(
    body: CompletionBody, request: Request, permissions: PermissionsDep, server: ServerDep
) -> Response:
    """Continue one or several prompts."""
    server.check_model(body.model, permissions)
    params, prompts = server.resolve_params(body.params()), body.prompts()
    wanted = replace(response_options(body, params), logprobs=body.wants_logprobs)
    head, caller = (
        response_header(server, "cmpl", params),
        server.request_context(permissions, body.priority, body.timeout),
    )
    server.admission.check(params.n * len(prompts), caller.meter)
    await server.check_structured(params)
    special = body.add_special_tokens is not False

    def prepare() -> list[EngineRequest]:
        ids = [_tokenize(server, prompt, special) for prompt in prompts]
        return [
            one
            for i, prompt in enumerate(ids)
            for one in server.build_requests(prompt, params, f"{head.id}-{i}", caller)
        ]

    requests = await offload_if_large(request, prepare)
    generation = Generation(server, requests, body.prompt_only, caller.meter)
    echo = _echo_texts(server, prompts, requests[:: params.n]) if body.echo else None
    writer = CompletionResponseBuilder(server, generation, params.n, head, wanted, echo, body.num_returned)
    return respond(generation, writer, bool(body.stream))


def _tokenize(server: ServerContext, prompt: PromptInput, add_special_tokens: bool) -> list[int]:
    return server.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else list(prompt)


def _echo_texts(
    server: ServerContext, prompts: Sequence[PromptInput], requests: Sequence[EngineRequest]
) -> list[str]:
    """The text of each prompt; of one that was cut, what is left of it."""
    return [_prompt_text(server, prompt, request) for prompt, request in zip(prompts, requests, strict=True)]


def _prompt_text(server: ServerContext, prompt: PromptInput, request: EngineRequest) -> str:
    whole = isinstance(prompt, str) and request.params.truncate_prompt_tokens is None
    return str(prompt) if whole else server.tokenizer.decode(request.prompt_ids)
