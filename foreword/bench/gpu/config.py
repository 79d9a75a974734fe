"""How much `foreword bench gpu` measures: all of it, a short look, or a rehearsal that runs every line on a CPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from foreword.bench.shapes import SHAPES, ModelShape, model_shape

__all__ = ["DRY_RUN", "FULL", "QUICK", "ROLES", "SECTIONS", "BenchConfig", "write_model"]

ROLES = ("large", "small")
MODEL_TYPES = MappingProxyType({"qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"})
BUDGETS = MappingProxyType(
    {
        "ceilings": 8.0,
        "checks": 65.0,
        "engines": 80.0,
        "kernels": 45.0,
        "steps": 110.0,
        "speculation": 70.0,
        "peers": 90.0,
    }
)
SECTIONS = tuple(BUDGETS)


@dataclass(frozen=True, slots=True)
class BenchConfig:
    """Sizes and budgets.

    device          "cuda" or "cpu"
    dtype           of weights, activations and KV
    large, small    the shapes that are measured; drafter is beside the large one, small_drafter beside the small one
    budgets         seconds by section; what one leaves is its successors'
    rounds          that count, of everything that is measured in turn
    copy_bytes      of the copy that bandwidth is taken from
    product         side of the square matrices that the product rate is taken from
    working_set     bytes of weights that are read before one of them is read again: more than any cache holds
    kernel_roles    of the shapes whose kernels are checked and measured
    row_counts      of the checks of bits: at and around every threshold
    check_context   tokens of the longest context in the checks of attention
    check_places    in that context, at which rows are compared
    sampled_rows    of logits whose sampling is measured
    kernel_rows     of linear layers whose speed is measured
    contexts        of attention
    population      different requests in the checks of engines; `solo` of them are also answered one at a time
    crowds          how many at once, in the checks of engines
    check_tokens    of an answer there
    streams         at once, where steps are measured; fast_streams where they are held against --fast-math
    prompt, answer  tokens
    long_prompt     tokens of the prompt whose speed is measured
    replayed        tokens of an answer whose replay is measured
    idle_steps      that the profiler sees
    peer_tokens     of an answer of a peer
    """

    device: str
    dtype: str
    large: ModelShape
    small: ModelShape
    drafter: ModelShape
    small_drafter: ModelShape
    budgets: Mapping[str, float]
    rounds: int
    copy_bytes: int
    product: int
    working_set: int
    kernel_roles: tuple[str, ...]
    row_counts: tuple[int, ...]
    check_context: int
    check_places: int
    sampled_rows: tuple[int, ...]
    kernel_rows: tuple[int, ...]
    contexts: tuple[int, ...]
    num_requests: int
    num_single: int
    batch_sizes: tuple[int, ...]
    check_tokens: int
    streams: tuple[int, ...]
    fast_streams: tuple[int, ...]
    prompt: int
    answer: int
    long_prompt: int
    replayed: int
    idle_steps: int
    peer_tokens: int

    @property
    def is_dry_run(self) -> bool:
        """Its figures say nothing of a GPU."""
        return self.device == "cpu"

    def shape(self, role: str) -> ModelShape:
        return self.large if role == "large" else self.small


FULL = BenchConfig(
    device="cuda",
    dtype="bfloat16",
    large=SHAPES["llama-3.1-8b"],
    small=SHAPES["qwen2.5-0.5b"],
    drafter=SHAPES["llama-3.2-1b"],
    small_drafter=model_shape("qwen2.5-drafter", 4, 896, 4864, 14, 2, 151936),
    budgets=BUDGETS,
    rounds=5,
    copy_bytes=1 << 30,
    product=8192,
    working_set=1 << 29,
    kernel_roles=ROLES,
    row_counts=(
        1,
        2,
        3,
        7,
        8,
        9,
        15,
        16,
        17,
        31,
        32,
        33,
        63,
        64,
        65,
        127,
        128,
        129,
        255,
        256,
        257,
        1000,
        4096,
        8191,
        16384,
    ),
    check_context=2500,
    check_places=6,
    sampled_rows=(1, 64),
    kernel_rows=(1, 8, 64, 256, 8192),
    contexts=(1024, 8192, 32768),
    num_requests=256,
    num_single=8,
    batch_sizes=(64, 256),
    check_tokens=24,
    streams=(1, 8, 64),
    fast_streams=(1, 64, 256),
    prompt=64,
    answer=96,
    long_prompt=8192,
    replayed=160,
    idle_steps=24,
    peer_tokens=64,
)
QUICK = replace(
    FULL,
    budgets=MappingProxyType({name: seconds / 2 for name, seconds in BUDGETS.items()}),
    rounds=2,
    row_counts=(1, 2, 3, 8, 16, 17, 33, 64, 65, 128, 257, 4096, 16384),
    num_requests=64,
    num_single=4,
    batch_sizes=(16, 64),
    check_tokens=12,
    answer=48,
    replayed=96,
    idle_steps=12,
    peer_tokens=32,
)
DRY_RUN = BenchConfig(
    device="cpu",
    dtype="float32",
    large=model_shape("tiny-large", 2, 64, 96, 4, 2, 272, head_dim=16, tie_word_embeddings=False),
    small=model_shape("tiny-small", 1, 32, 256, 2, 1, 272, head_dim=16),
    drafter=model_shape("tiny-drafter", 1, 32, 64, 2, 1, 272, head_dim=16),
    small_drafter=model_shape("tiny-small-drafter", 1, 32, 64, 2, 1, 272, head_dim=16),
    budgets=MappingProxyType(
        dict.fromkeys(SECTIONS, 600.0)
    ),  # however slow the machine is: nothing is left out
    rounds=1,
    copy_bytes=1 << 16,
    product=32,
    working_set=1 << 14,
    kernel_roles=("small",),
    row_counts=(1, 2, 17),
    check_context=20,
    check_places=1,
    sampled_rows=(1,),
    kernel_rows=(1, 2),
    contexts=(20,),
    num_requests=4,
    num_single=1,
    batch_sizes=(2, 4),
    check_tokens=4,
    streams=(1, 2, 3),
    fast_streams=(1, 2),
    prompt=6,
    answer=6,
    long_prompt=24,
    replayed=8,
    idle_steps=2,
    peer_tokens=3,
)


def write_model(folder: Path, shape: ModelShape, dtype: str, context: int = 1 << 16) -> Path:
    """A directory that `--load-format dummy` can load: config.json, and nothing else."""
    model_type = "qwen2" if shape.name.startswith("qwen") else "llama"
    config = {
        "model_type": model_type,
        "architectures": [MODEL_TYPES[model_type]],
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
