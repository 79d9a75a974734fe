"""From a config to an engine that can take its first request."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from foreword.cache.blocks import BlockPool
from foreword.config import Config
from foreword.core.batch import SCRATCH_BLOCK, Chunk
from foreword.drafting.control.controller import Controller
from foreword.drafting.control.costs import PassCost, Timings
from foreword.drafting.control.decisions import TracedController
from foreword.engine.ahead import ahead_of
from foreword.engine.calibrate import Calibrator, pass_seconds
from foreword.engine.encoding import Encoder
from foreword.engine.engine import Engine
from foreword.engine.memory import CudaMeter, measured, no_memory, told
from foreword.engine.parts import Loaded, Parts
from foreword.engine.scheduler import Scheduler
from foreword.engine.trace import TracedScheduler
from foreword.errors import ConfigError
from foreword.estimate import DeviceMemory
from foreword.hardware import machine, probe
from foreword.kernels.cards import card
from foreword.kernels.cpu.library import library_digest
from foreword.kernels.ops import Ops
from foreword.kernels.registry import select, source_digest, why_not_native
from foreword.models.base import Model, Precision
from foreword.models.loader import load_model, read_facts, weight_files
from foreword.resolve import EngineInfo, Machine, ModelFacts, Resolved, fitted, resolve

__all__ = ["FIT_DRAFTER", "load", "this_machine"]

Progress = Callable[[int, int], None]
SAMPLES, SAMPLE_BYTES = 64, 1 << 16  # of a weight file, evenly spread, the first and the last bytes among them
FIT_DRAFTER = (10, 50)  # how many times smaller a draft model usually pays
USUAL_ROWS = (6, 12, 24, 512)  # of prompts: attention has tiles of several widths
DEEP = 300  # more than one split of a context


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
    chosen = resolved or resolve(config, this_machine(config), target, drafter)
    loader = _Loader(config, chosen, unused_ids, progress, timings)
    try:
        return loader.engine(target, drafter, measures=resolved is None)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        raise ConfigError(no_memory(loader.resolved, error), "kv_cache_memory") from error


def _out_of_memory(error: Exception) -> bool:
    """Torch's allocator for CPUs has no exception of its own."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def this_machine(config: Config) -> Machine:
    """The hardware that `config` asks for, and which kernels run on it."""
    found = machine(probe(config.device))
    if config.cpu_isa == "reference" or why_not_native(found.device) is not None:
        return replace(found, kernels="torch")
    return replace(found, kernels="native" if found.device == "cpu" else "triton")


