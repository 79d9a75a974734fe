"""The processes of a server: the engine, and the encoder if one is configured."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from fastapi import FastAPI

from foreword.checkpoint import CheckpointInfo
from foreword.cli.banner import model_name
from foreword.config.resolve import EngineInfo
from foreword.embedding.client import EncoderClient
from foreword.embedding.sentence_transformers import read_decoder_pooling_config
from foreword.engine_client.client import SubprocessClient
from foreword.errors import ConfigError
from foreword.metrics.recorder import MetricsRecorder
from foreword.server.app import create_app, loading_app
from foreword.server.lifecycle import DrainState, Health

__all__ = ["ServerStack"]


class ServerStack:
    """The clients of both processes; leaving the context ends the processes."""

    def __init__(
        self, prepared: CheckpointInfo, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        self.name = model_name(prepared.config, prepared.path)  # of the generating model, in the API
        self.engine = SubprocessClient(
            prepared.config, prepared.never_sampled_ids, prepared.tokenizer.vocabulary, on_progress
        )
        self.encoder = EncoderClient(prepared.config) if prepared.config.embedding_model else None
        self._prepared = prepared
        self._pooling_config = read_decoder_pooling_config(prepared.path)

    async def start(self) -> EngineInfo:
        """Load both models at once. Raises ConfigError or CheckpointError."""
        if self.encoder is None:
            return await self.engine.start()
        loading = asyncio.create_task(self.encoder.start())
        try:
            info = await self.engine.start()
            encoder = await loading
        finally:
            loading.cancel()
        if encoder.name == self.name:
            raise ConfigError(
                f"two models are called {self.name!r}; rename one with --served-model-name",
                "served_model_name",
            )
        return info

    def loading_app(self, drain: DrainState) -> FastAPI:
        """The application until start() has returned."""
        return loading_app(Health(self.engine, self.encoder, drain))

    def serving_app(self, recorder: MetricsRecorder, drain: DrainState | None = None) -> FastAPI:
        """The application of the started server."""
        prepared = self._prepared
        return create_app(
            prepared.config,
            self.engine,
            prepared.tokenizer,
            recorder,
            self.name,
            self.encoder,
            self._pooling_config,
            drain,
            prepared.processor,
        )

    async def __aenter__(self) -> ServerStack:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.encoder is not None:
            await self.encoder.close()
        await self.engine.close()
