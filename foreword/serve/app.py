"""The HTTP application: one served model behind OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from foreword.config import Config, parse_bytes
from foreword.conversation import Conversations, open_pictures
from foreword.core.events import StepStats
from foreword.encoders.client import EncoderClient
from foreword.encoders.recipe import DECODER_RECIPE, Recipe
from foreword.engine.client import EngineClient
from foreword.grammar.check import GrammarChecker
from foreword.media.base import Processor
from foreword.metrics.recorder import Recorder
from foreword.serve.admission import Admission
from foreword.serve.auth import Authentication, Keyring
from foreword.serve.draining import Drain, Draining
from foreword.serve.errors import add_error_handlers
from foreword.serve.gate import Gate
from foreword.serve.looking import Looking
from foreword.serve.middleware import BodyLimit, LastResort, RequestIds
from foreword.serve.picture_memory import PictureMemory
from foreword.serve.probe import Probe
from foreword.serve.readiness import Health
from foreword.serve.routes import admin, chat, completions, docs, embeddings, health, metrics, models, rerank, score, tokenize
from foreword.serve.state import Server
from foreword.text.tokenizer import Tokenizer

__all__ = ["create_app"]

ROUTES = (chat, completions, embeddings, rerank, score, models, tokenize, health, metrics, docs, admin)
TICK_S = 1.0
MB = 1_000_000
EXPOSED = (
    "X-Request-Id",
    "Retry-After",
    *(f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")),
)


def create_app(
    config: Config,
    client: EngineClient,
    tokenizer: Tokenizer,
    recorder: Recorder,
    model_name: str,
    encoder: EncoderClient | None = None,
    recipe: Recipe = DECODER_RECIPE,
    drain: Drain | None = None,
    processor: Processor | None = None,
) -> FastAPI:
    """The application; starting and closing the clients is the caller's, and so is its end (`drain`).

    processor  of pictures, where the model takes some
    Raises CheckpointError for a broken chat template, ConfigError for impossible limits of pictures.
    """
    drain = drain or Drain()
    server = Server(
        config=config,
        client=client,
        tokenizer=tokenizer,
        conversations=Conversations(tokenizer, processor, config.max_images),
        recorder=recorder,
        admission=Admission(config.max_waiting, config.max_waiting_tokens, recorder.rejected),
        keys=_keyring(config, recorder),
        model_name=model_name,
        created=int(time.time()),
        grammars=GrammarChecker(tokenizer.vocabulary),
        encoder=encoder,
        recipe=recipe,
        looking=None if processor is None else _looking(config, processor, recorder),
    )
    probe = Probe(client, server.probe, config.health_probe)

    def stepped(stats: StepStats) -> None:
        recorder.step(stats)
        probe.stepped()

    client.on_step = stepped
    client.on_restart = recorder.restarted
    recorder.stats_now = lambda: client.stats
    app = FastAPI(title="Foreword", docs_url=None, redoc_url=None, lifespan=_lifespan)
    app.state.server = server
    app.state.health = Health(client, encoder, drain, probe)
    for module in ROUTES:
        app.include_router(module.router)
    add_error_handlers(app)
    _add_middleware(app, server, drain)
    return app


def _keyring(config: Config, recorder: Recorder) -> Keyring:
    path = Path(config.api_key_file) if config.api_key_file else None
    return Keyring(config.api_key, path, config.share_prefix_cache, recorder.rejected)


def _looking(config: Config, processor: Processor, recorder: Recorder) -> Looking:
    memory = PictureMemory(parse_bytes("image_memory", config.image_memory), recorder.rejected)
    return Looking(open_pictures(config, processor), memory, config.max_waiting, recorder.rejected)


def _add_middleware(app: FastAPI, server: Server, drain: Drain) -> None:
    """The last added is the outermost."""
    config = server.config
    app.add_middleware(BodyLimit, max_bytes=config.max_body_mb * MB, heap=server.heap)
    app.add_middleware(Gate, admission=server.admission)
    app.add_middleware(Authentication, keys=server.keys, on_refusal=server.recorder.rejected)
    app.add_middleware(Draining, drain=drain, on_refusal=server.recorder.rejected)
    app.add_middleware(LastResort)
    origins = [origin.strip() for origin in config.cors_origins.split(",") if origin.strip()]
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=EXPOSED
        )
    app.add_middleware(RequestIds)


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    server: Server = app.state.server
    ticking = asyncio.create_task(_tick(server))
    try:
        yield
    finally:
        ticking.cancel()
        await asyncio.gather(ticking, return_exceptions=True)
        await asyncio.to_thread(server.grammars.close)
        if server.looking is not None:
            await asyncio.to_thread(server.looking.close)


async def _tick(server: Server) -> None:
    """Lets the recorder write its periodic log lines, looks whether the keys have changed, and gives memory back."""
    while True:
        await asyncio.sleep(TICK_S)
        server.recorder.tick()
        await server.keys.refresh()
        await server.heap.tidy()
