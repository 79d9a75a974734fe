"""Sizes, jobs and budgets of `foreword bench gpu`: full, quick, and a dry run of every line on a CPU."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foreword.bench.shapes import EXPERTS_SHAPE, SHAPES, ExpertsShape, ModelShape, model_shape

ROLES = ("large", "small")
ARCHITECTURES = MappingProxyType({"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"})
SMALL_DRAFTER = model_shape("qwen2.5-drafter", 4, 896, 4864, 14, 2, 151936)


@dataclass(frozen=True, slots=True)
class Job:
    """Parts of a section that share a process: an error of the device costs no other job's parts."""

    section: str
    name: str  # unique in its section
    function: str  # "module:name" below foreword.bench.gpu; called with (BenchConfig, Report, *args)
    budget_s: float  # of an H100; a job inherits the unused time before it
    args: tuple[Any, ...] = ()


# In order of what a first run must tell: bits, steps of a large model, engines, kernels, the rest.
JOBS = (
    Job("start", "machine", "start:machine", 6),
    Job("start", "cold", "start:cold_start", 40),
    Job("start", "kernels", "start:compile_kernels", 25),
    Job("start", "warm", "start:warm_start", 7),
    Job("checks", "linear", "kernels:check_linear", 22),
    Job("checks", "experts", "kernels:check_experts", 8),
    Job("checks", "attention", "kernels:check_attention", 16),
    Job("checks", "sampling", "kernels:check_sampling", 6),
    Job("checks", "at load", "kernels:check_load", 8),
    Job("steps", "large", "steps:decode", 50, ("large",)),
    Job("steps", "contexts", "steps:contexts", 28),
    *(
        Job("steps", name, "steps:weight_format", 10, (name, field, value))
        for name, field, value in (
            ("int8", "quantization", "int8"),
            ("fp8", "quantization", "fp8"),
            ("int4", "quantization", "int4"),
            ("fp8 KV", "kv_cache_dtype", "fp8"),
        )
    ),
    Job("steps", "draft model", "steps:draft_model", 15),
    Job("steps", "host drafters", "steps:host_drafters", 15),
    Job("steps", "small", "steps:decode", 18, ("small",)),
    *(
        Job("engines", name, f"engines:{name.replace(' ', '_')}", 7)
        for name in ("eager", "graphs", "no overlap", "drafts", "draft model", "small cache", "fast math")
    ),
    *(
        Job("kernels", name, f"kernels:time_{name}", 10)
        for name in ("linear", "experts", "attention", "rows")
    ),
    *(Job("speculation", name, f"steps:{name}_drafts", 18) for name in ("adaptive", "fixed", "paid")),
    Job("variants", "", "variants:measure_variant", 55),  # command.py makes a job of each
    *(Job("peers", role, "steps:peer", 12, (role,)) for role in reversed(ROLES)),
)
SECTIONS = tuple(dict.fromkeys(job.section for job in JOBS))


