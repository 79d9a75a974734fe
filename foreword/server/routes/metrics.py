"""GET /metrics"""

from __future__ import annotations

from fastapi import APIRouter, Response

from foreword.metrics.prometheus import CONTENT_TYPE
from foreword.server.context import ServerDep

__all__ = ["router"]

router = APIRouter()


@router.get("/metrics")
async def metrics(server: ServerDep) -> Response:
    """What Prometheus scrapes."""
    return Response(server.recorder.render(), headers={"Content-Type": CONTENT_TYPE})
