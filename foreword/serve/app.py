"""The HTTP application: one served model behind OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from foreword.config import Config
from foreword.encoders.client import EncoderClient
from foreword.encoders.recipe import DECODER_RECIPE, Recipe
from foreword.engine.client import EngineClient
from foreword.grammar.check import GrammarChecker
from foreword.metrics.recorder import Recorder
from foreword.serve.auth import ApiKeys, Authentication
from foreword.serve.errors import add_error_handlers
from foreword.serve.middleware import BodyLimit, LastResort, RequestIds
from foreword.serve.routes import chat, completions, docs, embeddings, health, metrics, models, rerank, score, tokenize
from foreword.serve.state import Admission, Server
from foreword.text.template import ChatTemplate
from foreword.text.tokenizer import Tokenizer

__all__ = ["create_app"]

ROUTES = (chat, completions, embeddings, rerank, score, models, tokenize, health, metrics, docs)
TICK_S = 1.0
MB = 1_000_000


def create_app(
    config: Config,
    client: EngineClient,
    tokenizer: Tokenizer,
    recorder: Recorder,
    model_name: str,
    encoder: EncoderClient | None = None,
    recipe: Recipe = DECODER_RECIPE,
) -> FastAPI:
    """The application; starting and closing the clients is the caller's. Raises CheckpointError for a broken chat template."""
    server = Server(
        config=config,
        client=client,
        tokenizer=tokenizer,
        template=ChatTemplate.of(tokenizer),
        recorder=recorder,
        admission=Admission(config.max_waiting),
        model_name=model_name,
        created=int(time.time()),
        grammars=GrammarChecker(tokenizer.vocabulary),
        encoder=encoder,
        recipe=recipe,
    )
    client.on_step = recorder.step
    app = FastAPI(title="Foreword", docs_url=None, redoc_url=None, lifespan=_lifespan)
    app.state.server = server
    for module in ROUTES:
        app.include_router(module.router)
    add_error_handlers(app)
    _add_middleware(app, config)
    return app


def _add_middleware(app: FastAPI, config: Config) -> None:
    """The last added is the outermost."""
    app.add_middleware(BodyLimit, max_bytes=config.max_body_mb * MB)
    app.add_middleware(Authentication, keys=ApiKeys(config.api_key, config.share_prefix_cache))
    app.add_middleware(LastResort)
    origins = [origin.strip() for origin in config.cors_origins.split(",") if origin.strip()]
    if origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["X-Request-Id"]
        )
    app.add_middleware(RequestIds)


@contextlib.asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    ticking = asyncio.create_task(_tick(app.state.server.recorder))
    yield
    ticking.cancel()
    await asyncio.gather(ticking, return_exceptions=True)
    await asyncio.to_thread(app.state.server.grammars.close)


async def _tick(recorder: Recorder) -> None:
    """Lets the recorder write its periodic log lines."""
    while True:
        await asyncio.sleep(TICK_S)
        recorder.tick()
