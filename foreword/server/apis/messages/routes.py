"""POST /v1/messages and /v1/messages/count_tokens"""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request, Response

from foreword.core.params import SamplingParams
from foreword.server.answering.chat import count_prompt_tokens, start_chat
from foreword.server.answering.streaming import respond
from foreword.server.apis.body import num_parts
from foreword.server.apis.messages.body import CountTokensBody, MessagesBody
from foreword.server.apis.messages.conversation import MessagesConversation
from foreword.server.apis.messages.writer import MessagesWriter
from foreword.server.auth.keys import PermissionsDep
from foreword.server.http.responses import JSONResponse
from foreword.server.loaded_model import LoadedModel
from foreword.server.registry import ModelsDep, ServedModels
from foreword.tokenizer.chat_processor import ChatTask

router = APIRouter()


@router.post("/v1/messages")
async def messages(
    body: MessagesBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Answer a conversation, with Anthropic's bodies."""
    server = await models.acquire(body.model, permissions, request, body.stream)
    params = server.resolve_params(body.params(server.sampling_defaults))
    context = server.request_context(permissions, body, body.timeout)
    conversation, task = _read_task(body, request, models, server, params)
    message_id = f"msg_{uuid.uuid4().hex}"
    with conversation.rename_fields():
        generation = await start_chat(server, request, context, task, message_id)
    writer = MessagesWriter(
        server,
        generation,
        message_id,
        context.model,
        request.scope,
        body.omit_thinking,
        bool(body.metrics),
        body.prompt_only,
    )
    return respond(generation, writer, bool(body.stream))


@router.post("/v1/messages/count_tokens")
async def count_tokens(
    body: CountTokensBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Tokens of the prompt that /v1/messages would render."""
    server = await models.acquire(body.model, permissions, request)
    context = server.request_context(permissions, body)
    conversation, task = _read_task(body, request, models, server, SamplingParams())
    with conversation.rename_fields():
        count = await count_prompt_tokens(server, request, context, task)
    return JSONResponse({"input_tokens": count})


def _read_task(
    body: MessagesBody | CountTokensBody,
    request: Request,
    models: ServedModels,
    server: LoadedModel,
    params: SamplingParams,
) -> tuple[MessagesConversation, ChatTask]:
    server.check_num_parts(num_parts(body.messages), "messages")
    conversation = body.conversation(takes_images=server.chat_processor.placeholder_id is not None)
    tools, skipped = body.tool_use(conversation.referenced)
    models.check_fields(body, request, ignored=skipped)
    task = ChatTask(
        conversation.messages,
        params,
        tools,
        body.reasoning(),
        body.template_kwargs(conversation.continues),
        prompt_only=isinstance(body, MessagesBody) and body.prompt_only,
        call_id_prefix="toolu_",
    )
    return conversation, task
