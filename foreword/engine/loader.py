"""From a config to an engine that can take its first request.

Everything around the loaded models that an engine computes with, for one size of the KV cache.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from foreword.config.hardware import hardware_info, probe_hardware
from foreword.config.memory import DeviceMemory
from foreword.config.options import Config
from foreword.config.resolve import (
    EngineInfo,
    HardwareInfo,
    ModelInfo,
    ResolvedConfig,
    resolve,
    with_kv_cache,
)
from foreword.core.batch import NULL_BLOCK, Chunk
from foreword.engine.batch_builder import BatchBuilder
from foreword.engine.encoder_runner import EncoderCache, VisionEncoderRunner
from foreword.engine.engine import Engine
from foreword.engine.model_runner import ModelRunner
from foreword.engine.overlap import make_overlap_loop
from foreword.engine.profiler import (
    CudaMemoryMeter,
    ProfileRun,
    StepCostProfiler,
    log_memory,
    max_graph_rows,
    oom_message,
    profile_memory,
    time_passes,
)
from foreword.engine.scheduler import Scheduler
from foreword.engine.timers import StepTimer
from foreword.engine.trace import RecordingScheduler
from foreword.errors import ConfigError
from foreword.executor.decode_loop import DeviceDecodeLoop
from foreword.executor.graph_runner import GraphRunner
from foreword.grammar.manager import GrammarManager
from foreword.kernels.cpu.library import library_digest, load_library
from foreword.kernels.gpu import current_gpu
from foreword.kernels.ops import Ops
from foreword.kernels.registry import native_unavailable_reason, select_backend, source_digest
from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.storage import KVStorage
from foreword.models.base import Model, Precision
from foreword.models.loader import load_model, read_model_info, weight_files
from foreword.sampling.sampler import Sampler
from foreword.speculation.base import Drafter, ModelBasedDrafter
from foreword.speculation.control.controller import DraftLengthController
from foreword.speculation.control.cost_model import MeasuredCosts, PassCost
from foreword.speculation.control.trace import RecordingController
from foreword.speculation.drafters.draft_model import ModelDrafter
from foreword.speculation.drafters.grammar import GrammarDrafter
from foreword.speculation.drafters.ngram import NgramDrafter
from foreword.speculation.drafters.prediction import PredictionDrafter
from foreword.speculation.drafters.replay import ReplayDrafter, ReplayWithDraftModel, read_recording
from foreword.speculation.drafters.suffix import SuffixDrafter
from foreword.speculation.policy import FixedLength
from foreword.speculation.proposer import Proposer

__all__ = ["DRAFTER_SIZE_RATIO", "EngineComponents", "LoadedModels", "detect_hardware", "load"]

VISION_FLOP_RATIO = 2  # a multiply-add of a tower's linear layers takes as long as so many of a prompt (benchmarks/encoding.py)


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """The models; `drafter` guesses, if there is one, and is used for contexts of `drafter_len` tokens at most."""

    target: Model
    draft_model: Model | None = None
    draft_model_len: int = 0

    @property
    def models(self) -> tuple[Model, ...]:
        return (self.target,) if self.draft_model is None else (self.target, self.draft_model)


class EngineComponents:
    """What reads and writes tensors. `guide` shows pictures to the draft model, where both models see."""

    def __init__(
        self, config: Config, resolved: ResolvedConfig, never_sampled_ids: Sequence[int], loaded: LoadedModels
    ) -> None:
        self._config = config
        self._resolved = resolved
        self._never_sampled_ids = never_sampled_ids
        self._loaded = loaded
        self._model_drafters: list[ModelDrafter] = []
        model = loaded.target
        self.timer = StepTimer()
        self.grammars = GrammarManager(model.vocab_size)
        sampler = Sampler(model.ops, model.vocab_size, never_sampled_ids, resolved.test_mode)
        self.proposer = self._make_proposer()
        self.model_runner = ModelRunner(
            model, self._make_kv_storage(model), sampler, self.grammars, self.timer
        )
        self.encoder = self._make_encoder()
        self.draft_encoder = self._make_draft_encoder()
        tile, features = model.ops.row_tile, self.encoder.features
        self.batch_builder = BatchBuilder(
            resolved.block_size, tile, resolved.device, model.uses_mrope, features, model.ops.supports_graphs
        )

    def profile_steps(self) -> ProfileRun:
        """The largest steps that there can be."""
        towers = [model.vision_encoder for model in self._loaded.models if model.vision_encoder is not None]
        return ProfileRun(
            self._resolved, self.batch_builder, self.model_runner, self.proposer.model_drafters, towers
        )

    def reserve_graphs(self, capture: bool = True) -> list[GraphRunner]:
        """Set aside what passes in graphs are computed in; they are returned, if the backend has such. captures: see there."""
        resolved, target = self._resolved, self._loaded.target
        passes = [(self.model_runner.forward, target, resolved.max_model_len)]
        passes += [
            (drafter.forward, drafter.model, self._loaded.draft_model_len) for drafter in self._model_drafters
        ]
        recorded = []
        for forward, model, length in passes:
            if isinstance(forward, GraphRunner):
                blocks = -(-length // resolved.block_size)
                forward.reserve(
                    max_graph_rows(resolved),
                    blocks,
                    model.uses_mrope,
                    resolved.device,
                    resolved.block_size,
                    capture,
                )
                recorded.append(forward)
        return recorded

    def decode_loops(self) -> list[tuple[DeviceDecodeLoop, int]]:
        """Those that the engine will run ahead in, if the backend has such, and how many guesses a draft model makes in each."""
        forward, sampler, resolved = (
            self.model_runner.decode_loop_forward,
            self.model_runner.sampler,
            self._resolved,
        )
        if not isinstance(forward, GraphRunner) or not resolved.overlap or self._config.trace is not None:
            return []
        lender = self.proposer.device_drafter if resolved.draft_length == "fixed" else None
        drafted = [] if lender is None else [(lender.decode_loop_forward, resolved.num_speculative_tokens)]
        options = (resolved.block_size, sampler.never_sampled_ids)
        return [
            (forward.get_decode_loop(*options, drafter, sampler.with_hashes), guesses)
            for drafter, guesses in [(None, 0), *drafted]
        ]

    def _make_kv_storage(self, model: Model) -> KVStorage:
        resolved = self._resolved
        return KVStorage(
            resolved.num_blocks,
            resolved.block_size,
            model.kv_layer_shapes,
            resolved.kv_cache_dtype,
            resolved.device,
        )

    def _make_encoder(self) -> VisionEncoderRunner:
        resolved, model = self._resolved, self._loaded.target
        value_bytes = Precision.from_dtypes(resolved.dtype).dtype.itemsize
        cache = EncoderCache(resolved.image_cache_bytes)
        rows = resolved.max_num_batched_tokens
        return VisionEncoderRunner(
            model.vision_encoder, cache, _row_cost(model.info), rows, value_bytes, self.timer
        )

    def _make_draft_encoder(self) -> VisionEncoderRunner | None:
        for drafter in self.proposer.model_drafters:
            if (
                isinstance(drafter, ModelDrafter)
                and drafter.model.vision_encoder is not None
                and self.encoder.enabled
            ):
                guide = self.encoder.for_draft_model(drafter.model.vision_encoder, drafter.num_computed)
                drafter.set_image_source(guide, _row_cost(drafter.model.info))
                return guide
        return None

    def _make_proposer(self) -> Proposer:
        """Every drafter that was asked for; those that run a model apart."""
        lookups: list[Drafter] = []
        passes: list[ModelBasedDrafter] = []
        for name in self._resolved.drafters:
            drafter = self.make_drafter(name)
            if isinstance(drafter, ModelBasedDrafter):
                passes.append(drafter)
            else:
                lookups.append(drafter)
        policy = FixedLength(self._resolved.num_speculative_tokens)
        return Proposer(
            lookups, self._loaded.target.vocab_size, policy, passes, frozenset(self._never_sampled_ids)
        )

    def make_drafter(self, name: str) -> Drafter:
        """The one place that knows every drafter's constructor."""
        resolved = self._resolved
        if name == "grammar":
            return GrammarDrafter()
        if name == "prediction":
            return PredictionDrafter(frozenset(self._never_sampled_ids))
        if name == "suffix":
            return SuffixDrafter(resolved.suffix_corpus_bytes, self._never_sampled_ids, load_library()[0])
        if name == "ngram":
            return NgramDrafter(
                resolved.prompt_lookup_min, resolved.prompt_lookup_max, frozenset(self._never_sampled_ids)
            )
        if name == "replay":
            return self._make_replay_drafter()
        assert name == "draft"
        return self._make_model_drafter()

    def _make_replay_drafter(self) -> Drafter:
        config = self._config
        assert config.replay_file is not None
        replay = ReplayDrafter(
            read_recording(config.replay_file), config.replay_error_rate, self._loaded.target.vocab_size
        )
        return ReplayWithDraftModel(replay, self._make_model_drafter()) if config.replay_cost else replay

    def _make_model_drafter(self) -> ModelDrafter:
        resolved, model = self._resolved, self._loaded.draft_model
        assert model is not None, "a drafter without its model"
        # The two vocabularies may be padded differently: what the target cannot say is not guessed.
        unused = [i for i in self._never_sampled_ids if i < model.vocab_size]
        unused += range(self._loaded.target.vocab_size, model.vocab_size)
        drafter = ModelDrafter(
            model,
            self._make_kv_storage(model),
            Sampler(model.ops, model.vocab_size, unused),
            BlockPool(resolved.num_blocks),
            resolved.block_size,
            max_rows=resolved.max_num_batched_tokens,
            max_len=self._loaded.draft_model_len,
        )
        self._model_drafters.append(drafter)
        return drafter


