"""POST /tokenize and /detokenize"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter, Request, Response

from foreword.errors import InvalidRequest
from foreword.server.auth.keys import KeyPermissions, PermissionsDep
from foreword.server.context import ServerContext, ServerDep, offload_if_large
from foreword.server.errors import rename_field
from foreword.server.json_response import JSONResponse
from foreword.server.protocol.chat import to_template_messages
from foreword.server.protocol.tokenize import DetokenizeBody, TokenizeBody

__all__ = ["router"]

router = APIRouter()


@router.post("/tokenize")
async def tokenize(
    body: TokenizeBody, request: Request, permissions: PermissionsDep, server: ServerDep
) -> Response:
    """Token ids of a prompt or of a conversation."""
    server.check_model(body.model, permissions)
    body.check()
    ids = await _tokenize_body(server, body, request, permissions)
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": server.info().resolved.max_model_len,
        "tokens": ids,
    }
    if body.return_token_strs:
        answer["token_strs"] = [server.tokenizer.id_to_token(token_id) for token_id in ids]
    return JSONResponse(answer)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, permissions: PermissionsDep, server: ServerDep) -> Response:
    """Text of token ids."""
    server.check_model(body.model, permissions)
    for token_id in body.tokens:
        if not 0 <= token_id < server.tokenizer.vocab_size:
            raise InvalidRequest(
                f"tokens: id {token_id} is outside the vocabulary of {server.tokenizer.vocab_size}", "tokens"
            )
    return JSONResponse({"prompt": server.tokenizer.decode(body.tokens, skip_special_tokens=False)})


async def _tokenize_body(
    server: ServerContext, body: TokenizeBody, request: Request, permissions: KeyPermissions
) -> Sequence[int]:
    if body.messages is None:
        return await offload_if_large(
            request, lambda: server.tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
        )
    messages, rendering = to_template_messages(body.messages), body.template_kwargs()
    with rename_field({"prompt": "messages"}), ExitStack() as held:
        prompt = await server.build_prompt(
            request, messages, rendering, bool(body.add_special_tokens), permissions.fairness_key, held
        )
        return prompt.token_ids
