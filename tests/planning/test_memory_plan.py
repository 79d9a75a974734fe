"""The plan of a model's memory: its parts, and their sum."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from foreword.config.options import Config
from foreword.planning.hardware import HardwareInfo
from foreword.planning.memory import GIB, ModelInfo, PackedFormat
from foreword.planning.memory_plan import plan_memory
from foreword.planning.resolve import resolve

CPU = HardwareInfo("cpu", 8, 256 * GIB, supports_bfloat16=True)
GPU = HardwareInfo("cuda", 8, 190 * GIB, True, "triton", 192 * GIB, "NVIDIA B200", (9, 0))
DENSE = ModelInfo(
    "qwen3",
    32768,
    "bfloat16",
    parameters=8_000_000_000,
    vocab_size=150_000,
    kv_values_per_token=73_728,
    embedding_parameters=1_200_000_000,
    activation_values_per_row=50_000,
    lora_values_per_rank=1_000_000,
)
# 30B-A3B: 128 experts, 8 a token
EXPERTS = replace(
    DENSE,
    parameters=30_500_000_000,
    num_experts=128,
    experts_per_token=8,
    expert_parameters=29_000_000_000,
    embedding_parameters=600_000_000,
)
PACKED = replace(
    EXPERTS,
    packed_bytes=17_500_000_000,
    packed_parameters=30_500_000_000,
    packed_embedding_parameters=600_000_000,
    packed_formats=(
        PackedFormat("q4_k", 15_000_000_000, 14_000_000_000),
        PackedFormat("q6_k", 2_500_000_000, 2_000_000_000),
    ),
)
DRAFTER = replace(DENSE, parameters=600_000_000, kv_values_per_token=1000, embedding_parameters=100_000_000)


@pytest.mark.parametrize(
    "model", [DENSE, EXPERTS, PACKED, replace(DENSE, vision_parameters=10**8, image_token_id=1)]
)
@pytest.mark.parametrize(
    "options",
    [{}, {"quantization": "int4"}, {"kv_cache_dtype": "int8"}, {"enable_lora": True, "max_loras": 3}],
)
def test_parts_are_those_of_the_resolved_config(model: ModelInfo, options: dict[str, Any]) -> None:
    config = Config(**options)
    for hardware in (CPU, GPU, replace(CPU, kernel_backend="torch", free_bytes=500 * GIB)):
        for drafter in (None, DRAFTER):
            check_parts(config, hardware, model, drafter)


def check_parts(config: Config, hardware: HardwareInfo, model: ModelInfo, drafter: ModelInfo | None) -> None:
    resolved = resolve(config, hardware, model, drafter)
    parts = {part.name: part for part in plan_memory(config, hardware, model, drafter, resolved)}
    total = parts.pop("sum")
    assert total.num_bytes == sum(part.num_bytes for part in parts.values() if not part.is_subset)
    weights = sum(
        parts[name].num_bytes
        for name in ("weights", "vision encoder", "draft model", "adapters")
        if name in parts
    )
    assert weights == pytest.approx(resolved.weight_bytes, abs=3)
    assert parts["KV cache"].num_bytes == resolved.kv_bytes
    assert ("experts" in parts) == bool(model.num_experts)
    assert ("adapters" in parts) == config.enable_lora
    assert ("image cache" in parts) == (model.image_token_id is not None)
    if resolved.memory is not None:
        usable = resolved.memory.usable
        assert total.num_bytes == pytest.approx(usable - resolved.memory.kv_cache + resolved.kv_bytes, abs=3)


def test_experts_and_what_a_token_reads() -> None:
    """Of 128 experts a token reads 8, and all else."""
    parts = {part.name: part for part in plan_memory(Config(), CPU, PACKED)}
    assert parts["weights"].detail == "q4_k 13.97 GiB, q6_k 2.33 GiB"
    assert parts["experts"].num_bytes == 16_000_000_000 and parts["experts"].is_subset
    assert parts["experts"].detail == (
        "128 in a layer, 8 a token, which reads 2.33 GiB of the weights: 3.3 of 30.5 G parameters"
    )
    plain = {part.name: part for part in plan_memory(Config(), CPU, EXPERTS)}
    assert plain["experts"].num_bytes == pytest.approx(EXPERTS.expert_parameters * 2, rel=0.001)


def test_model_that_does_not_fit_needs_the_least_cache() -> None:
    parts = {part.name: part for part in plan_memory(Config(), replace(CPU, free_bytes=GIB), DENSE)}
    assert parts["KV cache"].detail == "512 tokens in bfloat16, 144.0 KiB a token"
    parts = {part.name: part for part in plan_memory(Config(max_model_len=4096), CPU, DENSE)}
    assert parts["KV cache"].num_bytes == 4096 * 73_728 * 2
