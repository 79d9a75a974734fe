"""Greedy tokens of Foreword and llama.cpp from the same GGUF files: states, Gemma 4, latent attention.

    python -m benchmarks.peers_gguf_states --peers ENVIRONMENT [--tokens 64]

Random float32 models as the converter writes them (tests/support/gguf_files.py); all values are float32 in
both engines. A line per file: prompts whose tokens are equal, and for the others the first different token.
The engines sum in another order, so that a near tie may differ; a wrong name, order or fold changes the
first tokens. ENVIRONMENT is the folder of peers_setup.make_environment(): a first call compiles llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from foreword import LLM, SamplingParams
from tests.support import gemma4_checkpoints as gemma4
from tests.support.checkpoints import write_checkpoint
from tests.support.gguf_files import write_gguf

sys.path.insert(0, str(Path(__file__).parent))
from peers_setup import make_environment
from peers_worker import Worker

CONTEXT = 512
NUM_TOKENS = 270  # of the tokenizer: Foreword never samples ids without a token
PROMPT_LENGTHS = (3, 20, 64, 65, 150)
LOAD_OPTIONS = MappingProxyType(
    {"threads": 1, "context": CONTEXT, "streams": 1, "kv_type": "f32", "flash": False}
)
HEADS = MappingProxyType({"linear_key_head_dim": 128, "linear_value_head_dim": 128})  # ggml needs them equal
DELTA_NET: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 256,
        "head_dim": 128,
        "layer_types": ...,
        "num_hidden_layers": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        **HEADS,
    }
)
LFM2: Mapping[str, Any] = MappingProxyType(
    {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "layer_types": ["conv", "conv", "full_attention", "conv", "full_attention", "conv"],
    }
)
LATENT: Mapping[str, Any] = MappingProxyType(
    {"kv_lora_rank": 64, "q_lora_rank": 48, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
)
# llama.cpp's shared layers read the last two of the others, which must be one of each kind in this order.
SHARED_LAYERS = [gemma4.SLIDING, gemma4.SLIDING, gemma4.FULL, gemma4.SLIDING, gemma4.FULL]
# Family, options of config.json, options of write_gguf()
MODELS: Mapping[str, tuple[str, Mapping[str, Any], Mapping[str, Any]]] = MappingProxyType(
    {
        "qwen35": ("qwen3_5_text", DELTA_NET, {}),
        "qwen35, as many key heads": ("qwen3_5_text", {**DELTA_NET, "linear_num_key_heads": 6}, {}),
        "qwen35moe": ("qwen3_5_moe_text", DELTA_NET, {}),
        "qwen3next": ("qwen3_next", DELTA_NET, {}),
        "qwen3next, joined qkvz": ("qwen3_next", DELTA_NET, {"join_qkvz": True}),
        "gemma4, shared K and V": (
            "gemma4_text",
            {"hidden_size": 256, "hidden_size_per_layer_input": 64, "layer_types": SHARED_LAYERS},
            {},
        ),
        "gemma4, experts": ("gemma4_text", {**gemma4.EXPERTS, "hidden_size": 256}, {}),
        "gemma4, values are keys": ("gemma4_unified_text", {"hidden_size": 256}, {}),
        "deepseek2, softmax": ("deepseek_v2", {**LATENT, "topk_method": "greedy"}, {}),
        "deepseek2, groups": ("deepseek_v3", LATENT, {}),
        "deepseek2, GLM": ("glm4_moe_lite", {**LATENT, "rms_norm_eps": 1e-5}, {}),
        "ernie4_5-moe": ("ernie4_5_moe", {"intermediate_size": 192}, {}),
        "exaone": ("exaone", {"rope_scaling": ...}, {}),
        "lfm2": ("lfm2", LFM2, {}),
        "lfm2moe": ("lfm2_moe", {**LFM2, "num_dense_layers": 2, "routed_scaling_factor": 1.0}, {}),
    }
)


def make_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def generate(file: Path, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Tokens of Foreword."""
    llm = LLM(str(file), dtype="float32", speculate="off", max_model_len=CONTEXT)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [list(output.token_ids) for output in outputs]


def first_difference(ours: Sequence[int], theirs: Sequence[int]) -> int | None:
    """The first place of a different token; None if all are equal."""
    pairs = enumerate(zip(ours, theirs, strict=True))
    return next((place for place, (one, other) in pairs if one != other), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peers", type=Path, required=True, help="environment of peers_setup.py")
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    environment, prompts = make_environment(arguments.peers), make_prompts()
    script = Path(__file__).with_name("peers_llama_cpp.py")
    differences: dict[str, list[int | None]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for index, (model, (family, options, keys)) in enumerate(MODELS.items()):
            checkpoint = write_checkpoint(folder / str(index), family, vocab_size=NUM_TOKENS, **options)
            file = write_gguf(checkpoint, folder / f"{index}.gguf", **keys)
            ours = generate(file, prompts, arguments.tokens)
            worker = Worker(environment.python, script, folder / "log", environment.variables)
            worker("load", path=str(file), **LOAD_OPTIONS)
            theirs = [
                worker("streams", prompts=[each], tokens=arguments.tokens)["ids"][0] for each in prompts
            ]
            worker.close()
            found = [first_difference(one, other) for one, other in zip(ours, theirs, strict=True)]
            differences[model] = found
            distinct = min(len(set(ids)) for ids in ours)
            places = [place for place in found if place is not None]
            print(
                f"{model:28} {found.count(None)} of {len(found)} prompts equal, {arguments.tokens} tokens "
                f"({distinct} different or more)" + (f"; others from token {places}" if places else "")
            )
    print(json.dumps({"tokens": arguments.tokens, "first_differences": differences}))


if __name__ == "__main__":
    main()
