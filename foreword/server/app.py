"""The HTTP application: one served model behind OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from foreword.config.options import Config, parse_bytes
from foreword.core.outputs import StepStats
from foreword.embedding.client import EncoderClient
from foreword.embedding.sentence_transformers import DECODER_POOLING, PoolingConfig
from foreword.engine_client.client import EngineClient
from foreword.grammar.check import GrammarChecker
from foreword.metrics.recorder import MetricsRecorder
from foreword.multimodal.base import ImageProcessor
from foreword.server.admission import Admission, AdmissionMiddleware
from foreword.server.auth.keys import AuthenticationMiddleware, Keyring
from foreword.server.context import ServerContext
from foreword.server.errors import add_error_handlers
from foreword.server.image_intake import ImageIntake, ImageMemory
from foreword.server.lifecycle import DrainMiddleware, DrainState, EngineProbe, Health
from foreword.server.middleware import BodyLimitMiddleware, RequestIdMiddleware, ServerErrorMiddleware
from foreword.server.routes import (
    admin,
    chat,
    completions,
    docs,
    embeddings,
    health,
    metrics,
    models,
    rerank,
    score,
    tokenize,
)
from foreword.tokenizer.input_processor import ChatInputProcessor, open_image_loader
from foreword.tokenizer.tokenizer import Tokenizer

__all__ = ["create_app"]

ROUTES = (chat, completions, embeddings, rerank, score, models, tokenize, health, metrics, docs, admin)
TICK_S = 1.0
MB = 1_000_000
EXPOSED_HEADERS = (
    "X-Request-Id",
    "Retry-After",
    *(
        f"x-ratelimit-{what}-{of}"
        for what in ("limit", "remaining", "reset")
        for of in ("requests", "tokens")
    ),
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
    processor: ImageProcessor | None = None,
) -> FastAPI:
    """The application; starting and closing the clients is the caller's, and so is its end (`drain`).

    processor  of pictures, where the model takes some
    Raises CheckpointError for a broken chat template, ConfigError for impossible limits of pictures.
    """
    drain = drain or DrainState()
    server = ServerContext(
        config=config,
        client=client,
        tokenizer=tokenizer,
        chat_processor=ChatInputProcessor(tokenizer, processor, config.max_images),
        recorder=recorder,
        admission=Admission(config.max_waiting, config.max_waiting_tokens, recorder.on_reject),
        keyring=_make_keyring(config, recorder),
        model_name=model_name,
        created=int(time.time()),
        grammar_checker=GrammarChecker(tokenizer.vocabulary),
        encoder=encoder,
        pooling_config=pooling_config,
        image_intake=None if processor is None else _make_image_intake(config, processor, recorder),
    )
    probe = EngineProbe(client, server.probe_request, config.health_probe)

    def stepped(stats: StepStats) -> None:
        recorder.on_step(stats)
        probe.on_step()

    client.on_step = stepped
    client.on_restart = recorder.on_restart
    recorder.get_stats = lambda: client.stats
    app = FastAPI(title="Foreword", docs_url=None, redoc_url=None, lifespan=_lifespan)
    app.state.server = server
    app.state.health = Health(client, encoder, drain, probe)
    for module in ROUTES:
        app.include_router(module.router)
    add_error_handlers(app)
    _add_middleware(app, server, drain)
    return app


def _make_keyring(config: Config, recorder: MetricsRecorder) -> Keyring:
    path = Path(config.api_key_file) if config.api_key_file else None
    return Keyring(config.api_key, path, config.share_prefix_cache, recorder.on_reject)


def _make_image_intake(config: Config, processor: ImageProcessor, recorder: MetricsRecorder) -> ImageIntake:
    memory = ImageMemory(parse_bytes("image_memory", config.image_memory), recorder.on_reject)
    return ImageIntake(open_image_loader(config, processor), memory, config.max_waiting, recorder.on_reject)


def _add_middleware(app: FastAPI, server: ServerContext, drain: DrainState) -> None:
    """The last added is the outermost."""
    config = server.config
    app.add_middleware(BodyLimitMiddleware, max_bytes=config.max_body_mb * MB, trimmer=server.trimmer)
    app.add_middleware(AdmissionMiddleware, admission=server.admission)
    app.add_middleware(AuthenticationMiddleware, keys=server.keyring, on_refusal=server.recorder.on_reject)
    app.add_middleware(DrainMiddleware, drain=drain, on_refusal=server.recorder.on_reject)
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
    app.add_middleware(RequestIdMiddleware)


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    server: ServerContext = app.state.server
    ticking = asyncio.create_task(_tick(server))
    try:
        yield
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        await asyncio.to_thread(server.grammar_checker.close)
        if server.image_intake is not None:
            await asyncio.to_thread(server.image_intake.close)


async def _tick(server: ServerContext) -> None:
    """Lets the recorder write its periodic log lines, looks whether the keys have changed, and gives memory back."""
    while True:
        await asyncio.sleep(TICK_S)
        server.recorder.log_if_due()
        await server.keyring.refresh()
        await server.trimmer.trim()
