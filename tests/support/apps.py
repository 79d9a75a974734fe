"""The server's application with a client that the test has made."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from foreword.checkpoint import CheckpointInfo
from foreword.config.models_file import ModelEntry, ModelsConfig
from foreword.config.options import Config
from foreword.engine_client.forkserver import ForkServer
from foreword.fleet.memory import UNLIMITED, UNPLANNED, FleetPlan, ModelPlan
from foreword.fleet.model_manager import ModelManager
from foreword.fleet.model_processes import ModelProcesses
from foreword.multimodal.image_processor import ImageProcessor
from foreword.server.app import create_app
from foreword.server.health import DrainState, Health
from foreword.server.http.request_log import RequestLog
from foreword.tokenizer.tokenizer import Tokenizer
from tests.support.fakes import VOCAB_SIZE, byte_tokenizer


@asynccontextmanager
async def open_app(
    client: Any,  # an engine client, which is started and closed
    config: Config | None = None,
    names: tuple[str, ...] = ("m",),  # of the model
    tokenizer: Tokenizer | None = None,
    processor: ImageProcessor | None = None,  # None: the model takes no images
    encoder: Any = None,
    drain: DrainState | None = None,
    request_log: RequestLog | None = None,
) -> AsyncIterator[FastAPI]:
    """The application of a manager with one pinned model; its lifespan is the caller's."""
    config, drain = config or Config(), drain or DrainState()
    entry = ModelEntry(names[0], replace(config, served_model_name=",".join(names)), None, pinned=True)
    prepared = CheckpointInfo(config, Path("none"), tokenizer or byte_tokenizer(), (), VOCAB_SIZE, processor)

    async def open_processes(*_: object) -> ModelProcesses:
        return ModelProcesses(prepared, client, encoder)

    models = ModelsConfig((entry,), None, None, 0.0)
    plan = FleetPlan(models, (ModelPlan(entry, UNPLANNED, (), None),), {UNPLANNED: UNLIMITED})
    async with ModelManager(config, plan, ForkServer(), open_processes=open_processes) as manager:
        await manager.wait_ready()
        health = Health(drain, manager)
        yield create_app(manager.models, health, drain, request_log or RequestLog(config.access_log))
