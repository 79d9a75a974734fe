"""From a config to an engine that can take its first request."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from foreword.cache.blocks import BlockPool
from foreword.cache.features import FeatureCache
from foreword.cache.storage import KVStorage
from foreword.config import Config
from foreword.core.batch import SCRATCH_BLOCK, Chunk
from foreword.drafting.base import Drafter, PassDrafter
from foreword.drafting.control.controller import Controller
from foreword.drafting.control.costs import PassCost, Timings
from foreword.drafting.control.decisions import TracedController
from foreword.drafting.drafting import Drafting
from foreword.drafting.grammar import GrammarDrafter
from foreword.drafting.model import ModelDrafter
from foreword.drafting.ngram import NgramDrafter
from foreword.drafting.policy import FixedLength
from foreword.drafting.prediction import PredictionDrafter
from foreword.drafting.replay import PaidReplay, ReplayDrafter, read_recording
from foreword.drafting.suffix import SuffixDrafter
from foreword.engine.ahead import ahead_of
from foreword.engine.assemble import Assembler
from foreword.engine.calibrate import Calibrator, pass_seconds
from foreword.engine.encoding import Encoder
from foreword.engine.engine import Engine
from foreword.engine.runner import Runner
from foreword.engine.scheduler import Scheduler
from foreword.engine.stages import Stages
from foreword.engine.trace import TracedScheduler
from foreword.errors import ConfigError
from foreword.grammar.grammars import Grammars
from foreword.hardware import machine, probe
from foreword.kernels.cpu.library import library_digest, load_library
from foreword.kernels.ops import Ops
from foreword.kernels.registry import select, why_not_native
from foreword.models.base import Model, Precision
from foreword.models.loader import load_model, read_facts, weight_files
from foreword.resolve import EngineInfo, Machine, ModelFacts, Resolved, resolve
from foreword.sampling.sampler import Sampler

__all__ = ["FIT_DRAFTER", "load", "this_machine"]

Progress = Callable[[int, int], None]
SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # of a weight file, evenly spread, the first and the last bytes among them
GIB = 1 << 30
TOWER_PACE = 2  # a multiply-add of a tower's linear layers takes as long as so many of a prompt (benchmarks/encoding.py)
FIT_DRAFTER = (10, 50)  # how many times smaller a draft model usually pays


def load(
    config: Config,
    unused_ids: Sequence[int],
    resolved: Resolved | None = None,
    progress: Progress | None = None,
    timings: Timings | None = None,
) -> Engine:
    """Load the checkpoint that `config.model` names (a directory) and everything around it.

    unused_ids  ids that are never sampled, nor drafted: no token has them, or they stand for pictures
    resolved, timings  choices and timings of an engine that this one replaces
    Raises ConfigError or CheckpointError.
    """
    assert config.model is not None and config.speculative_config is None, "a config that was not prepared"
    target = read_facts(Path(config.model), config.gguf_dequantize)
    drafter = read_facts(Path(str(config.draft_model)), config.gguf_dequantize) if config.runs_draft_model else None
    if resolved is None:
        resolved = resolve(config, this_machine(config), target, drafter)
    try:
        return _Loader(config, resolved, unused_ids, progress, timings).engine(target, drafter)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        raise ConfigError(
            f"out of memory while loading: weights need about {resolved.weight_bytes / GIB:.2f} GiB and the KV cache "
            f"{resolved.kv_bytes / GIB:.2f} GiB; a smaller model, --quantization or --kv-cache-memory would need less",
            "kv_cache_memory",
        ) from error


def _out_of_memory(error: Exception) -> bool:
    """Torch's allocator for CPUs has no exception of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def this_machine(config: Config) -> Machine:
    """The hardware that `config` asks for, and which kernels run on it."""
    found = machine(probe(config.device))
    if config.cpu_isa == "reference" or why_not_native(found.device) is not None or (config.fast_math and found.device == "cuda"):
        return replace(found, kernels="torch")
    return replace(found, kernels="native" if found.device == "cpu" else "triton")


