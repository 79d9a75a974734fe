"""Turns a `Config`, the hardware and the model into a `ResolvedConfig`: every choice, made once.

A restarted engine receives it unchanged. Imports no torch, because the API process resolves too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreword.config.drafters import NATIVE_DRAFTERS
from foreword.config.lora import AdapterInfo
from foreword.config.options import Config
from foreword.config.speculative_config import ignored_speculative_fields
from foreword.config.units import parse_bytes
from foreword.errors import ConfigError, InvalidRequest
from foreword.planning.fit_hints import fitting_options, measured_hints
from foreword.planning.hardware import HardwareInfo
from foreword.planning.memory import (
    GIB,
    DeviceMemory,
    MemorySizes,
    ModelInfo,
    StatePlan,
    batch_limits,
    blocks_for,
    cpu_reserve,
    estimate_gpu_memory,
    format_bytes,
    host_tier_bytes,
    kv_bytes_per_token,
    memory_sizes,
    min_context,
    num_drafted,
    parse_num_blocks,
    plan_states,
    resolve_dtypes,
    resolve_kv_dtype,
)

# Default limits of the KV cache on a CPU, whose memory is shared: a share of the free memory, and bytes.
CPU_KV_FRACTION = 0.5
MAX_CPU_KV_BYTES = 4 * GIB
DRAFT_SIZE_RATIO = (10, 50)  # target parameters / draft model parameters where drafting usually pays
MIN_THREADED_WEIGHT_BYTES = 32 << 20  # below this size, threads wait as long as they work
# Fields of Config that ResolvedConfig takes as they are.
COPIED_FIELDS = (
    *("quantization", "cpu_isa", "block_size", "prefix_caching", "draft_length", "prompt_lookup_min"),
    *("prompt_lookup_max", "fast_math", "test_mode", "enforce_eager", "overlap"),
)


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Every choice made."""

    device: str
    dtype: str  # activations
    weight_dtype: str  # weights that are not quantized
    quantization: str | None
    weight_format: str  # the model's weights, in words
    kv_cache_dtype: str
    cpu_isa: str  # "auto" or a forced instruction set
    threads: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int  # usable KV blocks, for target and draft model each
    kv_bytes: int
    weight_bytes: int  # all models, with room for adapters
    prefix_caching: bool
    drafters: tuple[str, ...]
    num_speculative_tokens: int
    draft_length: str  # "adaptive" or "fixed"
    suffix_corpus_bytes: int  # memory of finished outputs
    image_cache_bytes: int  # memory of image features
    prompt_lookup_min: int
    prompt_lookup_max: int
    fast_math: bool
    test_mode: bool
    enforce_eager: bool = False
    overlap: bool = True
    max_loras: int = 0  # 0: LoRA is off
    max_lora_rank: int = 0
    states: StatePlan | None = None  # None: no layers with state
    memory: DeviceMemory | None = None  # set for a GPU whose KV cache gets the remaining memory
    notes: tuple[str, ...] = ()  # deviations from the checkpoint or the user's choice, in words

    def check_method(self, method: str) -> None:
        """Raises InvalidRequest if a request asks for a drafter that does not run."""
        known = ("auto", "off", *self.drafters)
        if method not in known:
            raise InvalidRequest(
                f"speculation.method must be one of {', '.join(known)}, got {method!r:.80}",
                "speculation.method",
            )


