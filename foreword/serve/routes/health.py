"""GET /health, /live and /version"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from fastapi import APIRouter, Response

from foreword.errors import EngineDead
from foreword.serve.errors import envelope
from foreword.serve.state import ServerDep
from foreword.serve.wire import Json

__all__ = ["router"]

router = APIRouter()


@router.get("/health")
async def health(server: ServerDep) -> Response:
    """200 only if a step could run now."""
    try:
        server.info()
    except EngineDead as error:
        status = "loading" if server.client.info is None else "dead"
        return Json({"status": status, **envelope(error)}, status_code=error.status)
    return Json({"status": "ok"})


@router.get("/live")
async def live() -> Response:
    """The API process is there; says nothing of the engine."""
    return Json({"status": "ok"})


@router.get("/version")
async def version_of_foreword() -> Response:
    """The version of this server."""
    try:
        return Json({"version": version("foreword")})
    except PackageNotFoundError:  # run from a source tree that was never installed
        return Json({"version": "unknown"})
