"""Every option, once: flags, environment variables, config file and docs derive from these fields.

`Config` is what the user asked for. `resolve()` turns it, once, into `Resolved`, which a restarted
engine receives unchanged. Nothing here imports torch: the API process reads it too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from foreword.errors import ConfigError, InvalidRequest

__all__ = ["Config", "EngineInfo", "Machine", "ModelFacts", "Resolved", "kv_bytes_per_token", "option_fields", "resolve"]

DRAFTERS = ("grammar", "prediction", "suffix", "ngram", "draft", "replay")
GIB = 1 << 30
CPU_CACHE = 4 * GIB  # the KV cache's default bound on a machine whose memory others use too
WORTH_THREADS = 32 << 20  # bytes of weights below which threads wait for each other about as long as they work


def option(default: Any, help_: str, *, group: str, choices: tuple[str, ...] = (), secret: bool = False) -> Any:
    """A field that is also a flag; `help_` is its documentation everywhere."""
    metadata = {"help": help_, "group": group, "choices": choices, "secret": secret}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Config:
    """What the user asked for; None and "auto" leave the choice to `resolve()`."""

    model: str | None = option(None, "checkpoint directory, GGUF file or hub id (default: the bundled demo)", group="model")
    served_model_name: str | None = option(None, "name in the API (default: the model's last part)", group="model")
    embedding_model: str | None = option(
        None, "checkpoint of the BERT family that embeds, or ranks, beside the model, in a process of its own", group="model"
    )
    device: str = option("auto", "where to compute", group="model", choices=("auto", "cpu", "cuda"))
    dtype: str = option(
        "auto",
        "data type of weights, activations and KV cache",
        group="model",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = option(
        None,
        "round weights while loading: int8, or int4 (the embedding and the head stay in 8 bits)",
        group="model",
        choices=("int8", "int4"),
    )
    kv_cache_dtype: str = option(
        "auto", "data type of the KV cache, if not that of the activations", group="model", choices=("auto", "int8")
    )
    cpu_isa: str = option(
        "auto",
        "instruction set of the CPU kernels (default: the best here); reference computes in torch",
        group="model",
        choices=("auto", "amx", "avx512", "avx2", "portable", "reference"),
    )
    gguf_dequantize: bool = option(
        False, "take types of a GGUF file that have no kernels (Q2_K, Q3_K, Q4_1, ...) as floats of `dtype`", group="model"
    )
    max_model_len: int | None = option(
        None, "context limit in tokens (default: the checkpoint's, as the cache allows)", group="model"
    )
    seed: int | None = option(None, "seed for requests that bring none (default: a random one for each)", group="model")
    threads: int | None = option(
        None, "CPU threads of the engine (default: all cores; one for models below 32 MiB)", group="model"
    )
    fast_math: bool = option(False, "faster products whose bits depend on the batch: gives up exactness", group="model")

    max_num_seqs: int | None = option(None, "requests that run at once (default: 64 on CPU, 256 on GPU)", group="scheduler")
    max_num_batched_tokens: int | None = option(None, "rows of one step (default: 512 on CPU, 8192 on GPU)", group="scheduler")
    max_waiting: int = option(4096, "requests that may be open, running or waiting; more are answered 429", group="scheduler")
    kv_cache_memory: str | None = option(
        None,
        'memory of the KV cache, such as "2GiB" or "4000tokens" (default: from free memory; on a CPU at most 4 GiB)',
        group="scheduler",
    )
    gpu_memory_utilization: float = option(0.9, "share of the GPU's memory that may be used", group="scheduler")
    block_size: int = option(16, "tokens in one block of the KV cache (a power of two, 1 to 256)", group="scheduler")
    trace: str | None = option(
        None,
        "file to write every plan of the scheduler to, for replay; it holds token ids; FILE.drafts gets the decisions on drafts",
        group="scheduler",
    )
    prefix_caching: bool = option(True, "reuse the KV of equal prompt beginnings", group="scheduler")

    speculate: str = option(
        "auto",
        "auto, off, or drafters joined by commas: grammar, prediction, suffix, ngram, draft, replay",
        group="speculation",
    )
    draft_model: str | None = option(None, "a smaller checkpoint with the same tokenizer", group="speculation")
    num_speculative_tokens: int | None = option(
        None, "upper bound of drafted tokens a request and step (default 32, where fixed 4)", group="speculation"
    )
    draft_length: str = option(
        "adaptive",
        "adaptive drafts as much as pays, measured; fixed drafts up to the bound whenever there is a guess",
        group="speculation",
        choices=("adaptive", "fixed"),
    )
    suffix_corpus_memory: str = option(
        "64MiB", "memory for finished outputs that suffix guesses from, each key's for itself; 0 for none", group="speculation"
    )
    prompt_lookup_min: int = option(2, "shortest n-gram that ngram looks up", group="speculation")
    prompt_lookup_max: int = option(4, "longest n-gram that ngram looks up", group="speculation")
    replay_file: str | None = option(None, "JSON lines of recorded outputs for the replay drafter", group="speculation")
    replay_error_rate: float = option(0.0, "share of replayed tokens made wrong on purpose", group="speculation")
    replay_cost: bool = option(
        False, "run the draft model for every replayed token, so that its cost is paid", group="speculation"
    )
    speculative_config: str | None = option(None, "the above as JSON, as in vLLM", group="speculation")

    host: str = option("127.0.0.1", "address to listen on", group="server")
    port: int = option(8000, "port to listen on; 0 takes a free one", group="server")
    api_key: str | None = option(None, "key that clients must send; several joined by commas", group="server", secret=True)
    cors_origins: str = option("", "origins that browsers may call from, joined by commas; * for all", group="server")
    max_body_mb: int = option(32, "largest request body in MB", group="server")
    share_prefix_cache: bool = option(
        False, "let different API keys share cached prefixes, and the finished outputs that suffix guesses from", group="server"
    )
    log_level: str = option("info", "how much to log", group="server", choices=("debug", "info", "warning", "error"))
    log_interval: float = option(10.0, "seconds between throughput lines; 0 for none", group="server")
    test_mode: bool = option(False, "attach a hash of the raw logits to every token (slow; for exactness tests)", group="server")

    def __post_init__(self) -> None:
        for item in fields(self):
            _check_type(item.name, getattr(self, item.name), str(item.type))
            choices = item.metadata["choices"]
            if choices and getattr(self, item.name) not in (*choices, item.default):
                raise ConfigError(f"{item.name} must be one of {', '.join(choices)}, got {getattr(self, item.name)!r}", item.name)
        _between("block_size", self.block_size, 1, 256)
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}", "block_size")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "threads"):
            if getattr(self, name) is not None:
                _between(name, getattr(self, name), 1, 1 << 24)
        _between("num_speculative_tokens", self.num_speculative_tokens or 0, 0, 64)
        _between("prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max)
        _between("prompt_lookup_max", self.prompt_lookup_max, 1, 32)
        _between("replay_error_rate", self.replay_error_rate, 0.0, 1.0)
        parse_bytes("suffix_corpus_memory", self.suffix_corpus_memory)
        _between("gpu_memory_utilization", self.gpu_memory_utilization, 0.05, 1.0)
        _between("port", self.port, 0, 65535)
        _between("max_waiting", self.max_waiting, 1, 1 << 24)
        _between("log_interval", self.log_interval, 0, 86_400)
        _between("seed", self.seed or 0, -(2**63), 2**64 - 1)
        if self.max_num_seqs and self.max_num_batched_tokens and self.max_num_seqs > self.max_num_batched_tokens:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "every running request needs a row a step",
                "max_num_batched_tokens",
            )
        _between("max_body_mb", self.max_body_mb, 1, 1024)
        if self.replay_cost and not (self.draft_model and "replay" in self.drafter_names()):
            raise ConfigError("replay_cost needs --draft-model and the drafter replay", "replay_cost")
        self.drafter_names()

    def drafter_names(self) -> tuple[str, ...]:
        """The drafters that `speculate` asks for, in order; empty when it is off.

        `auto` is all that is there: what grammars force, predictions, suffix matching, and the draft model where one is
        given. `ngram` guesses what `suffix` guesses too.
        """
        if self.speculate == "off":
            return ()
        if self.speculate == "auto":
            return ("grammar", "prediction", "suffix", *(("draft",) if self.draft_model else ()))
        names = tuple(name.strip() for name in self.speculate.split(","))
        for name in names:
            if name not in DRAFTERS:
                raise ConfigError(f"speculate: unknown drafter {name!r}; known: auto, off, {', '.join(DRAFTERS)}", "speculate")
        if "draft" in names and not self.draft_model:
            raise ConfigError("speculate names `draft`, which needs --draft-model", "draft_model")
        if "replay" in names and not self.replay_file:
            raise ConfigError("speculate names `replay`, which needs --replay-file", "replay_file")
        if len(set(names)) < len(names):
            raise ConfigError(f"speculate names a drafter twice: {self.speculate}", "speculate")
        return names

    @property
    def runs_draft_model(self) -> bool:
        """Whether `draft_model` is loaded: to guess, or to be paid for in a replay."""
        return self.draft_model is not None and ("draft" in self.drafter_names() or self.replay_cost)

    @property
    def trace_of_drafts(self) -> Path:
        """Beside `trace`."""
        return Path(f"{self.trace}.drafts")

    def with_speculative_config(self) -> Config:
        """`speculative_config` (vLLM's JSON) spread over the fields it stands for."""
        if self.speculative_config is None:
            return self
        if self.speculate != "auto":
            raise ConfigError("give speculate or speculative_config, not both", "speculative_config")
        return replace(self, speculative_config=None, **_spread_vllm(self.speculative_config))


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
    prompt_lookup_min: int
    prompt_lookup_max: int
    fast_math: bool
    test_mode: bool

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
        prompt_lookup_min=config.prompt_lookup_min,
        prompt_lookup_max=config.prompt_lookup_max,
        fast_math=config.fast_math,
        test_mode=config.test_mode,
    )


