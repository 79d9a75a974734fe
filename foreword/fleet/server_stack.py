"""The processes of one loaded model: its engine, and its encoder if one is configured."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping
from types import TracebackType
from typing import Any

from fastapi import FastAPI

from foreword.checkpoint import CheckpointInfo, model_names
from foreword.core.readiness import OnLoadProgress, Readiness
from foreword.embedding.client import EncoderClient
from foreword.embedding.sentence_transformers import read_decoder_pooling_config
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.router import make_engine_client
from foreword.errors import ConfigError
from foreword.metrics.recorder import MetricsRecorder
from foreword.planning.resolve import EngineInfo
from foreword.server.app import create_app, loading_app, make_context
from foreword.server.http.request_log import RequestLog
from foreword.server.lifecycle import DrainState, Health
from foreword.server.loaded_model import LoadedModel
from foreword.server.model_names import check_adapter_names
from foreword.server.registry import ServedModels
from foreword.tokenizer.input_processor import ChatInputProcessor
from foreword.utils.threads import run_in_own_thread
from foreword.utils.version import __version__


class ServerStack:
    """The clients of both processes; leaving the context ends the processes."""

    def __init__(
        self,
        prepared: CheckpointInfo,
        on_progress: OnLoadProgress | None = None,
        fork_server: ForkServer | None = None,
        owns_fork_server: bool = True,
    ) -> None:
        """Raises ConfigError. `owns_fork_server`: it ends with this stack."""
        self.name, *self._aliases = model_names(prepared.config, prepared.path)  # in the API
        check_adapter_names(prepared.config.adapters, (self.name, *self._aliases))
        self.sampling_defaults = str(prepared.tokenizer.generation_config)  # in words
        self.has_chat_template = bool(prepared.tokenizer.chat_template)
        self.engine = make_engine_client(
            prepared.config,
            prepared.never_sampled_ids,
            prepared.tokenizer.vocabulary,
            on_progress,
            fork_server,
            owns_fork_server,
        )
        self.encoder = EncoderClient(prepared.config) if prepared.config.embedding_model else None
        self._prepared = prepared
        self._chat_processor: ChatInputProcessor | None = None
        self._pooling_config = read_decoder_pooling_config(prepared.path)

    async def start(self) -> EngineInfo:
        """Load both models at once, beside them the chat template. Raises ConfigError or CheckpointError."""
        starts: list[Coroutine[Any, Any, Any]] = [self.engine.start(), self._make_chat_processor()]
        if self.encoder is not None:
            starts.append(self.encoder.start())
        tasks = [asyncio.create_task(start) for start in starts]
        try:
            info: EngineInfo = (await asyncio.gather(*tasks))[0]
        finally:
            for task in tasks:
                task.cancel()
        self._check_engines_elsewhere(info)
        encoder = None if self.encoder is None else self.encoder.info
        adapters = (module.name for module in self._prepared.config.adapters)
        if encoder is not None and encoder.name in (self.name, *self._aliases, *adapters):
            raise ConfigError(
                f"two models are called {encoder.name!r}; rename one with --served-model-name",
                "served_model_name",
            )
        return info

    def _check_engines_elsewhere(self, info: EngineInfo) -> None:
        """Raises ConfigError if they plainly have another model; with one here, fingerprints are compared."""
        prepared = self._prepared
        config, has_images = prepared.config, prepared.processor is not None
        sees = info.image_token_id is not None
        if config.replicas or (info.vocab_size, sees) == (prepared.vocab_size, has_images):
            return
        raise ConfigError(
            f"the servers {config.replica_urls} have another model than {self.name}: {info.architecture}, "
            f"{info.vocab_size} rows of logits instead of {prepared.vocab_size}, "
            f"images {'yes' if sees else 'no'} instead of {'yes' if has_images else 'no'}",
            "replica_urls",
        )

    @property
    def readiness(self) -> Readiness:
        """While start() runs; never "ok", since the loading application answers no request."""
        engine = self.engine.readiness
        if not engine.is_ready:
            return engine
        is_waiting = self.encoder is not None and self.encoder.info is None
        return Readiness("loading", f"the {'encoder' if is_waiting else 'chat template'} is still loading")

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the processes that run."""
        encoder = None if self.encoder is None else self.encoder.pid
        return (*self.engine.pids.values(), *(() if encoder is None else (encoder,)))

    async def _make_chat_processor(self) -> None:
        """Compile the template and detect its tool format, in a thread. Raises CheckpointError."""
        prepared, config = self._prepared, self._prepared.config
        self._chat_processor = await run_in_own_thread(
            ChatInputProcessor, prepared.tokenizer, prepared.processor, config.max_images, config.tool_format
        )

    def loading_app(self, drain: DrainState, request_log: RequestLog) -> FastAPI:
        """The application until start() has returned."""
        return loading_app(Health(self, self.encoder, drain), self._prepared.config, request_log)

    def serving_app(self, request_log: RequestLog, drain: DrainState | None = None) -> FastAPI:
        """The application of the started server."""
        prepared, recorder = self._prepared, self.make_recorder()
        recorder.add_processes(lambda: self.engine.pids)
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
            tuple(self._aliases),
            request_log,
            self._chat_processor,
        )

    def make_context(
        self, models: ServedModels, recorder: MetricsRecorder, variants: Iterable[str]
    ) -> LoadedModel:
        """The started model as one of several. Raises CheckpointError, ConfigError."""
        prepared = self._prepared
        return make_context(
            models,
            prepared.config,
            self.engine,
            prepared.tokenizer,
            recorder,
            self.name,
            self.encoder,
            self._pooling_config,
            prepared.processor,
            tuple(self._aliases),
            self._chat_processor,
            variants,
        )

    def make_recorder(self) -> MetricsRecorder:
        """Metrics of the started model."""
        config, info = self._prepared.config, self.engine.info
        assert info is not None, "a started engine has info"
        recorder = MetricsRecorder(
            info.resolved.drafters,
            config.log_interval,
            multimodal=info.image_token_id is not None,
            info=_info_labels(self.name, info),
            num_positions=info.resolved.num_speculative_tokens,
            predictive=info.resolved.draft_length == "adaptive",
            vllm_metrics=config.vllm_metrics,
            max_loras=info.resolved.max_loras,
            speculative=bool(info.resolved.drafters or config.remote_urls),  # engines elsewhere may have some
        )
        return recorder

    async def __aenter__(self) -> ServerStack:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.encoder is not None:
            await self.encoder.close()
        await self.engine.close()


def _info_labels(name: str, info: EngineInfo) -> Mapping[str, str]:
    """What runs, as labels of `foreword_info`."""
    chosen = info.resolved
    return {
        "version": __version__,
        "model": name,
        "architecture": info.architecture,
        "device": info.gpu or chosen.device,
        "backend": info.backend,
        "dtype": chosen.dtype,
        "quantization": "none" if chosen.weight_format == chosen.weight_dtype else chosen.weight_format,
        "kv_cache_dtype": chosen.kv_cache_dtype,
        "speculate": ",".join(chosen.drafters) or "off",
        "draft_model": info.draft_model or "",
        "draft_length": chosen.draft_length if chosen.drafters else "",
    }
