"""POST /v1/chat/completions"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from foreword.core.request import Request as EngineRequest
from foreword.serve.access import AccessDep
from foreword.serve.chat_writer import ChatWriter
from foreword.serve.errors import naming
from foreword.serve.generation import Generation
from foreword.serve.respond import head_of, respond, wanted_of
from foreword.serve.schema.chat import ChatBody, plain_messages
from foreword.serve.state import ServerDep

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatBody, request: Request, access: AccessDep, server: ServerDep) -> Response:
    """Answer a conversation."""
    server.check_model(body.model, access)
    params = server.settle(body.params())
    wanted, head = wanted_of(body, params), head_of(server, "chatcmpl", params)
    caller = server.caller(access, body.priority, body.timeout)
    server.admission.check(params.n, caller.meter)
    await server.check_structured(params)

    def prepare() -> list[EngineRequest]:
        ids = server.chat_ids(plain_messages(body.messages), body.rendering(), bool(body.add_special_tokens))
        return server.requests(ids, params, head.id, caller)

    with naming({"prompt": "messages"}):
        requests = await server.while_rendering(request, prepare)
    generation = Generation(server, requests, meter=caller.meter)
    return await respond(request, generation, ChatWriter(server, generation, params.n, head, wanted), bool(body.stream))
