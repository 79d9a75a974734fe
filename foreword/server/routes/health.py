"""GET /health, /ready, /live, /healthz and /version"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Request, Response

from foreword.server.health import Health, HealthBody
from foreword.server.http.responses import JSONResponse

router = APIRouter()
HEALTH_503: dict[int | str, dict[str, Any]] = {
    503: {"model": HealthBody, "description": "No step could run now."}
}


@router.head("/health", include_in_schema=False)
@router.get("/health", response_model=HealthBody, responses=HEALTH_503)
async def health(request: Request) -> Response:
    """200 only if a step could run now."""
    state: Health = request.app.state.health
    return await state.response()


@router.head("/ready", include_in_schema=False)
@router.get("/ready", response_model=HealthBody, responses=HEALTH_503)
async def ready(request: Request) -> Response:
    """200 if /health is 200 and no shutdown has begun: whether to send requests here."""
    state: Health = request.app.state.health
    return await state.response(takes_traffic=True)


@router.head("/live", include_in_schema=False)
@router.head("/healthz", include_in_schema=False)
@router.get("/healthz")
@router.get("/live")
async def live() -> Response:
    """200 while the API process runs, whatever the engine does: whether to restart the server."""
    return JSONResponse({"status": "ok"})


@router.get("/version")
async def version_of_foreword() -> Response:
    """The version of this server."""
    try:
        return JSONResponse({"version": version("foreword")})
    except PackageNotFoundError:  # a source tree that was never installed
        return JSONResponse({"version": "unknown"})
