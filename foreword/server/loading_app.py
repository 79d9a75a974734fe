"""The application served while the model loads."""

from __future__ import annotations

from fastapi import FastAPI, Response
from fastapi import Request as HTTPRequest
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.errors import EngineDead
from foreword.server.errors import add_error_handlers, error_response
from foreword.server.lifecycle import Health
from foreword.server.middleware import RequestIdMiddleware
from foreword.server.routes import health

__all__ = ["SwappableApp", "loading_app"]

RETRY_AFTER_S = 1.0


ALL_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]


RETRY_AFTER_S = 1.0


class SwappableApp:
    """Leads to `app`, which may be exchanged while the server runs."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def loading_app(state: Health) -> FastAPI:
    """What there is until the engine is ready: its progress in /health, and 503 for everything else."""
    app = FastAPI(title="Foreword", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.health = state
    app.include_router(health.router)
    app.add_api_route("/{path:path}", _still_loading, methods=ALL_METHODS)
    add_error_handlers(app)
    app.add_middleware(RequestIdMiddleware)
    return app


async def _still_loading(request: HTTPRequest) -> Response:
    error = EngineDead("the model is still loading; see /health")
    error.retry_after_s = RETRY_AFTER_S
    return error_response(error)
