"""Building: from loaded models to an engine that can take its first request."""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from foreword.config.drafters import DRAFTERS, HEAD_DRAFTERS
from foreword.config.lora import AdapterInfo
from foreword.config.options import Config
from foreword.core.batch import NULL_BLOCK, Batch, Chunk
from foreword.core.grammars import Grammars, NoGrammars
from foreword.core.readiness import OnLoadProgress
from foreword.core.states import NO_STATES, StateSizes
from foreword.cuda_graphs.decode_loop import DeviceDecodeLoop
from foreword.cuda_graphs.graph_runner import GraphRunner
from foreword.engine.batch_builder import BatchBuilder
from foreword.engine.cost_profiler import StepCostProfiler, time_passes
from foreword.engine.encoder_runner import EncoderCache, VisionEncoderRunner
from foreword.engine.engine import Engine
from foreword.engine.fingerprint import load_warnings, make_fingerprint
from foreword.engine.memory_profiler import (
    CudaMemoryMeter,
    ProfileRun,
    log_memory,
    max_graph_rows,
    profile_memory,
)
from foreword.engine.model_runner import ModelRunner
from foreword.engine.overlap_scheduling import make_overlap_loop
from foreword.engine.scheduler import Scheduler
from foreword.engine.scheduler_trace import RecordingScheduler
from foreword.engine.timers import StepTimer
from foreword.engine.waiting_queue import ComputableUntil
from foreword.errors import ConfigError
from foreword.kernels.cpu.library import load_library
from foreword.kernels.gpu import current_gpu
from foreword.kernels.ops import Ops
from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.state_cache import StateCache
from foreword.kv_cache.storage import KVStorage
from foreword.lora.adapter import AdapterSlots
from foreword.models.decoder import Decoder
from foreword.models.interfaces import Precision
from foreword.planning.memory import DeviceMemory, ModelInfo
from foreword.planning.resolve import EngineInfo, ResolvedConfig, with_kv_cache
from foreword.sampling.sampler import Sampler
from foreword.speculation.draft_length.controller import DraftLengthController
from foreword.speculation.draft_length.controller_trace import RecordingController
from foreword.speculation.draft_length.cost_model import MeasuredCosts, PassCost
from foreword.speculation.draft_length.policy import FixedLength
from foreword.speculation.drafter import Drafter
from foreword.speculation.drafters.draft_model import ModelDrafter
from foreword.speculation.drafters.grammar import GrammarDrafter
from foreword.speculation.drafters.head import HeadDrafter, num_strip_blocks
from foreword.speculation.drafters.ngram import NgramDrafter
from foreword.speculation.drafters.prediction import PredictionDrafter
from foreword.speculation.drafters.replay import ReplayDrafter, ReplayWithDraftModel, read_recording
from foreword.speculation.drafters.suffix import SuffixDrafter
from foreword.speculation.drafters.text import TextDrafter
from foreword.speculation.engine_drafter import EngineDrafter, ModelBasedDrafter
from foreword.speculation.plugin import DrafterAdapter
from foreword.speculation.proposer import Proposer
from foreword.utils.mapped_memory import MemoryFile

logger = logging.getLogger(__name__)

VISION_FLOP_RATIO = 2  # time of a vision encoder's multiply-add / a decoder's (benchmarks/encoding.py)
WARMUP_ROWS = (6, 12, 24, 512)  # prompt chunks that select attention tiles of each width
WARMUP_CONTEXT = 300  # tokens: more than one split of split-KV attention


@dataclass(frozen=True, slots=True)
class LoadedModels:
    target: Decoder
    draft_model: Decoder | None = None
    draft_model_len: int = 0  # context limit of the draft model
    kv_memory: MemoryFile | None = None  # memory of the target's KV cache; None: private


