"""Options with which a model that does not fit would fit. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

from foreword.config.options import Config
from foreword.errors import ConfigError
from foreword.planning.hardware import HardwareInfo
from foreword.planning.memory import (
    GIB,
    SMALL_GPU_BATCHED_TOKENS,
    DeviceMemory,
    ModelInfo,
    blocks_for,
    cpu_reserve,
    estimate_gpu_memory,
    kv_bytes_per_token,
    memory_sizes,
    min_context,
    min_free_bytes,
    parse_num_blocks,
)

GPU_SIZES = (8, 12, 16, 24, 32, 40, 48, 80, 96, 141, 192, 288)  # GiB
MAX_GPU_HINTS = 5
STATE_SEQS = (8, 2, 1)  # requests at once, whose states take memory
Fits = Callable[[Config, HardwareInfo, Sequence[ModelInfo]], bool]  # planning/resolve.py: fits()


def fitting_options(
    config: Config, hardware: HardwareInfo, models: Sequence[ModelInfo], fits: Fits
) -> list[str]:
    """Flags with which the models fit, each tried: single ones, else combined. Then the memory for none."""
    if hardware.device == "cuda" and config.kv_cache_memory is None:
        return _fitting_gpu_options(config, hardware, models, fits)
    smaller: list[dict[str, Any]] = [{"quantization": "int8"}, {"quantization": "int4"}]
    smaller += [{"dtype": "bfloat16"}, {"kv_cache_dtype": "int8"}]
    if models[0].state_shapes:
        smaller += [{"max_num_seqs": count} for count in STATE_SEQS]
    variants = [(changes, models, "") for changes in ({}, *smaller)]
    if len(models) > 1:
        variants.append(({}, models[:1], "no --draft-model"))
    by_length: dict[int, list[str]] = {1: [], 2: [], 3: []}
    for changes, chosen, words in variants:
        for sizes in _cache_options(replace(config, **changes), hardware, chosen):
            options = {**changes, **sizes}
            length = len(options) + bool(words)
            if length and _try(config, options, hardware, chosen, fits):
                by_length[length].append(" ".join(filter(None, (words, _format_flags(options)))))
    hints = next(filter(None, by_length.values()), [])
    without_cache_size = replace(config, kv_cache_memory=None)
    for changed, words in ((config, ""), (without_cache_size, " and no --kv-cache-memory")):
        needed = _sufficient_bytes(changed, hardware, models)
        if fits(changed, replace(hardware, free_bytes=needed), models):
            return [*hints, f"{math.ceil(needed / GIB * 100) / 100:.2f} GiB of free memory{words}"]
    return hints


def _fitting_gpu_options(
    config: Config, hardware: HardwareInfo, models: Sequence[ModelInfo], fits: Fits
) -> list[str]:
    """As fitting_options(), by the estimate of a GPU's memory."""
    changes: list[dict[str, Any]] = [{"gpu_memory_utilization": 0.95}]
    changes += [{"max_num_batched_tokens": tokens} for tokens in (SMALL_GPU_BATCHED_TOKENS, 512)]
    changes += [{"enforce_eager": True}, {"kv_cache_dtype": "fp8"}]
    changes += [{"quantization": "fp8"}, {"quantization": "int4"}]
    if config.max_model_len is not None:
        left = (
            estimate_gpu_memory(config, hardware, models).kv_cache
            // memory_sizes(config, hardware, models).block
        )
        changes.insert(0, {"max_model_len": max(left, 0) * config.block_size})
    changes = [
        each for each in changes if all(getattr(config, name) != value for name, value in each.items())
    ]
    hints = [_format_flags(options) for options in changes if _try(config, options, hardware, models, fits)]
    if len(models) > 1 and fits(config, hardware, models[:1]):
        hints.append("no --draft-model")
    if not hints:
        pairs = [{**first, **second} for first, second in combinations(changes, 2)]
        pairs = [pair for pair in pairs if len(pair) == 2]
        hints = [_format_flags(options) for options in pairs if _try(config, options, hardware, models, fits)]
    used = hardware.total_bytes - hardware.free_bytes
    for size in GPU_SIZES:
        larger = replace(hardware, total_bytes=size * GIB, free_bytes=size * GIB - used)
        if size * GIB > hardware.total_bytes and fits(config, larger, models):
            return [*hints[:MAX_GPU_HINTS], f"a GPU of {size} GiB"]
    return hints[:MAX_GPU_HINTS]


def _cache_options(
    config: Config, hardware: HardwareInfo, models: Sequence[ModelInfo]
) -> Iterator[dict[str, Any]]:
    """Contexts and KV caches that may fit."""
    size, block_size = memory_sizes(config, hardware, models), config.block_size
    context = models[0].context_len
    free = max(hardware.free_bytes - size.fixed, 0)
    reserve = cpu_reserve(hardware.free_bytes) if hardware.device == "cpu" else 0
    roomy, tight = (max(left, 0) // size.block * block_size for left in (free - reserve, free))
    need, cache = min_context(config, models[0]), roomy
    if config.kv_cache_memory is not None:
        cache = min(parse_num_blocks(config, size.block) * block_size, tight)
    yield {}
    yield {"max_model_len": min(cache, context)}
    yield {"kv_cache_memory": f"{roomy if cache == tight and roomy >= need else need}tokens"}
    yield {"max_model_len": min(tight, context), "kv_cache_memory": f"{tight}tokens"}


def _sufficient_bytes(config: Config, hardware: HardwareInfo, models: Sequence[ModelInfo]) -> int:
    """Free memory in which `config` fits."""
    size = memory_sizes(config, hardware, models)
    if config.kv_cache_memory is not None:
        return size.fixed + parse_num_blocks(config, size.block) * size.block
    min_blocks = blocks_for(min_context(config, models[0]), config.block_size)
    return min_free_bytes(size.fixed + min_blocks * size.block)


def _try(
    config: Config,
    options: Mapping[str, Any],
    hardware: HardwareInfo,
    models: Sequence[ModelInfo],
    fits: Fits,
) -> bool:
    try:
        changed = replace(config, **options)
    except ConfigError:
        return False
    return fits(changed, hardware, models)


def _format_flags(options: Mapping[str, Any]) -> str:
    flags = ((f"--{name.replace('_', '-')}", value) for name, value in options.items())
    return " ".join(flag if value is True else f"{flag} {value}" for flag, value in flags)


def measured_hints(
    config: Config, dtypes: tuple[str, str], memory: DeviceMemory, models: Sequence[ModelInfo]
) -> str:
    """Options that help once the models are loaded; not tried, since that would load them again.

    dtypes  of the KV cache and of activations
    """
    length, block_size = config.max_model_len, config.block_size
    per_token = sum(kv_bytes_per_token(info, *dtypes) for info in models)
    num_tokens_left = max(memory.kv_cache // (block_size * per_token), 0) * block_size
    hints = {
        f"--max-model-len {num_tokens_left}": length and num_tokens_left >= 2,
        "a smaller model": not length or num_tokens_left < 2,
        "a higher --gpu-memory-utilization": config.gpu_memory_utilization <= 0.94,
        "fewer --max-num-batched-tokens": True,
        "--quantization fp8, int8 or int4": not config.quantization,
        "--kv-cache-dtype fp8 or int8": config.kv_cache_dtype == "auto" and length,
        "no --draft-model": len(models) > 1,
        "--enforce-eager": memory.cuda_graphs,
    }
    return ", ".join(hint for hint, applies in hints.items() if applies)
