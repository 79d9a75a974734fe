"""All options: flags, environment variables, config file and docs derive from these fields.

`resolve()` (resolve.py) turns `Config` into what runs. Imports no torch, because the API process uses it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from foreword.config.drafters import DRAFTERS, DrafterPlugin, find_plugin
from foreword.config.lora import LoraModule, parse_lora_modules
from foreword.errors import ConfigError, did_you_mean

MAX_FLOAT_DISPLAY = 1e300
GPUS_PATTERN = re.compile(r"(\d+|(GPU|MIG)-[\w/-]+)(,(\d+|(GPU|MIG)-[\w/-]+))*", re.ASCII)
MAX_CPUS = 1 << 16
MIN_ENGINE_KEY_CHARS = 16
URL_PATTERN = re.compile(r"https?://(\[[0-9a-fA-F:.%]+\]|[\w.-]+)(:\d{1,5})?(/[\w./~-]*)?", re.ASCII)
ROOT_PATH_PATTERN = re.compile(r"(?:/[\w.~-]+)+", re.ASCII)
# Units of parse_bytes().
UNIT_BYTES = {
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "b": 1,
    "": 1,
}
UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}  # of parse_duration()
# Fields of vLLM's speculative_config without effect: the only values taken (none: all), and why.
CONTROLLER_DECIDES = "the controller decides in each step whether drafts pay"
SUFFIX_SIZES = "--suffix-corpus-memory limits what suffix remembers; the controller chooses the length"
IGNORED_SPECULATIVE_FIELDS: dict[str, tuple[tuple[object, ...], str]] = {
    "draft_tensor_parallel_size": ((1,), "the draft model runs where the model runs"),
    "disable_by_batch_size": ((), CONTROLLER_DECIDES),
    "disable_logprobs": ((), "logprobs are the same with speculation"),
    "disable_padded_drafter_batch": ((), "drafts are not padded"),
    "draft_sample_method": ((), "a draft never changes the answer's distribution"),
    "rejection_sample_method": (("strict", "standard", "block"), "acceptance is always exact"),
    "enforce_eager": ((), "--enforce-eager applies to both models"),
    "max_model_len": ((), "the draft model's own context applies"),
    "parallel_drafting": ((False,), "tokens are drafted one after the other"),
    "suffix_decoding_max_tree_depth": ((), SUFFIX_SIZES),
    "suffix_decoding_max_cached_requests": ((), SUFFIX_SIZES),
    "suffix_decoding_max_spec_factor": ((), SUFFIX_SIZES),
    "suffix_decoding_min_token_prob": ((), CONTROLLER_DECIDES),
}
SPECULATIVE_NUMBERS = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
TRAINED_HEADS = re.compile("eagle|medusa|mtp|mlp_speculator")
# Inclusive limits of number fields.
RANGES: dict[str, tuple[float, float]] = {
    "block_size": (1, 256),
    **dict.fromkeys(("max_model_len", "max_num_seqs", "max_num_batched_tokens", "threads"), (1, 1 << 24)),
    "num_speculative_tokens": (0, 64),
    "prompt_lookup_max": (1, 32),
    "replay_error_rate": (0.0, 1.0),
    "max_request_slowdown": (0.0, 1.0),
    "max_images": (1, 1024),
    "max_image_mb": (1, 1024),
    "max_image_pixels": (1, 1 << 30),
    "media_timeout": (0.1, 3600),
    "gpu_memory_utilization": (0.05, 1.0),
    "port": (0, 65535),
    "max_waiting": (1, 1 << 24),
    "max_waiting_tokens": (1, 1 << 40),
    "default_max_tokens": (0, 1 << 24),
    **dict.fromkeys(("queue_timeout", "request_timeout", "drain_timeout", "drain_delay"), (0, 86_400)),
    **dict.fromkeys(("health_probe", "log_interval"), (0, 86_400)),
    "replicas": (0, 64),
    "max_replicas": (1, 1024),
    "router_timeout": (0, 86_400),
    "replica_timeout": (0, 86_400),
    "hang_timeout": (1, 86_400),
    "client_timeout": (1, 86_400),
    "max_connections": (1, 1 << 20),
    "seed": (-(2**63), 2**64 - 1),
    "max_body_mb": (1, 1024),
    "response_store_mb": (0, 1 << 20),
    "response_store_ttl": (1, 30 * 86_400),
    "max_loras": (1, 1024),
    "max_lora_rank": (1, 512),
    "max_loaded_models": (1, 1024),
    "max_swap_wait": (0, 86_400),
}


def option(
    default: Any,
    help_: str,
    *,
    group: str,
    choices: tuple[str, ...] = (),
    guards_access: bool = False,  # an empty value is an error, and never means the default
    many: bool = False,  # the flag takes several words, which are joined by commas
    variable: str = "",  # another environment variable that is read, after our own
    common: bool = False,  # shown by --help; the others by --help-all
) -> Any:
    """A field of Config that is also a flag; `help_` is its documentation."""
    metadata = {
        "help": help_,
        "group": group,
        "choices": choices,
        "guards_access": guards_access,
        "many": many,
        "variable": variable,
        "common": common,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True)
class Config:
    """The user's options; None and "auto" leave the choice to `resolve()`."""

    model: str | None = option(
        None,
        "checkpoint directory, GGUF file or hub id (default: the bundled demo)",
        group="model",
        common=True,
    )
    served_model_name: str | None = option(
        None,
        "name in the API (default: the model's last part); several by commas or spaces, the first in answers",
        group="model",
        many=True,
        common=True,
    )
    any_model_name: bool = option(
        False,
        "take any other name in the API as the served model's: agents ask for models of their own provider",
        group="model",
    )
    lora_modules: str | None = option(
        None,
        'LoRA adapters, name=path or {"name": ..., "path": ...}; each is a model of its name in the API',
        group="model",
        many=True,
    )
    enable_lora: bool = option(
        False, "keep room for LoRA adapters also without --lora-modules", group="model"
    )
    max_loras: int | None = option(
        None,
        "LoRA adapters in memory at a time (default: those of --lora-modules, at least 1)",
        group="model",
    )
    max_lora_rank: int = option(16, "largest rank of a LoRA adapter; memory is kept for it", group="model")
    allow_runtime_lora_updating: bool = option(
        False, "clients may load and unload LoRA adapters of --lora-dir, keys permitting", group="model"
    )
    lora_dir: str | None = option(
        None, "directory whose LoRA adapters clients may load; others are refused", group="model"
    )
    embedding_model: str | None = option(
        None,
        "checkpoint of the BERT family for embeddings or reranking, in its own process",
        group="model",
    )
    generation_config: str = option(
        "auto",
        "sampling defaults: those of generation_config.json, or none (as vllm): temperature 1 and no filters",
        group="model",
        choices=("auto", "none", "vllm"),
    )
    chat_template: str | None = option(
        None, "Jinja file, or its text, used in place of the checkpoint's chat template", group="model"
    )
    tool_format: str = option(
        "auto",
        "how the model writes tool calls: found and proven by its chat template, none, or a family's name, "
        "which is taken without proof (docs/tools.md has them)",
        group="model",
    )
    device: str = option(
        "auto", "compute device", group="model", choices=("auto", "cpu", "cuda"), common=True
    )
    dtype: str = option(
        "auto",
        "data type of weights, activations and KV cache; half is float16, float is float32",
        group="model",
        choices=("auto", "float32", "bfloat16", "float16", "half", "float"),
        common=True,
    )
    quantization: str | None = option(
        None,
        "quantize weights while loading: int8, int4 (embedding and head stay in 8 bits), or fp8 on GPUs",
        group="model",
        choices=("int8", "int4", "fp8"),
        common=True,
    )
    kv_cache_dtype: str = option(
        "auto",
        "data type of the KV cache (default: that of the activations); fp8 on GPUs",
        group="model",
        choices=("auto", "int8", "fp8"),
    )
    cpu_isa: str = option(
        "auto",
        "instruction set of the CPU kernels (default: the best available); reference computes in torch",
        group="model",
        choices=("auto", "amx", "avx512", "avx2-vnni", "avx2", "neon", "portable", "reference"),
    )
    gguf_dequantize: bool = option(
        False,
        "convert GGUF types without kernels (IQ2_XS, IQ3_XXS, TQ2_0, ...) to floats of `dtype`",
        group="model",
    )
    max_model_len: int | None = option(
        None,
        "context limit in tokens (default: the checkpoint's, as the cache allows)",
        group="model",
        common=True,
    )
    seed: int | None = option(
        None, "seed of requests without one (default and -1: a random one for each)", group="model"
    )
    threads: int | None = option(
        None,
        "CPU threads of the engine (default: all cores; one for models below 32 MiB, and on GPUs)",
        group="model",
    )
    cpus: str | None = option(
        None,
        'CPU cores that the engine may run on, as taskset lists them: "0-7,16-23" (default: all)',
        group="model",
    )
    gpus: str | None = option(
        None,
        "GPUs that the engine may use, as in CUDA_VISIBLE_DEVICES; it computes on the first (default: all)",
        group="model",
    )
    load_format: str = option(
        "auto",
        "auto loads the weights; dummy makes random ones of config.json's shapes, to measure speed",
        group="model",
        choices=("auto", "dummy"),
    )
    enforce_eager: bool = option(
        False, "launch kernels one by one instead of CUDA graphs; no effect on CPUs", group="model"
    )
    overlap: bool = option(
        True,
        "on GPUs, schedule and update one step while the device computes the next; tokens are the same",
        group="model",
    )
    allow_torch_on_gpu: bool = option(
        False,
        "compute in torch, many times slower, on a GPU where Triton's kernels cannot be used",
        group="model",
    )
    fast_math: bool = option(
        False, "faster matrix products whose bits depend on the batch: gives up exactness", group="model"
    )

    max_num_seqs: int | None = option(
        None, "maximum of running requests (default: 64 on CPU, 256 on GPU)", group="scheduler", common=True
    )
    max_num_batched_tokens: int | None = option(
        None,
        "rows of one step (default: 512 on a CPU, 8192 on a GPU of 64 GiB or more, 2048 on others)",
        group="scheduler",
    )
    max_waiting: int = option(
        4096, "maximum of open requests, running or waiting; more are rejected with 429", group="scheduler"
    )
    max_waiting_tokens: int = option(
        4_000_000,
        "maximum of prompt tokens of open requests; more are rejected with 429",
        group="scheduler",
    )
    queue_timeout: float = option(
        300.0,
        "seconds that a request may wait for its first step before it is rejected with 429; 0 for no limit",
        group="scheduler",
    )
    request_timeout: float = option(
        0.0,
        "seconds that a request may take in total before it fails with 408; 0 for no limit",
        group="scheduler",
    )
    default_max_tokens: int = option(
        16_384, "max_tokens of requests without it; 0: up to the end of the context", group="scheduler"
    )
    on_runaway: str = option(
        "warn",
        "on repetitive output: log a warning, stop with finish_reason repetition, or do nothing",
        group="scheduler",
        choices=("warn", "stop", "off"),
    )
    replicas: int = option(
        1,
        "engines of the model on this machine; the answers of one that dies go on in another; 0 only with "
        "--replica-urls",
        group="scheduler",
    )
    replica_urls: str | None = option(
        None,
        "servers whose engines are replicas too, comma-separated; --engine-key is that of these servers",
        group="scheduler",
        many=True,
    )
    max_replicas: int | None = option(
        None,
        "with --ray, most servers of the model, while requests wait (default: --replicas)",
        group="scheduler",
    )
    replica_timeout: float = option(
        60.0,
        "seconds that a request waits for a replica to be ready when none is",
        group="scheduler",
    )
    hang_timeout: float = option(
        60.0,
        "seconds that a step may take, or the heartbeat may be missing, before the engine is restarted",
        group="scheduler",
    )
    kv_cache_memory: str | None = option(
        None,
        'size of the KV cache: "2GiB", "4000tokens" (default: by free memory, at most 4 GiB on a CPU)',
        group="scheduler",
        common=True,
    )
    gpu_memory_utilization: float = option(
        0.9,
        "share of the GPU's memory that may be in use by all processes; the KV cache gets the rest of it",
        group="scheduler",
    )
    block_size: int = option(
        16, "tokens in one block of the KV cache (a power of two, 1 to 256)", group="scheduler"
    )
    trace: str | None = option(
        None,
        "file for the scheduler's decisions, for replay; has token ids; FILE.drafts: decisions on drafts",
        group="scheduler",
    )
    prefix_caching: bool = option(True, "reuse KV blocks of equal prompt prefixes", group="scheduler")

    max_images: int = option(16, "maximum of images in one request", group="images")
    max_image_mb: int = option(20, "maximum size of an image file in MB, before decoding", group="images")
    max_image_pixels: int = option(
        50_000_000, "maximum of pixels of an image, by its header, before decoding", group="images"
    )
    image_memory: str = option(
        "1GiB",
        "memory for the pixels of open requests, in each of two processes; more are rejected with 429",
        group="images",
    )
    image_cache_memory: str = option(
        "256MiB", "memory of the cache of encoded images, reused when an image comes again", group="images"
    )
    allowed_media_domains: str = option(
        "",
        "hosts that images may be fetched from by http(s), comma-separated (default: none, only data: URLs)",
        group="images",
    )
    allowed_local_media_path: str | None = option(
        None, "directory below which file:// images may be read (default: none)", group="images"
    )
    media_timeout: float = option(5.0, "timeout for fetching an image, in seconds", group="images")

    speculate: str = option(
        "auto",
        "auto, off, or comma-separated drafters: auto, grammar, prediction, suffix, ngram, draft, replay, "
        "module:Class for your own, or the name of an installed one",
        group="speculation",
        common=True,
    )
    draft_model: str | None = option(
        None, "a smaller checkpoint with the same tokenizer", group="speculation", common=True
    )
    num_speculative_tokens: int | None = option(
        None,
        "maximum of drafted tokens per request and step; 0: none (default: 32, or 4 with draft_length fixed)",
        group="speculation",
        common=True,
    )
    draft_length: str = option(
        "adaptive",
        "adaptive: the length with the highest measured gain; fixed: up to num_speculative_tokens",
        group="speculation",
        choices=("adaptive", "fixed"),
    )
    max_request_slowdown: float = option(
        0.02,
        "share of its time that a request may lose to drafts of others; more allows more tokens in all",
        group="speculation",
    )
    suffix_corpus_memory: str = option(
        "64MiB",
        "memory for finished outputs that suffix drafts from, separate for each API key; 0 for none",
        group="speculation",
    )
    prompt_lookup_min: int = option(2, "minimum length of the n-grams of ngram", group="speculation")
    prompt_lookup_max: int = option(4, "maximum length of the n-grams of ngram", group="speculation")
    replay_file: str | None = option(
        None, "JSON lines of recorded outputs for the replay drafter", group="speculation"
    )
    replay_error_rate: float = option(
        0.0, "share of replayed tokens that are replaced by wrong ones", group="speculation"
    )
    replay_cost: bool = option(
        False, "run the draft model for every replayed token, to include its cost", group="speculation"
    )
    speculative_config: str | None = option(None, "the above as JSON, as in vLLM", group="speculation")

    models: str | None = option(
        None,
        "several models, loaded on demand: a YAML file (docs/fleet.md), a directory of models, or names",
        group="fleet",
        many=True,
        common=True,
    )
    memory_limit: str | None = option(
        None,
        'memory of all loaded models: "48GiB" (default: the machine\'s, less a reserve)',
        group="fleet",
    )
    ray: str | None = option(
        None,
        "address of a Ray cluster whose machines run the engines, HOST:PORT or auto; local: this machine",
        group="fleet",
    )
    keep_alive: str | None = option(
        None,
        'with several models, time without an answer until one is unloaded: "5m", "90s", 0 for at once, '
        "-1 for never (default: 5m)",
        group="fleet",
    )
    max_loaded_models: int | None = option(
        None, "maximum of models in memory at a time (default: as many as fit)", group="fleet"
    )
    max_swap_wait: float | None = option(
        None,
        "seconds that requests of loaded models may pass one whose model waits for memory (default: 10)",
        group="fleet",
    )

    host: str = option("127.0.0.1", "address to listen on", group="server", common=True)
    port: int = option(8000, "port to listen on; 0 takes a free one", group="server", common=True)
    uds: str | None = option(
        None,
        "path of a Unix socket to listen on, instead of host and port; mode 660",
        group="server",
    )
    root_path: str = option(
        "", "path prefix that a proxy puts before all routes, such as /llm", group="server"
    )
    ui: bool = option(True, "serve the page at / and the API's fields at /docs", group="server")
    api_key: str | None = option(
        None,
        "API key that clients must send; comma-separated if several",
        group="server",
        guards_access=True,
        common=True,
    )
    api_key_file: str | None = option(
        None,
        "YAML file of hashed API keys and their limits, written by `foreword keys`; reloaded when it changes",
        group="server",
        guards_access=True,
    )
    usage_db: str | None = option(
        None,
        "SQLite file of usage by day, key and model, read by `foreword keys usage`; servers may share it",
        group="server",
    )
    engine_key: str | None = option(
        None,
        "key with which other servers (their --replica-urls) use this one's engine",
        group="server",
        guards_access=True,
    )
    router_timeout: float = option(
        0.0,
        "seconds without a server that uses the engine by --engine-key until this one ends; 0 for never",
        group="server",
    )
    cors_origins: str = option("", "allowed browser origins, comma-separated; * for all", group="server")
    max_body_mb: int = option(32, "maximum size of a request body in MB", group="server")
    response_store_mb: int = option(
        64,
        "MB of memory for responses that later ones continue by previous_response_id; 0 stores none",
        group="server",
    )
    response_store_ttl: float = option(
        3600.0, "seconds that a stored response is kept after its last use", group="server"
    )
    unknown_fields: str = option(
        "refuse",
        "unknown fields of requests: refuse with 400, or ignore and name in X-Foreword-Ignored-Fields",
        group="server",
        choices=("refuse", "warn"),
    )
    max_connections: int = option(
        4096, "maximum of open connections; more are closed at once", group="server"
    )
    client_timeout: float = option(
        30.0,
        "seconds that a client may take to send its request, or to receive the next part of its response",
        group="server",
    )
    drain_timeout: float = option(
        8.0,
        "seconds after SIGTERM in which open requests may finish; a second SIGTERM ends them at once",
        group="server",
    )
    drain_delay: float = option(
        0.0,
        "seconds after SIGTERM in which /ready is 503 and requests are still taken, so that proxies notice",
        group="server",
    )
    health_probe: float = option(
        0.0,
        "seconds without traffic after which /health generates a token to test the engine; 0 for never",
        group="server",
    )
    share_prefix_cache: bool = option(
        False,
        "share cached prefixes, and finished outputs for suffix, between API keys",
        group="server",
    )
    log_level: str = option(
        "info", "minimum level of log lines", group="server", choices=("debug", "info", "warning", "error")
    )
    log_format: str = option(
        "text", "format of log lines; json: one object a line", group="server", choices=("text", "json")
    )
    access_log: bool = option(
        False, "log a line for every request: method, route, status, time, key's name, bytes", group="server"
    )
    log_interval: float = option(10.0, "seconds between throughput lines; 0 for none", group="server")
    vllm_metrics: bool = option(
        False, "export metrics under vLLM's names too, for its dashboards and benchmarks", group="server"
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "URL that OpenTelemetry traces are sent to by OTLP/HTTP; needs the extra otel (docs/deploying.md)",
        group="server",
        variable="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    )
    test_mode: bool = option(
        False, "attach a hash of the raw logits to every token (slow; for exactness tests)", group="server"
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            name, value = item.name, getattr(self, item.name)
            _check_type(name, value, str(item.type))
            choices = item.metadata["choices"]
            if choices and value not in (*choices, item.default):
                hint = did_you_mean(str(value), choices)
                raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}{hint}", name)
            if name in RANGES and value is not None:
                _check_range(name, value, *RANGES[name])
        _check_range("prompt_lookup_min", self.prompt_lookup_min, 1, self.prompt_lookup_max)
        if self.block_size & (self.block_size - 1):
            raise ConfigError(f"block_size must be a power of two, got {self.block_size}", "block_size")
        for name in ("suffix_corpus_memory", "image_memory", "image_cache_memory"):
            parse_bytes(name, getattr(self, name))
        if self.kv_cache_memory is not None and parse_tokens("kv_cache_memory", self.kv_cache_memory) is None:
            parse_bytes("kv_cache_memory", self.kv_cache_memory)
        if self.cpus is not None:
            parse_cpus(self.cpus)
        if self.gpus is not None and not GPUS_PATTERN.fullmatch(self.gpus):
            raise ConfigError(f'gpus must be like "0" or "0,1", got {self.gpus!r:.80}', "gpus")
        if self.memory_limit is not None:
            parse_bytes("memory_limit", self.memory_limit)
        if self.keep_alive is not None:
            parse_duration("keep_alive", self.keep_alive)
        if self.models is not None and self.model is not None:
            raise ConfigError(
                "give --model or --models, not both: --models names the default first", "models"
            )
        self._check_keys()
        if self.root_path and not ROOT_PATH_PATTERN.fullmatch(self.root_path):
            raise ConfigError(
                f"root_path must be like /llm, without a / at its end, got {self.root_path!r:.200}",
                "root_path",
            )
        self.served_names()
        self._check_replicas()
        self._check_lora()
        rows = self.max_num_batched_tokens
        if self.max_num_seqs and rows and self.max_num_seqs > rows:
            raise ConfigError(
                f"max_num_batched_tokens {rows} is below max_num_seqs {self.max_num_seqs}: "
                "every running request needs one row per step",
                "max_num_batched_tokens",
            )
        if self.replay_cost and not (self.draft_model and "replay" in self.drafter_names()):
            raise ConfigError("replay_cost needs --draft-model and the drafter replay", "replay_cost")
        self.drafter_names()

    def _check_replicas(self) -> None:
        if not self.replicas and not self.remote_urls:
            raise ConfigError("replicas must be at least 1 without --replica-urls, got 0", "replicas")
        for url in self.remote_urls:
            if not URL_PATTERN.fullmatch(url) or self.remote_urls.count(url) > 1:
                raise ConfigError(
                    f"replica_urls must be different URLs such as http://10.0.0.7:8000, got {url!r:.200}",
                    "replica_urls",
                )
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(
                f"max_replicas {self.max_replicas} is below replicas {self.replicas}", "max_replicas"
            )
        if self.router_timeout and self.engine_key is None:
            raise ConfigError("router_timeout needs --engine-key", "router_timeout")
        if self.remote_urls and self.engine_key is None:
            raise ConfigError("replica_urls needs --engine-key: that of these servers", "engine_key")

    def _check_lora(self) -> None:
        modules = parse_lora_modules(self.lora_modules)
        if self.max_loras is not None and self.max_loras < len(modules):
            raise ConfigError(
                f"max_loras {self.max_loras} is below the {len(modules)} adapters of lora_modules",
                "max_loras",
            )
        if self.allow_runtime_lora_updating and not self.lora_dir:
            raise ConfigError(
                "allow_runtime_lora_updating needs --lora-dir: the directory whose adapters clients may load",
                "lora_dir",
            )

    @property
    def adapters(self) -> tuple[LoraModule, ...]:
        """The adapters of `lora_modules`."""
        return parse_lora_modules(self.lora_modules)

    @property
    def num_lora_slots(self) -> int:
        """Adapters in memory at a time; 0: LoRA is off."""
        modules = self.adapters
        if not (modules or self.enable_lora or self.max_loras or self.allow_runtime_lora_updating):
            return 0
        return self.max_loras or max(len(modules), 1)

    def _check_keys(self) -> None:
        """Raises ConfigError for an empty key: a server that was meant to have keys must not start open."""
        if self.api_key is not None and not all(key.strip() for key in self.api_key.split(",")):
            name, problem = "api_key", "is empty" if not self.api_key.strip() else "has an empty key"
        elif self.api_key_file is not None and not self.api_key_file.strip():
            name, problem = "api_key_file", "is empty"
        elif self.engine_key is not None and len(self.engine_key.strip()) < MIN_ENGINE_KEY_CHARS:
            problem = f"must have at least {MIN_ENGINE_KEY_CHARS} characters"
            raise ConfigError(f"engine_key {problem}: it gives all that the engine can do", "engine_key")
        else:
            return
        hint = f"leave out --{name.replace('_', '-')} and unset FOREWORD_{name.upper()}"
        raise ConfigError(f"{name} {problem}; to serve without keys, {hint}", name)

    def drafter_names(self) -> tuple[str, ...]:
        """Drafters of `speculate`, by priority; empty if it is off. Raises ConfigError."""
        return tuple(each.name if isinstance(each, DrafterPlugin) else each for each in self._drafters())

    def drafter_plugins(self) -> tuple[DrafterPlugin, ...]:
        """The drafters of `speculate` that are not built in."""
        return tuple(each for each in self._drafters() if isinstance(each, DrafterPlugin))

    def speculate_text(self) -> str:
        """`speculate` with the names of plug-ins: "auto, trigram"."""
        names = {plugin.item: plugin.name for plugin in self.drafter_plugins()}
        return ", ".join(names.get(item, item) for item in map(str.strip, self.speculate.split(",")))

    def without_plugin(self, plugin: DrafterPlugin) -> Config:
        """With the other drafters of `speculate`."""
        items = [item for item in map(str.strip, self.speculate.split(",")) if item != plugin.item]
        return replace(self, speculate=",".join(items) or "off")

    def _drafters(self) -> list[str | DrafterPlugin]:
        """`auto` includes the draft model if there is one, but not `ngram`, because `suffix` covers it."""
        if self.speculate == "off":
            return []
        drafters: list[str | DrafterPlugin] = []
        for item in (item.strip() for item in self.speculate.split(",")):
            if item == "off":
                raise ConfigError("speculate: `off` cannot be combined with drafters", "speculate")
            if item.isdecimal():
                problem = f"names drafters; --num-speculative-tokens {item} limits their tokens"
                raise ConfigError(f"speculate {problem}", "speculate")
            if item == "auto":
                drafters += ("grammar", "prediction", "suffix", *(("draft",) if self.draft_model else ()))
            else:
                drafters.append(item if item in DRAFTERS else find_plugin(item))
        if "draft" in drafters and not self.draft_model:
            raise ConfigError("speculate: `draft` needs --draft-model", "draft_model")
        if "replay" in drafters and not self.replay_file:
            raise ConfigError("speculate: `replay` needs --replay-file", "replay_file")
        names = [each.name if isinstance(each, DrafterPlugin) else each for each in drafters]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"speculate: two drafters are named {name}: {self.speculate}", "speculate")
        return [] if self.num_speculative_tokens == 0 else drafters

    def served_names(self) -> tuple[str, ...]:
        """The names of `served_model_name`, the first of which answers have; empty if none is given."""
        if self.served_model_name is None:
            return ()
        names = tuple(name.strip() for name in self.served_model_name.split(","))
        if not all(names) or len(set(names)) < len(names):
            raise ConfigError(
                "served_model_name must be different names, joined by commas, "
                f"got {self.served_model_name!r:.200}",
                "served_model_name",
            )
        return names

    @property
    def runs_draft_model(self) -> bool:
        """Whether `draft_model` is loaded: to draft, or for its cost in a replay."""
        return self.draft_model is not None and ("draft" in self.drafter_names() or self.replay_cost)

    @property
    def remote_urls(self) -> tuple[str, ...]:
        """The servers of `replica_urls`."""
        return tuple(url.strip().rstrip("/") for url in (self.replica_urls or "").split(",") if url.strip())

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ip_address(self.host).is_loopback
        except ValueError:  # a name, perhaps of an address of the network
            return False

    @property
    def publish_blocks(self) -> bool:
        """Whether engines report changes of their prefix caches, for a router."""
        return self.replicas > 1 or self.engine_key is not None

    @property
    def draft_trace_path(self) -> Path:
        return Path(f"{self.trace}.drafts")

    def with_speculative_config(self) -> Config:
        """Apply vLLM's JSON to the corresponding fields; `speculative_config` keeps those without effect."""
        if self.speculative_config is None:
            return self
        given, ignored = _split_speculative_config(self.speculative_config)
        rest = json.dumps(ignored) if ignored else None
        if not given:
            return replace(self, speculative_config=rest)
        if self.speculate != "auto":
            raise ConfigError("give speculate or speculative_config, not both", "speculative_config")
        return replace(self, speculative_config=rest, **_parse_speculative_config(given))

    def ignored_speculative_fields(self) -> dict[str, str]:
        """Fields of `speculative_config` without effect, and why, once it is applied."""
        names = json.loads(self.speculative_config) if self.speculative_config else {}
        return {name: IGNORED_SPECULATIVE_FIELDS[name][1] for name in names}


