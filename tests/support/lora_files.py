"""LoRA adapters for the tiny checkpoints: written as PEFT and llama.cpp do, and merged into a checkpoint."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foreword.weights.gguf.tensor_names import gguf_name
from tests.support.checkpoints import write_json
from tests.support.gguf_files import finish

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "query_key_value", "dense")
# Branches with state: Gated DeltaNet, and short convolutions, whose out_proj is also that of LFM2's attention
STATES = (
    "in_proj_qkv",
    "in_proj_z",
    "in_proj_a",
    "in_proj_b",
    "in_proj_qkvz",
    "in_proj_ba",
    "in_proj",
    "out_proj",
)
LINEAR = (
    *(*ATTENTION, *STATES, "gate_proj", "up_proj", "down_proj", "qkv_proj", "gate_up_proj"),
    *("w1", "w2", "w3", "c_fc", "c_fc_0", "c_fc_1", "c_proj", "fc1", "fc2"),
)


def projections(checkpoint: Path, modules: Iterable[str]) -> dict[str, tuple[int, int]]:
    """Shapes (N, K) of the checkpoint's linear layers of these names, by module path."""
    tensors = load_file(checkpoint / "model.safetensors")
    paths = {name.removesuffix(".weight"): value.shape for name, value in tensors.items() if value.dim() == 2}
    return {
        path: (shape[0], shape[1])
        for path, shape in paths.items()
        if path.split(".")[-1] in modules and "vision" not in path
    }


def write_adapter(
    path: Path,
    checkpoint: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    modules: Iterable[str] = LINEAR,
    ranks: Mapping[str, int] | None = None,
    strength: float = 1.0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Path:
    """A directory as PEFT saves it.

    ranks    exceptions from `rank`, by the end of a module's path
    options  of adapter_config.json
    """
    path.mkdir(parents=True, exist_ok=True)
    rng = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for module, (rows, columns) in projections(checkpoint, modules).items():
        r = next((size for end, size in (ranks or {}).items() if module.endswith(end)), rank)
        a = torch.randn(r, columns, generator=rng) * columns**-0.5
        b = torch.randn(rows, r, generator=rng) * (strength * r**-0.5)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.to(dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.to(dtype)
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(checkpoint),
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "lora_dropout": 0.1,
        "bias": "none",
        "task_type": "CAUSAL_LM",
        **({"rank_pattern": dict(ranks)} if ranks else {}),
        **options,
    }
    write_json(path / "adapter_config.json", config)
    save_file(tensors, path / "adapter_model.safetensors", metadata={"format": "pt"})
    return path


def merge_adapter(path: Path, checkpoint: Path, adapter: Path) -> Path:
    """The checkpoint with W + scale * B A, computed in float64: what the adapter means."""
    shutil.copytree(checkpoint, path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(checkpoint / "model.safetensors")
    weights = load_file(adapter / "adapter_model.safetensors")
    for name, a in weights.items():
        if ".lora_A." not in name:
            continue
        b = weights[name.replace(".lora_A.", ".lora_B.")]
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        alphas = config.get("alpha_pattern") or {}
        ends = (value for end, value in alphas.items() if module.endswith(f".{end}"))
        alpha = next(ends, config["lora_alpha"])
        scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
        delta = scale * (b.double() @ a.double())
        base = tensors[f"{module}.weight"]
        tensors[f"{module}.weight"] = (base.double() + delta).to(base.dtype)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def write_gguf_adapter(
    path: Path,
    adapter: Path,
    architecture: str,
    heads: Mapping[str, int] | None = None,
    quantization: gguf.GGMLQuantizationType | None = None,
    **metadata: Any,
) -> Path:
    """The adapter of a directory as a GGUF file; `heads`: of those whose rows the converter permutes."""
    config = json.loads((adapter / "adapter_config.json").read_text())
    writer = gguf.GGUFWriter(path, architecture)
    values = {
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(config["lora_alpha"]),
    }
    for key, value in {**values, **metadata}.items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in load_file(adapter / "adapter_model.safetensors").items():
        module, _, letter = (
            name.removeprefix("base_model.model.").removesuffix(".weight").rpartition(".lora_")
        )
        count = (heads or {}).get(module.split(".")[-1])
        if letter == "B" and count is not None:  # each head's rows i and i + D / 2 become neighbours
            tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        array = tensor.contiguous().numpy()
        kind = quantization if letter == "A" else None
        if kind is not None:
            array = gguf.quants.quantize(array, kind)
        target = f"{gguf_name(f'{module}.weight', architecture)}.lora_{letter.lower()}"
        writer.add_tensor(target, array, raw_dtype=kind)
    finish(writer)
    return path
