"""What was asked for becomes what runs: every choice, made once.

`resolve()` turns a `Config`, the machine and the model into `Resolved`, which a restarted engine receives unchanged. Nothing
here imports torch: the API process reads it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreword.config.memory import (
    GIB,
    DeviceMemory,
    ModelInfo,
    activation_bytes,
    estimate_memory,
    kv_bytes_per_token,
    weight_bytes,
)
from foreword.config.options import Config, parse_bytes
from foreword.errors import ConfigError, InvalidRequest

__all__ = ["EngineInfo", "HardwareInfo", "ModelInfo", "ResolvedConfig", "resolve", "with_kv_cache"]

CPU_MEMORY_FRACTION = 0.5
MAX_CPU_KV_BYTES = 4 * GIB  # the KV cache's default bound on a machine whose memory others use too
LARGE_GPU_BYTES = 64 * GIB  # from here on a step has MOST_ROWS rows: their logits alone may take several GiB
LARGE_GPU_BATCHED_TOKENS, SMALL_GPU_BATCHED_TOKENS = 8192, 2048
MIN_THREADED_WEIGHT_BYTES = (
    32 << 20
)  # bytes of weights below which threads wait for each other about as long as they work


@dataclass(frozen=True, slots=True)
class HardwareInfo:
    """What `resolve()` needs to know of the hardware.

    free_bytes, total_bytes  memory of the device
    gpu         name of the GPU, or None; capability is its compute capability
    kernels     who computes: "native", "triton" or "torch"; see estimate.weight_bytes()
    """

    device: str
    cores: int
    free_bytes: int
    supports_bfloat16: bool
    kernel_backend: str = "native"
    total_bytes: int = 0
    gpu: str | None = None
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class ResolvedConfig:
    """Every choice made.

    dtype           of activations
    weight_dtype    of weights that are not quantized
    quantization    what weights are rounded to while loading, "int8", "int4" or "fp8", or None
    weight_format   how the model's weights are held, in words
    kv_cache_dtype  of the KV cache
    cpu_isa         instruction set of the CPU kernels: "auto" or a forced one
    num_blocks      usable blocks of the cache, for target and drafter alike
    draft_length    "adaptive" or "fixed"
    suffix_corpus_bytes  memory for finished outputs
    image_cache_bytes  memory for features of pictures
    memory          how a GPU's memory is divided, where the KV cache gets what is left
    notes           what was chosen otherwise than the checkpoint or the user would have it, in words
    """

    device: str
    dtype: str
    weight_dtype: str
    quantization: str | None
    weight_format: str
    kv_cache_dtype: str
    cpu_isa: str
    threads: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int
    kv_bytes: int
    weight_bytes: int
    prefix_caching: bool
    drafters: tuple[str, ...]
    num_speculative_tokens: int
    draft_length: str
    suffix_corpus_bytes: int
    image_cache_bytes: int
    prompt_lookup_min: int
    prompt_lookup_max: int
    fast_math: bool
    test_mode: bool
    enforce_eager: bool = False
    overlap: bool = True
    memory: DeviceMemory | None = None
    notes: tuple[str, ...] = ()

    def check_method(self, method: str) -> None:
        """Raises InvalidRequest if a request asks for a drafter that does not run."""
        known = ("auto", "off", *self.drafters)
        if method not in known:
            raise InvalidRequest(
                f"speculation.method must be one of {', '.join(known)}, got {method!r:.80}",
                "speculation.method",
            )


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts of a loaded engine, as plain values.

    fingerprint   equality of answers holds between engines of the same fingerprint
    backend       name of the kernel backend
    load_seconds  time spent by stage: import, weights, warmup
    draft_model   name of the draft model's directory, or None
    image_token_id  id that stands for pictures in prompts; None: the model sees none
    gpu           name and compute capability of the GPU in use, or None
    num_graphs    CUDA graphs that were captured at the start
    warnings      what the operator should know (a draft model of an unfit size, no compiler, ...)
    """

    architecture: str
    parameters: int
    vocab_size: int
    resolved: ResolvedConfig
    fingerprint: str
    backend: str
    load_seconds: dict[str, float]
    draft_model: str | None = None
    draft_parameters: int = 0
    warnings: tuple[str, ...] = ()
    image_token_id: int | None = None
    gpu: str | None = None
    num_cuda_graphs: int = 0


