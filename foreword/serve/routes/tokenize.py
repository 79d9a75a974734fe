"""POST /tokenize and /detokenize"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from fastapi import APIRouter, Request, Response

from foreword.errors import InvalidRequest
from foreword.serve.access import Access, AccessDep
from foreword.serve.errors import naming
from foreword.serve.schema.chat import plain_messages
from foreword.serve.schema.tokenize import DetokenizeBody, TokenizeBody
from foreword.serve.state import Server, ServerDep, away_from_loop
from foreword.serve.wire import Json

__all__ = ["router"]

router = APIRouter()


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request, access: AccessDep, server: ServerDep) -> Response:
    """Token ids of a prompt or of a conversation."""
    server.check_model(body.model, access)
    body.check()
    ids = await _ids(server, body, request, access)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": server.info().resolved.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [server.tokenizer.token(token_id) for token_id in ids]
    return Json(answer)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, access: AccessDep, server: ServerDep) -> Response:
    """Text of token ids."""
    server.check_model(body.model, access)
    for token_id in body.tokens:
        if not 0 <= token_id < server.tokenizer.vocab_size:
            raise InvalidRequest(f"tokens: id {token_id} is outside the vocabulary of {server.tokenizer.vocab_size}", "tokens")
    return Json({"prompt": server.tokenizer.decode(body.tokens, skip_special_tokens=False)})


async def _ids(server: Server, body: TokenizeBody, request: Request, access: Access) -> Sequence[int]:
    if body.messages is None:
        return await away_from_loop(
            request, lambda: server.tokenizer.encode(body.prompt or "", body.add_special_tokens is not False)
        )
    messages, rendering = plain_messages(body.messages), body.rendering()
    with naming({"prompt": "messages"}), ExitStack() as held:
        prompt = await server.prompt(request, messages, rendering, bool(body.add_special_tokens), access.account, held)
        return prompt.ids
