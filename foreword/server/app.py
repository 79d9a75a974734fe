"""The HTTP applications: OpenAI's API of one served model, and a placeholder while the model loads."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.config.options import Config, parse_bytes
from foreword.core.outputs import StepStats
from foreword.embedding.client import EncoderClient
from foreword.embedding.sentence_transformers import DECODER_POOLING, PoolingConfig
from foreword.engine_client.client import EngineClient
from foreword.errors import ModelLoading
from foreword.grammar.check import GrammarChecker
from foreword.metrics.recorder import MetricsRecorder
from foreword.multimodal.base import ImageProcessor
from foreword.server.admission import Admission, AdmissionMiddleware
from foreword.server.auth.keys import AuthenticationMiddleware, Keyring
from foreword.server.auth.usage_log import UsageLog
from foreword.server.context import ServerContext
from foreword.server.errors import add_error_handlers, error_response
from foreword.server.image_intake import ImageIntake, ImageMemory
from foreword.server.lifecycle import DrainMiddleware, DrainState, EngineProbe, Health
from foreword.server.middleware import (
    BodyLimitMiddleware,
    RootPathMiddleware,
    ServerErrorMiddleware,
)
from foreword.server.model_names import ModelNames
from foreword.server.request_log import RequestLog, RequestLogMiddleware, RouteTable
from foreword.server.response_store import ResponseStore
from foreword.server.routes import (
    adapters,
    admin,
    chat,
    completions,
    embeddings,
    health,
    info,
    messages,
    ranking,
    responses,
    tokenize,
)
from foreword.tokenizer.input_processor import ChatInputProcessor, open_image_loader
from foreword.tokenizer.tokenizer import Tokenizer

__all__ = ["SwappableApp", "create_app", "loading_app"]

ROUTES = (
    chat,
    responses,
    messages,
    completions,
    embeddings,
    ranking,
    tokenize,
    health,
    info,
    adapters,
    admin,
)
ALL_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
SUGGESTED_PATHS = tuple(
    route.path
    for module in ROUTES
    for route in module.router.routes
    if isinstance(route, APIRoute) and route.include_in_schema
)
ROUTE_TABLE = RouteTable((route for module in ROUTES for route in module.router.routes), "/openapi.json")
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


def create_app(
    config: Config,
    client: EngineClient,
    tokenizer: Tokenizer,
    recorder: MetricsRecorder,
    model_name: str,
    encoder: EncoderClient | None = None,
    pooling_config: PoolingConfig = DECODER_POOLING,
    drain: DrainState | None = None,
    processor: ImageProcessor | None = None,  # None: the model takes no images
    aliases: tuple[str, ...] = (),  # further names of the model
    request_log: RequestLog | None = None,
    chat_processor: ChatInputProcessor | None = None,  # None: one of its own
) -> FastAPI:
    """The application. The caller starts and closes the clients, and drains the server.

    Raises CheckpointError for an invalid chat template, ConfigError for impossible image limits.
    """
    drain, request_log = drain or DrainState(), request_log or RequestLog(config.access_log)
    key_file = Path(config.api_key_file) if config.api_key_file else None
    usage = UsageLog(
        Path(config.usage_db) if config.usage_db else None, recorder.on_usage, recorder.on_usage_db_error
    )
    server = ServerContext(
        config=config,
        client=client,
        tokenizer=tokenizer,
        chat_processor=chat_processor
        or ChatInputProcessor(tokenizer, processor, config.max_images, config.tool_format),
        recorder=recorder,
        admission=Admission(config.max_waiting, config.max_waiting_tokens, recorder.on_reject),
        keyring=Keyring(config.api_key, key_file, config.share_prefix_cache, usage, recorder.on_reject),
        usage=usage,
        names=ModelNames(
            client,
            model_name,
            aliases,
            encoder,
            config.adapters,
            config.any_model_name,
            Path(config.lora_dir) if config.lora_dir else None,
        ),
        created=int(time.time()),
        grammar_checker=GrammarChecker(tokenizer.vocabulary),
        encoder=encoder,
        pooling_config=pooling_config,
        image_intake=None if processor is None else _make_image_intake(config, processor, recorder),
        response_store=ResponseStore(config.response_store_mb * MB, config.response_store_ttl),
    )
    probe = EngineProbe(client, server.probe_request, config.health_probe)

    def on_step(stats: StepStats) -> None:
        recorder.on_step(stats)
        probe.on_step()

    client.on_step = on_step
    client.on_restart = recorder.on_restart
    recorder.get_stats = lambda: client.stats
    request_log.on_response = recorder.on_http_response
    servers = [{"url": config.root_path}] if config.root_path else None
    app = FastAPI(
        title="Foreword",
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        servers=servers,
        telemetry=NO_TELEMETRY,
    )
    app.state.server = server
    app.state.request_log = request_log
    app.state.health = Health(client, encoder, drain, probe)
    for module in ROUTES:
        app.include_router(module.router)
    add_error_handlers(app, SUGGESTED_PATHS)
    _add_middleware(app, server, drain, request_log)
    return app


def _make_image_intake(config: Config, processor: ImageProcessor, recorder: MetricsRecorder) -> ImageIntake:
    memory = ImageMemory(parse_bytes("image_memory", config.image_memory), recorder.on_reject)
    return ImageIntake(open_image_loader(config, processor), memory, config.max_waiting, recorder.on_reject)


def _add_middleware(app: FastAPI, server: ServerContext, drain: DrainState, request_log: RequestLog) -> None:
    """The middleware added last is the outermost."""
    config, on_refusal = server.config, server.recorder.on_reject
    app.add_middleware(BodyLimitMiddleware, max_bytes=config.max_body_mb * MB)
    app.add_middleware(AdmissionMiddleware, admission=server.admission)
    app.add_middleware(AuthenticationMiddleware, keys=server.keyring, on_refusal=on_refusal)
    app.add_middleware(DrainMiddleware, drain=drain, on_refusal=on_refusal)
    app.add_middleware(ServerErrorMiddleware)
    origins = [origin.strip() for origin in config.cors_origins.split(",") if origin.strip()]
    if origins:
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
    server: ServerContext = app.state.server
    request_log: RequestLog = app.state.request_log
    await server.usage.flush()  # reads what keys have used today
    ticker = asyncio.create_task(_tick(server, request_log))
    try:
        yield
    finally:
        ticker.cancel()
        await asyncio.gather(ticker, return_exceptions=True)
        request_log.flush(force=True)
        await server.usage.close()
        await asyncio.to_thread(server.grammar_checker.close)
        if server.image_intake is not None:
            await asyncio.to_thread(server.image_intake.close)


async def _tick(server: ServerContext, request_log: RequestLog) -> None:
    """Write log lines and usage, drop expired responses, and reload a changed key file."""
    while True:
        await asyncio.sleep(TICK_S)
        server.recorder.log_if_due()
        request_log.flush()
        server.response_store.expire()
        await server.keyring.refresh()
        await server.usage.flush()


class SwappableApp:
    """Forwards to `app`, which is replaced once the model is loaded."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def loading_app(state: Health, config: Config, request_log: RequestLog) -> FastAPI:
    """The application until the engine is ready: progress in /health, 503 for every other route."""
    app = FastAPI(title="Foreword", docs_url=None, redoc_url=None, openapi_url=None, telemetry=NO_TELEMETRY)
    app.state.health = state
    app.include_router(health.router)
    app.add_api_route("/{path:path}", _still_loading, methods=ALL_METHODS)
    add_error_handlers(app)
    _add_outer_middleware(app, config, request_log)
    return app


async def _still_loading(request: Request) -> Response:
    return error_response(ModelLoading("the model is still loading; see /health"), request.scope)
