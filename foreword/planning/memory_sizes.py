"""Data types and batch limits of a config, and the memory that its models take. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from foreword.config.options import Config
from foreword.config.units import parse_bytes, parse_tokens
from foreword.planning.hardware import HardwareInfo
from foreword.planning.memory import (
    GIB,
    DeviceMemory,
    ModelInfo,
    activation_bytes,
    estimate_memory,
    kv_bytes_per_token,
    lora_bytes,
    weight_bytes,
)

MIN_CONTEXT = 512  # tokens that the default KV cache must hold; less with max_model_len
LARGE_GPU_BYTES = 64 * GIB
LARGE_GPU_BATCHED_TOKENS, SMALL_GPU_BATCHED_TOKENS = 8192, 2048  # limited by the memory of their logits


@dataclass(frozen=True, slots=True)
class MemorySizes:
    """Bytes of all models."""

    weights: int  # with room for adapters
    block: int  # one block of the KV cache
    lora: int  # room for adapters


def memory_sizes(config: Config, hardware: HardwareInfo, models: Sequence[ModelInfo]) -> MemorySizes:
    dtype, weight_dtype = resolve_dtypes(config, hardware, models[0])
    kv_dtype = resolve_kv_dtype(config, dtype)
    options = (dtype, weight_dtype, config.quantization, hardware.kernel_backend)
    lora = lora_bytes(models[0], dtype, config.num_lora_slots, config.max_lora_rank)
    return MemorySizes(
        sum(weight_bytes(info, *options) for info in models) + lora,
        config.block_size * sum(kv_bytes_per_token(info, kv_dtype) for info in models),
        lora,
    )


def estimate_gpu_memory(config: Config, hardware: HardwareInfo, models: Sequence[ModelInfo]) -> DeviceMemory:
    """The estimate before loading."""
    dtype, _ = resolve_dtypes(config, hardware, models[0])
    _, rows = batch_limits(config, hardware)
    has_images = models[0].image_token_id is not None
    return estimate_memory(
        hardware.total_bytes,
        hardware.free_bytes,
        config.gpu_memory_utilization,
        memory_sizes(config, hardware, models).weights,
        activations=max(activation_bytes(info, dtype, rows) for info in models),
        image_cache=parse_bytes("image_cache_memory", config.image_cache_memory) if has_images else 0,
        cuda_graphs=hardware.kernel_backend == "triton" and not config.enforce_eager,
    )


def batch_limits(config: Config, hardware: HardwareInfo) -> tuple[int, int]:
    """max_num_seqs and max_num_batched_tokens; if one is configured, it limits the other."""
    num_seqs, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
    if hardware.device != "cuda":
        default_seqs, default_tokens = 64, 512
    elif hardware.total_bytes >= LARGE_GPU_BYTES:
        default_seqs, default_tokens = 256, LARGE_GPU_BATCHED_TOKENS
    else:
        default_seqs, default_tokens = 256, SMALL_GPU_BATCHED_TOKENS
    if num_seqs is None:
        num_seqs = min(default_seqs, num_tokens or 256)
    return num_seqs, num_tokens or max(default_tokens, num_seqs)


def resolve_dtypes(config: Config, hardware: HardwareInfo, model: ModelInfo) -> tuple[str, str]:
    """Data types of activations and weights. A CPU computes float16 weights in float32, which is exact."""
    asked = {"half": "float16", "float": "float32"}.get(config.dtype, config.dtype)
    dtype = model.dtype if asked == "auto" else asked
    if hardware.device == "cpu" and dtype == "float16":
        return "float32", "float16"
    if config.dtype == "auto" and dtype == "bfloat16" and not hardware.supports_bfloat16:
        dtype = "float32" if hardware.device == "cpu" else "float16"
    return dtype, dtype


def resolve_kv_dtype(config: Config, dtype: str) -> str:
    return dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype


def min_context(config: Config, model: ModelInfo) -> int:
    """Tokens that the KV cache must hold."""
    return config.max_model_len or min(model.context_len, MIN_CONTEXT)


def parse_num_blocks(config: Config, bytes_per_block: int) -> int:
    """KV blocks of the configured kv_cache_memory. Raises ConfigError."""
    text = str(config.kv_cache_memory)
    num_tokens = parse_tokens("kv_cache_memory", text)
    if num_tokens is not None:
        return blocks_for(num_tokens, config.block_size)
    return parse_bytes("kv_cache_memory", text) // bytes_per_block


def blocks_for(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)
