"""What was asked for becomes what runs: every choice, made once.

`resolve()` turns a `Config`, the machine and the model into `Resolved`, which a restarted engine receives unchanged. Nothing
here imports torch: the API process reads it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from foreword.config import Config, parse_bytes
from foreword.errors import ConfigError, InvalidRequest
from foreword.estimate import (
    GIB,
    DeviceMemory,
    ModelFacts,
    activation_bytes,
    estimated_memory,
    kv_bytes_per_token,
    weight_bytes,
)

__all__ = ["EngineInfo", "Machine", "ModelFacts", "Resolved", "fitted", "resolve"]

CPU_SHARE = 0.5
CPU_CACHE = 4 * GIB  # the KV cache's default bound on a machine whose memory others use too
LARGE_GPU = 64 * GIB  # from here on a step has MOST_ROWS rows: their logits alone may take several GiB
MOST_ROWS, FEWER_ROWS = 8192, 2048
WORTH_THREADS = 32 << 20  # bytes of weights below which threads wait for each other about as long as they work


@dataclass(frozen=True, slots=True)
class Machine:
    """What `resolve()` needs to know of the hardware.

    free_bytes, total_bytes  memory of the device
    gpu         name of the GPU, or None; capability is its compute capability
    kernels     who computes: "native", "triton" or "torch"; see estimate.weight_bytes()
    """

    device: str
    cores: int
    free_bytes: int
    bfloat16: bool
    kernels: str = "native"
    total_bytes: int = 0
    gpu: str | None = None
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Resolved:
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
                f"speculation.method must be one of {', '.join(known)}, got {method!r:.80}", "speculation.method"
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
    resolved: Resolved
    fingerprint: str
    backend: str
    load_seconds: dict[str, float]
    draft_model: str | None = None
    draft_parameters: int = 0
    warnings: tuple[str, ...] = ()
    image_token_id: int | None = None
    gpu: str | None = None
    num_graphs: int = 0


def resolve(config: Config, machine: Machine, model: ModelFacts, drafter: ModelFacts | None = None) -> Resolved:
    """Fix every choice, once.

    Raises ConfigError, with the estimate, where the model does not fit.
    """
    _check_kinds(config, machine)
    dtype, weight_dtype = _dtypes(config, machine, model)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    models = [model] if drafter is None else [model, drafter]
    weights = sum(weight_bytes(facts, dtype, weight_dtype, config.quantization, machine.kernels) for facts in models)
    max_num_seqs, max_num_batched_tokens = _rows(config, machine)
    per_block = config.block_size * sum(kv_bytes_per_token(facts, kv_dtype) for facts in models)
    useful = max_num_seqs * _blocks(config.max_model_len or model.context, config.block_size)
    measures = machine.device == "cuda" and config.kv_cache_memory is None
    num_blocks = useful if measures else _num_blocks(config, machine, weights, per_block, useful)
    chosen = Resolved(
        device=machine.device,
        dtype=dtype,
        weight_dtype=weight_dtype,
        quantization=config.quantization,
        weight_format="the file's types" if model.weight_bytes is not None else config.quantization or weight_dtype,
        kv_cache_dtype=kv_dtype,
        cpu_isa=config.cpu_isa,
        threads=config.threads or (machine.cores if machine.device == "cpu" and weights >= WORTH_THREADS else 1),
        max_model_len=_max_model_len(config, model, num_blocks),
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
        notes=_notes(config, machine, model),
    )
    if not measures:
        return chosen
    memory = estimated_memory(
        machine.total_bytes,
        machine.free_bytes,
        config.gpu_memory_utilization,
        weights,
        max(activation_bytes(facts, dtype, max_num_batched_tokens) for facts in models),
        chosen.image_cache_bytes if model.image_token_id is not None else 0,
        graphs=machine.kernels == "triton" and not config.enforce_eager,
    )
    try:
        return fitted(chosen, config, memory, models)
    except ConfigError as refused:
        # Of the estimate only the weights are certain: where they leave room, the loaded models will show whether it is enough.
        try:
            hoped = fitted(chosen, config, replace(memory, activations=0, graphs=0), models)
        except ConfigError:
            raise refused from None
        return replace(hoped, memory=memory)


def fitted(chosen: Resolved, config: Config, memory: DeviceMemory, models: Sequence[ModelFacts]) -> Resolved:
    """The same choices, with the KV cache that a GPU's memory leaves room for, but no more than can ever be used, and with the
    context that fits into it; models are the target and the drafter, if there is one.

    Raises ConfigError, with the whole estimate, if that is less than what was asked for, or nothing.
    """
    block_size = chosen.block_size
    per_token = sum(kv_bytes_per_token(facts, chosen.kv_cache_dtype) for facts in models)
    wanted = config.max_model_len or models[0].context
    room = memory.for_kv // (block_size * per_token)
    if room < _blocks(config.max_model_len or 1, block_size):
        raise ConfigError(*_too_much(config, memory, per_token, max(room, 0) * block_size, len(models)))
    num_blocks = min(room, chosen.max_num_seqs * _blocks(wanted, block_size))
    return replace(
        chosen,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * block_size * per_token,
        weight_bytes=memory.weights,
        max_model_len=_max_model_len(config, models[0], num_blocks),
        memory=memory,
    )


def _too_much(config: Config, memory: DeviceMemory, per_token: int, room: int, num_models: int) -> tuple[str, str]:
    """The refusal and the name of the option; `room` tokens would fit into the KV cache."""
    if config.max_model_len is None:
        name, what = "model", "the model does not fit"
        need = f"no KV cache ({per_token / 1024:.1f} KiB a token) has room beside it"
    else:
        name, what = "max_model_len", f"max_model_len {config.max_model_len} does not fit"
        need = (
            f"its KV cache needs {config.max_model_len * per_token / GIB:.2f} GiB, {max(memory.for_kv, 0) / GIB:.2f} GiB are left"
        )
    helps = [f"--max-model-len {room}" if config.max_model_len and room >= 2 else "a smaller model"]
    helps += [] if config.gpu_memory_utilization > 0.94 else ["a higher --gpu-memory-utilization"]
    helps += ["fewer --max-num-batched-tokens"]
    helps += [] if config.quantization else ["--quantization fp8, int8 or int4"]
    helps += ["--kv-cache-dtype fp8 or int8"] if config.kv_cache_dtype == "auto" and config.max_model_len else []
    helps += ["no --draft-model"] if num_models > 1 else []
    helps += ["--enforce-eager"] if memory.graphs else []
    return f"{what}: {need} ({memory}). What would help: {', '.join(helps)}", name


def _check_kinds(config: Config, machine: Machine) -> None:
    """Raises ConfigError for data types that the device does not compute with."""
    if machine.device == "cpu" and config.quantization == "fp8":
        raise ConfigError("quantization fp8 needs an NVIDIA GPU; on a CPU int8 or int4 would work", "quantization")
    if machine.device == "cpu" and config.kv_cache_dtype == "fp8":
        raise ConfigError("kv_cache_dtype fp8 needs an NVIDIA GPU; on a CPU int8 would work", "kv_cache_dtype")
    if machine.device == "cuda" and config.dtype == "bfloat16" and not machine.bfloat16:
        raise ConfigError(f"{_no_bfloat16(machine)}; float16 or float32 would work", "dtype")


def _no_bfloat16(machine: Machine) -> str:
    major, minor = machine.capability
    return f"dtype bfloat16 is not to be had on {machine.gpu or 'this GPU'} (compute capability {major}.{minor})"


def _notes(config: Config, machine: Machine, model: ModelFacts) -> tuple[str, ...]:
    old = machine.device == "cuda" and not machine.bfloat16 and config.dtype == "auto" and model.dtype == "bfloat16"
    return (f"{_no_bfloat16(machine)}: float16 instead",) if old else ()


def _num_speculative_tokens(config: Config) -> int:
    if config.num_speculative_tokens is not None:
        return config.num_speculative_tokens
    return 32 if config.draft_length == "adaptive" else 4


def _rows(config: Config, machine: Machine) -> tuple[int, int]:
    """max_num_seqs and max_num_batched_tokens; what was asked for bounds what was not."""
    num_seqs, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
    gpu = machine.device == "cuda"
    if num_seqs is None:
        num_seqs = min(256 if gpu else 64, num_tokens or 256)
    usual = (MOST_ROWS if machine.total_bytes >= LARGE_GPU else FEWER_ROWS) if gpu else 512
    return num_seqs, num_tokens or max(usual, num_seqs)


def _dtypes(config: Config, machine: Machine, model: ModelFacts) -> tuple[str, str]:
    """Of activations and of weights. A CPU computes with float16 weights in float32: exactly, and from half the bytes."""
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    if machine.device == "cpu" and dtype == "float16":
        return "float32", "float16"
    if config.dtype == "auto" and dtype == "bfloat16" and not machine.bfloat16:
        dtype = "float32" if machine.device == "cpu" else "float16"
    return dtype, dtype


def _num_blocks(config: Config, machine: Machine, weights: int, per_block: int, useful: int) -> int:
    """Blocks of the cache: as asked for, or on a CPU from free memory, but not more than can ever be used."""
    if config.kv_cache_memory is not None:
        return _asked_blocks(config.kv_cache_memory.strip(), config.block_size, machine, weights, per_block)
    spare = min(int(machine.free_bytes * CPU_SHARE) - weights, CPU_CACHE)
    if spare < per_block:
        raise ConfigError(
            f"the model does not fit: weights need {weights / GIB:.2f} GiB and {CPU_SHARE:.0%} of the free memory is "
            f"{machine.free_bytes * CPU_SHARE / GIB:.2f} GiB; a smaller model or dtype would fit",
            "model",
        )
    return min(spare // per_block, useful)


def _asked_blocks(text: str, block_size: int, machine: Machine, weights: int, per_block: int) -> int:
    if text.endswith("tokens"):
        num_blocks = _blocks(_whole("kv_cache_memory", text[:-6]), block_size)
    else:
        num_blocks = parse_bytes("kv_cache_memory", text) // per_block
    if num_blocks < 1:
        raise ConfigError(f"kv_cache_memory {text} holds no block of {per_block} bytes", "kv_cache_memory")
    if weights + num_blocks * per_block > machine.free_bytes:
        raise ConfigError(
            f"kv_cache_memory {text} needs {num_blocks * per_block / GIB:.2f} GiB beside {weights / GIB:.2f} GiB of weights; "
            f"{machine.free_bytes / GIB:.2f} GiB are free",
            "kv_cache_memory",
        )
    return num_blocks


def _max_model_len(config: Config, model: ModelFacts, num_blocks: int) -> int:
    cache = num_blocks * config.block_size
    if config.max_model_len is None:
        length = min(model.context, cache)
    elif config.max_model_len > cache:
        raise ConfigError(
            f"max_model_len {config.max_model_len} does not fit into a KV cache of {cache} tokens; "
            f"lower --max-model-len or raise --kv-cache-memory",
            "max_model_len",
        )
    else:
        length = config.max_model_len
    if length > model.context:
        raise ConfigError(f"max_model_len {length} is above the checkpoint's {model.context} positions", "max_model_len")
    if length < 2:
        raise ConfigError(f"max_model_len {length} leaves no room for an answer: at least 2 are needed", "max_model_len")
    return length


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} must begin with a whole number, got {text!r}", name) from None
