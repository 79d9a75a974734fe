"""The HTTP applications: OpenAI's API of the served models, and a placeholder while a model loads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.config.options import Config
from foreword.config.units import parse_bytes
from foreword.core.outputs import StepStats
from foreword.embedding.client import EncoderClient
from foreword.embedding.sentence_transformers import DECODER_POOLING, PoolingConfig
from foreword.engine_client.base import EngineClient
from foreword.errors import ModelLoading
from foreword.grammar.check import GrammarChecker
from foreword.metrics.recorder import MetricsRecorder
from foreword.multimodal.image_processor import ImageProcessor
from foreword.server.admission import AdmissionMiddleware
from foreword.server.answering.image_intake import ImageIntake, ImageMemory
from foreword.server.apis.chat import routes as chat
from foreword.server.apis.completions import routes as completions
from foreword.server.apis.embeddings import routes as embeddings
from foreword.server.apis.messages import routes as messages
from foreword.server.apis.ranking import routes as ranking
from foreword.server.apis.responses import routes as responses
from foreword.server.auth.keys import AuthenticationMiddleware
from foreword.server.http.errors import add_error_handlers, error_response
from foreword.server.http.middleware import (
    BodyLimitMiddleware,
    RootPathMiddleware,
    ServerErrorMiddleware,
)
from foreword.server.http.request_log import RequestLog, RequestLogMiddleware, RouteTable
from foreword.server.lifecycle import DrainMiddleware, DrainState, EngineProbe, Health
from foreword.server.loaded_model import LoadedModel
from foreword.server.model_names import ModelNames
from foreword.server.registry import HeldModelsMiddleware, ServedModels
from foreword.server.routes import (
    adapters,
    admin,
    engine,
    health,
    info,
    loading,
    reload,
    replicas,
    tokenize,
    ui,
)
from foreword.tokenizer.input_processor import ChatInputProcessor, open_image_loader
from foreword.tokenizer.tokenizer import Tokenizer
from foreword.utils.logging import log_model

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
    loading,
    adapters,
    admin,
    reload,
    ui,
)
ALL_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
SUGGESTED_PATHS = tuple(
    route.path
    for module in ROUTES
    for route in module.router.routes
    if isinstance(route, APIRoute) and route.include_in_schema
)
ROUTE_TABLE = RouteTable(
    (route for module in (*ROUTES, engine, replicas) for route in module.router.routes), "/openapi.json"
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
    """The application of one model. The caller starts and closes the clients, and drains the server.

    Raises CheckpointError for an invalid chat template, ConfigError for impossible image limits.
    """
    drain, request_log = drain or DrainState(), request_log or RequestLog(config.access_log)
    models = ServedModels(config, recorder)
    server = make_context(
        models,
        config,
        client,
        tokenizer,
        recorder,
        model_name,
        encoder,
        pooling_config,
        processor,
        aliases,
        chat_processor,
    )
    models.add(server)
    probe = EngineProbe(client, server.probe_request, config.health_probe)

    def on_step(stats: StepStats) -> None:
        recorder.on_step(stats)
        probe.on_step()

    client.on_step = on_step
    return models_app(models, Health(client, encoder, drain, probe), drain, request_log)


def make_context(
    models: ServedModels,
    config: Config,
    client: EngineClient,
    tokenizer: Tokenizer,
    recorder: MetricsRecorder,
    model_name: str,
    encoder: EncoderClient | None,
    pooling_config: PoolingConfig,
    processor: ImageProcessor | None,
    aliases: tuple[str, ...],
    chat_processor: ChatInputProcessor | None,
    variants: Iterable[str] = (),  # names
) -> LoadedModel:
    """The context of a started model, with the arguments of create_app().

    Raises CheckpointError, ConfigError.
    """
    client.on_step = recorder.on_step
    client.on_restart = recorder.on_restart
    recorder.get_stats = lambda: client.stats
    return LoadedModel(
        config=config,
        client=client,
        tokenizer=tokenizer,
        chat_processor=chat_processor
        or ChatInputProcessor(tokenizer, processor, config.max_images, config.tool_format),
        recorder=recorder,
        admission=models.admission,
        generations=models.generations,
        usage=models.usage,
        names=ModelNames(
            client,
            model_name,
            aliases,
            encoder,
            config.adapters,
            config.any_model_name,
            Path(config.lora_dir) if config.lora_dir else None,
            variants,
        ),
        grammar_checker=GrammarChecker(tokenizer.vocabulary),
        encoder=encoder,
        pooling_config=pooling_config,
        image_intake=None if processor is None else _make_image_intake(config, processor, recorder),
    )


def models_app(models: ServedModels, state: Health, drain: DrainState, request_log: RequestLog) -> FastAPI:
    """The application of the models, which come and go."""
    root_path = models.config.root_path
    request_log.on_response = models.recorder.on_http_response
    servers = [{"url": root_path}] if root_path else None
    app = FastAPI(
        title="Foreword",
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
        servers=servers,
        telemetry=NO_TELEMETRY,
    )
    app.state.models = models
    app.state.request_log = request_log
    app.state.health = state
    for module in ROUTES:
        if module is not ui or models.config.ui:
            app.include_router(module.router)
    app.state.engine_sessions = None
    if any(model.config.remote_urls for model in models.models):
        app.include_router(replicas.router)
    elif models.config.engine_key is not None:
        app.state.engine_sessions = engine.EngineSessions(drain)
        app.include_router(engine.router)
    add_error_handlers(app, SUGGESTED_PATHS)
    _add_middleware(app, models, drain, request_log)
    return app


def _make_image_intake(config: Config, processor: ImageProcessor, recorder: MetricsRecorder) -> ImageIntake:
    memory = ImageMemory(parse_bytes("image_memory", config.image_memory), recorder.on_reject)
    return ImageIntake(open_image_loader(config, processor), memory, config.max_waiting, recorder.on_reject)


def _add_middleware(app: FastAPI, models: ServedModels, drain: DrainState, request_log: RequestLog) -> None:
    """The middleware added last is the outermost."""
    config, on_refusal = models.config, models.recorder.on_reject
    if models.loader is not None:
        app.add_middleware(HeldModelsMiddleware)
    app.add_middleware(BodyLimitMiddleware, max_bytes=config.max_body_mb * MB)
    app.add_middleware(AdmissionMiddleware, admission=models.admission)
    app.add_middleware(AuthenticationMiddleware, keys=models.keyring, on_refusal=on_refusal)
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
    models: ServedModels = app.state.models
    request_log: RequestLog = app.state.request_log
    await models.usage.flush()  # reads what keys have used today
    ticker = asyncio.create_task(_tick(models, request_log, app.state.engine_sessions))
    try:
        yield
    finally:
        ticker.cancel()
        await asyncio.gather(ticker, return_exceptions=True)
        request_log.flush(force=True)
        await models.usage.close()
        if models.loader is None:
            await models.default.close()


async def _tick(
    models: ServedModels, request_log: RequestLog, sessions: engine.EngineSessions | None
) -> None:
    """Write log lines and usage, drop expired responses, and reload a changed key file."""
    while True:
        await asyncio.sleep(TICK_S)
        for server in models.loaded:
            if models.loader is not None:
                log_model.set(server.model_name)
            server.recorder.log_if_due()
        log_model.set("")
        if sessions is not None and models.config.router_timeout:
            sessions.end_server_if_unused(models.config.router_timeout)
        request_log.flush()
        models.response_store.expire()
        await models.keyring.refresh()
        await models.usage.flush()


class SwappableApp:
    """Forwards to `app`, which is replaced once the model is loaded."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


def loading_app(state: Health, config: Config, request_log: RequestLog) -> FastAPI:
    """The application until the engine is ready: progress in /health, 503 for every route of the model."""
    app = FastAPI(title="Foreword", docs_url=None, redoc_url=None, openapi_url=None, telemetry=NO_TELEMETRY)
    app.state.health = state
    app.include_router(health.router)
    if config.ui:
        app.include_router(ui.router)  # it shows the progress
    app.add_api_route("/{path:path}", _still_loading, methods=ALL_METHODS)
    add_error_handlers(app)
    _add_outer_middleware(app, config, request_log)
    return app


async def _still_loading(request: Request) -> Response:
    return error_response(ModelLoading("the model is still loading; see /health"), request.scope)
