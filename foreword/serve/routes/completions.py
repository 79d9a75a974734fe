"""POST /v1/completions"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fastapi import APIRouter, Request, Response

from foreword.core.request import Request as EngineRequest
from foreword.serve.access import AccessDep
from foreword.serve.completion_writer import CompletionWriter
from foreword.serve.generation import Generation
from foreword.serve.respond import head_of, respond, wanted_of
from foreword.serve.schema.completion import CompletionBody, Prompt
from foreword.serve.state import Server, ServerDep, away_from_loop

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request, access: AccessDep, server: ServerDep) -> Response:
    """Continue one or several prompts."""
    server.check_model(body.model, access)
    params, prompts = server.settle(body.params()), body.prompts()
    wanted = replace(wanted_of(body, params), logprobs=body.wants_logprobs)
    head, caller = head_of(server, "cmpl", params), server.caller(access, body.priority, body.timeout)
    server.admission.check(params.n * len(prompts), caller.meter)
    await server.check_structured(params)
    special = body.add_special_tokens is not False

    def prepare() -> list[EngineRequest]:
        ids = [_ids(server, prompt, special) for prompt in prompts]
        return [one for i, prompt in enumerate(ids) for one in server.requests(prompt, params, f"{head.id}-{i}", caller)]

    requests = await away_from_loop(request, prepare)
    generation = Generation(server, requests, body.prompt_only, caller.meter)
    echo = _echo(server, prompts, requests[:: params.n]) if body.echo else None
    writer = CompletionWriter(server, generation, params.n, head, wanted, echo, body.returned)
    return respond(generation, writer, bool(body.stream))


def _ids(server: Server, prompt: Prompt, add_special_tokens: bool) -> list[int]:
    return server.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else list(prompt)


def _echo(server: Server, prompts: Sequence[Prompt], requests: Sequence[EngineRequest]) -> list[str]:
    """The text of each prompt; of one that was cut, what is left of it."""
    return [_text(server, prompt, request) for prompt, request in zip(prompts, requests, strict=True)]


def _text(server: Server, prompt: Prompt, request: EngineRequest) -> str:
    whole = isinstance(prompt, str) and request.params.truncate_prompt_tokens is None
    return str(prompt) if whole else server.tokenizer.decode(request.prompt_ids)