class _Loader:
    def __init__(
        self,
        config: Config,
        resolved: Resolved,
        unused_ids: Sequence[int],
        progress: Progress | None,
        timings: Timings | None,
    ) -> None:
        self.config = config
        self.resolved = resolved
        self.unused_ids = unused_ids
        self.progress = progress
        self.timings = timings
        self.ops = select(resolved.device, resolved.fast_math, resolved.threads, resolved.cpu_isa)
        self.seconds: dict[str, float] = {}

    def engine(self, target: ModelFacts, drafter: ModelFacts | None) -> Engine:
        resolved = self.resolved
        torch.set_num_threads(self.ops.threads(resolved.threads))
        started = time.perf_counter()
        assert self.config.model is not None
        model = self.model(self.config.model, resolved.max_model_len)
        kv = self.storage(model)
        sampler = Sampler(self.ops, model.vocab_size, self.unused_ids, resolved.test_mode)
        drafting = self.drafting(model.vocab_size)
        self.seconds["weights"] = time.perf_counter() - started
        stages = Stages()
        grammars = Grammars(model.vocab_size)
        runner = Runner(model, kv, sampler, grammars, stages)
        encoder = self.encoder(model, stages)
        guide = self.guide(encoder, drafting)
        tile, directions = self.ops.row_tile, model.directions
        assembler = Assembler(resolved.block_size, tile, resolved.device, directions, encoder.features)
        started = time.perf_counter()
        runner.warm_up(assembler.lay_out([Chunk([0], 0, [SCRATCH_BLOCK], 1)]))
        self.seconds["warmup"] = time.perf_counter() - started
        if not drafting.off and resolved.draft_length == "adaptive":
            started = time.perf_counter()
            drafting.timings = self.timings or self.timed(assembler, runner, drafting)
            drafting.policy = self.controller(drafting.timings)
            stages.take()
            self.seconds["calibration"] = time.perf_counter() - started
        info, memory = self.info(target, drafter), _device_memory(resolved)
        scheduler = self.scheduler(encoder)
        ahead = ahead_of(runner, scheduler, drafting, stages, resolved) if self.config.trace is None else None
        return Engine(info, scheduler, assembler, runner, encoder, drafting, grammars, stages, memory, guide=guide, ahead=ahead)

    def encoder(self, model: Model, stages: Stages) -> Encoder:
        resolved = self.resolved
        value_bytes = Precision.of(resolved.dtype).dtype.itemsize
        cache = FeatureCache(resolved.image_cache_bytes)
        return Encoder(model.tower, cache, _row_cost(model.facts), resolved.max_num_batched_tokens, value_bytes, stages)

    def guide(self, encoder: Encoder, drafting: Drafting) -> Encoder | None:
        """What shows pictures to the draft model, if both models see."""
        for drafter in drafting.passes:
            if isinstance(drafter, ModelDrafter) and drafter.model.tower is not None and encoder.sees:
                guide = encoder.beside(drafter.model.tower, drafter.known)
                drafter.see_with(guide, _row_cost(drafter.model.facts))
                return guide
        return None

    def drafting(self, vocab_size: int) -> Drafting:
        """Every drafter that was asked for; those that run a model apart."""
        lookups: list[Drafter] = []
        passes: list[PassDrafter] = []
        for name in self.resolved.drafters:
            drafter = self.drafter(name, vocab_size)
            if isinstance(drafter, PassDrafter):
                passes.append(drafter)
            else:
                lookups.append(drafter)
        policy = FixedLength(self.resolved.num_speculative_tokens)
        return Drafting(lookups, vocab_size, policy, passes, frozenset(self.unused_ids))

    def timed(self, assembler: Assembler, runner: Runner, drafting: Drafting) -> Timings:
        resolved = self.resolved
        calibration = Calibrator(assembler, runner, resolved.max_num_batched_tokens, resolved.max_model_len).calibration()
        return Timings(calibration, {model.name: pass_seconds(model, resolved.max_num_seqs) for model in drafting.passes})

    def controller(self, timings: Timings) -> Controller:
        """The policy that knows what steps cost here."""
        passes = {name: PassCost.measured(seconds) for name, seconds in timings.passes.items()}
        options = (timings.calibration, self.resolved.num_speculative_tokens, passes)
        if self.config.trace is None:
            return Controller(*options)
        return TracedController(self.config.trace_of_drafts, *options)

    def scheduler(self, encoder: Encoder) -> Scheduler:
        resolved, trace = self.resolved, self.config.trace
        pool = BlockPool(resolved.num_blocks)
        options = (resolved.block_size, resolved.max_num_seqs, resolved.max_num_batched_tokens, resolved.prefix_caching)
        if trace is None:
            return Scheduler(pool, *options, reach=encoder.reach)
        try:
            return TracedScheduler(Path(trace), pool, *options, reach=encoder.reach)
        except OSError as error:
            raise ConfigError(f"trace: cannot write {trace}: {error.strerror}", "trace") from None

    def model(self, path: str, max_model_len: int) -> Model:
        resolved = self.resolved
        precision = Precision.of(resolved.dtype, resolved.weight_dtype, resolved.quantization)
        options = (self.config.gguf_dequantize, self.config.load_format == "dummy")
        return load_model(Path(path), self.ops, precision, resolved.device, max_model_len, self.progress, *options)

    def storage(self, model: Model) -> KVStorage:
        resolved = self.resolved
        return KVStorage(resolved.num_blocks, resolved.block_size, model.kv_layers, resolved.kv_cache_dtype, resolved.device)

    def drafter(self, name: str, vocab_size: int) -> Drafter:
        """The one place that knows every drafter's constructor."""
        config, resolved = self.config, self.resolved
        if name == "grammar":
            return GrammarDrafter()
        if name == "prediction":
            return PredictionDrafter(frozenset(self.unused_ids))
        if name == "suffix":
            return SuffixDrafter(resolved.suffix_corpus_bytes, self.unused_ids, load_library()[0])
        if name == "ngram":
            return NgramDrafter(resolved.prompt_lookup_min, resolved.prompt_lookup_max, frozenset(self.unused_ids))
        if name == "replay":
            return self.replay_drafter(vocab_size)
        assert name == "draft" and config.draft_model is not None
        return self.model_drafter(config.draft_model, vocab_size)

    def replay_drafter(self, vocab_size: int) -> Drafter:
        config = self.config
        assert config.replay_file is not None
        replay = ReplayDrafter(read_recording(config.replay_file), config.replay_error_rate, vocab_size)
        if not config.replay_cost:
            return replay
        assert config.draft_model is not None
        return PaidReplay(replay, self.model_drafter(config.draft_model, vocab_size))

    def model_drafter(self, path: str, vocab_size: int) -> ModelDrafter:
        resolved = self.resolved
        max_len = min(resolved.max_model_len, read_facts(Path(path), self.config.gguf_dequantize).context)
        model = self.model(path, max_len)
        # The two vocabularies may be padded differently: what the target cannot say is not guessed.
        unused = [i for i in self.unused_ids if i < model.vocab_size] + list(range(vocab_size, model.vocab_size))
        return ModelDrafter(
            model,
            self.storage(model),
            Sampler(self.ops, model.vocab_size, unused),
            BlockPool(resolved.num_blocks),
            resolved.block_size,
            max_rows=resolved.max_num_batched_tokens,
            max_len=max_len,
        )

    def info(self, target: ModelFacts, drafter: ModelFacts | None) -> EngineInfo:
        return EngineInfo(
            architecture=target.architecture,
            parameters=target.parameters,
            vocab_size=target.vocab_size,
            resolved=self.resolved,
            fingerprint=_fingerprint(self.config, self.resolved, self.ops, target.image_token_id is not None),
            backend=self.ops.name,
            load_seconds=self.seconds,
            draft_model=Path(self.config.draft_model).name if drafter and self.config.draft_model else None,
            draft_parameters=drafter.parameters if drafter else 0,
            warnings=_warnings(self.resolved, target, drafter),
            image_token_id=target.image_token_id,
        )


