"""The processes of one model: its engine, and its encoder if one is configured."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any

from foreword.checkpoint import CheckpointInfo, model_names, prepare_checkpoint
from foreword.config.options import Config
from foreword.config.units import parse_bytes
from foreword.core.outputs import StepStats
from foreword.core.readiness import OnLoadProgress, Readiness
from foreword.embedding.client import EncoderClient
from foreword.embedding.sentence_transformers import read_decoder_pooling_config
from foreword.engine_client.base import EngineClient
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.make_client import make_engine_client
from foreword.engine_client.router import EngineRouter
from foreword.errors import ConfigError
from foreword.grammar.check import GrammarChecker
from foreword.metrics.recorder import MetricsRecorder
from foreword.planning.resolve import EngineInfo
from foreword.server.answering.image_intake import ImageIntake, ImageMemory
from foreword.server.health import EngineProbe
from foreword.server.loaded_model import LoadedModel, make_probe_request
from foreword.server.model_names import ModelNames
from foreword.server.registry import ServedModels
from foreword.tokenizer.chat_processor import ChatInputProcessor, open_image_loader
from foreword.utils.threads import run_in_own_thread
from foreword.utils.version import __version__


async def open_processes(
    config: Config, on_progress: OnLoadProgress, fork_server: ForkServer
) -> ModelProcesses:
    """Read the checkpoint; start() then starts its processes. Raises ConfigError, CheckpointError."""
    prepared = await run_in_own_thread(prepare_checkpoint, config)
    engine = make_engine_client(
        prepared.config,
        prepared.never_sampled_ids,
        prepared.tokenizer.engine_vocabulary,
        on_progress,
        fork_server,
    )
    encoder = EncoderClient(prepared.config) if prepared.config.embedding_model else None
    return ModelProcesses(prepared, engine, encoder)


class ModelProcesses:
    """The clients of both processes, from the beginning of a load to the end of an unload."""

    def __init__(
        self, prepared: CheckpointInfo, engine: EngineRouter, encoder: EncoderClient | None = None
    ) -> None:
        """Raises CheckpointError for a pooling that decoders do not have."""
        self.prepared = prepared
        self.engine = engine
        self.encoder = encoder
        self._pooling_config = read_decoder_pooling_config(prepared.path)
        self._chat_processor: ChatInputProcessor | None = None

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
        self._check_remote_engines(info)
        return info

    def _check_remote_engines(self, info: EngineInfo) -> None:
        """Raises ConfigError if remote engines serve another model. With a local engine, fingerprints are
        compared instead.
        """
        prepared = self.prepared
        config, has_images = prepared.config, prepared.processor is not None
        sees = info.image_token_id is not None
        if config.replicas or (info.vocab_size, sees) == (prepared.vocab_size, has_images):
            return
        name, *_ = model_names(config, prepared.path)
        raise ConfigError(
            f"the servers {config.replica_urls} have another model than {name}: {info.architecture}, "
            f"{info.vocab_size} rows of logits instead of {prepared.vocab_size}, "
            f"images {'yes' if sees else 'no'} instead of {'yes' if has_images else 'no'}",
            "replica_urls",
        )

    @property
    def readiness(self) -> Readiness:
        """The state of the load while start() runs; never "ok"."""
        engine = self.engine.readiness
        if not engine.is_ready:
            return engine
        is_waiting = self.encoder is not None and self.encoder.info is None
        return Readiness("loading", f"the {'encoder' if is_waiting else 'chat template'} is still loading")

    @property
    def pids(self) -> tuple[int, ...]:
        """The processes that run."""
        encoder = None if self.encoder is None else self.encoder.pid
        return (*self.engine.pids.values(), *(() if encoder is None else (encoder,)))

    async def _make_chat_processor(self) -> None:
        """Compile the template and detect its tool format, in a thread. Raises CheckpointError."""
        prepared, config = self.prepared, self.prepared.config
        self._chat_processor = await run_in_own_thread(
            ChatInputProcessor, prepared.tokenizer, prepared.processor, config.max_images, config.tool_format
        )

    def make_recorder(self, name: str) -> MetricsRecorder:
        """Metrics of the started model."""
        config, info = self.prepared.config, self.engine.info
        assert info is not None, "a started engine has info"
        return MetricsRecorder(
            info.resolved.drafters,
            config.log_interval,
            multimodal=info.image_token_id is not None,
            info=_info_labels(name, info),
            num_positions=info.resolved.num_speculative_tokens,
            predictive=info.resolved.draft_length == "adaptive",
            vllm_metrics=config.vllm_metrics,
            max_loras=info.resolved.max_loras,
            speculative=bool(info.resolved.drafters or config.remote_urls),  # remote engines may have some
        )

    def make_loaded_model(
        self, models: ServedModels, names: ModelNames, recorder: MetricsRecorder
    ) -> LoadedModel:
        """The started model. Raises ConfigError for names that clash, and for impossible image limits."""
        prepared, config, client = self.prepared, self.prepared.config, self.engine
        assert self._chat_processor is not None, "a started model has a chat processor"
        names.attach(client, self.encoder)
        probe = EngineProbe(
            client, lambda id_: make_probe_request(client, prepared.tokenizer, id_), config.health_probe
        )
        _connect(client, recorder, probe)
        intake = None
        if prepared.processor is not None:
            memory = ImageMemory(parse_bytes("image_memory", config.image_memory), recorder.on_reject)
            loader = open_image_loader(config, prepared.processor)
            intake = ImageIntake(loader, memory, config.max_waiting, recorder.on_reject)
        return LoadedModel(
            config=config,
            client=client,
            tokenizer=prepared.tokenizer,
            chat_processor=self._chat_processor,
            recorder=recorder,
            admission=models.admission,
            intake=models.intake,
            generations=models.generations,
            usage=models.usage,
            names=names,
            served=names.default,
            grammar_checker=GrammarChecker(prepared.tokenizer.vocabulary),
            probe=probe,
            encoder=self.encoder,
            pooling_config=self._pooling_config,
            image_intake=intake,
        )

    async def close(self) -> None:
        """End the processes."""
        if self.encoder is not None:
            await self.encoder.close()
        await self.engine.close()


OpenProcesses = Callable[[Config, OnLoadProgress, ForkServer], Awaitable[ModelProcesses]]


def _connect(client: EngineClient, recorder: MetricsRecorder, probe: EngineProbe) -> None:
    """Record the engine's steps and restarts."""

    def on_step(stats: StepStats) -> None:
        recorder.on_step(stats)
        probe.on_step()

    client.on_step = on_step
    client.on_restart = recorder.on_restart
    recorder.get_stats = lambda: client.stats


def _info_labels(name: str, info: EngineInfo) -> Mapping[str, str]:
    """Labels of `foreword_info`."""
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
