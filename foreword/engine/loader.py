"""Loading: from a config to the files, models and hardware that it names, and on to an engine."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from foreword.config.lora import AdapterInfo
from foreword.config.options import Config
from foreword.config.speculative_config import apply_speculative_config
from foreword.config.units import parse_cpus
from foreword.core.readiness import OnLoadProgress
from foreword.engine.builder import EngineBuilder, LoadedModels
from foreword.engine.engine import Engine
from foreword.engine.fingerprint import compute_types, types_in_use
from foreword.engine.kv_tiers import adopt_blocks, make_prefix_loader
from foreword.engine.memory_profiler import oom_message
from foreword.errors import CheckpointError, ConfigError
from foreword.kernels.cpu.library import load_library
from foreword.kernels.gpu import ComputeTypes, current_gpu, triton_unavailable_reason
from foreword.kernels.ops import Ops
from foreword.kernels.registry import native_unavailable_reason, select_backend
from foreword.layers.lora import LoraLimits
from foreword.models.decoder import Decoder
from foreword.models.heads.head_loader import load_head, load_mtp_head, read_head_info
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model, read_model_info
from foreword.planning.hardware import HardwareInfo, hardware_info, probe_hardware
from foreword.planning.memory import ModelInfo, resolve_dtypes
from foreword.planning.memory_plan import ModelDescription
from foreword.planning.resolve import ResolvedConfig, resolve
from foreword.speculation.draft_length.cost_model import MeasuredCosts
from foreword.speculation.drafter import Drafter, DrafterContext
from foreword.speculation.plugin import make_plugin
from foreword.utils.mapped_memory import MemoryFile
from foreword.weights.trained_heads import head_method
from foreword.weights.unsupported_families import draft_model_with_states

logger = logging.getLogger(__name__)

TRITON_CAPABILITY = (8, 0)  # compute capability from which Triton is expected to work


def load(
    config: Config,
    never_sampled_ids: Sequence[int],
    resolved: ResolvedConfig | None = None,
    on_progress: OnLoadProgress | None = None,
    timings: MeasuredCosts | None = None,
    adapters: Sequence[AdapterInfo] | None = None,
    kv_memory: MemoryFile | None = None,
) -> Engine:
    """Load the checkpoint directory `config.model` and build its engine.

    never_sampled_ids  ids without a token, and image placeholders: never sampled and never drafted
    resolved, timings, adapters  of the engine that this one replaces; None: resolve and measure
    kv_memory  outlives the engine, and may have blocks of the one before; None: private memory
    Raises ConfigError or CheckpointError.
    """
    is_prepared = config.model is not None and apply_speculative_config(config) == config
    assert is_prepared, "the config is not prepared"
    config, target, draft_model = _read_infos(config)
    started = time.perf_counter()
    chosen = resolved or resolve(config, detect_hardware(config, target, on_progress), target, draft_model)
    if resolved is not None and resolved.device == "cuda":
        _try_kernels(config, types_in_use(resolved), on_progress)
    trial_s = time.perf_counter() - started
    plugins = make_plugins(config, chosen, target, never_sampled_ids, is_restart=resolved is not None)
    options = (chosen.device, chosen.fast_math, chosen.threads, chosen.cpu_isa)
    ops = select_backend(*options, eager=chosen.enforce_eager, types=types_in_use(chosen))
    builder = EngineBuilder(config, chosen, ops, never_sampled_ids, on_progress, timings, plugins, adapters)
    if chosen.device == "cuda":
        builder.load_seconds["trial"] = trial_s
    try:
        torch.set_num_threads(ops.num_torch_threads(chosen.threads))
        with builder.time_stage("weights"):
            models = _load_models(config, chosen, ops, draft_model, builder.report("weights"))
        models = replace(models, kv_memory=kv_memory)
        if kv_memory is not None:
            kv_memory.disown()
        engine = builder.build(models, target, draft_model, measure_memory=resolved is None)
        engine.prefix_loader = make_prefix_loader(config, engine, is_restart=resolved is not None)
        if kv_memory is not None:
            adopt_blocks(config, engine, kv_memory)
        return engine
    except (MemoryError, OSError, RuntimeError) as error:
        # Torch's CPU allocator raises a plain RuntimeError, and mmap() an OSError
        is_oom = isinstance(error, MemoryError | torch.OutOfMemoryError)
        is_oom |= isinstance(error, OSError) and error.errno == errno.ENOMEM
        if not (is_oom or "can't allocate memory" in str(error)):
            raise
        raise ConfigError(oom_message(builder.resolved, error), "kv_cache_memory") from error


def _load_models(
    config: Config,
    resolved: ResolvedConfig,
    ops: Ops,
    draft_model: ModelInfo | None,
    report: Callable[[int, int], None] | None,
) -> LoadedModels:
    precision = Precision.from_dtypes(resolved.dtype, resolved.weight_dtype, resolved.quantization)

    def load_checkpoint(path: str, max_model_len: int, lora: LoraLimits | None = None) -> Decoder:
        options = (config.gguf_dequantize, config.load_format == "dummy", lora)
        return load_model(Path(path), ops, precision, resolved.device, max_model_len, report, *options)

    max_len = resolved.max_model_len
    limits = LoraLimits(resolved.max_loras, resolved.max_lora_rank) if resolved.max_loras else None
    target = load_checkpoint(str(config.model), max_len, limits)
    if draft_model is None:
        return LoadedModels(target)
    path, target_path = Path(str(config.draft_model)), Path(str(config.model))
    dummy = config.load_format == "dummy"
    if draft_model.is_head and path == target_path:
        mtp_options = (dummy, config.gguf_dequantize, config.mtp_vocab_size)
        target.head = load_mtp_head(path, target, ops, precision, resolved.device, *mtp_options)
    elif draft_model.is_head:
        options = (resolved.device, max_len, report, dummy, config.gguf_dequantize)
        target.head = load_head(path, target, ops, precision, *options)
    if draft_model.is_head:
        return LoadedModels(target)
    draft_len = min(max_len, draft_model.context_len)
    return LoadedModels(target, load_checkpoint(str(config.draft_model), draft_len), draft_len)


def read_drafter_info(config: Config) -> ModelInfo | None:
    """The draft model or the trained head that `config` names. Raises ConfigError, CheckpointError."""
    if not config.runs_draft_model:
        return None
    path, target_path = Path(str(config.draft_model)), Path(str(config.model))
    if head_method(path, target_path) is not None:
        return read_head_info(path, target_path, config.load_format == "dummy", config.gguf_dequantize)
    info = read_model_info(path, config.gguf_dequantize)
    if info.state_shapes:
        raise draft_model_with_states(info.architecture)
    return info


def _read_infos(config: Config) -> tuple[Config, ModelInfo, ModelInfo | None]:
    """The config, the model, and its draft model or head.

    An optional head that cannot be loaded is left out, with a note. Raises ConfigError, CheckpointError.
    """
    target = read_model_info(Path(str(config.model)), config.gguf_dequantize)
    try:
        return config, target, read_drafter_info(config)
    except CheckpointError as error:
        if not config.is_head_optional:
            raise
        note = f"the MTP head, which drafts, is not used: {error}"
        target = replace(target, unused_parts=(*target.unused_parts, note))
        return config.without_optional_head(), target, None


def make_plugins(
    config: Config,
    resolved: ResolvedConfig,
    target: ModelInfo,
    never_sampled_ids: Sequence[int],
    is_restart: bool = False,
) -> dict[str, Drafter]:
    """Plugged-in drafters by name: made once, and first, so that their errors show early. Raises ConfigError.

    A restart goes on without one that fails: requests wait for it.
    """
    context = DrafterContext(
        model=Path(str(config.model)),
        vocab_size=target.vocab_size,
        never_sampled_ids=frozenset(never_sampled_ids),
        max_model_len=resolved.max_model_len,
        num_speculative_tokens=resolved.num_speculative_tokens,
        device=resolved.device,
    )
    plugins: dict[str, Drafter] = {}
    for plugin in config.drafter_plugins():
        try:
            plugins[plugin.name] = make_plugin(plugin.reference, not plugin.is_installed, context)
        except ConfigError as error:
            if not is_restart:
                raise
            logger.error("engine: restarts without the drafter %s: %s", plugin.name, error)
    return plugins


def detect_hardware(
    config: Config, model: ModelInfo, on_progress: OnLoadProgress | None = None
) -> HardwareInfo:
    """The hardware that `config` selects, with the kernel backend for it.

    Raises ConfigError where a GPU's kernels cannot be used.
    """
    hardware = hardware_info(probe_hardware(config.device))
    hardware = replace(hardware, native_library_error=load_library()[1])
    if hardware.device == "cpu":
        missing = config.cpu_isa == "reference" or native_unavailable_reason("cpu") is not None
        return replace(hardware, kernel_backend="torch" if missing else "native")
    types = compute_types(*resolve_dtypes(config, hardware, model), config.quantization)
    missing = _try_kernels(config, types, on_progress) is not None
    return replace(hardware, kernel_backend="torch" if missing else "triton")


def describe_model(config: Config) -> ModelDescription:
    """Read headers and configs only. Raises ConfigError or CheckpointError."""
    config, target, drafter = _read_infos(config)
    hardware = detect_hardware(config, target)
    if config.cpus is not None:
        hardware = replace(hardware, cores=len(parse_cpus(config.cpus)))
    return ModelDescription(hardware, target, drafter)


def _try_kernels(config: Config, types: ComputeTypes, on_progress: OnLoadProgress | None) -> str | None:
    """Why torch computes on this GPU, or None. Raises ConfigError unless that is allowed."""
    report = None if on_progress is None else partial(on_progress, "kernels")
    reason, gpu = triton_unavailable_reason(types, report), current_gpu()
    if reason is None or gpu is None or gpu.capability < TRITON_CAPABILITY or config.allow_torch_on_gpu:
        return reason
    raise ConfigError(
        f"{reason}; --allow-torch-on-gpu computes in torch instead, many times slower", "allow_torch_on_gpu"
    )
