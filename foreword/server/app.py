"""The HTTP applications: OpenAI's API of the served models, and a placeholder while a model loads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.config.options import Config
from foreword.config.units import parse_bytes
from foreword.errors import ModelLoading
from foreword.server.admission import AdmissionMiddleware
from foreword.server.apis import completions, embeddings, ranking
from foreword.server.apis.chat import routes as chat
from foreword.server.apis.messages import routes as messages
from foreword.server.apis.responses import routes as responses
from foreword.server.auth.browser_guard import BrowserGuard, split_origins
from foreword.server.auth.keys import AuthenticationMiddleware
from foreword.server.health import DrainMiddleware, DrainState, Health
from foreword.server.http.errors import add_error_handlers, error_response
from foreword.server.http.middleware import (
    BodyLimitMiddleware,
    HeldModelsMiddleware,
    RootPathMiddleware,
    ServerErrorMiddleware,
)
from foreword.server.http.request_log import RequestLog, RequestLogMiddleware, RouteTable
from foreword.server.registry import ServedModels
from foreword.server.routes import admin, engine, probes, slots, tokenize, ui
from foreword.server.routes import models as model_routes
from foreword.server.stall_monitor import StallMonitor
from foreword.utils.logging import log_model

logger = logging.getLogger("foreword.serve")
ROUTERS = (
    chat.router,
    responses.router,
    messages.router,
    completions.router,
    embeddings.router,
    ranking.router,
    tokenize.router,
    probes.health_router,
    probes.router,
    model_routes.router,
    slots.router,
    admin.router,
    admin.admin_router,
    ui.router,
)
ALL_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
SUGGESTED_PATHS = tuple(
    route.path
    for router in ROUTERS
    for route in router.routes
    if isinstance(route, APIRoute) and route.include_in_schema
)
ROUTE_TABLE = RouteTable(
    (
        route
        for router in (*ROUTERS, engine.sessions_router, engine.replicas_router)
        for route in router.routes
    ),
    "/openapi.json",
)
# FastAPI's own telemetry quotes what clients send; older versions ignore this. Ours is metrics/tracing.py.
NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
TICK_S = 1.0  # period of log lines and of checks of the key file
MB = 1_000_000
EXPOSED_HEADERS = (
    "X-Request-Id",
    "X-Foreword-Ignored-Fields",
    "Retry-After",
    "x-should-retry",
    *(f"x-ratelimit-{a}-{b}" for a in ("limit", "remaining", "reset") for b in ("requests", "tokens")),
)


def create_app(models: ServedModels, health: Health, drain: DrainState, request_log: RequestLog) -> FastAPI:
    """The application of the models, which come and go."""
    root_path = models.config.root_path
    request_log.on_response = models.metrics.on_http_response
    servers = [{"url": root_path}] if root_path else None
    app = FastAPI(
        title="Foreword",
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        servers=servers,
        telemetry=NO_TELEMETRY,
        strict_content_type=True,  # a page of another site sends JSON as text/plain, or without a type
    )
    app.state.models = models
    app.state.request_log = request_log
    app.state.health = health
    for router in ROUTERS:
        if router is not ui.router or models.config.ui:
            app.include_router(router)
    app.state.engine_sessions = None
    if any(model.config.remote_urls for model in models.models):
        app.include_router(engine.replicas_router)
    elif models.config.engine_key is not None:
        app.state.engine_sessions = engine.EngineSessions(
            drain, parse_bytes("image_memory", models.config.image_memory)
        )
        app.include_router(engine.sessions_router)
    add_error_handlers(app, SUGGESTED_PATHS)
    _add_middleware(app, models, drain, request_log)
    return app


def _add_middleware(app: FastAPI, models: ServedModels, drain: DrainState, request_log: RequestLog) -> None:
    """The middleware added last is the outermost."""
    config, on_refusal = models.config, models.metrics.on_reject
    app.add_middleware(HeldModelsMiddleware)
    app.add_middleware(BodyLimitMiddleware, max_bytes=config.max_body_mb * MB)
    app.add_middleware(AdmissionMiddleware, admission=models.admission)
    app.add_middleware(
        AuthenticationMiddleware,
        keys=models.keyring,
        browser_guard=BrowserGuard(config),
        on_refusal=on_refusal,
    )
    app.add_middleware(DrainMiddleware, drain=drain, on_refusal=on_refusal)
    app.add_middleware(ServerErrorMiddleware)
    if origins := split_origins(config):
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED_HEADERS,
        )
    _add_outer_middleware(app, config, request_log)


def _add_outer_middleware(app: FastAPI, config: Config, request_log: RequestLog) -> None:
    """The middleware that sees every request, also while the model loads."""
    app.add_middleware(RequestLogMiddleware, log=request_log, routes=ROUTE_TABLE)
    if config.root_path:
        app.add_middleware(RootPathMiddleware, root_path=config.root_path, routes=ROUTE_TABLE)


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    models: ServedModels = app.state.models
    request_log: RequestLog = app.state.request_log
    await models.usage.flush()  # reads what keys have used today
    monitor = StallMonitor(models.metrics.on_event_loop_stall)
    tickers = [
        asyncio.create_task(monitor.run(), name="stall monitor"),
        asyncio.create_task(_tick(models, request_log, app.state.engine_sessions), name="housekeeping"),
    ]
    try:
        yield
    finally:
        for ticker in tickers:
            ticker.cancel()
        await asyncio.gather(*tickers, return_exceptions=True)
        request_log.flush(force=True)
        await models.usage.close()


async def _tick(
    models: ServedModels, request_log: RequestLog, sessions: engine.EngineSessions | None
) -> None:
    """Write log lines and usage, drop expired responses, and reload a changed key file."""
    while True:
        await asyncio.sleep(TICK_S)
        with _log_failure("log of throughput"):
            for model in models.models:
                if model.loaded is not None:
                    log_model.set(model.log_name)
                    model.loaded.recorder.log_if_due()
        log_model.set("")
        if sessions is not None and models.config.router_timeout:
            with _log_failure("check of the router's sessions"):
                sessions.end_server_if_unused(models.config.router_timeout)
        with _log_failure("request log"):
            request_log.flush()
        with _log_failure("expiry of responses"):
            models.response_store.expire()
        with _log_failure("check of the key file"):
            await models.keyring.refresh()
        with _log_failure("write of usage"):
            await models.usage.flush()


@contextlib.contextmanager
def _log_failure(step: str) -> Iterator[None]:
    """A step of _tick() that fails does not end the others."""
    try:
        yield
    except Exception:
        logger.exception("housekeeping: the %s failed", step)


class SwappableApp:
    """Forwards to `app`, which is replaced once the model is loaded."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def loading_app(health: Health, config: Config, request_log: RequestLog) -> FastAPI:
    """The application until the engine is ready: progress in /health, 503 for every route of the model."""
    app = FastAPI(title="Foreword", docs_url=None, redoc_url=None, openapi_url=None, telemetry=NO_TELEMETRY)
    app.state.health = health
    app.include_router(probes.health_router)
    if config.ui:
        app.include_router(ui.router)  # it shows the progress
    app.add_api_route("/{path:path}", _still_loading, methods=ALL_METHODS)
    add_error_handlers(app)
    _add_outer_middleware(app, config, request_log)
    return app


async def _still_loading(request: Request) -> Response:
    return error_response(ModelLoading("the model is still loading; see /health"), request.scope)
