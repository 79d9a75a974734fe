"""All options: flags, environment variables, config file and docs derive from these fields.

`resolve()` (planning/resolve.py) turns `Config` into what runs. Imports no torch: the API process uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from foreword.config.drafters import HEAD_DRAFTERS, DrafterPlugin, parse_drafters
from foreword.config.lora import LoraModule, parse_lora_modules
from foreword.config.option_checks import check_options
from foreword.errors import ConfigError


def option(
    default: Any,
    help_: str,
    *,
    group: str,
    choices: tuple[str, ...] = (),
    limits: tuple[float, float] | None = None,  # inclusive
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
        "limits": limits,
        "guards_access": guards_access,
        "many": many,
        "variable": variable,
        "common": common,
    }
    return field(default=default, metadata=metadata)


model_option = partial(option, group="model")
scheduler_option = partial(option, group="scheduler")
image_option = partial(option, group="images")
speculation_option = partial(option, group="speculation")
fleet_option = partial(option, group="fleet")
server_option = partial(option, group="server")


@dataclass(frozen=True, slots=True)
class Config:
    """The user's options; None and "auto" leave the choice to `resolve()`."""

    model: str | None = model_option(
        None, "checkpoint directory, GGUF file or hub id (default: the bundled demo)", common=True
    )
    served_model_name: str | None = model_option(
        None,
        "name in the API (default: the model's last part); several by commas or spaces, the first in answers",
        many=True,
        common=True,
    )
    any_model_name: bool = model_option(
        False,
        "take any other name in the API as the served model's: agents ask for models of their own provider",
    )
    lora_modules: str | None = model_option(
        None,
        'LoRA adapters, name=path or {"name": ..., "path": ...}; each is a model of its name in the API',
        many=True,
    )
    enable_lora: bool = model_option(False, "keep room for LoRA adapters also without --lora-modules")
    max_loras: int | None = model_option(
        None,
        "LoRA adapters in memory at a time (default: those of --lora-modules, at least 1)",
        limits=(1, 1024),
    )
    max_lora_rank: int = model_option(
        16, "largest rank of a LoRA adapter; memory is kept for it", limits=(1, 512)
    )
    allow_runtime_lora_updating: bool = model_option(
        False, "clients may load and unload LoRA adapters of --lora-dir, keys permitting"
    )
    lora_dir: str | None = model_option(
        None, "directory whose LoRA adapters clients may load; others are refused"
    )
    embedding_model: str | None = model_option(
        None, "checkpoint of the BERT family for embeddings or reranking, in its own process"
    )
    generation_config: str = model_option(
        "auto",
        "sampling defaults: those of generation_config.json, or none (as vllm): temperature 1 and no filters",
        choices=("auto", "none", "vllm"),
    )
    chat_template: str | None = model_option(
        None, "Jinja file, or its text, used in place of the checkpoint's chat template"
    )
    tool_format: str = model_option(
        "auto",
        "how the model writes tool calls: found and proven by its chat template, none, or a family's name, "
        "which is taken without proof (docs/tools.md has them)",
    )
    device: str = model_option("auto", "compute device", choices=("auto", "cpu", "cuda"), common=True)
    dtype: str = model_option(
        "auto",
        "data type of weights, activations and KV cache; half is float16, float is float32",
        choices=("auto", "float32", "bfloat16", "float16", "half", "float"),
        common=True,
    )
    quantization: str | None = model_option(
        None,
        "quantize weights while loading: int8, int4 (embedding and head stay in 8 bits), or fp8 on GPUs",
        choices=("int8", "int4", "fp8"),
        common=True,
    )
    kv_cache_dtype: str = model_option(
        "auto",
        "data type of the KV cache (default: that of the activations); fp8 on GPUs",
        choices=("auto", "int8", "fp8"),
    )
    cpu_isa: str = model_option(
        "auto",
        "instruction set of the CPU kernels (default: the best available); reference computes in torch",
        choices=("auto", "amx", "avx512", "avx2-vnni", "avx2", "neon", "portable", "reference"),
    )
    gguf_dequantize: bool = model_option(
        False, "convert GGUF types without kernels (IQ2_XS, IQ3_XXS, TQ2_0, ...) to floats of `dtype`"
    )
    max_model_len: int | None = model_option(
        None,
        "context limit in tokens (default: the checkpoint's, as the cache allows)",
        limits=(1, 1 << 24),
        common=True,
    )
    seed: int | None = model_option(
        None,
        "seed of requests without one (default and -1: a random one for each)",
        limits=(-(2**63), 2**64 - 1),
    )
    threads: int | None = model_option(
        None,
        "CPU threads of the engine (default: all cores; one for models below 32 MiB, and on GPUs)",
        limits=(1, 1 << 24),
    )
    cpus: str | None = model_option(
        None, 'CPU cores that the engine may run on, as taskset lists them: "0-7,16-23" (default: all)'
    )
    gpus: str | None = model_option(
        None,
        "GPUs that the engine may use, as in CUDA_VISIBLE_DEVICES; it computes on the first (default: all)",
    )
    load_format: str = model_option(
        "auto",
        "auto loads the weights; dummy makes random ones of config.json's shapes, to measure speed",
        choices=("auto", "dummy"),
    )
    enforce_eager: bool = model_option(
        False, "launch kernels one by one instead of CUDA graphs; no effect on CPUs"
    )
    overlap: bool = model_option(
        True, "on GPUs, schedule and update one step while the device computes the next; tokens are the same"
    )
    allow_torch_on_gpu: bool = model_option(
        False, "compute in torch, many times slower, on a GPU where Triton's kernels cannot be used"
    )
    fast_math: bool = model_option(
        False, "faster matrix products whose bits depend on the batch: gives up exactness"
    )

    max_num_seqs: int | None = scheduler_option(
        None, "maximum of running requests (default: 64 on CPU, 256 on GPU)", limits=(1, 1 << 24), common=True
    )
    max_num_batched_tokens: int | None = scheduler_option(
        None,
        "rows of one step (default: 512 on a CPU, 8192 on a GPU of 64 GiB or more, 2048 on others)",
        limits=(1, 1 << 24),
    )
    max_waiting: int = scheduler_option(
        4096, "maximum of open requests, running or waiting; more are rejected with 429", limits=(1, 1 << 24)
    )
    max_waiting_tokens: int = scheduler_option(
        4_000_000,
        "maximum of tokens in prompts and parameters of open requests; more are rejected with 429",
        limits=(1, 1 << 40),
    )
    queue_timeout: float = scheduler_option(
        300.0,
        "seconds that a request may wait for its first step before it is rejected with 429; 0 for no limit",
        limits=(0, 86_400),
    )
    request_timeout: float = scheduler_option(
        0.0,
        "seconds that a request may take in total before it fails with 408; 0 for no limit",
        limits=(0, 86_400),
    )
    default_max_tokens: int = scheduler_option(
        16_384, "max_tokens of requests without it; 0: up to the end of the context", limits=(0, 1 << 24)
    )
    on_runaway: str = scheduler_option(
        "warn",
        "on repetitive output: log a warning, stop with finish_reason repetition, or do nothing",
        choices=("warn", "stop", "off"),
    )
    replicas: int = scheduler_option(
        1,
        "engines of the model on this machine; the answers of one that dies go on in another; 0 only with "
        "--replica-urls",
        limits=(0, 64),
    )
    replica_urls: str | None = scheduler_option(
        None,
        "servers whose engines are replicas too, comma-separated; --engine-key is that of these servers",
        many=True,
    )
    max_replicas: int | None = scheduler_option(
        None,
        "with --ray, most servers of the model, while requests wait (default: --replicas)",
        limits=(1, 1024),
    )
    replica_timeout: float = scheduler_option(
        60.0, "seconds that a request waits for a replica to be ready when none is", limits=(0, 86_400)
    )
    hang_timeout: float = scheduler_option(
        60.0,
        "seconds that a step may take, or the heartbeat may be missing, before the engine is restarted",
        limits=(1, 86_400),
    )
    kv_cache_memory: str | None = scheduler_option(
        None,
        'size of the KV cache: "2GiB", "4000tokens" (default: by free memory, at most 4 GiB on a CPU)',
        common=True,
    )
    gpu_memory_utilization: float = scheduler_option(
        0.9,
        "share of the GPU's memory that may be in use by all processes; the KV cache gets the rest of it",
        limits=(0.05, 1.0),
    )
    block_size: int = scheduler_option(
        16, "tokens in one block of the KV cache (a power of two, 1 to 256)", limits=(1, 256)
    )
    trace: str | None = scheduler_option(
        None,
        "file for the scheduler's decisions, for replay; has token ids; FILE.drafts: decisions on drafts",
    )
    prefix_caching: bool = scheduler_option(True, "reuse KV blocks of equal prompt prefixes")
    kv_cache_dir: str | None = scheduler_option(
        None, "directory where KV blocks are kept for later engines; they reveal prompts (default: none)"
    )
    kv_cache_host_memory: str | None = scheduler_option(
        None,
        "host memory of each engine for KV blocks that a GPU's KV cache has no room for (default: none)",
    )
    kv_cache_shared_memory: bool = scheduler_option(
        False,
        "keep the KV cache of a CPU engine in memory that the engine after a crash or reload takes over",
    )
    kv_cache_disk: str = scheduler_option("20GiB", "limit of the files in --kv-cache-dir, of all engines")

    max_images: int = image_option(16, "maximum of images in one request", limits=(1, 1024))
    max_image_mb: int = image_option(
        20, "maximum size of an image file in MB, before decoding", limits=(1, 1024)
    )
    max_image_pixels: int = image_option(
        50_000_000, "maximum of pixels of an image, by its header, before decoding", limits=(1, 1 << 30)
    )
    image_memory: str = image_option(
        "1GiB", "memory for the pixels of open requests, in each of two processes; more are rejected with 429"
    )
    image_cache_memory: str = image_option(
        "256MiB", "memory of the cache of encoded images, reused when an image comes again"
    )
    allowed_media_domains: str = image_option(
        "",
        "hosts that images may be fetched from by http(s), comma-separated (default: none, only data: URLs)",
    )
    allowed_local_media_path: str | None = image_option(
        None, "directory below which file:// images may be read (default: none)"
    )
    media_timeout: float = image_option(5.0, "timeout for fetching an image, in seconds", limits=(0.1, 3600))

    speculate: str = speculation_option(
        "auto",
        "auto, off, or comma-separated drafters: auto, grammar, prediction, suffix, text, ngram, "
        "draft, eagle3, dflash, mtp, replay, module:Class for your own, or the name of an installed one",
        common=True,
    )
    draft_model: str | None = speculation_option(
        None, "a smaller checkpoint with the same tokenizer, or a trained head of the model", common=True
    )
    num_speculative_tokens: int | None = speculation_option(
        None,
        "maximum of drafted tokens per request and step; 0: none (default: 32, or 4 with draft_length fixed)",
        limits=(0, 64),
        common=True,
    )
    mtp_vocab_size: int = speculation_option(
        32768,
        "an MTP head drafts ids below this, the earliest merges of most vocabularies; 0: all",
        limits=(0, 2**31 - 1),
    )
    draft_length: str = speculation_option(
        "adaptive",
        "adaptive: the length with the highest measured gain; fixed: up to num_speculative_tokens",
        choices=("adaptive", "fixed"),
    )
    max_request_slowdown: float = speculation_option(
        0.02,
        "share of its time that a request may lose to drafts of others; more allows more tokens in all",
        limits=(0.0, 1.0),
    )
    suffix_corpus_memory: str = speculation_option(
        "64MiB", "memory for finished outputs that suffix drafts from, separate for each API key; 0 for none"
    )
    prompt_lookup_min: int = speculation_option(2, "minimum length of the n-grams of ngram")
    prompt_lookup_max: int = speculation_option(4, "maximum length of the n-grams of ngram", limits=(1, 32))
    replay_file: str | None = speculation_option(
        None, "JSON lines of recorded outputs for the replay drafter"
    )
    replay_error_rate: float = speculation_option(
        0.0, "share of replayed tokens that are replaced by wrong ones", limits=(0.0, 1.0)
    )
    replay_cost: bool = speculation_option(
        False, "run the draft model for every replayed token, to include its cost"
    )
    speculative_config: str | None = speculation_option(None, "the above as JSON, as in vLLM")

    models: str | None = fleet_option(
        None,
        "several models, loaded on demand: a YAML file (docs/fleet.md), a directory of models, or names",
        many=True,
        common=True,
    )
    memory_limit: str | None = fleet_option(
        None, 'memory of all loaded models: "48GiB" (default: the machine\'s, less a reserve)'
    )
    ray: str | None = fleet_option(
        None,
        "address of a Ray cluster whose machines run the engines, HOST:PORT or auto; local: this machine",
    )
    keep_alive: str | None = fleet_option(
        None,
        'time without an answer until a model is unloaded: "5m", "90s", 0 for at once, '
        "-1 for never (default: 5m with --models, else never)",
    )
    max_loaded_models: int | None = fleet_option(
        None, "maximum of models in memory at a time (default: as many as fit)", limits=(1, 1024)
    )
    max_swap_wait: float | None = fleet_option(
        None,
        "seconds that requests of loaded models may pass one whose model waits for memory (default: 10)",
        limits=(0, 86_400),
    )

    host: str = server_option("127.0.0.1", "address to listen on", common=True)
    port: int = server_option(8000, "port to listen on; 0 takes a free one", limits=(0, 65535), common=True)
    uds: str | None = server_option(
        None, "path of a Unix socket to listen on, instead of host and port; mode 660"
    )
    root_path: str = server_option("", "path prefix that a proxy puts before all routes, such as /llm")
    ui: bool = server_option(True, "serve the page at / and the API's fields at /docs")
    api_key: str | None = server_option(
        None, "API key that clients must send; comma-separated if several", guards_access=True, common=True
    )
    api_key_file: str | None = server_option(
        None,
        "YAML file of hashed API keys and their limits, written by `foreword keys`; reloaded when it changes",
        guards_access=True,
    )
    usage_db: str | None = server_option(
        None,
        "SQLite file of usage by day, key and model, read by `foreword keys usage`; servers may share it",
    )
    engine_key: str | None = server_option(
        None, "key with which other servers (their --replica-urls) use this one's engine", guards_access=True
    )
    router_timeout: float = server_option(
        0.0,
        "seconds without a server that uses the engine by --engine-key until this one ends; 0 for never",
        limits=(0, 86_400),
    )
    cors_origins: str = server_option("", "allowed browser origins, comma-separated; * for all")
    allowed_hosts: str = server_option(
        "",
        "names besides --host under which clients reach a server without keys, comma-separated, such as "
        "ai.example.com or .example.com for all subdomains; addresses and local names always are; * for all",
    )
    max_body_mb: int = server_option(32, "maximum size of a request body in MB", limits=(1, 1024))
    response_store_mb: int = server_option(
        64,
        "MB of memory for responses that later ones continue by previous_response_id; 0 stores none",
        limits=(0, 1 << 20),
    )
    response_store_ttl: float = server_option(
        3600.0, "seconds that a stored response is kept after its last use", limits=(1, 30 * 86_400)
    )
    unknown_fields: str = server_option(
        "refuse",
        "unknown fields of requests: refuse with 400, or ignore and name in X-Foreword-Ignored-Fields",
        choices=("refuse", "warn"),
    )
    max_connections: int = server_option(
        4096, "maximum of open connections; more are closed at once", limits=(1, 1 << 20)
    )
    client_timeout: float = server_option(
        30.0,
        "seconds that a client may take to send its request, or to receive the next part of its response",
        limits=(1, 86_400),
    )
    drain_timeout: float = server_option(
        8.0,
        "seconds after SIGTERM in which open requests may finish; a second SIGTERM ends them at once",
        limits=(0, 86_400),
    )
    drain_delay: float = server_option(
        0.0,
        "seconds after SIGTERM in which /ready is 503 and requests are still taken, so that proxies notice",
        limits=(0, 86_400),
    )
    health_probe: float = server_option(
        0.0,
        "seconds without traffic after which /health generates a token to test the engine; 0 for never",
        limits=(0, 86_400),
    )
    share_prefix_cache: bool = server_option(
        False, "share cached prefixes, and finished outputs for suffix, between API keys"
    )
    log_level: str = server_option(
        "info", "minimum level of log lines", choices=("debug", "info", "warning", "error")
    )
    log_format: str = server_option(
        "text", "format of log lines; json: one object a line", choices=("text", "json")
    )
    access_log: bool = server_option(
        False, "log a line for every request: method, route, status, time, key's name, bytes"
    )
    log_interval: float = server_option(
        10.0, "seconds between throughput lines; 0 for none", limits=(0, 86_400)
    )
    vllm_metrics: bool = server_option(
        False, "export metrics under vLLM's names too, for its dashboards and benchmarks"
    )
    otlp_traces_endpoint: str | None = server_option(
        None,
        "URL that OpenTelemetry traces are sent to by OTLP/HTTP; needs the extra otel (docs/deploying.md)",
        variable="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    )
    test_mode: bool = server_option(
        False, "attach a hash of the raw logits to every token (slow; for exactness tests)"
    )

    # No option: resolve_paths() sets it where `auto` chose the MTP head, without which the model runs too
    is_head_optional: bool = False

    def __post_init__(self) -> None:
        check_options(self)

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
        return replace(self, speculate=self._speculate_without(plugin.item))

    def without_optional_head(self) -> Config:
        """Without the MTP head that `auto` chose."""
        assert self.is_head_optional
        speculate = self._speculate_without("mtp")
        return replace(self, speculate=speculate, draft_model=None, is_head_optional=False)

    def _speculate_without(self, drafter: str) -> str:
        items = [item for item in map(str.strip, self.speculate.split(",")) if item != drafter]
        return ",".join(items) or "off"

    def _drafters(self) -> list[str | DrafterPlugin]:
        drafters = parse_drafters(self.speculate, self.draft_model, self.replay_file)
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
        names = {"draft", *HEAD_DRAFTERS}
        return self.draft_model is not None and (bool(names & {*self.drafter_names()}) or self.replay_cost)

    @property
    def drafts_text(self) -> bool:
        """Whether the engine needs the tokenizer before its first request."""
        return "text" in self.drafter_names()

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


def option_fields() -> tuple[Any, ...]:
    """Dataclass fields of Config that are options, in order."""
    return tuple(item for item in fields(Config) if item.metadata)
