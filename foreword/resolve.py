"""What was asked for becomes what runs: every choice, made once.

`resolve()` turns a `Config`, the machine and the model into `Resolved`, which a restarted engine receives unchanged. Nothing
here imports torch: the API process reads it too.
"""

from __future__ import annotations

from dataclasses import dataclass

from foreword.config import Config, parse_bytes
from foreword.errors import ConfigError, InvalidRequest

__all__ = ["EngineInfo", "Machine", "ModelFacts", "Resolved", "kv_bytes_per_token", "resolve"]

GIB = 1 << 30
CPU_CACHE = 4 * GIB  # the KV cache's default bound on a machine whose memory others use too
WORTH_THREADS = 32 << 20  # bytes of weights below which threads wait for each other about as long as they work


@dataclass(frozen=True, slots=True)
class Machine:
    """What `resolve()` needs to know of the hardware.

    native  the kernels multiply with weights of every kind as they are; torch wants them in the activations' type too
    """

    device: str
    cores: int
    free_bytes: int
    bfloat16: bool
    native: bool = True


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What `resolve()` needs to know of a checkpoint.

    context             positions it was made for
    dtype               of its weights
    parameters          number of weights (tied ones once)
    kv_values_per_token numbers that one token keeps in the KV cache (all layers, K and V)
    kv_vectors_per_token  vectors that those numbers make up, one for each head: int8 has a scale for each
    embedding_parameters  parameters of the embedding and of the head
    weight_bytes        of weights that keep the form they have in the file; None: there are none
    kept_parameters     how many weights that are
    tower_parameters    of the tower that sees pictures
    image_token_id      id of the placeholder of a picture's tokens; None: the model sees none
    kept_embedding_parameters  of these, parameters of the embedding and of the head
    """

    architecture: str
    context: int
    dtype: str
    parameters: int
    vocab_size: int
    kv_values_per_token: int
    kv_vectors_per_token: int = 0
    embedding_parameters: int = 0
    weight_bytes: int | None = None
    kept_parameters: int = 0
    kept_embedding_parameters: int = 0
    tower_parameters: int = 0
    image_token_id: int | None = None


@dataclass(frozen=True, slots=True)
class Resolved:
    """Every choice made.

    dtype           of activations
    weight_dtype    of weights that are not quantized
    quantization    what weights are rounded to while loading, "int8" or "int4", or None
    weight_format   how the model's weights are held, in words
    kv_cache_dtype  of the KV cache
    cpu_isa         instruction set of the CPU kernels: "auto" or a forced one
    num_blocks      usable blocks of the cache, for target and drafter alike
    draft_length    "adaptive" or "fixed"
    suffix_corpus_bytes  memory for finished outputs
    image_cache_bytes  memory for features of pictures
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


# A value's bytes by data type; int4 has a scale of 16 bits for each 32 values, and int8 one of 32 bits for each row or
# vector, which is counted apart where there are many.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "int4": 18 / 32}
SCALE_BYTES = 4


def resolve(config: Config, machine: Machine, model: ModelFacts, drafter: ModelFacts | None = None) -> Resolved:
    """Fix every choice, once.

    Raises ConfigError, with the estimate, where the model does not fit.
    """
    gpu = machine.device == "cuda"
    dtype, weight_dtype = _dtypes(config, machine, model)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    models = [model] if drafter is None else [model, drafter]
    weights = sum(_weight_bytes(facts, dtype, weight_dtype, config.quantization, machine.native) for facts in models)
    max_num_seqs, max_num_batched_tokens = _rows(config, gpu)
    per_block = config.block_size * sum(kv_bytes_per_token(facts, kv_dtype) for facts in models)
    wanted = config.max_model_len or model.context
    num_blocks = _num_blocks(config, machine, weights, per_block, max_num_seqs * _blocks(wanted, config.block_size))
    return Resolved(
        device=machine.device,
        dtype=dtype,
        weight_dtype=weight_dtype,
        quantization=config.quantization,
        weight_format="the file's types" if model.weight_bytes is not None else config.quantization or weight_dtype,
        kv_cache_dtype=kv_dtype,
        cpu_isa=config.cpu_isa,
        threads=config.threads or (machine.cores if weights >= WORTH_THREADS else 1),
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
    )


def _num_speculative_tokens(config: Config) -> int:
    if config.num_speculative_tokens is not None:
        return config.num_speculative_tokens
    return 32 if config.draft_length == "adaptive" else 4


def kv_bytes_per_token(facts: ModelFacts, kv_dtype: str) -> int:
    """Of one token in the KV cache, scales included."""
    scales = facts.kv_vectors_per_token * SCALE_BYTES if kv_dtype == "int8" else 0
    return int(facts.kv_values_per_token * DTYPE_BYTES[kv_dtype]) + scales


def _rows(config: Config, gpu: bool) -> tuple[int, int]:
    """max_num_seqs and max_num_batched_tokens; what was asked for bounds what was not."""
    num_seqs, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
    if num_seqs is None:
        num_seqs = min(256 if gpu else 64, num_tokens or 256)
    return num_seqs, num_tokens or max(8192 if gpu else 512, num_seqs)


def _dtypes(config: Config, machine: Machine, model: ModelFacts) -> tuple[str, str]:
    """Of activations and of weights. A CPU computes with float16 weights in float32: exactly, and from half the bytes."""
    dtype = model.dtype if config.dtype == "auto" else config.dtype
    if machine.device == "cpu" and dtype == "float16":
        return "float32", "float16"
    if config.dtype == "auto" and dtype == "bfloat16" and not machine.bfloat16:
        dtype = "float32" if machine.device == "cpu" else "float16"
    return dtype, dtype


def _weight_bytes(facts: ModelFacts, dtype: str, weight_dtype: str, quantization: str | None, native: bool) -> int:
    """The embedding and the head are never rounded to less than 8 bits, a tower that sees not at all. Torch holds what is
    quantized as float32, and whatever is not of the activations' type once more in that."""
    tower_dtype = dtype if quantization else weight_dtype
    if not native:
        values = facts.kept_parameters if quantization is None else facts.parameters - facts.tower_parameters
        held = {"float32", dtype}, {tower_dtype, dtype}
        quantized, dense = (sum(DTYPE_BYTES[kind] for kind in kinds) for kinds in held)
        return int(values * quantized + (facts.parameters - values) * dense)
    linear = quantization or weight_dtype
    embedding = "int8" if quantization else weight_dtype
    outer = facts.embedding_parameters - facts.kept_embedding_parameters
    layers = facts.parameters - facts.kept_parameters - facts.tower_parameters - outer
    made = layers * DTYPE_BYTES[linear] + outer * DTYPE_BYTES[embedding] + facts.tower_parameters * DTYPE_BYTES[tower_dtype]
    return (facts.weight_bytes or 0) + int(made)


def _num_blocks(config: Config, machine: Machine, weights: int, per_block: int, useful: int) -> int:
    """Blocks of the cache: as asked for, or from free memory, but not more than can ever be used."""
    if config.kv_cache_memory is not None:
        return _asked_blocks(config.kv_cache_memory.strip(), config.block_size, machine, weights, per_block)
    share = config.gpu_memory_utilization if machine.device == "cuda" else 0.5
    spare = int(machine.free_bytes * share) - weights
    if machine.device == "cpu":
        spare = min(spare, CPU_CACHE)
    if spare < per_block:
        raise ConfigError(
            f"the model does not fit: weights need {weights / GIB:.2f} GiB and {share:.0%} of the free memory is "
            f"{machine.free_bytes * share / GIB:.2f} GiB; a smaller model or dtype would fit",
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