def resolve(
    config: Config, hardware: HardwareInfo, model: ModelInfo, drafter: ModelInfo | None = None
) -> ResolvedConfig:
    """Fix every choice, once.

    Raises ConfigError, with the estimate, where the model does not fit.
    """
    _check_dtypes(config, hardware)
    dtype, weight_dtype = _resolve_dtypes(config, hardware, model)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    models = [model] if drafter is None else [model, drafter]
    weights = sum(
        weight_bytes(facts, dtype, weight_dtype, config.quantization, hardware.kernel_backend)
        for facts in models
    )
    max_num_seqs, max_num_batched_tokens = _resolve_batch_limits(config, hardware)
    per_block = config.block_size * sum(kv_bytes_per_token(facts, kv_dtype) for facts in models)
    useful = max_num_seqs * _blocks_for(config.max_model_len or model.context_len, config.block_size)
    measures = hardware.device == "cuda" and config.kv_cache_memory is None
    num_blocks = useful if measures else _resolve_num_blocks(config, hardware, weights, per_block, useful)
    chosen = ResolvedConfig(
        device=hardware.device,
        dtype=dtype,
        weight_dtype=weight_dtype,
        quantization=config.quantization,
        weight_format="the file's types"
        if model.packed_bytes is not None
        else config.quantization or weight_dtype,
        kv_cache_dtype=kv_dtype,
        cpu_isa=config.cpu_isa,
        threads=config.threads
        or (hardware.cores if hardware.device == "cpu" and weights >= MIN_THREADED_WEIGHT_BYTES else 1),
        max_model_len=_resolve_max_model_len(config, model, num_blocks),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=config.block_size,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * per_block,
        weight_bytes=weights,
        prefix_caching=config.prefix_caching,
        drafters=config.drafter_names(),
        num_speculative_tokens=_num_speculative_tokens(config),
        draft_length=config.draft_length,
        suffix_corpus_bytes=parse_bytes("suffix_corpus_memory", config.suffix_corpus_memory),
        image_cache_bytes=parse_bytes("image_cache_memory", config.image_cache_memory),
        prompt_lookup_min=config.prompt_lookup_min,
        prompt_lookup_max=config.prompt_lookup_max,
        fast_math=config.fast_math,
        test_mode=config.test_mode,
        enforce_eager=config.enforce_eager,
        overlap=config.overlap,
        notes=_notes(config, hardware, model),
    )
    if not measures:
        return chosen
    memory = estimate_memory(
        hardware.total_bytes,
        hardware.free_bytes,
        config.gpu_memory_utilization,
        weights,
        max(activation_bytes(facts, dtype, max_num_batched_tokens) for facts in models),
        chosen.image_cache_bytes if model.image_token_id is not None else 0,
        cuda_graphs=hardware.kernel_backend == "triton" and not config.enforce_eager,
    )
    try:
        return with_kv_cache(chosen, config, memory, models)
    except ConfigError as refused:
        # Of the estimate only the weights are certain: where they leave room, the loaded models will show whether it is enough.
        try:
            hoped = with_kv_cache(chosen, config, replace(memory, activations=0, cuda_graphs=0), models)
        except ConfigError:
            raise refused from None
        return replace(hoped, memory=memory)


