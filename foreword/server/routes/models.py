"""GET /v1/models and /v1/models/{id}"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from foreword.server.auth.keys import PermissionsDep
from foreword.server.context import ServerContext, ServerDep
from foreword.server.json_response import JSONResponse

__all__ = ["router"]

router = APIRouter()


@router.get("/v1/models")
async def models(permissions: PermissionsDep, server: ServerDep) -> Response:
    """The models that this caller may use: what generates, and perhaps an encoder."""
    return JSONResponse(
        {
            "object": "list",
            "data": [_model_card(server, name) for name in permissions.allowed_models(server.model_names)],
        }
    )


@router.get("/v1/models/{name:path}")
async def model(name: str, permissions: PermissionsDep, server: ServerDep) -> Response:
    """Facts of one model."""
    server.check_access(name, permissions)
    return JSONResponse(_model_card(server, name))


def _model_card(server: ServerContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": server.created,
        "owned_by": "foreword",
        "root": name,
        "parent": None,
        "max_model_len": _max_tokens(server, name),
    }


def _max_tokens(server: ServerContext, name: str) -> int | None:
    """Longest text; None while the engine is loading."""
    if name != server.model_name:
        assert server.encoder is not None and server.encoder.info is not None
        return server.encoder.info.max_tokens
    info = server.client.info
    return info.resolved.max_model_len if info is not None else None