@dataclass(frozen=True, slots=True)
class BenchConfig:
    device: str = "cuda"  # "cuda" or "cpu"
    dtype: str = "bfloat16"  # of weights, activations and KV
    large: ModelShape = SHAPES["llama-3.1-8b"]
    small: ModelShape = SHAPES["qwen2.5-0.5b"]
    experts: ExpertsShape = EXPERTS_SHAPE
    adapters: int = 8  # LoRA adapters of a layer
    adapter_rank: int = 16
    drafter: ModelShape = SHAPES["llama-3.2-1b"]  # draft model of `large`
    small_drafter: ModelShape = SMALL_DRAFTER
    budget_factor: float = 1.0  # of the budgets of all jobs
    rounds: int = 5  # counted rounds of every comparison
    copy_bytes: int = 1 << 30  # of the copy that measures bandwidth
    product: int = 8192  # side of the square matrices that measure the product rate
    working_set: int = 1 << 29  # bytes of weights read in turn, larger than any cache
    kernel_roles: tuple[str, ...] = ROLES  # shapes whose kernels are checked and timed
    # Of the checks of bits: around every tile edge.
    row_counts: tuple[int, ...] = (1, 8, 16, 17, 32, 33, 64, 65, 128, 129, 257, 512, 1000, 4096)
    check_context: int = 2500  # tokens, in the checks of attention
    repeats: int = 500  # of one product in the check of repetition
    sampled_rows: tuple[int, ...] = (1, 64)  # rows of logits in the sampler's timings
    kernel_rows: tuple[int, ...] = (1, 8, 64, 256, 8192)  # of timed linear layers
    contexts: tuple[int, ...] = (1024, 8192, 32768)  # tokens, of timed attention
    max_context: int = 131072  # tokens, for which attention is planned in the section "steps", job "contexts"
    # (requests, tokens of each), decoding within max_context
    long_contexts: tuple[tuple[int, int], ...] = ((4, 8192), (16, 8192), (4, 32768))
    num_requests: int = 256  # distinct requests in the engine checks
    num_single: int = 8  # requests that are also answered one at a time
    batch_sizes: tuple[int, ...] = (64, 256)  # concurrent requests in the engine checks
    check_tokens: int = 24  # output tokens in the engine checks
    streams: tuple[int, ...] = (1, 8, 64)  # concurrent requests of timed steps
    fast_streams: tuple[int, ...] = (1, 64, 256)  # the same, compared with --fast-math
    prompt: int = 64  # tokens
    answer: int = 96  # tokens
    long_prompt: int = 8192  # tokens of the timed prompt
    arrival_streams: int = 32  # requests that decode while others arrive
    arrival_prompt: int = 200  # tokens of a request that arrives
    arrivals: int = 8
    replayed: int = 160  # output tokens of the speculation section
    idle_steps: int = 24  # steps seen by the profiler
    variant_layers: int = 4  # of the large shape in the section "variants"
    peer_tokens: int = 64  # output tokens of the transformers comparison

    @property
    def is_dry_run(self) -> bool:
        return self.device == "cpu"

    @property
    def max_batch(self) -> int:
        return max(*self.fast_streams, *self.batch_sizes)

    def shape(self, role: str) -> ModelShape:
        return self.large if role == "large" else self.small

    def draft_shape(self, role: str) -> ModelShape:
        return self.drafter if role == "large" else self.small_drafter


FULL = BenchConfig()
QUICK = replace(
    FULL,
    budget_factor=0.5,
    rounds=2,
    repeats=100,
    num_requests=64,
    num_single=4,
    batch_sizes=(16, 64),
    check_tokens=12,
    answer=48,
    long_contexts=((4, 8192),),
    replayed=96,
    idle_steps=12,
    peer_tokens=32,
)
DRY_RUN = BenchConfig(
    device="cpu",
    dtype="float32",
    large=model_shape("tiny-large", 2, 64, 96, 4, 2, 272, head_dim=16, tie_word_embeddings=False),
    small=model_shape("tiny-small", 1, 32, 256, 2, 1, 272, head_dim=16),
    experts=ExpertsShape(num_experts=5, top_k=2, hidden=32, inner=16),
    adapters=2,
    adapter_rank=4,
    drafter=model_shape("tiny-drafter", 1, 32, 64, 2, 1, 272, head_dim=16),
    small_drafter=model_shape("tiny-small-drafter", 1, 32, 64, 2, 1, 272, head_dim=16),
    budget_factor=60.0,  # a slow machine must skip nothing
    rounds=1,
    copy_bytes=1 << 16,
    product=32,
    working_set=1 << 14,
    kernel_roles=("small",),
    row_counts=(1, 2, 17),
    check_context=20,
    repeats=2,
    sampled_rows=(1,),
    kernel_rows=(1,),
    contexts=(20,),
    max_context=64,
    long_contexts=((2, 24),),
    num_requests=4,
    num_single=1,
    batch_sizes=(2, 4),
    check_tokens=4,
    streams=(1, 2, 3),
    fast_streams=(1, 2),
    prompt=6,
    answer=6,
    long_prompt=24,
    arrival_streams=2,
    arrival_prompt=8,
    arrivals=2,
    replayed=8,
    idle_steps=2,
    variant_layers=1,
    peer_tokens=3,
)


def write_model(folder: Path, shape: ModelShape, dtype: str, context: int = 1 << 16) -> Path:
    """Write a directory for `--load-format dummy`: config.json alone."""
    model_type = "qwen2" if shape.name.startswith("qwen") else "llama"
    config = {
        "model_type": model_type,
        "architectures": [ARCHITECTURES[model_type]],
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": context,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tie_word_embeddings,
        "torch_dtype": dtype,
    }
    path = folder / shape.name
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return path