def option_fields() -> tuple[Any, ...]:
    """Dataclass fields of Config, in order."""
    return fields(Config)


def parse_bytes(name: str, text: str) -> int:
    """Parse "2GiB", "512MiB", "1.5GB" or a number of bytes. Raises ConfigError."""
    match = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", text.strip().lower())
    tokens = ' or "4000tokens"' if name == "kv_cache_memory" else ""
    try:
        return int(float(match[1]) * UNIT_BYTES[match[2]])  # type: ignore[index]
    except (TypeError, ValueError, KeyError, OverflowError):
        raise ConfigError(f'{name} must be like "2GiB" or "512MiB"{tokens}, got {text!r}', name) from None


def parse_tokens(name: str, text: str) -> int | None:
    """The number of "4000tokens"; None for another unit. Raises ConfigError."""
    number, unit, rest = text.strip().partition("tokens")
    if not unit or rest:
        return None
    try:
        return int(number)
    except ValueError:
        raise ConfigError(f"{name} must begin with a whole number, got {text!r}", name) from None


def parse_cpus(text: str) -> tuple[int, ...]:
    """CPU numbers of "0-3,8,16-31:2", where :2 takes every second one. Raises ConfigError."""
    cpus: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+)(?::(\d+))?)?\s*", part)
        first, last, stride = (int(each or 0) for each in match.groups()) if match else (0, -1, 0)
        if match and match[2] is None:
            last = first
        stride = 1 if match and match[3] is None else stride
        if not first <= last < MAX_CPUS or stride < 1:
            raise ConfigError(f'cpus must be like "0-7,16-23", got {text!r:.80}', "cpus")
        cpus.update(range(first, last + 1, stride))
    return tuple(sorted(cpus))