def _row_cost(facts: ModelInfo) -> int:
    """Multiply-adds of a tower that take as long as a row of a prompt."""
    return (facts.parameters - facts.vision_parameters - facts.embedding_parameters) // VISION_FLOP_RATIO


OnProgress = Callable[[int, int], None]
NUM_SAMPLES, SAMPLE_BYTES = (
    64,
    1 << 16,
)  # of a weight file, evenly spread, the first and the last bytes among them
DRAFTER_SIZE_RATIO = (10, 50)  # how many times smaller a draft model usually pays
WARMUP_ROWS = (6, 12, 24, 512)  # of prompts: attention has tiles of several widths
WARMUP_CONTEXT = 300  # more than one split of a context


def load(
    config: Config,
    never_sampled_ids: Sequence[int],
    resolved: ResolvedConfig | None = None,
    on_progress: OnProgress | None = None,
    timings: MeasuredCosts | None = None,
) -> Engine:
    """Load the checkpoint that `config.model` names (a directory) and everything around it.

    unused_ids  ids that are never sampled, nor drafted: no token has them, or they stand for pictures
    resolved, timings  choices and timings of an engine that this one replaces
    Raises ConfigError or CheckpointError.
    """
    assert config.model is not None and config.speculative_config is None, "a config that was not prepared"
    target = read_model_info(Path(config.model), config.gguf_dequantize)
    drafter = (
        read_model_info(Path(str(config.draft_model)), config.gguf_dequantize)
        if config.runs_draft_model
        else None
    )
    chosen = resolved or resolve(config, detect_hardware(config), target, drafter)
    loader = _Loader(config, chosen, never_sampled_ids, on_progress, timings)
    try:
        return loader.build_engine(target, drafter, measure_memory=resolved is None)
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise ConfigError(oom_message(loader.resolved, error), "kv_cache_memory") from error


