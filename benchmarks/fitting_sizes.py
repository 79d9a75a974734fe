"""No measurement: memory that published models with layers with state need, by the plan of `foreword check`.

    python -m benchmarks.fitting_sizes

Prints the table of docs/models.md. Shapes are those of the published config.json files, but for two that are
inferred: the width of the MLP of LFM2-700M, and the places of attention in LFM2-2.6B. Each is planned as by

    foreword check MODEL --quantization Q --max-model-len 8192 --max-num-seqs 4 --max-num-batched-tokens 512

which gives the least free memory on a CPU, and the smallest GPU. The KV cache holds at least 8,192 tokens.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreword.config.options import Config
from foreword.models.model_loader import read_model_info
from foreword.planning.fit_hints import GPU_SIZES
from foreword.planning.hardware import HardwareInfo
from foreword.planning.memory import GIB, ModelInfo, plan_states, weight_bytes
from foreword.planning.resolve import fits

LIMITS: Mapping[str, int] = {"max_model_len": 8192, "max_num_seqs": 4, "max_num_batched_tokens": 512}
STEPS_PER_GIB, MAX_GIB = 10, 288
CPU = HardwareInfo("cpu", cores=8, free_bytes=0, supports_bfloat16=True)
GPU = HardwareInfo("cuda", 8, 0, True, "triton", gpu="a GPU", capability=(8, 9))

LFM2 = {
    "model_type": "lfm2",
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "vocab_size": 65536,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}
QWEN35 = {
    "model_type": "qwen3_5_text",
    "head_dim": 256,
    "vocab_size": 248320,
    "num_hidden_layers": 32,
    "linear_num_value_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
}
QWEN35_MOE = {**QWEN35, "model_type": "qwen3_5_moe_text", "num_key_value_heads": 2, "num_experts": 256}


def shape(base: Mapping[str, Any], hidden: int, inner: int, heads: int, **options: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_attention_heads": heads}
    common = {"max_position_embeddings": 32768, "torch_dtype": "bfloat16"}
    return {**common, **base, **sizes, **options}


def experts(hidden: int, heads: int, inner: int, top_k: int, **options: Any) -> dict[str, Any]:
    sizes = {"moe_intermediate_size": inner, "shared_expert_intermediate_size": inner}
    return shape(QWEN35_MOE, hidden, inner, heads, **sizes, num_experts_per_tok=top_k, **options)


def attention_at(count: int, *places: int) -> list[str]:
    return ["full_attention" if place in places else "conv" for place in range(count)]


SHAPES: Mapping[str, dict[str, Any]] = {
    "LFM2-350M": shape(LFM2, 1024, 6656, 16),
    "LFM2-700M": shape(LFM2, 1536, 10240, 24),
    "LFM2-1.2B": shape(LFM2, 2048, 12288, 32),
    "LFM2-2.6B": shape(
        {**LFM2, "full_attn_idxs": None},
        *(2048, 10752, 32),
        num_hidden_layers=30,
        layer_types=attention_at(30, 2, 5, 9, 13, 17, 21, 24, 27),
        block_auto_adjust_ff_dim=False,
    ),
    "LFM2-8B-A1B": shape(
        {"model_type": "lfm2_moe", "num_key_value_heads": 8, "vocab_size": 65536},
        *(2048, 7168, 32),
        num_hidden_layers=24,
        layer_types=attention_at(24, 2, 6, 10, 14, 18, 21),
        num_dense_layers=2,
        moe_intermediate_size=1792,
        num_experts=32,
        num_experts_per_tok=4,
    ),
    "Qwen3.5-0.8B": shape(
        QWEN35,
        *(1024, 3584, 8),
        num_hidden_layers=24,
        num_key_value_heads=2,
        linear_num_value_heads=16,
        tie_word_embeddings=True,
    ),
    "Qwen3.5-2B": shape(
        QWEN35,
        *(2048, 6144, 8),
        num_hidden_layers=24,
        num_key_value_heads=2,
        linear_num_value_heads=16,
        tie_word_embeddings=True,
    ),
    "Qwen3.5-4B": shape(QWEN35, 2560, 9216, 16, num_key_value_heads=4, tie_word_embeddings=True),
    "Qwen3.5-9B": shape(QWEN35, 4096, 12288, 16, num_key_value_heads=4),
    "Qwen3.5-27B": shape(
        QWEN35, 5120, 17408, 24, num_hidden_layers=64, num_key_value_heads=4, linear_num_value_heads=48
    ),
    "Qwen3.5-35B-A3B": experts(2048, 16, 512, 8, num_hidden_layers=40),
    "Qwen3-Next-80B-A3B": experts(
        *(2048, 16, 512, 10),
        model_type="qwen3_next",
        num_hidden_layers=48,
        num_experts=512,
        vocab_size=151936,
    ),
    "Qwen3.5-122B-A10B": experts(3072, 32, 1024, 8, num_hidden_layers=48, linear_num_value_heads=64),
}


def rows(names: Iterable[str]) -> Iterator[list[str]]:
    """Cells of the table for some models."""
    for name in names:
        with tempfile.TemporaryDirectory() as folder:
            config = {key: value for key, value in SHAPES[name].items() if value is not None}
            (Path(folder) / "config.json").write_text(json.dumps(config))
            info = read_model_info(Path(folder))
        plans = [Config(model=name, quantization=kind, **LIMITS) for kind in ("int4", "int8")]
        states = plan_states(plans[0], CPU, info)
        assert states is not None, "a model with layers with state"
        yield [
            name,
            f"{info.parameters / 1e9:.2f} G",
            *(
                f"{weight_bytes(info, info.dtype, info.dtype, plan.quantization, 'native') / GIB:.1f}"
                for plan in plans
            ),
            f"{states.fixed_bytes / (1 << 20):.0f} MiB",
            *(f"{_least_cpu_gib(plan, info):.1f}" for plan in plans),
            *(_smallest_gpu(plan, info) for plan in plans),
        ]


def _least_cpu_gib(config: Config, info: ModelInfo) -> float:
    def fits_in(steps: int) -> bool:
        return fits(config, replace(CPU, free_bytes=steps * GIB // STEPS_PER_GIB), [info])

    return _first(fits_in, MAX_GIB * STEPS_PER_GIB) / STEPS_PER_GIB


def _first(is_enough: Callable[[int], bool], high: int) -> int:
    """The least number that is enough, by bisection."""
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _smallest_gpu(config: Config, info: ModelInfo) -> str:
    for size in GPU_SIZES:
        if fits(config, replace(GPU, total_bytes=size * GIB, free_bytes=size * GIB), [info]):
            return str(size)
    return "-"


def main() -> None:
    for row in rows(SHAPES):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