def _num_speculative_tokens(config: Config) -> int:
    if config.num_speculative_tokens is not None:
        return config.num_speculative_tokens
    return 32 if config.draft_length == "adaptive" else 4


def kv_bytes_per_token(facts: ModelFacts, kv_dtype: str) -> int:
    """Of one token in the KV cache, scales included."""
    scales = facts.kv_vectors_per_token * SCALE_BYTES if kv_dtype == "int8" else 0
    return int(facts.kv_values_per_token * DTYPE_BYTES[kv_dtype]) + scales


def option_fields() -> tuple[Any, ...]:
    """The dataclass fields of Config, in order, for whoever derives flags or docs from them."""
    return fields(Config)


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
    """The embedding and the head are never rounded to less than 8 bits. Torch holds what is quantized as float32, and
    whatever is not of the activations' type once more in that."""
    if not native:
        values = facts.kept_parameters if quantization is None else facts.parameters
        held = {"float32", dtype}, {weight_dtype, dtype}
        quantized, dense = (sum(DTYPE_BYTES[kind] for kind in kinds) for kinds in held)
        return int(values * quantized + (facts.parameters - values) * dense)
    linear = quantization or weight_dtype
    embedding = "int8" if quantization else weight_dtype
    outer = facts.embedding_parameters - facts.kept_embedding_parameters
    layers = facts.parameters - facts.kept_parameters - outer
    return (facts.weight_bytes or 0) + int(layers * DTYPE_BYTES[linear] + outer * DTYPE_BYTES[embedding])


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


