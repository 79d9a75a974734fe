"""GET /v1/models, /metrics and /docs"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse

from foreword.errors import Unauthorized
from foreword.metrics.prometheus import CONTENT_TYPE
from foreword.server.auth.keys import PermissionsDep, key_from_headers
from foreword.server.context import ServerContext
from foreword.server.http import JSONResponse
from foreword.server.served_models import ModelsDep, ServedModels

__all__ = ["model_card", "router"]

router = APIRouter()
DOCS_PAGE = Path(__file__).parent.parent / "static" / "docs.html"  # self-contained: loads nothing remote


@router.get("/v1/models")
async def list_models(permissions: PermissionsDep, models: ModelsDep) -> Response:
    """The models that this key may use, with their encoders and adapters."""
    cards = [
        model_card(models, server, name)
        for server in models.loaded
        for name in server.allowed_names(permissions)
    ]
    return JSONResponse({"object": "list", "data": cards})


@router.get("/v1/models/{name:path}")
async def get_model(name: str, permissions: PermissionsDep, models: ModelsDep) -> Response:
    """Facts of one model."""
    if not name:  # a slash at the end of the path
        return await list_models(permissions, models)
    server = models.default
    is_served = name in server.names.all
    model = server.check_access(name, permissions)
    return JSONResponse(model_card(models, server, name if is_served else model.name))


def model_card(models: ServedModels, server: ServerContext, name: str) -> dict[str, Any]:
    """A model as in /v1/models."""
    model = server.names.resolve(name)
    if not model.is_encoder:
        info = server.client.info  # None while the engine is loading
        max_model_len = info.resolved.max_model_len if info is not None else None
        defaults = {"sampling_defaults": server.tokenizer.generation_config.as_dict()}
    else:
        assert server.encoder is not None and server.encoder.info is not None
        max_model_len, defaults = server.encoder.info.max_tokens, {}
    return {
        "id": name,
        "object": "model",
        "created": models.created,
        "owned_by": "foreword",
        "root": model.root,
        "parent": model.parent,
        "max_model_len": max_model_len,
        **defaults,
    }


@router.get("/metrics")
async def metrics(request: Request, models: ModelsDep) -> Response:
    """Metrics in Prometheus' text format; those by API key only with the key of an admin."""
    text = models.recorder.render(with_keys=_may_see_keys(request, models))
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


def _may_see_keys(request: Request, models: ServedModels) -> bool:
    """Whether this is an admin, or a server without keys. Everybody may read the other metrics."""
    if models.keyring.is_open:
        return True
    try:
        return models.keyring.identify(key_from_headers(request.scope["headers"])).admin
    except Unauthorized:
        return False


@router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    return HTMLResponse(DOCS_PAGE.read_text(encoding="utf-8"))
