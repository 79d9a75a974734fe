"""The limits of single options, and which options go together."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TYPE_CHECKING

from foreword.config.lora import parse_lora_modules
from foreword.config.units import parse_bytes, parse_cpus, parse_duration, parse_tokens
from foreword.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from foreword.config.options import Config

MEMORY_OPTIONS = (
    *("suffix_corpus_memory", "image_memory", "image_cache_memory", "kv_cache_disk", "kv_cache_host_memory"),
    "memory_limit",
)
MAX_FLOAT_DISPLAY = 1e300
GPUS_PATTERN = re.compile(r"(\d+|(GPU|MIG)-[\w/-]+)(,(\d+|(GPU|MIG)-[\w/-]+))*", re.ASCII)
MIN_ENGINE_KEY_CHARS = 16
URL_PATTERN = re.compile(r"https?://(\[[0-9a-fA-F:.%]+\]|[\w.-]+)(:\d{1,5})?(/[\w./~-]*)?", re.ASCII)
ORIGIN_PATTERN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s]*")
HOST_PATTERN = re.compile(r"\*|(\*?\.)?[\w-]+(\.[\w-]+)*", re.ASCII)
ROOT_PATH_PATTERN = re.compile(r"(?:/[\w.~-]+)+", re.ASCII)


def check_options(config: Config) -> None:
    """Raises ConfigError, which names an option, its value and its limit."""
    for item in fields(config):
        name, value = item.name, getattr(config, item.name)
        _check_type(name, value, str(item.type))
        if not item.metadata:  # no option
            continue
        choices = item.metadata["choices"]
        if choices and value not in (*choices, item.default):
            hint = did_you_mean(str(value), choices)
            raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}{hint}", name)
        if (limits := item.metadata["limits"]) is not None and value is not None:
            _check_range(name, value, *limits)
    _check_range("prompt_lookup_min", config.prompt_lookup_min, 1, config.prompt_lookup_max)
    if config.block_size & (config.block_size - 1):
        raise ConfigError(f"block_size must be a power of two, got {config.block_size}", "block_size")
    for name in MEMORY_OPTIONS:
        if (text := getattr(config, name)) is not None:
            parse_bytes(name, text)
    _check_kv_cache(config)
    if config.cpus is not None:
        parse_cpus(config.cpus)
    if config.gpus is not None and not GPUS_PATTERN.fullmatch(config.gpus):
        raise ConfigError(f'gpus must be like "0" or "0,1", got {config.gpus!r:.80}', "gpus")
    if config.keep_alive is not None:
        parse_duration("keep_alive", config.keep_alive)
    if config.models is not None and config.model is not None:
        raise ConfigError("give --model or --models, not both: --models names the default first", "models")
    _check_keys(config)
    if config.root_path and not ROOT_PATH_PATTERN.fullmatch(config.root_path):
        raise ConfigError(
            f"root_path must be like /llm, without a / at its end, got {config.root_path!r:.200}", "root_path"
        )
    for host in filter(None, map(str.strip, config.allowed_hosts.split(","))):
        if not HOST_PATTERN.fullmatch(host):
            raise ConfigError(
                "allowed_hosts must be names without scheme and port, such as ai.example.com, "
                f"got {host!r:.200}",
                "allowed_hosts",
            )
    for origin in filter(None, map(str.strip, config.cors_origins.split(","))):
        if not ORIGIN_PATTERN.fullmatch(origin):
            raise ConfigError(
                "cors_origins must be * or origins with scheme and port, such as http://localhost:8080, "
                f"got {origin!r:.200}",
                "cors_origins",
            )
    config.served_names()
    _check_replicas(config)
    _check_lora(config)
    rows = config.max_num_batched_tokens
    if config.max_num_seqs and rows and config.max_num_seqs > rows:
        raise ConfigError(
            f"max_num_batched_tokens {rows} is below max_num_seqs {config.max_num_seqs}: "
            "every running request needs one row per step",
            "max_num_batched_tokens",
        )
    if config.replay_cost and not (config.draft_model and "replay" in config.drafter_names()):
        raise ConfigError("replay_cost needs --draft-model and the drafter replay", "replay_cost")
    config.drafter_names()


def _check_kv_cache(config: Config) -> None:
    if config.kv_cache_memory is not None and parse_tokens("kv_cache_memory", config.kv_cache_memory) is None:
        parse_bytes("kv_cache_memory", config.kv_cache_memory)
    defaults = {item.name: item.default for item in fields(config)}
    if config.kv_cache_dir is None and config.kv_cache_disk != defaults["kv_cache_disk"]:
        raise ConfigError(
            "--kv-cache-disk limits the files of --kv-cache-dir DIR, which is not given", "kv_cache_disk"
        )
    for name in ("kv_cache_dir", "kv_cache_host_memory"):
        if getattr(config, name) is None:
            continue
        if not config.prefix_caching:
            raise ConfigError(f"{name} needs prefix_caching: blocks are found by it", name)
        if config.trace is not None:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(f"trace cannot record what {flag} reads: give one of them", "trace")


def _check_replicas(config: Config) -> None:
    if not config.replicas and not config.remote_urls:
        raise ConfigError("replicas must be at least 1 without --replica-urls, got 0", "replicas")
    for url in config.remote_urls:
        if not URL_PATTERN.fullmatch(url) or config.remote_urls.count(url) > 1:
            raise ConfigError(
                f"replica_urls must be different URLs such as http://10.0.0.7:8000, got {url!r:.200}",
                "replica_urls",
            )
    if config.max_replicas is not None and config.max_replicas < config.replicas:
        raise ConfigError(
            f"max_replicas {config.max_replicas} is below replicas {config.replicas}", "max_replicas"
        )
    if config.router_timeout and config.engine_key is None:
        raise ConfigError("router_timeout needs --engine-key", "router_timeout")
    if config.remote_urls and config.engine_key is None:
        raise ConfigError("replica_urls needs --engine-key: that of these servers", "engine_key")


def _check_lora(config: Config) -> None:
    modules = parse_lora_modules(config.lora_modules)
    if config.max_loras is not None and config.max_loras < len(modules):
        raise ConfigError(
            f"max_loras {config.max_loras} is below the {len(modules)} adapters of lora_modules", "max_loras"
        )
    if config.allow_runtime_lora_updating and not config.lora_dir:
        raise ConfigError(
            "allow_runtime_lora_updating needs --lora-dir: the directory whose adapters clients may load",
            "lora_dir",
        )


def _check_keys(config: Config) -> None:
    """Raises ConfigError for an empty key: a server that was meant to have keys must not start open."""
    if config.api_key is not None and not all(key.strip() for key in config.api_key.split(",")):
        name, problem = "api_key", "is empty" if not config.api_key.strip() else "has an empty key"
    elif config.api_key_file is not None and not config.api_key_file.strip():
        name, problem = "api_key_file", "is empty"
    elif config.engine_key is not None and len(config.engine_key.strip()) < MIN_ENGINE_KEY_CHARS:
        problem = f"must have at least {MIN_ENGINE_KEY_CHARS} characters"
        raise ConfigError(f"engine_key {problem}: it gives all that the engine can do", "engine_key")
    else:
        return
    hint = f"leave out --{name.replace('_', '-')} and unset FOREWORD_{name.upper()}"
    raise ConfigError(f"{name} {problem}; to serve without keys, {hint}", name)


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