def with_kv_cache(
    resolved: ResolvedConfig, config: Config, memory: DeviceMemory, models: Sequence[ModelInfo]
) -> ResolvedConfig:
    """The same choices, with the KV cache that a GPU's memory leaves room for, but no more than can ever be used, and with the
    context that fits into it; models are the target and the drafter, if there is one.

    Raises ConfigError, with the whole estimate, if that is less than what was asked for, or nothing.
    """
    block_size = resolved.block_size
    per_token = sum(kv_bytes_per_token(facts, resolved.kv_cache_dtype) for facts in models)
    wanted = config.max_model_len or models[0].context_len
    room = memory.kv_cache // (block_size * per_token)
    if room < _blocks_for(config.max_model_len or 1, block_size):
        raise ConfigError(
            *_out_of_memory_message(config, memory, per_token, max(room, 0) * block_size, len(models))
        )
    num_blocks = min(room, resolved.max_num_seqs * _blocks_for(wanted, block_size))
    return replace(
        resolved,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * block_size * per_token,
        weight_bytes=memory.weights,
        max_model_len=_resolve_max_model_len(config, models[0], num_blocks),
        memory=memory,
    )


def _out_of_memory_message(
    config: Config, memory: DeviceMemory, bytes_per_token: int, num_tokens_left: int, num_models: int
) -> tuple[str, str]:
    """The refusal and the name of the option; `room` tokens would fit into the KV cache."""
    if config.max_model_len is None:
        name, what = "model", "the model does not fit"
        need = f"no KV cache ({bytes_per_token / 1024:.1f} KiB a token) has room beside it"
    else:
        name, what = "max_model_len", f"max_model_len {config.max_model_len} does not fit"
        need = f"its KV cache needs {config.max_model_len * bytes_per_token / GIB:.2f} GiB, {max(memory.kv_cache, 0) / GIB:.2f} GiB are left"
    helps = [
        f"--max-model-len {num_tokens_left}"
        if config.max_model_len and num_tokens_left >= 2
        else "a smaller model"
    ]
    helps += [] if config.gpu_memory_utilization > 0.94 else ["a higher --gpu-memory-utilization"]
    helps += ["fewer --max-num-batched-tokens"]
    helps += [] if config.quantization else ["--quantization fp8, int8 or int4"]
    helps += (
        ["--kv-cache-dtype fp8 or int8"] if config.kv_cache_dtype == "auto" and config.max_model_len else []
    )
    helps += ["no --draft-model"] if num_models > 1 else []
    helps += ["--enforce-eager"] if memory.cuda_graphs else []
    return f"{what}: {need} ({memory}). What would help: {', '.join(helps)}", name


def _check_dtypes(config: Config, hardware: HardwareInfo) -> None:
    """Raises ConfigError for data types that the device does not compute with."""
    if hardware.device == "cpu" and config.quantization == "fp8":
        raise ConfigError(
            "quantization fp8 needs an NVIDIA GPU; on a CPU int8 or int4 would work", "quantization"
        )
    if hardware.device == "cpu" and config.kv_cache_dtype == "fp8":
        raise ConfigError(
            "kv_cache_dtype fp8 needs an NVIDIA GPU; on a CPU int8 would work", "kv_cache_dtype"
        )
    if hardware.device == "cuda" and config.dtype == "bfloat16" and not hardware.supports_bfloat16:
        raise ConfigError(f"{_no_bfloat16_message(hardware)}; float16 or float32 would work", "dtype")


def _no_bfloat16_message(hardware: HardwareInfo) -> str:
    major, minor = hardware.capability
    return f"dtype bfloat16 is not to be had on {hardware.gpu or 'this GPU'} (compute capability {major}.{minor})"


def _notes(config: Config, hardware: HardwareInfo, model: ModelInfo) -> tuple[str, ...]:
    old = (
        hardware.device == "cuda"
        and not hardware.supports_bfloat16
        and config.dtype == "auto"
        and model.dtype == "bfloat16"
    )
    return (f"{_no_bfloat16_message(hardware)}: float16 instead",) if old else ()


def _num_speculative_tokens(config: Config) -> int:
    if config.num_speculative_tokens is not None:
        return config.num_speculative_tokens
    return 32 if config.draft_length == "adaptive" else 4