def format_cpus(cpus: Iterable[int]) -> str:
    """ "0-3,8", the inverse of parse_cpus()."""
    numbers = sorted(cpus)
    starts = [cpu for cpu in numbers if cpu - 1 not in numbers]
    ends = [cpu for cpu in numbers if cpu + 1 not in numbers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def parse_duration(name: str, text: str) -> float | None:
    """Seconds of "5m", "90s", "1h30m" or a number; None for a negative one: never. Raises ConfigError."""
    given = text.strip().lower()
    if re.fullmatch(r"-[0-9.]+(ms|[smhd])?", given):
        return None
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", given):
        return float(given)
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(ms|[smhd])", given)
    if not parts or "".join(map("".join, parts)) != given:
        problem = f'must be like "5m", "90s" or "1h30m", 0 for at once, or -1 for never, got {text!r:.80}'
        raise ConfigError(f"{name} {problem}", name)
    return sum(float(number) * UNIT_SECONDS[unit] for number, unit in parts)


def _split_speculative_config(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The fields of vLLM's JSON that mean something here, and those without effect that deserve a note."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"speculative_config is not JSON: {error}", "speculative_config") from None
    if not isinstance(given, Mapping):
        raise ConfigError("speculative_config must be a JSON object", "speculative_config")
    given = {name: value for name, value in given.items() if value is not None}
    ignored = {name: given.pop(name) for name in IGNORED_SPECULATIVE_FIELDS if name in given}
    for name in list(ignored):
        accepted, reason = IGNORED_SPECULATIVE_FIELDS[name]
        if not accepted:
            continue
        if (value := ignored.pop(name)) not in accepted:
            limits = " or ".join(map(json.dumps, accepted))
            problem = f"{name} can only be {limits}, got {json.dumps(value)}: {reason}"
            raise ConfigError(f"speculative_config: {problem}", "speculative_config")
    return given, ignored


def _parse_speculative_config(given: dict[str, Any]) -> dict[str, Any]:
    changes = {name: given.pop(name) for name in SPECULATIVE_NUMBERS if name in given}
    model, method = given.pop("model", None), given.pop("method", None)
    has_no_model = model in (None, "ngram", "[ngram]")
    if given:
        name = sorted(map(str, given))[0]
        known = ("method", "model", *SPECULATIVE_NUMBERS)
        problem = f"unknown field {name!r}{did_you_mean(name, known)}; known: {', '.join(known)}"
        raise ConfigError(f"speculative_config: {problem}", "speculative_config")
    if method is None:
        if model is None and not changes.keys() & {"prompt_lookup_min", "prompt_lookup_max"}:
            return changes  # of the drafters that `speculate` names
        method = "ngram" if has_no_model else "draft_model"
    if method in ("ngram", "suffix") and has_no_model:
        return {**changes, "speculate": method}
    if method in ("draft", "draft_model") and isinstance(model, str):
        return {**changes, "speculate": "draft", "draft_model": model}
    problem = f"method must be ngram, suffix or draft_model (with a model), got {method!r}"
    if TRAINED_HEADS.search(str(method).lower()):
        problem += ": trained heads are not supported yet"
    raise ConfigError(f"speculative_config: {problem}", "speculative_config")


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        limits = f"between {low:.15g} and {high:.15g}"
        raise ConfigError(f"{name} must be {limits}, got {_format_number(value)}", name)


def _format_number(value: float) -> str:
    """The number as text; a large int would overflow a float."""
    if abs(value) < MAX_FLOAT_DISPLAY:
        return f"{value:g}"
    return f"a number of {value.bit_length()} bits" if isinstance(value, int) else "inf"


def _check_type(name: str, value: object, annotation: str) -> None:
    allowed = {"str": str, "int": int, "float": (int, float), "bool": bool, "None": type(None)}
    types = tuple(part.strip() for part in annotation.split("|"))
    is_allowed = any(isinstance(value, allowed[type_name]) for type_name in types)  # type: ignore[arg-type]
    if not is_allowed or (isinstance(value, bool) and "bool" not in types):
        raise ConfigError(f"{name} must be {annotation}, got {value!r}", name)
