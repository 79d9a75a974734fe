"""POST /v1/chat/completions"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from foreword.server.answering.chat import start_chat
from foreword.server.answering.streaming import respond, response_header, response_options
from foreword.server.apis.body import num_parts
from foreword.server.apis.chat.body import ChatBody, to_template_messages
from foreword.server.apis.chat.writer import ChatWriter
from foreword.server.auth.keys import PermissionsDep
from foreword.server.registry import ModelsDep
from foreword.tokenizer.chat_processor import ChatTask

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(
    body: ChatBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Answer a conversation."""
    models.check_fields(body, request)
    server = await models.acquire(body.model, permissions, request, body.stream)
    params = server.resolve_params(body.params(server.sampling_defaults))
    options, header = response_options(body, params), response_header(server, "chatcmpl", params)
    context = server.request_context(permissions, body, body.timeout)
    server.check_num_parts(num_parts(body.messages), "messages")
    task = ChatTask(
        to_template_messages(body.messages),
        params,
        tools=body.tool_use(),
        reasoning=body.reasoning(),
        template_kwargs=body.template_kwargs(),
        add_special_tokens=bool(body.add_special_tokens),
        separate_reasoning=body.wants_separate_reasoning,
    )
    generation = await start_chat(server, request, context, task, header.id)
    writer = ChatWriter(server, generation, params.n, header, options, task.tools, body.wants_function_call)
    return respond(generation, writer, bool(body.stream))
