"""GET /v1/models and /v1/models/{id}"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from foreword.serve.state import Server, ServerDep
from foreword.serve.wire import Json

__all__ = ["router"]

router = APIRouter()


@router.get("/v1/models")
async def models(server: ServerDep) -> Response:
    """The models that are served: one."""
    return Json({"object": "list", "data": [_card(server)]})


@router.get("/v1/models/{name:path}")
async def model(name: str, server: ServerDep) -> Response:
    """Facts of one model."""
    server.check_model(name)
    return Json(_card(server))


def _card(server: Server) -> dict[str, Any]:
    info = server.client.info
    return {
        "id": server.model_name,
        "object": "model",
        "created": server.created,
        "owned_by": "foreword",
        "root": server.model_name,
        "parent": None,
        "max_model_len": info.resolved.max_model_len if info is not None else None,
    }