def _row_cost(facts: ModelFacts) -> int:
    """Multiply-adds of a tower that take as long as a row of a prompt."""
    return (facts.parameters - facts.tower_parameters - facts.embedding_parameters) // TOWER_PACE


def _warnings(resolved: Resolved, target: ModelFacts, drafter: ModelFacts | None) -> tuple[str, ...]:
    warnings = list(resolved.notes)
    if drafter is not None:
        ratio = target.parameters / drafter.parameters
        if not FIT_DRAFTER[0] <= ratio <= FIT_DRAFTER[1]:
            warnings.append(
                f"the draft model is 1/{ratio:.1f} of the model's size; between 1/{FIT_DRAFTER[0]} and 1/{FIT_DRAFTER[1]} "
                "it usually pays best"
            )
    missing = why_not_native(resolved.device)
    if missing is not None:
        warnings.append(missing)
    if resolved.quantization is not None and target.weight_bytes is not None:
        warnings.append(f"--quantization {resolved.quantization} leaves blocks that are quantized in the file as they are")
    if resolved.fast_math:
        warnings.append("--fast-math: answers may change with the load and with speculation; exactness is given up")
    return tuple(warnings)


def _fingerprint(config: Config, resolved: Resolved, ops: Ops, sees: bool) -> str:
    """Equal fingerprints promise equal answers: weights, kernels and their build, types, RoPE and thread layout in one name."""
    assert config.model is not None
    facts = (
        config.load_format,
        [_samples(file) for file in weight_files(Path(config.model))],
        ops.name,
        library_digest() if resolved.device == "cpu" else "",
        torch.__version__,
        version("llguidance"),
        version("pillow") if sees else "",
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        torch.cuda.get_device_name() if resolved.device == "cuda" else resolved.device,
        resolved.dtype,
        resolved.weight_dtype,
        resolved.quantization,
        resolved.kv_cache_dtype,
        resolved.max_model_len,
    )
    return "fw_" + hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def _samples(path: Path) -> tuple[str, int, str]:
    """Name, size and a hash of SAMPLES pieces of a weight file: tells checkpoints apart without reading them."""
    size = path.stat().st_size
    digest = hashlib.blake2b(digest_size=8)
    with path.open("rb") as file:
        for number in range(SAMPLES):
            file.seek(max(size - SAMPLE_BYTES, 0) * number // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return path.name, size, digest.hexdigest()


def _device_memory(resolved: Resolved) -> Callable[[], int]:
    """Bytes on the device: what CUDA has allocated; on a CPU weights and KV cache."""
    if resolved.device == "cuda":
        return torch.cuda.memory_allocated
    return lambda: resolved.weight_bytes + resolved.kv_bytes
