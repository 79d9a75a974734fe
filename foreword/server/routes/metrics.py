"""GET /metrics"""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from foreword.errors import Unauthorized
from foreword.metrics.prometheus import CONTENT_TYPE
from foreword.server.auth.keys import key_from_headers
from foreword.server.registry import ModelsDep, ServedModels

router = APIRouter()


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