class EngineComponents:
    """Everything that reads or writes tensors, for one size of the KV cache."""

    def __init__(
        self,
        config: Config,
        resolved: ResolvedConfig,
        never_sampled_ids: Sequence[int],
        models: LoadedModels,
        plugins: Mapping[str, Drafter],
    ) -> None:
        self._config = config
        self._plugins = plugins
        self._resolved = resolved
        self._never_sampled_ids = never_sampled_ids
        self._models = models
        self._model_drafters: list[ModelDrafter] = []
        model = models.target
        timer = StepTimer()
        unused_ids = [i for i in never_sampled_ids if 0 <= i < model.vocab_size]
        sampler = Sampler(model.ops, model.vocab_size, unused_ids, resolved.test_mode)
        self._kv = self._make_kv_storage(model)
        self.proposer = self._make_proposer()
        grammars = _make_grammars(model.vocab_size)
        self.model_runner = ModelRunner(model, self._kv, sampler, grammars, timer)
        self.encoder = VisionEncoderRunner(
            model.vision_encoder,
            EncoderCache(resolved.image_cache_bytes),
            _row_cost(model.info),
            resolved.max_num_batched_tokens,
            Precision.from_dtypes(resolved.dtype).dtype.itemsize,
            timer,
        )
        self.draft_encoder = self._make_draft_encoder()
        self.batch_builder = BatchBuilder(
            resolved.block_size,
            model.ops.row_tile,
            resolved.device,
            model.uses_mrope,
            self.encoder.features,
            model.ops.supports_graphs,
            model.lora.limits is not None,
            model.has_states,
            model.head is not None,
        )

    def profile_run(self) -> ProfileRun:
        models = (self._models.target, self._models.draft_model)
        encoders = [model.vision_encoder for model in models if model and model.vision_encoder is not None]
        drafters = self.proposer.model_drafters
        return ProfileRun(self._resolved, self.batch_builder, self.model_runner, drafters, encoders)

    def reserve_graphs(self, capture: bool = True) -> list[GraphRunner]:
        """Allocate the buffers of graph runners, and return these; see GraphRunner.reserve."""
        resolved, target = self._resolved, self._models.target
        passes = [(self.model_runner.forward, target, resolved.max_model_len)]
        passes += [(d.forward, d.model, self._models.draft_model_len) for d in self._model_drafters]
        runners = []
        for forward, model, length in passes:
            if isinstance(forward, GraphRunner):
                num_blocks, rows = -(-length // resolved.block_size), max_graph_rows(resolved)
                device, block_size, num_seqs = resolved.device, resolved.block_size, resolved.max_num_seqs
                lora = model.lora.limits is not None
                sizes = (rows, num_seqs, num_blocks, model.uses_mrope, device, block_size)
                forward.reserve(*sizes, capture, lora)
                runners.append(forward)
        return runners

    def forwards(self) -> list[Callable[[Batch], Tensor]]:
        """The passes to logits of all models, the target's first."""
        return [self.model_runner.forward, *(drafter.forward for drafter in self._model_drafters)]

    def decode_loops(self) -> list[tuple[DeviceDecodeLoop, int]]:
        """The decode loops that overlap will use, each with its draft length."""
        resolved, sampler = self._resolved, self.model_runner.sampler
        forward = self.model_runner.decode_loop_forward
        if not isinstance(forward, GraphRunner) or not resolved.overlap or self._config.trace is not None:
            return []
        block_size, unused_ids, hashes = resolved.block_size, sampler.never_sampled_ids, sampler.with_hashes
        loops = [(forward.get_decode_loop(block_size, unused_ids, None, hashes), 0)]
        drafter = self.proposer.device_drafter
        if drafter is not None and resolved.draft_length == "fixed":
            loop = forward.get_decode_loop(block_size, unused_ids, drafter.decode_loop_forward, hashes)
            loops.append((loop, resolved.num_speculative_tokens))
        return loops

    def _make_kv_storage(self, model: Decoder) -> KVStorage:
        resolved, layers, head = self._resolved, model.cache_shapes, model.head
        num_draft_blocks = 0
        if head is not None:
            strip_size = num_strip_blocks(head, resolved.num_speculative_tokens, resolved.block_size)
            num_draft_blocks = resolved.max_num_seqs * strip_size
        options = (
            resolved.kv_cache_dtype,
            resolved.device,
            state_sizes(resolved),
            getattr(torch, resolved.dtype),
            None if head is None else head.cache_shape,
            num_draft_blocks,
            self._models.kv_memory if model is self._models.target else None,
        )
        return KVStorage(resolved.num_blocks, resolved.block_size, layers, *options)

    def _make_draft_encoder(self) -> VisionEncoderRunner | None:
        for drafter in self.proposer.model_drafters:
            if not isinstance(drafter, ModelDrafter) or drafter.model.vision_encoder is None:
                continue
            if self._models.target.vision_encoder is not None:
                encoder = self.encoder.for_draft_model(drafter.model.vision_encoder, drafter.num_computed)
                drafter.set_image_source(encoder, _row_cost(drafter.model.info))
                return encoder
        return None

    def _make_proposer(self) -> Proposer:
        names = [name for name in self._resolved.drafters if name in DRAFTERS or name in self._plugins]
        drafters = [self._make_drafter(name) for name in names]
        return Proposer(
            [drafter for drafter in drafters if not isinstance(drafter, ModelBasedDrafter)],
            self._models.target.vocab_size,
            FixedLength(self._resolved.num_speculative_tokens),
            [drafter for drafter in drafters if isinstance(drafter, ModelBasedDrafter)],
            frozenset(self._never_sampled_ids),
        )

    def _make_drafter(self, name: str) -> EngineDrafter:
        config, resolved, unused_ids = self._config, self._resolved, self._never_sampled_ids
        if name == "grammar":
            return GrammarDrafter()
        if name == "prediction":
            return PredictionDrafter(frozenset(unused_ids))
        if name == "suffix":
            library, reason = load_library()
            assert library is not None, reason  # resolve() has checked
            return SuffixDrafter(resolved.suffix_corpus_bytes, unused_ids, library)
        if name == "text":
            library, reason = load_library()
            assert library is not None, reason
            return TextDrafter(unused_ids, library)
        if name == "ngram":
            sizes = resolved.prompt_lookup_min, resolved.prompt_lookup_max
            return self._adapt(name, NgramDrafter(*sizes, frozenset(unused_ids)))
        if name == "replay":
            assert config.replay_file is not None
            recording, vocab_size = read_recording(config.replay_file), self._models.target.vocab_size
            replay = ReplayDrafter(recording, config.replay_error_rate, vocab_size)
            return ReplayWithDraftModel(replay, self._make_model_based()) if config.replay_cost else replay
        if name in self._plugins:
            return self._adapt(name, self._plugins[name])
        assert name == "draft" or name in HEAD_DRAFTERS
        return self._make_model_based()

    def _adapt(self, name: str, drafter: Drafter) -> DrafterAdapter:
        return DrafterAdapter(name, drafter, self._models.target.vocab_size)

    def _make_model_based(self) -> ModelBasedDrafter:
        target, resolved = self._models.target, self._resolved
        if target.head is None:
            return self._make_model_drafter()
        unused_ids = [i for i in self._never_sampled_ids if 0 <= i < target.vocab_size]
        sampler = Sampler(target.ops, target.vocab_size, unused_ids)
        options = (resolved.num_speculative_tokens, resolved.max_model_len, target.vocab_size)
        return HeadDrafter(target.head, target.ops, self._kv, sampler, *options)

    def _make_model_drafter(self) -> ModelDrafter:
        resolved, model = self._resolved, self._models.draft_model
        assert model is not None, "a model drafter without its model"
        # The vocabularies may be padded differently: ids beyond the target's are not drafted
        unused_ids = [i for i in self._never_sampled_ids if 0 <= i < model.vocab_size]
        unused_ids += range(self._models.target.vocab_size, model.vocab_size)
        drafter = ModelDrafter(
            model,
            self._make_kv_storage(model),
            Sampler(model.ops, model.vocab_size, unused_ids),
            BlockPool(resolved.num_blocks),
            resolved.block_size,
            max_rows=resolved.max_num_batched_tokens,
            max_len=self._models.draft_model_len,
        )
        self._model_drafters.append(drafter)
        return drafter


def state_sizes(resolved: ResolvedConfig) -> StateSizes:
    """Memory of layers with state."""
    if resolved.states is None:
        return NO_STATES
    return resolved.states.sizes(resolved.num_blocks * resolved.block_size)


def _make_grammars(vocab_size: int) -> Grammars:
    """Imports llguidance, which a machine that only measures a GPU may lack."""
    try:
        manager = importlib.import_module("foreword.grammar.manager")
    except ModuleNotFoundError as error:
        if error.name != "llguidance":
            raise
        return NoGrammars()
    grammars: Grammars = manager.GrammarManager(vocab_size)
    return grammars


def _row_cost(info: ModelInfo) -> int:
    """Multiply-adds of a vision encoder that take as long as one decoder row."""
    return (info.parameters - info.vision_parameters - info.embedding_parameters) // VISION_FLOP_RATIO


class EngineBuilder:
    """Builds an engine in stages: compile kernels, size the KV cache, capture graphs, measure costs."""

    def __init__(
        self,
        config: Config,
        resolved: ResolvedConfig,
        ops: Ops,
        never_sampled_ids: Sequence[int],
        on_progress: OnLoadProgress | None,
        timings: MeasuredCosts | None,
        plugins: Mapping[str, Drafter],
        adapters: Sequence[AdapterInfo] | None = None,
    ) -> None:
        self.config = config
        self.adapters = adapters
        self.resolved = resolved  # fit_kv_cache() replaces it by the measured one
        self.never_sampled_ids = never_sampled_ids
        self.on_progress = on_progress
        self.timings = timings
        self.ops = ops
        self.plugins = plugins
        self.load_seconds: dict[str, float] = {}
        self.num_graphs = 0

    def build(
        self, loaded: LoadedModels, target: ModelInfo, draft_model: ModelInfo | None, measure_memory: bool
    ) -> Engine:
        """The engine of loaded models; `measure_memory` sizes the KV cache of a GPU by a trial."""
        if self.resolved.device == "cuda" and self.ops.supports_graphs:
            with self.time_stage("kernels"):
                self.precompile(loaded)
        if measure_memory and self.resolved.memory is not None:
            infos = [target] if draft_model is None else [target, draft_model]
            with self.time_stage("memory"):
                loaded = self.fit_kv_cache(loaded, self.resolved.memory, infos)
        components = self.make_components(self.resolved, loaded)
        runner, proposer = components.model_runner, components.proposer
        self.capture_graphs(components)
        is_adaptive = not proposer.is_disabled and self.resolved.draft_length == "adaptive"
        with self.time_stage("warmup"):
            if self.ops.supports_graphs or self.timings is not None or not is_adaptive:  # else it calibrates
                self.warm_up(components.batch_builder, runner.forward)
        if is_adaptive:
            with self.time_stage("calibration"):
                proposer.timings = self.timings or self.measure_costs(components)
                proposer.policy = self.build_controller(proposer.timings)
                runner.timer.reset()
        scheduler = self.build_scheduler(components.encoder.computable_until)
        slots = AdapterSlots(loaded.target.lora) if loaded.target.lora.limits is not None else None
        adapters = () if slots is None else self.load_adapters(slots)
        overlap = None
        if self.config.trace is None:  # a trace records schedules, and overlap steps have none
            overlap = make_overlap_loop(runner, scheduler, proposer, runner.timer, self.resolved)
        return Engine(
            self.make_info(target, draft_model, loaded.target.rope_digest, adapters),
            scheduler,
            components.batch_builder,
            runner,
            proposer,
            components.encoder,
            components.draft_encoder,
            overlap,
            slots,
            self.config.publish_blocks,
        )

    @property
    def max_graph_requests(self) -> int:
        return min(self.resolved.max_num_seqs, self.resolved.max_num_batched_tokens)

    def make_components(self, resolved: ResolvedConfig, loaded: LoadedModels) -> EngineComponents:
        return EngineComponents(self.config, resolved, self.never_sampled_ids, loaded, self.plugins)

    @contextmanager
    def time_stage(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.load_seconds[stage] = time.perf_counter() - started

    def load_adapters(self, slots: AdapterSlots) -> tuple[AdapterInfo, ...]:
        """Load the adapters of --lora-modules, in order, or those of the engine that this one replaces."""
        if self.adapters is None:
            return tuple(slots.load(module.path) for module in self.config.adapters)
        for info in self.adapters:
            try:
                slots.load(info.path, info.digest)
            except Exception as error:  # its requests fail, the others go on
                logger.error("engine: restarts without an adapter: %s", error or type(error).__name__)
        return slots.loaded

    def precompile(self, loaded: LoadedModels) -> None:
        """Compile kernels in threads, as far as the backend does that at run time."""
        components = self.make_components(replace(self.resolved, num_blocks=1), loaded)
        self.ops.precompile(partial(self.run_all, components), self.report("kernels"))
        del components
        CudaMemoryMeter().reset()  # collects reference cycles, which hold device memory

    def run_all(self, components: EngineComponents) -> None:
        """Everything that a start and requests run, without a CUDA graph."""
        for runner in components.reserve_graphs(capture=False):
            runner.capture_graphs()
        for loop, num_draft in components.decode_loops():
            loop.capture_graphs(self.max_graph_requests, num_draft)
        profile = components.profile_run()
        profile.run_max()
        profile.run_graphs()
        for forward in components.forwards():
            self.warm_up(components.batch_builder, forward)

    def warm_up(self, batch_builder: BatchBuilder, forward: Callable[[Batch], Tensor]) -> None:
        with torch.inference_mode():
            for chunks in self.warmup_batches():
                forward(batch_builder.flatten(chunks))

    def report(self, stage: str) -> Callable[[int, int], None] | None:
        """The progress of one stage: (done, total)."""
        return None if self.on_progress is None else partial(self.on_progress, stage)

    def fit_kv_cache(
        self, loaded: LoadedModels, estimate: DeviceMemory, infos: Sequence[ModelInfo]
    ) -> LoadedModels:
        """Size the KV cache and the context by measured memory; the measurement has a cache of one block."""
        resolved = replace(self.resolved, num_blocks=1)
        components = self.make_components(resolved, loaded)
        components.reserve_graphs(capture=False)
        meter = CudaMemoryMeter()
        memory = profile_memory(meter, estimate, components.profile_run())
        del components
        meter.reset()  # collects reference cycles, which hold device memory
        self.resolved = with_kv_cache(self.resolved, self.config, memory, infos)
        max_len = self.resolved.max_model_len
        draft_len = min(max_len, infos[-1].context_len)
        loaded.target.set_max_model_len(max_len)
        if loaded.target.head is not None:
            loaded.target.head.set_max_model_len(max_len)
        if loaded.draft_model is not None:
            loaded.draft_model.set_max_model_len(draft_len)
        return replace(loaded, draft_model_len=draft_len)

    def capture_graphs(self, components: EngineComponents) -> None:
        resolved, runners = self.resolved, components.reserve_graphs()
        if runners and not resolved.enforce_eager:
            with self.time_stage("graphs"):
                for runner in runners:
                    runner.capture_graphs(self.report("graphs"))
                for loop, num_draft in components.decode_loops():
                    loop.capture_graphs(self.max_graph_requests, num_draft, self.report("graphs"))
            self.num_graphs = sum(runner.num_graphs for runner in runners)
        if resolved.memory is not None:
            log_memory(resolved.memory, sum(runner.graph_bytes for runner in runners))

    def warmup_batches(self) -> Iterator[list[Chunk]]:
        """Batches on the scratch block: one row, and on GPUs, whose kernels are compiled per shape, also
        prompt chunks of several sizes after a context, alone and with a decoding row."""
        resolved = self.resolved
        blocks = [NULL_BLOCK] * -(-resolved.max_model_len // resolved.block_size)
        row = Chunk([0], 0, blocks, 1)
        yield [row]
        for size in WARMUP_ROWS if self.ops.supports_graphs else ():
            start = min(resolved.max_model_len - size, WARMUP_CONTEXT)
            if start >= 0 and size < resolved.max_num_batched_tokens:
                prompt = Chunk([0] * size, start, blocks, 1)
                yield from ([prompt], [row, prompt])

    def measure_costs(self, components: EngineComponents) -> MeasuredCosts:
        resolved = self.resolved
        max_rows, max_len = resolved.max_num_batched_tokens, resolved.max_model_len
        profiler = StepCostProfiler(
            components.batch_builder,
            components.model_runner,
            components.proposer.vocab_size,
            max_rows,
            max_len,
            resolved.max_num_seqs,
        )
        calibration = profiler.measure()
        drafters = components.proposer.model_drafters
        passes = {drafter.name: time_passes(drafter, resolved.max_num_seqs) for drafter in drafters}
        one_pass = {drafter.name: drafter.one_pass for drafter in drafters if drafter.one_pass}
        return MeasuredCosts(calibration, passes, one_pass)

    def build_controller(self, timings: MeasuredCosts) -> DraftLengthController:
        passes = PassCost.by_drafter(timings.pass_seconds, timings.one_pass)
        max_tokens, max_slowdown = self.resolved.num_speculative_tokens, self.config.max_request_slowdown
        earning = [name for name in (*self.plugins, "text") if name in self.resolved.drafters]
        options = (timings.calibration, max_tokens, passes, earning, max_slowdown)
        if self.config.trace is None:
            return DraftLengthController(*options)
        return RecordingController(self.config.draft_trace_path, *options)

    def build_scheduler(self, computable_until: ComputableUntil) -> Scheduler:
        resolved, trace = self.resolved, self.config.trace
        pool, max_rows = BlockPool(resolved.num_blocks), resolved.max_num_batched_tokens
        options = (resolved.block_size, resolved.max_num_seqs, max_rows, resolved.prefix_caching)
        states = None
        if resolved.states is not None:
            states = StateCache(state_sizes(resolved), resolved.states.interval, resolved.block_size)
        if trace is None:
            return Scheduler(pool, *options, computable_until=computable_until, states=states)
        try:
            return RecordingScheduler(
                Path(trace), pool, *options, computable_until=computable_until, states=states
            )
        except OSError as error:
            raise ConfigError(f"trace: cannot write {trace}: {error.strerror}", "trace") from None

    def make_info(
        self,
        target: ModelInfo,
        draft_model: ModelInfo | None,
        rope_digest: str,
        adapters: tuple[AdapterInfo, ...],
    ) -> EngineInfo:
        config, resolved, is_multimodal = self.config, self.resolved, target.image_token_id is not None
        facts = (config, resolved, self.ops, rope_digest, self.never_sampled_ids, is_multimodal)
        return EngineInfo(
            architecture=target.architecture,
            parameters=target.parameters,
            vocab_size=target.vocab_size,
            resolved=resolved,
            fingerprint=make_fingerprint(*facts),
            backend=self.ops.name,
            load_seconds=self.load_seconds,
            hidden_size=target.hidden_size,
            draft_model=Path(str(config.draft_model)).name if draft_model else None,
            draft_parameters=draft_model.parameters if draft_model else 0,
            warnings=load_warnings(config, resolved, target, draft_model),
            image_token_id=target.image_token_id,
            gpu=str(current_gpu() or "") if resolved.device == "cuda" else None,
            num_cuda_graphs=self.num_graphs,
            adapters=adapters,
        )
