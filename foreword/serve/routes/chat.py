"""POST /v1/chat/completions"""

from __future__ import annotations

from contextlib import ExitStack

from fastapi import APIRouter, Request, Response

from foreword.serve.access import AccessDep
from foreword.serve.chat_writer import ChatWriter
from foreword.serve.errors import naming
from foreword.serve.generation import Generation
from foreword.serve.respond import head_of, respond, wanted_of
from foreword.serve.schema.chat import ChatBody, plain_messages
from foreword.serve.state import ServerDep, away_from_loop

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request, access: AccessDep, server: ServerDep) -> Response:
    """Answer a conversation."""
    server.check_model(body.model, access)
    params = server.settle(body.params())
    wanted, head = wanted_of(body, params), head_of(server, "chatcmpl", params)
    caller = server.caller(access, body.priority, body.timeout)
    with naming({"prompt": "messages"}), ExitStack() as held, server.admission.place(params.n, caller.meter):
        await server.check_structured(params)
        messages, rendering = plain_messages(body.messages), body.rendering()
        prompt = await server.prompt(request, messages, rendering, bool(body.add_special_tokens), caller.account, held)
        requests = await away_from_loop(request, lambda: server.requests(prompt.ids, params, head.id, caller, prompt.pictures))
        generation = Generation(server, requests, meter=caller.meter, held=held.pop_all())
    return respond(generation, ChatWriter(server, generation, params.n, head, wanted), bool(body.stream))
