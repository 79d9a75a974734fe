"""POST /v1/completions"""

from __future__ import annotations

from dataclasses import replace

from fastapi import APIRouter, Request, Response

from foreword.core.request import Request as EngineRequest
from foreword.server.answering.chat import build_requests
from foreword.server.answering.generation import Generation
from foreword.server.answering.streaming import respond, response_header, response_options
from foreword.server.apis.body import TextOrIds
from foreword.server.apis.completions.body import CompletionBody
from foreword.server.apis.completions.writer import CompletionWriter
from foreword.server.auth.keys import PermissionsDep
from foreword.server.loaded_model import offload_if_large
from foreword.server.registry import ModelsDep

router = APIRouter()


@router.post("/v1/completions")
async def completions(
    body: CompletionBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Continue one or several prompts."""
    models.check_fields(body, request)
    server = await models.acquire(body.model, permissions, request, body.stream)
    params = server.resolve_params(body.params(server.sampling_defaults))
    prompts = body.prompts()
    options = replace(response_options(body, params), logprobs=body.wants_logprobs)
    header = response_header(server, "cmpl", params)
    context = server.request_context(permissions, body, body.timeout)
    server.admission.check(params.n * len(prompts), context.meter)
    await server.check_structured(params)
    add_special_tokens = body.add_special_tokens is not False

    def tokenize(prompt: TextOrIds) -> list[int]:
        if isinstance(prompt, str):
            return server.tokenizer.encode(prompt, add_special_tokens)
        return list(prompt)

    def build_all_requests() -> list[EngineRequest]:
        token_ids = [tokenize(prompt) for prompt in prompts]
        return [
            engine_request
            for i, ids in enumerate(token_ids)
            for engine_request in build_requests(server, ids, params, f"{header.id}-{i}", context)
        ]

    def echo_text(prompt: TextOrIds, engine_request: EngineRequest) -> str:
        if isinstance(prompt, str) and engine_request.params.truncate_prompt_tokens is None:
            return prompt
        return server.tokenizer.decode(engine_request.prompt_ids)

    requests = await offload_if_large(request, build_all_requests)
    generation = Generation(server, requests, context, body.prompt_only)
    firsts = requests[:: params.n]
    echo = list(map(echo_text, prompts, firsts)) if body.echo else None
    writer = CompletionWriter(server, generation, params.n, header, options, echo, body.num_returned)
    return respond(generation, writer, bool(body.stream))
