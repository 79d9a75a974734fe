"""POST /v1/chat/completions"""

from __future__ import annotations

from contextlib import ExitStack

from fastapi import APIRouter, Request, Response

from foreword.server.auth.keys import PermissionsDep
from foreword.server.context import ServerDep, offload_if_large
from foreword.server.errors import rename_field
from foreword.server.generation import Generation
from foreword.server.protocol.chat import ChatBody, to_template_messages
from foreword.server.responses import ChatResponseBuilder
from foreword.server.streaming import respond, response_header, response_options

__all__ = ["router"]

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(
    body: ChatBody, request: Request, permissions: PermissionsDep, server: ServerDep
) -> Response:
    """Answer a conversation."""
    server.check_fields(body, request)
    server.check_model(body.model, permissions)
    params = server.resolve_params(body.params(server.tokenizer.generation_config.params))
    options, header = response_options(body, params), response_header(server, "chatcmpl", params)
    context = server.request_context(permissions, body, body.timeout)
    with (
        rename_field({"prompt": "messages"}),
        ExitStack() as resources,
        server.admission.reserve(params.n, context.meter),
    ):
        await server.check_structured(params)
        messages, kwargs = to_template_messages(body.messages), body.template_kwargs()
        prompt = await server.build_prompt(
            request, messages, kwargs, bool(body.add_special_tokens), context.fairness_key, resources
        )
        requests = await offload_if_large(
            request,
            lambda: server.build_requests(
                prompt.token_ids, params, header.id, context, prompt.images, body.runs_to_end
            ),
        )
        generation = Generation(server, requests, meter=context.meter, resources=resources.pop_all())
    builder = ChatResponseBuilder(server, generation, params.n, header, options)
    return respond(generation, builder, bool(body.stream))