@dataclass(frozen=True, slots=True)
class KVFiles:
    """Files of an engine in its --kv-cache-dir."""

    folder: str  # name of that of its namespace
    namespace: bytes
    block_bytes: int
    state_bytes: int | None = None  # None: no layer has a state


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Properties of a loaded engine, as plain values."""

    architecture: str
    parameters: int
    vocab_size: int
    resolved: ResolvedConfig
    fingerprint: str  # engines of the same fingerprint give equal answers
    backend: str  # name of the kernel backend
    load_seconds: dict[str, float]  # by stage: import, weights, warmup
    hidden_size: int = 0  # numbers of an embedding
    draft_model: str | None = None  # name of its directory
    draft_parameters: int = 0
    warnings: tuple[str, ...] = ()  # for the operator
    image_token_id: int | None = None  # placeholder of images; None: text only
    gpu: str | None = None  # name and compute capability
    num_cuda_graphs: int = 0  # captured at startup
    adapters: tuple[AdapterInfo, ...] = ()  # loaded at startup, in the order of `lora_modules`
    kv_files: KVFiles | None = None


def resolve(
    config: Config, hardware: HardwareInfo, model: ModelInfo, drafter: ModelInfo | None = None
) -> ResolvedConfig:
    """Make every choice.

    Raises ConfigError; where the model does not fit, with the memory estimate and flags that would fit.
    """
    hardware = _share(hardware, config)
    _check_device(config, hardware)
    check_max_model_len(config, model.context_len)
    models = [model] if drafter is None else [model, drafter]
    try:
        return _resolve(config, hardware, models)
    except _DoesNotFit as error:
        hints = ", ".join(fitting_options(config, hardware, models, fits))
        raise ConfigError(f"{error.message}. What would help: {hints}", error.param) from None


def _share(hardware: HardwareInfo, config: Config) -> HardwareInfo:
    """One replica's part of the cores, unless it has `cpus` of its own, and of the host's memory."""
    count = max(config.replicas, 1)
    cores = hardware.cores // count if config.cpus is None else hardware.cores
    memory = hardware.free_bytes // count if hardware.device == "cpu" else hardware.free_bytes
    host = None if hardware.host_free_bytes is None else hardware.host_free_bytes // count
    return replace(hardware, cores=max(cores, 1), free_bytes=memory, host_free_bytes=host)


class _DoesNotFit(ConfigError):
    """Weights and KV cache exceed the memory, or the context the requested KV cache."""


def _resolve(config: Config, hardware: HardwareInfo, models: Sequence[ModelInfo]) -> ResolvedConfig:
    """As resolve(), but without hints and checks of single options. Raises _DoesNotFit."""
    model = models[0]
    dtype, weight_dtype = resolve_dtypes(config, hardware, model)
    sizes = memory_sizes(config, hardware, models)
    max_num_seqs, max_num_batched_tokens = batch_limits(config, hardware, model)
    gets_remaining_memory = hardware.device == "cuda" and config.kv_cache_memory is None
    max_tokens = config.max_model_len or model.context_len
    max_useful_blocks = max_num_seqs * blocks_for(max_tokens, config.block_size)
    if gets_remaining_memory:
        num_blocks = max_useful_blocks
    elif config.kv_cache_memory is not None:
        num_blocks = _configured_num_blocks(config, hardware, sizes)
    else:
        num_blocks = min(_default_num_blocks(config, hardware, model, sizes), max_useful_blocks)

    resolved = ResolvedConfig(
        **{name: getattr(config, name) for name in COPIED_FIELDS},
        device=hardware.device,
        dtype=dtype,
        weight_dtype=weight_dtype,
        weight_format=_describe_weights(config, model, weight_dtype),
        kv_cache_dtype=resolve_kv_dtype(config, dtype),
        threads=config.threads or _default_threads(hardware, sizes.weights),
        max_model_len=_resolve_max_model_len(config, model, num_blocks),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * sizes.block,
        weight_bytes=sizes.weights,
        drafters=_resolve_drafters(config, hardware),
        num_speculative_tokens=num_drafted(config),
        suffix_corpus_bytes=parse_bytes("suffix_corpus_memory", config.suffix_corpus_memory),
        image_cache_bytes=parse_bytes("image_cache_memory", config.image_cache_memory),
        max_loras=config.num_lora_slots,
        max_lora_rank=config.max_lora_rank if config.num_lora_slots else 0,
        states=plan_states(config, hardware, model),
        notes=_notes(config, hardware, model),
    )
    return _fit_gpu_memory(resolved, config, hardware, models) if gets_remaining_memory else resolved


def fits(config: Config, hardware: HardwareInfo, models: Sequence[ModelInfo]) -> bool:
    """Whether the models fit by the estimate of the memory."""
    try:
        _check_device(config, hardware)
        check_max_model_len(config, models[0].context_len)
        resolved = _resolve(config, hardware, models)
    except ConfigError:
        return False
    return resolved.memory is None or resolved.memory.kv_cache >= resolved.kv_bytes


def draft_size_warning(target_parameters: int, draft_parameters: int) -> str | None:
    """Why a draft model of this size is unlikely to pay; None if it may."""
    ratio, (low, high) = target_parameters / draft_parameters, DRAFT_SIZE_RATIO
    if low <= ratio <= high:
        return None
    if ratio <= 1:
        return (
            f"the draft model has {1 / ratio:.1f} times the model's parameters: its tokens cost about "
            f"{1 / ratio:.1f} times as much as the model's own; 1/{low} to 1/{high} usually pays"
        )
    return f"the draft model has 1/{ratio:.1f} of the model's parameters; 1/{low} to 1/{high} usually pays"


def _fit_gpu_memory(
    resolved: ResolvedConfig, config: Config, hardware: HardwareInfo, models: Sequence[ModelInfo]
) -> ResolvedConfig:
    """Size the KV cache by the estimated free memory of the GPU. Raises _DoesNotFit."""
    memory = estimate_gpu_memory(config, hardware, models)
    try:
        return _with_kv_cache(resolved, config, memory, models)
    except _DoesNotFit as error:
        # Only the weights are certain: if they leave room, the loaded models are measured before refusing.
        try:
            optimistic = replace(memory, activations=0, cuda_graphs=0)
            return replace(_with_kv_cache(resolved, config, optimistic, models), memory=memory)
        except _DoesNotFit:
            raise error from None


def with_kv_cache(
    resolved: ResolvedConfig, config: Config, memory: DeviceMemory, models: Sequence[ModelInfo]
) -> ResolvedConfig:
    """Size KV cache and context by a GPU's remaining memory, at most to what can ever be used.

    `models` are the target and, if any, the draft model. Raises ConfigError, with the measured memory,
    if the requested context or a single block does not fit.
    """
    try:
        return _with_kv_cache(resolved, config, memory, models)
    except _DoesNotFit as error:
        hints = measured_hints(config, (resolved.kv_cache_dtype, resolved.dtype), memory, models)
        raise ConfigError(f"{error.message}. What would help: {hints}", error.param) from None


def _with_kv_cache(
    resolved: ResolvedConfig, config: Config, memory: DeviceMemory, models: Sequence[ModelInfo]
) -> ResolvedConfig:
    """As with_kv_cache(), but without hints. Raises _DoesNotFit."""
    block_size = resolved.block_size
    per_token = sum(kv_bytes_per_token(info, resolved.kv_cache_dtype, resolved.dtype) for info in models)
    max_tokens = config.max_model_len or models[0].context_len
    block = block_size * per_token
    if resolved.states is not None:
        block += resolved.states.block_share(block_size)
    room = memory.kv_cache // block
    if room < blocks_for(config.max_model_len or 1, block_size):
        raise _out_of_memory_error(config, memory, per_token)
    num_blocks = min(room, resolved.max_num_seqs * blocks_for(max_tokens, block_size))
    return replace(
        resolved,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * block,
        weight_bytes=memory.weights,
        max_model_len=_resolve_max_model_len(config, models[0], num_blocks),
        memory=memory,
    )


def _out_of_memory_error(config: Config, memory: DeviceMemory, bytes_per_token: int) -> _DoesNotFit:
    length = config.max_model_len
    if length is None:
        name, problem = "model", "the model does not fit"
        need = f"it leaves no memory for the KV cache ({bytes_per_token / 1024:.1f} KiB a token)"
    else:
        name, problem = "max_model_len", f"max_model_len {length} does not fit"
        left = f"{max(memory.kv_cache, 0) / GIB:.2f} GiB are left"
        need = f"its KV cache needs {length * bytes_per_token / GIB:.2f} GiB, {left}"
    return _DoesNotFit(f"{problem}: {need} ({memory})", name)


def _check_device(config: Config, hardware: HardwareInfo) -> None:
    """Raises ConfigError for data types and memory that the device does not support."""
    host_bytes, host_free = host_tier_bytes(config), hardware.host_free_bytes
    if host_free is not None and host_bytes > host_free:
        free = f"{format_bytes(host_free)} of the host's memory are free for each engine"
        problem = f"kv_cache_host_memory {config.kv_cache_host_memory} does not fit: {free}"
        raise ConfigError(problem, "kv_cache_host_memory")
    if hardware.device == "cuda" and config.kv_cache_shared_memory:
        raise ConfigError("kv_cache_shared_memory needs --device cpu", "kv_cache_shared_memory")
    if hardware.device == "cpu" and config.quantization == "fp8":
        hint = "on a CPU int8 or int4 would work"
        raise ConfigError(f"quantization fp8 needs an NVIDIA GPU; {hint}", "quantization")
    if hardware.device == "cpu" and config.kv_cache_dtype == "fp8":
        hint = "on a CPU int8 would work"
        raise ConfigError(f"kv_cache_dtype fp8 needs an NVIDIA GPU; {hint}", "kv_cache_dtype")
    if hardware.device == "cuda" and config.dtype == "bfloat16" and not hardware.supports_bfloat16:
        raise ConfigError(f"{_no_bfloat16_message(hardware)}; float16 or float32 would work", "dtype")


def _no_bfloat16_message(hardware: HardwareInfo) -> str:
    major, minor = hardware.capability
    gpu = f"{hardware.gpu or 'this GPU'} (compute capability {major}.{minor})"
    return f"dtype bfloat16 is not supported on {gpu}"


def _describe_weights(config: Config, model: ModelInfo, weight_dtype: str) -> str:
    return "the file's types" if model.packed_bytes is not None else config.quantization or weight_dtype


def _default_threads(hardware: HardwareInfo, weights: int) -> int:
    return hardware.cores if hardware.device == "cpu" and weights >= MIN_THREADED_WEIGHT_BYTES else 1


def _notes(config: Config, hardware: HardwareInfo, model: ModelInfo) -> tuple[str, ...]:
    wants_bfloat16 = config.dtype == "auto" and model.dtype == "bfloat16"
    notes = list(model.unused_parts)
    tiers = [name for name in ("kv_cache_host_memory", "kv_cache_dir") if getattr(config, name) is not None]
    if hardware.device == "cuda" and tiers:
        notes.append(f"{' and '.join(tiers)}: not tried on a GPU yet")
    elif config.kv_cache_host_memory is not None:
        notes.append("kv_cache_host_memory is for GPUs: here a larger kv_cache_memory does the same sooner")
    if hardware.device == "cuda" and wants_bfloat16 and not hardware.supports_bfloat16:
        notes.append(f"{_no_bfloat16_message(hardware)}: float16 instead")
    if "suffix" in config.drafter_names() and hardware.native_library_error:
        notes.append("speculate: ngram replaces suffix and text, which need the native library")
    for name, reason in ignored_speculative_fields(config).items():
        notes.append(f"speculative_config: {name} has no effect: {reason}")
    if config.speculate != "off" and config.num_speculative_tokens == 0:
        notes.append("num_speculative_tokens is 0: nothing is drafted, as with --speculate off")
    elif config.draft_model is not None and not config.runs_draft_model:
        reason = f"--speculate {config.speculate} names no drafter that needs it"
        notes.append(f"the draft model {config.draft_model} is not used: {reason}")
    return tuple(notes)


def _resolve_drafters(config: Config, hardware: HardwareInfo) -> tuple[str, ...]:
    """The drafters of `speculate`. Without the native library, in `auto`, ngram replaces suffix and text."""
    names, reason = config.drafter_names(), hardware.native_library_error
    if not reason:
        return names
    for name in map(str.strip, config.speculate.split(",")):
        if name in NATIVE_DRAFTERS:
            raise ConfigError(
                f"speculate: {name} needs the native library ({reason}); use ngram", "speculate"
            )
    return tuple(dict.fromkeys("ngram" if name in NATIVE_DRAFTERS else name for name in names))


def _default_num_blocks(config: Config, hardware: HardwareInfo, model: ModelInfo, size: MemorySizes) -> int:
    """KV blocks on a CPU: a share of the free memory, or more where the context needs it and it is there."""
    free = hardware.free_bytes
    usable = free - cpu_reserve(free)
    need = min_context(config, model)
    room, min_blocks = (usable - size.fixed) // size.block, blocks_for(need, config.block_size)
    if room < min_blocks:
        name = "model" if config.max_model_len is None else "max_model_len"
        raise _DoesNotFit(
            f"the model does not fit: weights need {size} and the KV cache of {need} "
            f"tokens {min_blocks * size.block / GIB:.2f} GiB; of {free / GIB:.2f} GiB of free memory"
            f"{_cgroup_note(hardware)} {usable / GIB:.2f} GiB may be used",
            name,
        )
    limit = min(int(free * CPU_KV_FRACTION), MAX_CPU_KV_BYTES) // size.block
    return min(max(limit, min_blocks), room)


def _configured_num_blocks(config: Config, hardware: HardwareInfo, size: MemorySizes) -> int:
    """KV blocks of kv_cache_memory, which may use the reserve too."""
    text, num_blocks = config.kv_cache_memory, parse_num_blocks(config, size.block)
    if num_blocks < 1:
        raise _DoesNotFit(f"kv_cache_memory {text} holds no block of {size.block} bytes", "kv_cache_memory")
    kv_bytes = num_blocks * size.block
    if size.fixed + kv_bytes > hardware.free_bytes:
        raise _DoesNotFit(
            f"kv_cache_memory {text} needs {kv_bytes / GIB:.2f} GiB and the weights "
            f"{size}; {hardware.free_bytes / GIB:.2f} GiB are free"
            f"{_cgroup_note(hardware)}",
            "kv_cache_memory",
        )
    return num_blocks


def _cgroup_note(hardware: HardwareInfo) -> str:
    """Behind the free memory, if a cgroup's limit and not the machine's memory decides it."""
    if hardware.cgroup_limit is None:
        return ""
    return f" (the container or cgroup may use {hardware.cgroup_limit / GIB:.2f} GiB)"


def check_max_model_len(config: Config, context_len: int) -> None:
    """Raises ConfigError if the configured length is above the checkpoint's, or leaves no room."""
    length = config.max_model_len
    if length is not None and length > context_len:
        problem, hint = f"is above the checkpoint's {context_len} positions", "lower --max-model-len"
    elif length is not None and length < 2:
        problem, hint = "leaves no room for an answer", "at least 2 are needed"
    else:
        return
    raise ConfigError(f"max_model_len {length} {problem}; {hint}", "max_model_len")


def _resolve_max_model_len(config: Config, model: ModelInfo, num_blocks: int) -> int:
    num_tokens = num_blocks * config.block_size
    length = config.max_model_len or min(model.context_len, num_tokens)
    if length > num_tokens:
        problem = f"does not fit into a KV cache of {num_tokens} tokens"
        raise _DoesNotFit(f"max_model_len {length} {problem}", "max_model_len")
    if length < 2:
        problem = f"a KV cache of {num_tokens} tokens leaves no room for an answer"
        raise _DoesNotFit(problem, "kv_cache_memory")
    return length
