"""GET /health, /ready, /live, /healthz, /version and /metrics"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from foreword.errors import Unauthorized
from foreword.metrics.prometheus import CONTENT_TYPE
from foreword.server.auth.keys import key_from_headers
from foreword.server.health import Health, HealthBody
from foreword.server.http.responses import JSONResponse
from foreword.server.registry import ModelsDep, ServedModels
from foreword.utils.version import __version__

router = APIRouter()
health_router = APIRouter()  # also while the model loads
HEALTH_503: dict[int | str, dict[str, Any]] = {
    503: {"model": HealthBody, "description": "No step could run now."}
}


@health_router.head("/health", include_in_schema=False)
@health_router.get("/health", response_model=HealthBody, responses=HEALTH_503)
async def health(request: Request) -> Response:
    """200 only if a step could run now."""
    state: Health = request.app.state.health
    return await state.response()


@health_router.head("/ready", include_in_schema=False)
@health_router.get("/ready", response_model=HealthBody, responses=HEALTH_503)
async def ready(request: Request) -> Response:
    """200 if /health is 200 and no shutdown has begun: whether to send requests here."""
    state: Health = request.app.state.health
    return await state.response(takes_traffic=True)


@health_router.head("/live", include_in_schema=False)
@health_router.head("/healthz", include_in_schema=False)
@health_router.get("/healthz")
@health_router.get("/live")
async def live() -> Response:
    """200 while the API process runs, whatever the engine does: whether to restart the server."""
    return JSONResponse({"status": "ok"})


@health_router.get("/version")
async def version_of_foreword() -> Response:
    """The version of this server."""
    return JSONResponse({"version": __version__})


@router.get("/metrics")
async def metrics(request: Request, models: ModelsDep) -> Response:
    """Metrics in Prometheus' text format; those by API key only with the key of an admin."""
    text = models.render_metrics(with_keys=_may_see_keys(request, models))
    return Response(text, headers={"Content-Type": CONTENT_TYPE})


def _may_see_keys(request: Request, models: ServedModels) -> bool:
    """Whether this is an admin, or a server without keys. Everybody may read the other metrics."""
    if models.keyring.is_open:
        return True
    try:
        return models.keyring.identify(key_from_headers(request.scope["headers"])).admin
    except Unauthorized:
        return False