class _Loader:
    """resolved: what runs; once the models are loaded, with the KV cache that a GPU has room for."""

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
        self.ops = select(resolved.device, resolved.fast_math, resolved.threads, resolved.cpu_isa, resolved.enforce_eager)
        self.seconds: dict[str, float] = {}
        self.num_graphs = 0

    def engine(self, target: ModelFacts, drafter: ModelFacts | None, measures: bool) -> Engine:
        torch.set_num_threads(self.ops.threads(self.resolved.threads))
        with self.timing("weights"):
            loaded = self.models(drafter)
        if measures and self.resolved.memory is not None:
            with self.timing("memory"):
                loaded = self.measure(loaded, self.resolved.memory, [target] if drafter is None else [target, drafter])
        parts = Parts(self.config, self.resolved, self.unused_ids, loaded)
        runner, drafting = parts.runner, parts.drafting
        self.record(parts)
        with self.timing("warmup"):
            for chunks in self.usual():
                runner.warm_up(parts.assembler.lay_out(chunks))
        if not drafting.off and self.resolved.draft_length == "adaptive":
            with self.timing("calibration"):
                drafting.timings = self.timings or self.timed(parts)
                drafting.policy = self.controller(drafting.timings)
                parts.stages.take()
        scheduler = self.scheduler(parts.encoder)
        ahead = None
        if self.config.trace is None:
            ahead = ahead_of(runner, scheduler, drafting, parts.stages, self.resolved)
        return Engine(
            self.info(target, drafter),
            scheduler,
            parts.assembler,
            runner,
            parts.encoder,
            drafting,
            parts.grammars,
            parts.stages,
            _device_memory(self.resolved),
            guide=parts.guide,
            ahead=ahead,
        )

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] = time.perf_counter() - started

    def models(self, drafter: ModelFacts | None) -> Loaded:
        config, longest = self.config, self.resolved.max_model_len
        assert config.model is not None
        target = self.model(config.model, longest)
        if drafter is None:
            return Loaded(target)
        length = min(longest, drafter.context)
        return Loaded(target, self.model(str(config.draft_model), length), length)

    def measure(self, loaded: Loaded, estimate: DeviceMemory, facts: Sequence[ModelFacts]) -> Loaded:
        """Choose the size of the KV cache, and with it the context. What is measured on has a block of cache, and is dropped."""
        parts = Parts(self.config, replace(self.resolved, num_blocks=1), self.unused_ids, loaded)
        parts.reserve(captures=False)
        meter = CudaMeter()
        memory = measured(meter, estimate, parts.largest())
        del parts
        meter.reset()  # it has cycles, which would keep its memory for a while
        self.resolved = fitted(self.resolved, self.config, memory, facts)
        longest = self.resolved.max_model_len
        length = min(longest, facts[-1].context)
        loaded.target.limit(longest)
        if loaded.drafter is not None:
            loaded.drafter.limit(length)
        return replace(loaded, drafter_len=length)

    def record(self, parts: Parts) -> None:
        """Capture graphs, where the backend has such."""
        recorded = parts.reserve()
        if recorded and not self.resolved.enforce_eager:
            with self.timing("graphs"):
                for forward in recorded:
                    forward.prepare(self.progress)
                for rounds, guesses in parts.rounds():
                    rounds.prepare(min(self.resolved.max_num_seqs, self.resolved.max_num_batched_tokens), guesses, self.progress)
            self.num_graphs = sum(forward.num_graphs for forward in recorded)
        if self.resolved.memory is not None:
            told(self.resolved.memory, sum(forward.graph_bytes for forward in recorded))

    def usual(self) -> Iterator[list[Chunk]]:
        """Batches on the scratch block: one row, and on devices whose kernels are compiled by the shape of what they get,
        prompts of several sizes deep in a context, alone and beside a row that decodes."""
        resolved = self.resolved
        blocks = [SCRATCH_BLOCK] * -(-resolved.max_model_len // resolved.block_size)
        row = Chunk([0], 0, blocks, 1)
        yield [row]
        for size in USUAL_ROWS if self.ops.recordable else ():
            start = min(resolved.max_model_len - size, DEEP)
            if start >= 0 and size < resolved.max_num_batched_tokens:
                prompt = Chunk([0] * size, start, blocks, 1)
                yield from ([prompt], [row, prompt])

    def timed(self, parts: Parts) -> Timings:
        resolved = self.resolved
        longest = (resolved.max_num_batched_tokens, resolved.max_model_len)
        calibration = Calibrator(parts.assembler, parts.runner, *longest).calibration()
        return Timings(calibration, {model.name: pass_seconds(model, resolved.max_num_seqs) for model in parts.drafting.passes})

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
            gpu=str(card() or "") if self.resolved.device == "cuda" else None,
            num_graphs=self.num_graphs,
        )


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
        library_digest() if resolved.device == "cpu" else source_digest(),
        torch.__version__,
        version("llguidance"),
        version("pillow") if sees else "",
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        (str(card()), torch.version.cuda, _triton()) if resolved.device == "cuda" else resolved.device,
        resolved.dtype,
        resolved.weight_dtype,
        resolved.quantization,
        resolved.kv_cache_dtype,
        resolved.max_model_len,
    )
    return "fw_" + hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()


def _triton() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


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