def parse_bytes(name: str, text: str) -> int:
    """ "2GiB", "512MiB", "1.5GB" or a plain number of bytes."""
    units = {"kib": 1 << 10, "mib": 1 << 20, "gib": GIB, "kb": 10**3, "mb": 10**6, "gb": 10**9, "b": 1, "": 1}
    match = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", text.strip().lower())
    tokens = ' or "4000tokens"' if name == "kv_cache_memory" else ""
    try:
        return int(float(match[1]) * units[match[2]])  # type: ignore[index]
    except (TypeError, ValueError, KeyError, OverflowError):
        raise ConfigError(f'{name} must be like "2GiB" or "512MiB"{tokens}, got {text!r}', name) from None


def _spread_vllm(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"speculative_config is not JSON: {error}", "speculative_config") from None
    if not isinstance(given, Mapping):
        raise ConfigError("speculative_config must be a JSON object", "speculative_config")
    given = dict(given)
    changes = {
        name: given.pop(name) for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max") if name in given
    }
    model = given.pop("model", None)
    method = given.pop("method", None) or ("ngram" if model in (None, "ngram", "[ngram]") else "draft_model")
    if given:
        raise ConfigError(f"speculative_config: unknown field {sorted(given)[0]!r}", "speculative_config")
    if method in ("ngram", "suffix") and model in (None, "ngram", "[ngram]"):
        return {**changes, "speculate": method}
    if method in ("draft", "draft_model") and isinstance(model, str):
        return {**changes, "speculate": "draft", "draft_model": model}
    raise ConfigError(f"speculative_config: method must be ngram, suffix or draft_model, got {method!r}", "speculative_config")


def _blocks(tokens: int, block_size: int) -> int:
    return -(-tokens // block_size)


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{name} must begin with a whole number, got {text!r}", name) from None


def _between(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be between {low:g} and {high:g}, got {value:g}", name)


def _check_type(name: str, value: object, annotation: str) -> None:
    allowed = {"str": str, "int": int, "float": (int, float), "bool": bool, "None": type(None)}
    kinds = tuple(part.strip() for part in annotation.split("|"))
    if isinstance(value, bool) and "bool" not in kinds:
        raise ConfigError(f"{name} must be {annotation}, got {value!r}", name)
    if not any(isinstance(value, allowed[kind]) for kind in kinds):  # type: ignore[arg-type]
        raise ConfigError(f"{name} must be {annotation}, got {value!r}", name)
