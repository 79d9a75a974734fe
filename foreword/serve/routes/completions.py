"""POST /v1/completions"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from foreword.core.request import Request as EngineRequest
from foreword.serve.completion_writer import CompletionWriter
from foreword.serve.generation import Generation
from foreword.serve.respond import caller_of, head_of, respond, wanted_of
from foreword.serve.schema.completion import CompletionBody, Prompt
from foreword.serve.state import Server, ServerDep, away_from_loop

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/completions")
async def completions(body: CompletionBody, request: Request, server: ServerDep) -> Response:
    """Continue one or several prompts."""
    server.check_model(body.model)
    params, prompts = server.settle(body.params()), body.prompts()
    wanted, head, caller = wanted_of(body, params), head_of(server, "cmpl", params), caller_of(request, body)
    server.admission.check(params.n * len(prompts))
    special = body.add_special_tokens is not False

    def prepare() -> list[EngineRequest]:
        ids = [_ids(server, prompt, special) for prompt in prompts]
        return [one for i, prompt in enumerate(ids) for one in server.requests(prompt, params, f"{head.id}-{i}", caller)]

    requests = await away_from_loop(request, prepare)
    generation = Generation(server, requests, body.prompt_only)
    echo = [_text(server, prompt) for prompt in prompts] if body.echo else None
    writer = CompletionWriter(server, generation, params.n, head, wanted, echo)
    return await respond(request, generation, writer, bool(body.stream))


def _ids(server: Server, prompt: Prompt, add_special_tokens: bool) -> list[int]:
    return server.tokenizer.encode(prompt, add_special_tokens) if isinstance(prompt, str) else list(prompt)


def _text(server: Server, prompt: Prompt) -> str:
    return prompt if isinstance(prompt, str) else server.tokenizer.decode(prompt)