def _is_out_of_memory(error: Exception) -> bool:
    """Torch's allocator for CPUs has no exception of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def detect_hardware(config: Config) -> HardwareInfo:
    """The hardware that `config` asks for, and which kernels run on it."""
    found = hardware_info(probe_hardware(config.device))
    if config.cpu_isa == "reference" or native_unavailable_reason(found.device) is not None:
        return replace(found, kernel_backend="torch")
    return replace(found, kernel_backend="native" if found.device == "cpu" else "triton")


class _Loader:
    """resolved: what runs; once the models are loaded, with the KV cache that a GPU has room for."""

    def __init__(
        self,
        config: Config,
        resolved: ResolvedConfig,
        never_sampled_ids: Sequence[int],
        on_progress: OnProgress | None,
        timings: MeasuredCosts | None,
    ) -> None:
        self.config = config
        self.resolved = resolved
        self.never_sampled_ids = never_sampled_ids
        self.on_progress = on_progress
        self.timings = timings
        self.ops = select_backend(
            resolved.device, resolved.fast_math, resolved.threads, resolved.cpu_isa, resolved.enforce_eager
        )
        self.load_seconds: dict[str, float] = {}
        self.num_graphs = 0

    def build_engine(self, target: ModelInfo, draft_model: ModelInfo | None, measure_memory: bool) -> Engine:
        torch.set_num_threads(self.ops.num_torch_threads(self.resolved.threads))
        with self.time_stage("weights"):
            loaded = self.load_models(draft_model)
        if measure_memory and self.resolved.memory is not None:
            with self.time_stage("memory"):
                loaded = self.fit_kv_cache(
                    loaded, self.resolved.memory, [target] if draft_model is None else [target, draft_model]
                )
        parts = EngineComponents(self.config, self.resolved, self.never_sampled_ids, loaded)
        runner, drafting = parts.model_runner, parts.proposer
        self.capture_graphs(parts)
        with self.time_stage("warmup"):
            for chunks in self.warmup_batches():
                runner.warm_up(parts.batch_builder.flatten(chunks))
        if not drafting.is_disabled and self.resolved.draft_length == "adaptive":
            with self.time_stage("calibration"):
                drafting.timings = self.timings or self.measure_costs(parts)
                drafting.policy = self.build_controller(drafting.timings)
                parts.timer.reset()
        scheduler = self.build_scheduler(parts.encoder)
        ahead = None
        if self.config.trace is None:
            ahead = make_overlap_loop(runner, scheduler, drafting, parts.timer, self.resolved)
        return Engine(
            self.build_info(target, draft_model),
            scheduler,
            parts.batch_builder,
            runner,
            parts.encoder,
            drafting,
            parts.grammars,
            parts.timer,
            _device_memory_reader(self.resolved),
            draft_encoder=parts.draft_encoder,
            overlap=ahead,
        )

    @contextmanager
    def time_stage(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.load_seconds[stage] = time.perf_counter() - started

    def load_models(self, draft_model: ModelInfo | None) -> LoadedModels:
        config, longest = self.config, self.resolved.max_model_len
        assert config.model is not None
        target = self.load_checkpoint(config.model, longest)
        if draft_model is None:
            return LoadedModels(target)
        length = min(longest, draft_model.context_len)
        return LoadedModels(target, self.load_checkpoint(str(config.draft_model), length), length)

    def fit_kv_cache(
        self, loaded: LoadedModels, estimate: DeviceMemory, facts: Sequence[ModelInfo]
    ) -> LoadedModels:
        """Choose the size of the KV cache, and with it the context. What is measured on has a block of cache, and is dropped."""
        parts = EngineComponents(
            self.config, replace(self.resolved, num_blocks=1), self.never_sampled_ids, loaded
        )
        parts.reserve_graphs(capture=False)
        meter = CudaMemoryMeter()
        memory = profile_memory(meter, estimate, parts.profile_steps())
        del parts
        meter.reset()  # it has cycles, which would keep its memory for a while
        self.resolved = with_kv_cache(self.resolved, self.config, memory, facts)
        longest = self.resolved.max_model_len
        length = min(longest, facts[-1].context_len)
        loaded.target.set_max_model_len(longest)
        if loaded.draft_model is not None:
            loaded.draft_model.set_max_model_len(length)
        return replace(loaded, draft_model_len=length)

    def capture_graphs(self, components: EngineComponents) -> None:
        """Capture graphs, where the backend has such."""
        recorded = components.reserve_graphs()
        if recorded and not self.resolved.enforce_eager:
            with self.time_stage("graphs"):
                for forward in recorded:
                    forward.capture_graphs(self.on_progress)
                for rounds, guesses in components.decode_loops():
                    rounds.capture_graphs(
                        min(self.resolved.max_num_seqs, self.resolved.max_num_batched_tokens),
                        guesses,
                        self.on_progress,
                    )
            self.num_graphs = sum(forward.num_graphs for forward in recorded)
        if self.resolved.memory is not None:
            log_memory(self.resolved.memory, sum(forward.graph_bytes for forward in recorded))

    def warmup_batches(self) -> Iterator[list[Chunk]]:
        """Batches on the scratch block: one row, and on devices whose kernels are compiled by the shape of what they get,
        prompts of several sizes deep in a context, alone and beside a row that decodes."""
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
        longest = (resolved.max_num_batched_tokens, resolved.max_model_len)
        calibration = StepCostProfiler(components.batch_builder, components.model_runner, *longest).measure()
        return MeasuredCosts(
            calibration,
            {
                model.name: time_passes(model, resolved.max_num_seqs)
                for model in components.proposer.model_drafters
            },
        )

    def build_controller(self, timings: MeasuredCosts) -> DraftLengthController:
        """The policy that knows what steps cost here."""
        passes = {name: PassCost.from_seconds(seconds) for name, seconds in timings.pass_seconds.items()}
        options = (timings.calibration, self.resolved.num_speculative_tokens, passes)
        if self.config.trace is None:
            return DraftLengthController(*options)
        return RecordingController(self.config.draft_trace_path, *options)

    def build_scheduler(self, encoder: VisionEncoderRunner) -> Scheduler:
        resolved, trace = self.resolved, self.config.trace
        pool = BlockPool(resolved.num_blocks)
        options = (
            resolved.block_size,
            resolved.max_num_seqs,
            resolved.max_num_batched_tokens,
            resolved.prefix_caching,
        )
        if trace is None:
            return Scheduler(pool, *options, computable_until=encoder.computable_until)
        try:
            return RecordingScheduler(Path(trace), pool, *options, computable_until=encoder.computable_until)
        except OSError as error:
            raise ConfigError(f"trace: cannot write {trace}: {error.strerror}", "trace") from None

    def load_checkpoint(self, path: str, max_model_len: int) -> Model:
        resolved = self.resolved
        precision = Precision.from_dtypes(resolved.dtype, resolved.weight_dtype, resolved.quantization)
        options = (self.config.gguf_dequantize, self.config.load_format == "dummy")
        return load_model(
            Path(path), self.ops, precision, resolved.device, max_model_len, self.on_progress, *options
        )

    def build_info(self, target: ModelInfo, draft_model: ModelInfo | None) -> EngineInfo:
        return EngineInfo(
            architecture=target.architecture,
            parameters=target.parameters,
            vocab_size=target.vocab_size,
            resolved=self.resolved,
            fingerprint=_fingerprint(self.config, self.resolved, self.ops, target.image_token_id is not None),
            backend=self.ops.name,
            load_seconds=self.load_seconds,
            draft_model=Path(self.config.draft_model).name
            if draft_model and self.config.draft_model
            else None,
            draft_parameters=draft_model.parameters if draft_model else 0,
            warnings=_load_warnings(self.resolved, target, draft_model),
            image_token_id=target.image_token_id,
            gpu=str(current_gpu() or "") if self.resolved.device == "cuda" else None,
            num_cuda_graphs=self.num_graphs,
        )


def _load_warnings(
    resolved: ResolvedConfig, target: ModelInfo, draft_model: ModelInfo | None
) -> tuple[str, ...]:
    warnings = list(resolved.notes)
    if draft_model is not None:
        ratio = target.parameters / draft_model.parameters
        if not DRAFTER_SIZE_RATIO[0] <= ratio <= DRAFTER_SIZE_RATIO[1]:
            warnings.append(
                f"the draft model is 1/{ratio:.1f} of the model's size; between 1/{DRAFTER_SIZE_RATIO[0]} and 1/{DRAFTER_SIZE_RATIO[1]} "
                "it usually pays best"
            )
    missing = native_unavailable_reason(resolved.device)
    if missing is not None:
        warnings.append(missing)
    if resolved.quantization is not None and target.packed_bytes is not None:
        warnings.append(
            f"--quantization {resolved.quantization} leaves blocks that are quantized in the file as they are"
        )
    if resolved.fast_math:
        warnings.append(
            "--fast-math: answers may change with the load and with speculation; exactness is given up"
        )
    return tuple(warnings)


def _fingerprint(config: Config, resolved: ResolvedConfig, ops: Ops, is_multimodal: bool) -> str:
    """Equal fingerprints promise equal answers: weights, kernels and their build, types, RoPE and thread layout in one name."""
    assert config.model is not None
    facts = (
        config.load_format,
        [_sample_digest(file) for file in weight_files(Path(config.model))],
        ops.name,
        library_digest() if resolved.device == "cpu" else source_digest(),
        torch.__version__,
        version("llguidance"),
        version("pillow") if is_multimodal else "",
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        (str(current_gpu()), torch.version.cuda, _triton_version())
        if resolved.device == "cuda"
        else resolved.device,
        resolved.dtype,
        resolved.weight_dtype,
        resolved.quantization,
        resolved.kv_cache_dtype,
        resolved.max_model_len,
    )
    return "fw_" + hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _sample_digest(path: Path) -> tuple[str, int, str]:
    """Name, size and a hash of SAMPLES pieces of a weight file: tells checkpoints apart without reading them."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        for number in range(NUM_SAMPLES):
            file.seek(max(size - SAMPLE_BYTES, 0) * number // (NUM_SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return path.name, size, digest.hexdigest()


def _device_memory_reader(resolved: ResolvedConfig) -> Callable[[], int]:
    """Bytes on the device: what CUDA has allocated; on a CPU weights and KV cache."""
    if resolved.device == "cuda":
        return torch.cuda.memory_allocated
    return lambda: resolved.weight_bytes + resolved.kv_bytes
