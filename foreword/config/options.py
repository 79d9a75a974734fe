"""Every option, once: flags, environment variables, config file and docs derive from these fields.

`Config` is what the user asked for; `resolve()` (resolve.py) makes of it what runs. Nothing here imports torch: the API
process reads it too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from foreword.errors import ConfigError

__all__ = ["DRAFTERS", "Config", "option_fields", "parse_bytes"]

DRAFTERS = ("grammar", "prediction", "suffix", "ngram", "draft", "replay")
GIB = 1 << 30
MAX_FLOAT_DISPLAY = 1e300


def option(
    default: Any, help_: str, *, group: str, choices: tuple[str, ...] = (), secret: bool = False
) -> Any:
    """A field that is also a flag; `help_` is its documentation everywhere."""
    metadata = {"help": help_, "group": group, "choices": choices, "secret": secret}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Config:
    """What the user asked for; None and "auto" leave the choice to `resolve()`."""

    model: str | None = option(
        None, "checkpoint directory, GGUF file or hub id (default: the bundled demo)", group="model"
    )
    served_model_name: str | None = option(
        None, "name in the API (default: the model's last part)", group="model"
    )
    embedding_model: str | None = option(
        None,
        "checkpoint of the BERT family that embeds, or ranks, beside the model, in a process of its own",
        group="model",
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
        "round weights while loading: int8, int4 (the embedding and the head stay in 8 bits), or fp8 on GPUs",
        group="model",
        choices=("int8", "int4", "fp8"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "data type of the KV cache, if not that of the activations; fp8 on GPUs",
        group="model",
        choices=("auto", "int8", "fp8"),
    )
    cpu_isa: str = option(
        "auto",
        "instruction set of the CPU kernels (default: the best here); reference computes in torch",
        group="model",
        choices=("auto", "amx", "avx512", "avx2", "portable", "reference"),
    )
    gguf_dequantize: bool = option(
        False,
        "take types of a GGUF file that have no kernels (Q2_K, Q3_K, Q4_1, ...) as floats of `dtype`",
        group="model",
    )
    max_model_len: int | None = option(
        None, "context limit in tokens (default: the checkpoint's, as the cache allows)", group="model"
    )
    seed: int | None = option(
        None, "seed for requests that bring none (default: a random one for each)", group="model"
    )
    threads: int | None = option(
        None,
        "CPU threads of the engine (default: all cores; one for models below 32 MiB, and on GPUs)",
        group="model",
    )
    load_format: str = option(
        "auto",
        "auto reads the weights; dummy makes random ones of the shapes that config.json tells, to measure speed",
        group="model",
        choices=("auto", "dummy"),
    )
    enforce_eager: bool = option(
        False, "launch kernels one by one instead of CUDA graphs; without effect on CPUs", group="model"
    )
    overlap: bool = option(
        True,
        "on GPUs, plan and commit one step while the device computes the next; tokens are the same",
        group="model",
    )
    fast_math: bool = option(
        False, "faster products whose bits depend on the batch: gives up exactness", group="model"
    )

    max_num_seqs: int | None = option(
        None, "requests that run at once (default: 64 on CPU, 256 on GPU)", group="scheduler"
    )
    max_num_batched_tokens: int | None = option(
        None,
        "rows of one step (default: 512 on a CPU, 8192 on a GPU of 64 GiB or more, 2048 on others)",
        group="scheduler",
    )
    max_waiting: int = option(
        4096, "requests that may be open, running or waiting; more are answered 429", group="scheduler"
    )
    max_waiting_tokens: int = option(
        4_000_000,
        "prompt tokens that may be open, running or waiting; more are answered 429",
        group="scheduler",
    )
    queue_timeout: float = option(
        300.0,
        "seconds that a request may wait for its first step before it is answered 429; 0 for no limit",
        group="scheduler",
    )
    request_timeout: float = option(
        0.0,
        "seconds that a request may take in all before it ends with an error 408; 0 for no limit",
        group="scheduler",
    )
    default_max_tokens: int = option(
        16_384, "max_tokens of requests that bring none; 0: up to the end of the context", group="scheduler"
    )
    on_runaway: str = option(
        "warn",
        "what becomes of an answer that repeats itself: a warning, an end with finish_reason repetition, or nothing",
        group="scheduler",
        choices=("warn", "stop", "off"),
    )
    hang_timeout: float = option(
        60.0,
        "seconds that a step may take, or the engine may give no sign of life, before it is replaced",
        group="scheduler",
    )
    kv_cache_memory: str | None = option(
        None,
        'memory of the KV cache, such as "2GiB" or "4000tokens" (default: from free memory; on a CPU at most 4 GiB)',
        group="scheduler",
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of the GPU's memory that may be in use, whoever uses it; the KV cache gets what is left",
        group="scheduler",
    )
    block_size: int = option(
        16, "tokens in one block of the KV cache (a power of two, 1 to 256)", group="scheduler"
    )
    trace: str | None = option(
        None,
        "file to write every plan of the scheduler to, for replay; it holds token ids; FILE.drafts gets the decisions on drafts",
        group="scheduler",
    )
    prefix_caching: bool = option(True, "reuse the KV of equal prompt beginnings", group="scheduler")

    max_images: int = option(16, "pictures that one request may hold", group="pictures")
    max_image_mb: int = option(20, "largest picture file in MB, before it is decoded", group="pictures")
    max_image_pixels: int = option(
        50_000_000, "largest picture in pixels, as its file says before it is decoded", group="pictures"
    )
    image_memory: str = option(
        "1GiB",
        "memory for the pixels of open requests, running or waiting, in each of two processes; more are answered 429",
        group="pictures",
    )
    image_cache_memory: str = option(
        "256MiB",
        "memory for what the model has made of pictures, so that one that comes again is not encoded again",
        group="pictures",
    )
    allowed_media_domains: str = option(
        "",
        "hosts that pictures may be fetched from by http(s), joined by commas (default: none, only data: URLs)",
        group="pictures",
    )
    allowed_local_media_path: str | None = option(
        None, "directory below which file:// pictures may be read (default: none)", group="pictures"
    )
    media_timeout: float = option(5.0, "seconds in which a picture must be fetched", group="pictures")

    speculate: str = option(
        "auto",
        "auto, off, or drafters joined by commas: grammar, prediction, suffix, ngram, draft, replay",
        group="speculation",
    )
    draft_model: str | None = option(
        None, "a smaller checkpoint with the same tokenizer", group="speculation"
    )
    num_speculative_tokens: int | None = option(
        None,
        "upper bound of drafted tokens a request and step (default 32, where fixed 4)",
        group="speculation",
    )
    draft_length: str = option(
        "adaptive",
        "adaptive drafts as much as pays, measured; fixed drafts up to the bound whenever there is a guess",
        group="speculation",
        choices=("adaptive", "fixed"),
    )
    suffix_corpus_memory: str = option(
        "64MiB",
        "memory for finished outputs that suffix guesses from, each key's for itself; 0 for none",
        group="speculation",
    )
    prompt_lookup_min: int = option(2, "shortest n-gram that ngram looks up", group="speculation")
    prompt_lookup_max: int = option(4, "longest n-gram that ngram looks up", group="speculation")
    replay_file: str | None = option(
        None, "JSON lines of recorded outputs for the replay drafter", group="speculation"
    )
    replay_error_rate: float = option(
        0.0, "share of replayed tokens made wrong on purpose", group="speculation"
    )
    replay_cost: bool = option(
        False, "run the draft model for every replayed token, so that its cost is paid", group="speculation"
    )
    speculative_config: str | None = option(None, "the above as JSON, as in vLLM", group="speculation")

    host: str = option("127.0.0.1", "address to listen on", group="server")
    port: int = option(8000, "port to listen on; 0 takes a free one", group="server")
    api_key: str | None = option(
        None, "key that clients must send; several joined by commas", group="server", secret=True
    )
    api_key_file: str | None = option(
        None,
        "YAML file of hashed API keys and their limits, as `foreword keys` writes it; read again when it changes",
        group="server",
    )
    cors_origins: str = option(
        "", "origins that browsers may call from, joined by commas; * for all", group="server"
    )
    max_body_mb: int = option(32, "largest request body in MB", group="server")
    max_connections: int = option(
        4096, "connections that may be open; more are closed at once", group="server"
    )
    client_timeout: float = option(
        30.0,
        "seconds that a client may take to send its request, or to take the next part of its answer",
        group="server",
    )
    drain_timeout: float = option(
        8.0,
        "seconds after SIGTERM in which open answers may finish; a second SIGTERM ends them at once",
        group="server",
    )
    health_probe: float = option(
        0.0,
        "seconds of idleness after which /health asks the engine for a real token; 0 for never",
        group="server",
    )
    share_prefix_cache: bool = option(
        False,
        "let different API keys share cached prefixes, and the finished outputs that suffix guesses from",
        group="server",
    )
    trust_remote_code: bool = option(
        False,
        "refused: no code out of a checkpoint is ever run (the flag exists for those who look for it)",
        group="server",
    )
    log_level: str = option(
        "info", "how much to log", group="server", choices=("debug", "info", "warning", "error")
    )
    log_interval: float = option(10.0, "seconds between throughput lines; 0 for none", group="server")
    test_mode: bool = option(
        False, "attach a hash of the raw logits to every token (slow; for exactness tests)", group="server"
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            _check_type(item.name, getattr(self, item.name), str(item.type))
            choices = item.metadata["choices"]
            if choices and getattr(self, item.name) not in (*choices, item.default):
                raise ConfigError(
                    f"{item.name} must be one of {', '.join(choices)}, got {getattr(self, item.name)!r}",
                    item.name,
                )
        _check_range("block_size", self.block_size, 1, 256)
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}", "block_size")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "threads"):
            if getattr(self, name) is not None:
                _check_range(name, getattr(self, name), 1, 1 << 24)
        _check_range("num_speculative_tokens", self.num_speculative_tokens or 0, 0, 64)
        _check_range("prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max)
        _check_range("prompt_lookup_max", self.prompt_lookup_max, 1, 32)
        _check_range("replay_error_rate", self.replay_error_rate, 0.0, 1.0)
        for name in ("suffix_corpus_memory", "image_memory", "image_cache_memory"):
            parse_bytes(name, getattr(self, name))
        _check_range("max_images", self.max_images, 1, 1024)
        _check_range("max_image_mb", self.max_image_mb, 1, 1024)
        _check_range("max_image_pixels", self.max_image_pixels, 1, 1 << 30)
        _check_range("media_timeout", self.media_timeout, 0.1, 3600)
        _check_range("gpu_memory_utilization", self.gpu_memory_utilization, 0.05, 1.0)
        _check_range("port", self.port, 0, 65535)
        _check_range("max_waiting", self.max_waiting, 1, 1 << 24)
        _check_range("max_waiting_tokens", self.max_waiting_tokens, 1, 1 << 40)
        _check_range("default_max_tokens", self.default_max_tokens, 0, 1 << 24)
        for name in ("queue_timeout", "request_timeout", "drain_timeout", "health_probe", "log_interval"):
            _check_range(name, getattr(self, name), 0, 86_400)
        _check_range("hang_timeout", self.hang_timeout, 1, 86_400)
        _check_range("client_timeout", self.client_timeout, 1, 86_400)
        _check_range("max_connections", self.max_connections, 1, 1 << 20)
        if self.trust_remote_code:
            raise ConfigError(
                "trust_remote_code: no code out of a checkpoint is ever run; leave it out",
                "trust_remote_code",
            )
        _check_range("seed", self.seed or 0, -(2**63), 2**64 - 1)
        if (
            self.max_num_seqs
            and self.max_num_batched_tokens
            and self.max_num_seqs > self.max_num_batched_tokens
        ):
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}: "
                "every running request needs a row a step",
                "max_num_batched_tokens",
            )
        _check_range("max_body_mb", self.max_body_mb, 1, 1024)
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
                raise ConfigError(
                    f"speculate: unknown drafter {name!r}; known: auto, off, {', '.join(DRAFTERS)}",
                    "speculate",
                )
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
    def draft_trace_path(self) -> Path:
        """Beside `trace`."""
        return Path(f"{self.trace}.drafts")

    def with_speculative_config(self) -> Config:
        """`speculative_config` (vLLM's JSON) spread over the fields it stands for."""
        if self.speculative_config is None:
            return self
        if self.speculate != "auto":
            raise ConfigError("give speculate or speculative_config, not both", "speculative_config")
        return replace(
            self, speculative_config=None, **_parse_vllm_speculative_config(self.speculative_config)
        )


def option_fields() -> tuple[Any, ...]:
    """The dataclass fields of Config, in order, for whoever derives flags or docs from them."""
    return fields(Config)


def parse_bytes(name: str, text: str) -> int:
    """ "2GiB", "512MiB", "1.5GB" or a plain number of bytes."""
    units = {"kib": 1 << 10, "mib": 1 << 20, "gib": GIB, "kb": 10**3, "mb": 10**6, "gb": 10**9, "b": 1, "": 1}
    match = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", text.strip().lower())
    tokens = ' or "4000tokens"' if name == "kv_cache_memory" else ""
    try:
        return int(float(match[1]) * units[match[2]])  # type: ignore[index]
    except (TypeError, ValueError, KeyError, OverflowError):
        raise ConfigError(f'{name} must be like "2GiB" or "512MiB"{tokens}, got {text!r}', name) from None


def _parse_vllm_speculative_config(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"speculative_config is not JSON: {error}", "speculative_config") from None
    if not isinstance(given, Mapping):
        raise ConfigError("speculative_config must be a JSON object", "speculative_config")
    given = dict(given)
    changes = {
        name: given.pop(name)
        for name in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
        if name in given
    }
    model = given.pop("model", None)
    method = given.pop("method", None) or ("ngram" if model in (None, "ngram", "[ngram]") else "draft_model")
    if given:
        raise ConfigError(f"speculative_config: unknown field {sorted(given)[0]!r}", "speculative_config")
    if method in ("ngram", "suffix") and model in (None, "ngram", "[ngram]"):
        return {**changes, "speculate": method}
    if method in ("draft", "draft_model") and isinstance(model, str):
        return {**changes, "speculate": "draft", "draft_model": model}
    raise ConfigError(
        f"speculative_config: method must be ngram, suffix or draft_model, got {method!r}",
        "speculative_config",
    )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{name} must be between {low:g} and {high:g}, got {_format_number(value)}", name)


def _format_number(value: float) -> str:
    """A number as it was given; a whole one may be too long for a float."""
    return (
        f"{value:g}"
        if abs(value) < MAX_FLOAT_DISPLAY
        else f"a number of {value.bit_length()} bits"
        if isinstance(value, int)
        else "inf"
    )


def _check_type(name: str, value: object, annotation: str) -> None:
    allowed = {"str": str, "int": int, "float": (int, float), "bool": bool, "None": type(None)}
    kinds = tuple(part.strip() for part in annotation.split("|"))
    if isinstance(value, bool) and "bool" not in kinds:
        raise ConfigError(f"{name} must be {annotation}, got {value!r}", name)
    if not any(isinstance(value, allowed[kind]) for kind in kinds):  # type: ignore[arg-type]
        raise ConfigError(f"{name} must be {annotation}, got {value!r}", name)
