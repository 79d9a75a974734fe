"""POST /tokenize and /detokenize, with vLLM's bodies"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter, Request, Response

from foreword.chat_formats.tool_validation import check_tools
from foreword.errors import InvalidRequest
from foreword.server.answering.generation import build_prompt
from foreword.server.answering.streaming import INLINE_IDS
from foreword.server.apis.body import TABLES, ModelName, StrictModel, count_parts
from foreword.server.apis.chat.body import (
    ChatTool,
    Message,
    ReasoningBody,
    TemplateOptions,
    to_template_messages,
)
from foreword.server.auth.keys import KeyPermissions, PermissionsDep
from foreword.server.http.errors import rename_field
from foreword.server.http.responses import json_pieces
from foreword.server.intake import IntakeRoute
from foreword.server.loaded_model import LoadedModel
from foreword.server.registry import ModelsDep
from foreword.tokenizer.chat_processor import ChatTask
from foreword.tokenizer.tokenizer import MAX_TEXT_TOKENS
from foreword.utils.threads import join_in_own_thread

router = APIRouter(route_class=IntakeRoute)


class TokenizeBody(ReasoningBody, TemplateOptions):
    peer_fields = TABLES["template"]
    model: ModelName = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[ChatTool] | None = None  # for a prompt of messages
    add_special_tokens: bool | None = None  # default: true for a prompt, false for messages
    return_token_strs: bool | None = None

    def num_parts(self) -> tuple[int, str]:
        return count_parts(self.messages or ()), "messages"


class DetokenizeBody(StrictModel):
    peer_fields = TABLES["template"]
    model: ModelName = None
    tokens: list[int]

    def check_num_parts(self, limit: int | None) -> None:
        """Raises InvalidRequest for more ids than /tokenize returns, which are no prompt."""
        if len(self.tokens) > MAX_TEXT_TOKENS:
            raise InvalidRequest(
                f"tokens holds {len(self.tokens)} ids; at most {MAX_TEXT_TOKENS} are taken", "tokens"
            )


@router.post("/tokenize")
async def tokenize(
    body: TokenizeBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Token ids of a prompt or of a conversation."""
    await models.check_fields(body, request)
    server = await models.acquire(body.model, permissions, request)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("either prompt or messages is required, and not both", "prompt")
    ids = await _token_ids(server, body, request, permissions)

    def result() -> dict[str, Any]:
        known = {"count": len(ids), "max_model_len": server.max_model_len, "tokens": ids}
        if not body.return_token_strs:
            return known
        return known | {"token_strs": [server.tokenizer.id_to_token(token_id) for token_id in ids]}

    return await _respond(result, len(ids))


@router.post("/detokenize")
async def detokenize(
    body: DetokenizeBody, request: Request, permissions: PermissionsDep, models: ModelsDep
) -> Response:
    """Text of token ids."""
    await models.check_fields(body, request)
    server = await models.acquire(body.model, permissions, request)
    body.check_num_parts(server.max_model_len)
    tokenizer = server.tokenizer

    def decode() -> str:
        for token_id in body.tokens:
            if not 0 <= token_id < tokenizer.vocab_size:
                raise InvalidRequest(
                    f"tokens: id {token_id} is outside the vocabulary of {tokenizer.vocab_size}", "tokens"
                )
        return tokenizer.decode(body.tokens, skip_special_tokens=False)

    text = await server.intake.offload_if_large(request, decode)
    return await _respond(lambda: {"prompt": text}, len(body.tokens))


async def _respond(result: Callable[[], dict[str, Any]], num_ids: int) -> Response:
    """The answer about that many ids; of many it is made in a thread."""

    def pieces() -> Iterator[bytes]:
        return json_pieces(result(), levels=1)

    content = b"".join(pieces()) if num_ids <= INLINE_IDS else await join_in_own_thread(pieces)
    return Response(content, media_type="application/json")


async def _token_ids(
    server: LoadedModel, body: TokenizeBody, request: Request, permissions: KeyPermissions
) -> Sequence[int]:
    """The prompt's tokens, also if they exceed the context: callers learn by how much."""
    if body.messages is None:
        return await server.intake.offload_if_large(
            request, lambda: server.tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
        )
    body.check_num_parts(server.max_model_len)
    task = await server.intake.offload_if_large(request, lambda: _read_task(body))
    context = permissions.request_context()
    with rename_field({"prompt": "messages"}), ExitStack() as resources:
        return (await build_prompt(server, request, context, task, resources)).token_ids


def _read_task(body: TokenizeBody) -> ChatTask:
    return ChatTask(
        to_template_messages(body.messages or ()),
        reasoning=body.reasoning(),
        tools=check_tools([tool.tool(f"tools[{i}]") for i, tool in enumerate(body.tools or ())]),
        template_kwargs=body.template_kwargs(),
        add_special_tokens=bool(body.add_special_tokens),
    )