def _resolve_batch_limits(config: Config, hardware: HardwareInfo) -> tuple[int, int]:
    """max_num_seqs and max_num_batched_tokens; what was asked for bounds what was not."""
    num_seqs, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
    gpu = hardware.device == "cuda"
    if num_seqs is None:
        num_seqs = min(256 if gpu else 64, num_tokens or 256)
    usual = (
        (LARGE_GPU_BATCHED_TOKENS if hardware.total_bytes >= LARGE_GPU_BYTES else SMALL_GPU_BATCHED_TOKENS)
        if gpu
        else 512
    )
    return num_seqs, num_tokens or max(usual, num_seqs)


def _resolve_dtypes(config: Config, hardware: HardwareInfo, model: ModelInfo) -> tuple[str, str]:
    """Of activations and of weights. A CPU computes with float16 weights in float32: exactly, and from half the bytes."""
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    if hardware.device == "cpu" and dtype == "float16":
        return "float32", "float16"
    if config.dtype == "auto" and dtype == "bfloat16" and not hardware.supports_bfloat16:
        dtype = "float32" if hardware.device == "cpu" else "float16"
    return dtype, dtype


def _resolve_num_blocks(
    config: Config, hardware: HardwareInfo, weights: int, bytes_per_block: int, max_useful_blocks: int
) -> int:
    """Blocks of the cache: as asked for, or on a CPU from free memory, but not more than can ever be used."""
    if config.kv_cache_memory is not None:
        return _parse_num_blocks(
            config.kv_cache_memory.strip(), config.block_size, hardware, weights, bytes_per_block
        )
    spare = min(int(hardware.free_bytes * CPU_MEMORY_FRACTION) - weights, MAX_CPU_KV_BYTES)
    if spare < bytes_per_block:
        raise ConfigError(
            f"the model does not fit: weights need {weights / GIB:.2f} GiB and {CPU_MEMORY_FRACTION:.0%} of the free memory is "
            f"{hardware.free_bytes * CPU_MEMORY_FRACTION / GIB:.2f} GiB; a smaller model or dtype would fit",
            "model",
        )
    return min(spare // bytes_per_block, max_useful_blocks)


def _parse_num_blocks(
    text: str, block_size: int, hardware: HardwareInfo, weights: int, bytes_per_block: int
) -> int:
    if text.endswith("tokens"):
        num_blocks = _blocks_for(_parse_int("kv_cache_memory", text[:-6]), block_size)
    else:
        num_blocks = parse_bytes("kv_cache_memory", text) // bytes_per_block
    if num_blocks < 1:
        raise ConfigError(
            f"kv_cache_memory {text} holds no block of {bytes_per_block} bytes", "kv_cache_memory"
        )
    if weights + num_blocks * bytes_per_block > hardware.free_bytes:
        raise ConfigError(
            f"kv_cache_memory {text} needs {num_blocks * bytes_per_block / GIB:.2f} GiB beside {weights / GIB:.2f} GiB of weights; "
            f"{hardware.free_bytes / GIB:.2f} GiB are free",
            "kv_cache_memory",
        )
    return num_blocks


def _resolve_max_model_len(config: Config, model: ModelInfo, num_blocks: int) -> int:
    cache = num_blocks * config.block_size
    if config.max_model_len is None:
        length = min(model.context_len, cache)
    elif config.max_model_len > cache:
        raise ConfigError(
            f"max_model_len {config.max_model_len} does not fit into a KV cache of {cache} tokens; "
            f"lower --max-model-len or raise --kv-cache-memory",
            "max_model_len",
        )
    else:
        length = config.max_model_len
    if length > model.context_len:
        raise ConfigError(
            f"max_model_len {length} is above the checkpoint's {model.context_len} positions", "max_model_len"
        )
    if length < 2:
        raise ConfigError(
            f"max_model_len {length} leaves no room for an answer: at least 2 are needed", "max_model_len"
        )
    return length


def _blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _parse_int(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} must begin with a whole number, got {text!r}", name) from None
