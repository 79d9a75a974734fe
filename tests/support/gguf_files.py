"""Writes GGUF files for tests: valid ones like llama.cpp's converter, and arbitrary bytes with RawGGUF."""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import TokenType
from safetensors.torch import load_file
from torch import Tensor

from foreword.models.model_loader import check_weights, read_model_info
from foreword.weights.gguf.tensor_names import gguf_name
from tests.support import gemma4_checkpoints as gemma4
from tests.support.checkpoints import (
    DELTA_NET_FAMILIES,
    LATENT_FAMILIES,
    LFM2_FAMILIES,
    MAMBA2_FAMILIES,
    MOE_FAMILIES,
)
from tests.support.forward_helpers import ForwardHelper
from tests.support.gguf_written_names import WRITTEN
from tests.support.layouts import LAYER_NORM_FAMILIES

ARCHITECTURES = {
    "bailing_moe_v2": "bailingmoe2",
    "cohere": "command-r",
    "glm4_moe": "glm4moe",
    "hunyuan_v1_moe": "hunyuan-moe",
    "minimax_m2": "minimax-m2",
    "ernie4_5_moe": "ernie4_5-moe",
    "deepseek_v2": "deepseek2",
    "deepseek_v3": "deepseek2",
    "glm4_moe_lite": "deepseek2",
    "mistral": "llama",
    "falcon_h1": "falcon-h1",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gemma4_unified_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "granitemoeshared": "granitemoe",
    "granitemoehybrid": "granitehybrid",
    "hunyuan_v1_dense": "hunyuan-dense",
    "lfm2_moe": "lfm2moe",
    "ministral3": "mistral3",
    "mixtral": "llama",
    "nemotron_h": "nemotron_h_moe",
    "phi": "phi2",
    "solar_open": "glm4moe",
    "olmo3": "olmo2",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
ROUTED_FAMILIES = ("bailing_moe_v2", "dots1", "glm4_moe", "solar_open")
EXAONE_NAMES = {
    "transformer.wte": "model.embed_tokens",
    "transformer.h.": "model.layers.",
    "transformer.ln_f": "model.norm",
    "attn.attention.out_proj": "self_attn.o_proj",
    "attn.attention": "self_attn",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "c_fc_0": "gate_proj",
    "c_fc_1": "up_proj",
    "c_proj": "down_proj",
}
# Families without an architecture of files, or with one that is not supported
NO_GGUF_FAMILIES = (
    *("bailing_moe", "cohere2_moe", "exaone_moe", "glm", "granite_swa"),
    *("mellum", "ministral", "mistral4", "phimoe"),
)
CODEBOOK_TYPES = (Kind.IQ1_S, Kind.IQ2_XXS, Kind.IQ2_XS, Kind.IQ2_S, Kind.IQ3_XXS, Kind.IQ3_S)
# Types that the `gguf` package can only read: a block's bytes with its scale and its minimum, and the minimum
# beside a scale of 1 that centers the values.
SCALE_PLACES: dict[Kind, tuple[int, int | None, float]] = {
    Kind.Q4_K: (0, 2, 7.5),
    Kind.Q5_K: (0, 2, 15.5),
    Kind.Q6_K: (208, None, 0),
    Kind.Q2_K: (80, 82, 1.5),
    Kind.Q3_K: (108, None, 0),
    **dict.fromkeys((Kind.IQ4_NL, Kind.IQ4_XS, *CODEBOOK_TYPES), (0, None, 0)),
}
PERMUTED_FAMILIES = ("arcee", "llama", "ministral3", "mistral", "mixtral", "smollm3")
DEFAULT_ROTARY_FACTORS = {
    **dict.fromkeys(DELTA_NET_FAMILIES, 0.25),
    "glm4": 0.5,
    "glm4_moe": 0.5,
    "nemotron": 0.5,
    "phi": 0.5,
    "stablelm": 0.25,
}
EXPERT_PATTERN = re.compile(r"(.+\.experts)\.(\d+)\.(\w+)\.weight")
MTP_NAMES = {
    "mtp.fc.": "eh_proj.",
    "mtp.pre_fc_norm_embedding.": "enorm.",
    "mtp.pre_fc_norm_hidden.": "hnorm.",
    "mtp.norm.": "shared_head.norm.",
    "mtp.layers.0.": "",
}
# What the converter writes beside the keys that llama.cpp reads, or with the values of its defaults
DEFAULT_KEYS: dict[str, dict[str, Any]] = {
    "cohere": {"rope.scaling.type": "none"},
    "cohere2": {"rope.scaling.type": "none"},
    "exaone": {"attention.layer_norm_epsilon": 1e-5},
    "gemma3_text": {"rope.freq_base_swa": 10000.0},
    "glm4_moe_lite": {"expert_group_count": 1, "expert_group_used_count": 1},
    "nemotron": {"attention.layer_norm_rms_epsilon": 1e-5, "rope.scaling.type": "none"},
    "nemotron_h": {"attention.layer_norm_epsilon": 1e-5},
    "olmo3": {"rope.freq_base_swa": 10000.0},
    "phi3": {"rope.scaling.original_context_length": 512},
    "stablelm": {"use_parallel_residual": False},
}
SHORT_NAMES = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
Array = npt.NDArray[Any]
Write = Callable[[gguf.GGUFWriter], None]


def write_gguf(
    checkpoint: Path,
    path: Path,
    tensor_type: Kind | Callable[[str], Kind] = Kind.F32,
    more: Write | None = None,
    architecture: str = "",
    fuse_experts: bool = False,
    join_qkv: bool = False,
    join_qkvz: bool = False,
    join_kv_b: bool = False,
    **metadata: Any,
) -> Path:
    """Convert a checkpoint of tests/support/checkpoints.py; `tensor_type` may depend on the name.

    more          writes further keys and tensors
    architecture  of the file, if not the usual one of the family
    fuse_experts  gate and up of all experts in one tensor
    join_qkv      q, k and v in one tensor, as in older files of phi2
    join_qkvz     in_proj_qkvz of Qwen3-Next stays one tensor, as in older files
    join_kv_b     kv_b_proj stays one tensor, and lengths are those of heads, as in older files of deepseek2
    metadata      keys of the architecture, dots as two underscores; None removes one
    """
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = architecture or ARCHITECTURES.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    keys = _keys(config) | _latent_keys(config, join_kv_b) | DEFAULT_KEYS.get(config["model_type"], {})
    keys = _written_keys(keys, config) | {key.replace("__", "."): value for key, value in metadata.items()}
    for key, value in keys.items():
        _add(writer, f"{architecture}.{key}", value)
    backend = tokenizers.Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    files = json.loads((checkpoint / "tokenizer_config.json").read_text())
    template, size = files["chat_template"], config["vocab_size"]
    write_byte_level(
        writer, backend, "gpt-2", bos="<bos>", eos="<eos>", add_bos=False, template=template, size=size
    )
    stored = load_file(checkpoint / "model.safetensors")
    stored = {name.replace("backbone.", "model."): tensor for name, tensor in stored.items()}
    stored = {_mtp_name(name, config): tensor for name, tensor in stored.items()}
    if config["model_type"] == "exaone":
        stored = {_llama_name(name): tensor for name, tensor in stored.items()}
    if architecture == "apertus":
        stored = split_xielu(writer, stored)
    tensors = stack_experts(join_qkv_proj(stored) if join_qkv else stored, fuse_experts)
    if config["model_type"] == "granitemoehybrid" and not config["num_local_experts"]:
        tensors = {name.replace("shared_mlp", "mlp"): tensor for name, tensor in tensors.items()}
    tensors = tensors if join_kv_b else split_kv_b(tensors, config)
    for name, tensor in (tensors if join_qkvz else split_qkvz(tensors, config)).items():
        file_name = gguf_name(name, architecture)
        values = to_gguf_layout(name, tensor, config)
        named_type = tensor_type(file_name) if callable(tensor_type) else tensor_type
        is_float = values.ndim == 1 or file_name.endswith(("conv.weight", "conv1d.weight", "norm.weight"))
        is_float |= file_name.endswith(("ssm_a", "ssm_d"))
        is_float |= "ffn_gate_inp" in file_name or file_name.endswith("bias")
        stored_type = Kind.F32 if is_float else named_type
        writer.add_tensor(file_name, quantize(values, stored_type), raw_dtype=stored_type)
    rope = config.get("rope_parameters") or {
        **(config.get("rope_scaling") or {}),
        "rope_theta": config.get("rope_theta"),
    }
    if architecture in ("apertus", "exaone") and rope.get("rope_type") == "llama3":
        divisors = llama3_divisors(rope, config["hidden_size"] // 4)
        writer.add_tensor("rope_freqs.weight", np.array(divisors, np.float32))
    if architecture == "gemma4":
        writer.add_tensor(gemma4.ROPE_FREQS, np.array(gemma4.rope_divisors(config), np.float32))
    if more is not None:
        more(writer)
    finish(writer)
    return path


def check_same_model(checkpoint: Path, file: Path) -> None:
    """A file of floats has the checkpoint's logits in every bit, its parameters and sizes of caches."""
    prompt = torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(7)).tolist()
    assert torch.equal(ForwardHelper(file).logits(prompt), ForwardHelper(checkpoint).logits(prompt))
    ours, theirs = read_model_info(file), read_model_info(checkpoint)
    assert (ours.parameters, ours.state_shapes) == (theirs.parameters, theirs.state_shapes)
    assert ours.kv_values_per_token == theirs.kv_values_per_token
    assert check_weights(file) > 0


def _mtp_name(name: str, config: dict[str, Any]) -> str:
    """Tensors of Qwen's MTP head by the names of DeepSeek's, which the converter gives them."""
    prefix = f"model.layers.{config['num_hidden_layers']}."
    for theirs, ours in MTP_NAMES.items():
        if name.startswith(theirs):
            return prefix + ours + name.removeprefix(theirs)
    return name


def _llama_name(name: str) -> str:
    """EXAONE's names of tensors"""
    for old, new in EXAONE_NAMES.items():
        name = name.replace(old, new)
    return name


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stack_experts(tensors: dict[str, Tensor], fused: bool) -> dict[str, Tensor]:
    """Tensors by names that gguf_name() knows: of experts one for gate, up and down, as in GGUF files."""
    result: dict[str, Tensor] = {}
    experts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".experts.")
        last = last if module.endswith(("mlp", "moe", "feed_forward")) else ""  # Gemma 4's stay as they are
        if match := EXPERT_PATTERN.fullmatch(name):
            kind = SHORT_NAMES.get(match[3], match[3])
            experts.setdefault(f"{match[1]}.{kind}", {})[int(match[2])] = tensor
        elif last.startswith("gate_up_proj"):  # gpt-oss: rows of gate and up alternate
            rows = tensor.mT if tensor.ndim == 3 else tensor
            suffix = last.removeprefix("gate_up_proj")
            result[f"{module}.experts.gate_proj{suffix}"] = rows[:, ::2]
            result[f"{module}.experts.up_proj{suffix}"] = rows[:, 1::2]
        elif last == "down_proj":
            result[name] = tensor.mT
        elif name.endswith("moe.input_linear.weight"):
            prefix = name.removesuffix("input_linear.weight")
            result[f"{prefix}experts.gate_proj"], result[f"{prefix}experts.up_proj"] = tensor.chunk(2, 1)
        elif name.endswith("moe.output_linear.weight"):
            result[f"{name.removesuffix('output_linear.weight')}experts.down_proj"] = tensor
        elif name.endswith("shared_mlp.input_linear.weight"):
            for half, kind in zip(tensor.chunk(2), ("gate_proj", "up_proj"), strict=True):
                result[name.replace("input_linear", kind)] = half
        else:
            result[name.replace("shared_mlp.output_linear", "shared_mlp.down_proj")] = tensor
    for name, parts in experts.items():
        result[name] = torch.stack([parts[index] for index in range(len(parts))])
    if fused:
        for name in [name for name in result if name.endswith("experts.gate_proj")]:
            module = name.removesuffix("gate_proj")
            gate, up = result.pop(name), result.pop(f"{module}up_proj")
            result[f"{module}gate_up_proj"] = torch.cat((gate, up), 1)
    return result


def split_xielu(writer: gguf.GGUFWriter, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors without the constants of activations, which become keys."""
    for name in ("alpha_p", "alpha_n", "beta", "eps"):
        constants = [value for key, value in tensors.items() if key.endswith(f"act_fn.{name}")]
        writer.add_array(f"xielu.{name}", [float(value) for value in constants])
    return {name: value for name, value in tensors.items() if ".act_fn." not in name}


def llama3_divisors(rope: dict[str, Any], head_dim: int) -> list[float]:
    """Divisors of frequencies of RoPE's type llama3, as the converter writes them."""
    wavelengths = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    ratio = rope["original_max_position_embeddings"] / wavelengths
    smooth = ((ratio - low) / (high - low)).clip(0, 1)
    divisors: list[float] = (1 / ((1 - smooth) / rope["factor"] + smooth)).tolist()
    return divisors


def join_qkv_proj(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """q_proj, k_proj and v_proj in one, weights and biases."""
    result = {name: tensor for name, tensor in tensors.items() if ".q_proj." not in name}
    for name in tensors.keys() - result.keys():
        parts = [name.replace(".q_proj.", f".{letter}_proj.") for letter in "qkv"]
        result[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat([tensors[part] for part in parts])
        result = {other: tensor for other, tensor in result.items() if other not in parts}
    return result


def split_qkvz(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Rows of q, k, v and z of all key heads instead of one key head after the other."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, joined, _ = name.partition("in_proj_qkvz")
        if not joined:
            result[name] = tensor
            continue
        groups, size = config["linear_num_key_heads"], config["linear_key_head_dim"]
        values = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
        parts = tensor.reshape(groups, -1, tensor.shape[1]).split([size, size, values, values], 1)
        *qkv, z = (part.flatten(0, 1) for part in parts)
        result |= {f"{prefix}in_proj_qkv.weight": torch.cat(qkv), f"{prefix}in_proj_z.weight": z}
    return result


def split_kv_b(tensors: dict[str, Tensor], config: dict[str, Any]) -> dict[str, Tensor]:
    """Keys [heads, L, D] and values [heads, D, L] of latent attention in tensors of their own."""
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        prefix, joined, _ = name.partition("kv_b_proj")
        if not joined:
            result[name] = tensor
            continue
        sizes = [config["qk_nope_head_dim"], config["v_head_dim"]]
        keys, values = tensor.view(-1, sum(sizes), tensor.shape[1]).split(sizes, 1)
        result |= {f"{prefix}k_b_proj.weight": keys.mT, f"{prefix}v_b_proj.weight": values}
    return result


def _latent_keys(config: dict[str, Any], is_older: bool) -> dict[str, Any]:
    """Keys of deepseek2."""
    if config["model_type"] not in LATENT_FAMILIES:
        return {}
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    lengths = config["qk_nope_head_dim"] + rope, config["v_head_dim"]
    yarn, is_sigmoid = config.get("rope_parameters", {}), config["model_type"] != "deepseek_v2"
    keys = {
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.head_count_kv": config["num_attention_heads"] if is_older else 1,
        "attention.key_length": lengths[0] if is_older else rank + rope,
        "attention.value_length": lengths[1] if is_older else rank,
        "attention.key_length_mla": None if is_older else lengths[0],
        "attention.value_length_mla": None if is_older else lengths[1],
        "rope.dimension_count": rope,
        "leading_dense_block_count": config.get("first_k_dense_replace", 1),
        "expert_count": config["n_routed_experts"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": True if is_sigmoid else None,
        "expert_gating_func": 2 if is_sigmoid else None,
        "expert_group_count": config.get("n_group"),
        "expert_group_used_count": config.get("topk_group"),
    }
    if "mscale_all_dim" in yarn:
        keys["rope.scaling.yarn_log_multiplier"] = 0.1 * yarn["mscale_all_dim"]
    return keys


def _keys(config: dict[str, Any]) -> dict[str, Any]:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    default_factor = DEFAULT_ROTARY_FACTORS.get(config["model_type"], 1.0)
    norm = "layer_norm" if config["model_type"] in LAYER_NORM_FAMILIES else "layer_norm_rms"
    eps = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "norm_epsilon", "layer_norm_epsilon")
    keys = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": _feed_forward_length(config),
        "block_count": config["num_hidden_layers"],
        "attention.head_count": heads,
        "attention.head_count_kv": config["num_key_value_heads"] or heads,
        f"attention.{norm}_epsilon": next(config[key] for key in eps if key in config),
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "rope.dimension_count": config.get(
            "rotary_dim", int(head_dim * config.get("partial_rotary_factor", default_factor))
        ),
        "rope.freq_base": config.get("rope_theta"),
        "vocab_size": config["vocab_size"],
    }
    if config["model_type"].startswith("gemma4"):
        keys |= gemma4.gguf_keys(config)
    return keys | _family_keys(config) | _state_keys(config)


def _written_keys(keys: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """Without those that the converter leaves out for the family."""
    written = WRITTEN[config["model_type"]].keys.split()
    lengths = () if config.get("head_dim") else ("attention.key_length", "attention.value_length")
    optional = ("expert_gating_func", "rope.dimension_count", "rope.freq_base", "vocab_size", *lengths)
    return {key: value for key, value in keys.items() if key in written or key not in optional}


def _feed_forward_length(config: dict[str, Any]) -> int | None:
    """LFM2 adjusts the size of its MLPs; Solar Open has none."""
    size: int | None = config.get("intermediate_size")
    if size is None or config["model_type"] != "lfm2":
        return size
    multiple = config.get("block_multiple_of", 256)
    return -(-(2 * size // 3) // multiple) * int(multiple)


def _state_keys(config: dict[str, Any]) -> dict[str, Any]:
    """Keys of families whose layers have states."""
    family, types = config["model_type"], config.get("layer_types", [])
    kv_heads = config["num_key_value_heads"]
    if family == "nemotron_h":
        return _nemotron_h_keys(config)
    if family in MAMBA2_FAMILIES:
        return _mamba2_keys(config, [kv_heads * (item == "full_attention") for item in types])
    if family in LFM2_FAMILIES:
        keys = {
            "attention.head_count_kv": [kv_heads * (item == "full_attention") for item in types],
            "shortconv.l_cache": config.get("conv_L_cache", 3),
        }
        if family == "lfm2_moe":
            keys |= {"leading_dense_block_count": config["num_dense_layers"], "expert_gating_func": 2}
        return keys
    if family not in DELTA_NET_FAMILIES:
        return {}
    keys = {
        "attention.recurrent_layers": [item == "linear_attention" for item in types] or None,
        "full_attention_interval": config.get("full_attention_interval", 4),
        "ssm.conv_kernel": config.get("linear_conv_kernel_dim", 4),
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
    }
    return keys if family == "qwen3_next" else keys | {"rope.dimension_sections": [11, 11, 10, 0]}


def _nemotron_h_keys(config: dict[str, Any]) -> dict[str, Any]:
    pattern, is_moe = config["hybrid_override_pattern"], "E" in config["hybrid_override_pattern"]
    size = config["moe_intermediate_size" if is_moe else "intermediate_size"]
    keys = {
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind == "*") for kind in pattern],
        "feed_forward_length": [size * (kind in "E-") for kind in pattern],
        "ssm.conv_kernel": config.get("conv_kernel", 4),
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "rope.scaling.finetuned": False,
    }
    experts = {
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
        "expert_shared_count": 1,
        "expert_weights_norm": config.get("norm_topk_prob", True),
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_group_count": 1,
        "expert_group_used_count": 1,
    }
    return keys | (experts if is_moe else dict.fromkeys(experts))


def _mamba2_keys(config: dict[str, Any], kv_heads: list[int]) -> dict[str, Any]:
    keys = {
        "ssm.conv_kernel": config.get("mamba_d_conv", 4),
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "ssm.inner_size": config["mamba_n_heads"] * config["mamba_d_head"],
    }
    if config["model_type"] == "falcon_h1":
        return keys
    keys |= {"attention.head_count_kv": kv_heads, "rope.scaling.finetuned": False}
    if not config["num_local_experts"]:
        keys["feed_forward_length"] = config["shared_intermediate_size"]
    return keys


def _family_keys(config: dict[str, Any]) -> dict[str, Any]:
    family = config["model_type"]
    keys: dict[str, Any] = {}
    has_window = family in ("cohere2", "exaone4", "gpt_oss", "olmo3", "phi3", "starcoder2")
    if has_window or (family.startswith("gemma") and family != "gemma"):
        window = config["sliding_window"]
        keys["attention.sliding_window"] = window if family == "starcoder2" else window or 0
    if family in ("exaone4", "olmo3") and config.get("layer_types"):
        is_sliding = [item == "sliding_attention" for item in config["layer_types"]]
        keys["attention.sliding_window_pattern"] = is_sliding
    if family == "gemma2":
        keys["attn_logit_softcapping"] = config["attn_logit_softcapping"]
        keys["final_logit_softcapping"] = config["final_logit_softcapping"]
    if family in ("cohere", "cohere2"):
        keys["logit_scale"] = config["logit_scale"]
    if family == "cohere2" and config["sliding_window_pattern"] != 4:
        keys["attention.sliding_window_pattern"] = config["sliding_window_pattern"]
    if family in MOE_FAMILIES and family != "nemotron_h":
        counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        keys["expert_count"] = next(config[key] for key in counts if key in config)
        used = next(config[key] for key in ("moe_topk", "moe_k", "num_experts_per_tok") if key in config)
        keys["expert_used_count"] = used[0] if isinstance(used, list) else used
        keys["expert_feed_forward_length"] = config.get("moe_intermediate_size")
        shared = ("shared_expert_intermediate_size", "shared_intermediate_size")
        keys["expert_shared_feed_forward_length"] = next(
            (config[key] for key in shared if key in config), None
        )
    if family in ("gpt_oss", "hunyuan_v1_moe", "minimax_m2"):
        keys["expert_feed_forward_length"] = config["intermediate_size"]
    if family in ROUTED_FAMILIES:
        shared = config.get("n_shared_experts") or config.get("num_shared_experts") or 0
        keys |= {
            "expert_gating_func": 2,
            "expert_shared_count": shared,
            "expert_weights_norm": config["norm_topk_prob"],
            "expert_weights_scale": config["routed_scaling_factor"],
            "expert_group_count": config["n_group"],
            "expert_group_used_count": config["topk_group"],
            "leading_dense_block_count": config.get("first_k_dense_replace"),
        }
    if family == "bailing_moe_v2":
        keys["expert_shared_feed_forward_length"] = shared * config["moe_intermediate_size"]
    if family == "ernie4_5_moe":
        keys |= {
            "leading_dense_block_count": config["moe_layer_start_index"],
            "interleave_moe_layer_step": 1,
            "expert_shared_count": config["moe_num_shared_experts"],
            "expert_shared_feed_forward_length": config["intermediate_size"] // config["num_key_value_heads"],
        }
    if family == "minimax_m2":
        keys["expert_gating_func"] = 2
    if family == "hunyuan_v1_moe":
        keys |= {"expert_shared_count": 1, "expert_shared_feed_forward_length": config["intermediate_size"]}
    if family.startswith("granite"):
        keys["attention.scale"] = config["attention_multiplier"]
        keys["embedding_scale"] = config["embedding_multiplier"]
        keys["residual_scale"] = config["residual_multiplier"]
        keys["logit_scale"] = config["logits_scaling"]
    rope = config.get("rope_parameters", {})
    rope = rope.get("full_attention", rope)
    if family == "apertus":
        keys["rope.freq_base"] = rope["rope_theta"]
    if rope.get("rope_type") == "yarn":
        keys["rope.freq_base"] = rope["rope_theta"]
        keys["rope.scaling.type"] = "yarn"
        keys["rope.scaling.factor"] = rope["factor"]
        keys["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    if family == "ministral3":
        keys["rope.scaling.yarn_log_multiplier"] = rope["mscale_all_dim"]
        keys["attention.temperature_scale"] = rope["llama_4_scaling_beta"]
    if family.startswith("hunyuan_v1"):  # the converter stretches the base
        size = config["head_dim"]
        alpha = config["rope_scaling"]["alpha"]
        keys["rope.freq_base"] = config["rope_theta"] * alpha ** (size / (size - 2))
        keys["rope.scaling.type"] = "none"
        keys["rope.scaling.factor"] = 1.0
        keys["rope.scaling.original_context_length"] = config["max_position_embeddings"]
    return keys


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    adders = {
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        str: writer.add_string,
        list: writer.add_array,
    }
    if value is not None:
        adders[type(value)](key, value)


def to_gguf_layout(name: str, tensor: Tensor, config: dict[str, Any]) -> Array:
    """Changes by the converter: permuted rows of q and k, norms plus 1, and those of states."""
    value = _to_state_layout(name, tensor.to(torch.float32), config)
    if config["model_type"] == "falcon_h1":
        value = _multiply(name, value, config)
    family = config["model_type"]
    if family in DELTA_NET_FAMILIES and name.endswith("norm.weight") and "linear_attn" not in name:
        value = value + 1
    if family in ("gemma", "gemma2", "gemma3_text", "nemotron") and name.endswith("norm.weight"):
        value = value + 1
    if (family in (*PERMUTED_FAMILIES, "nemotron_h") or family.startswith("granite")) and (
        ".q_proj." in name or ".k_proj." in name
    ):
        key = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
        heads = config[key] or config["num_attention_heads"]
        value = value.reshape(heads, 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
    if name.endswith("shared_expert_gate.weight"):
        value = value.squeeze(0)
    return value.numpy()


def _to_state_layout(name: str, value: Tensor, config: dict[str, Any]) -> Tensor:
    """Convolutions lose their middle dimension, decays get their sign; Qwen3.5's value heads are tiled."""
    if name.endswith(("conv.conv.weight", "conv1d.weight")):
        value = value.squeeze(1)
    if name.endswith("A_log"):
        value = -value.exp()
    if config["model_type"] in MAMBA2_FAMILIES:
        if name.endswith(("A_log", ".D")):
            value = value[:, None]
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            value = value.view(config.get("mamba_n_groups") or config["n_groups"], -1)
    if config["model_type"] not in ("qwen3_5_text", "qwen3_5_moe_text") or ".linear_attn." not in name:
        return value
    groups, size = config["linear_num_key_heads"], config["linear_value_head_dim"]
    heads = config["linear_num_value_heads"]
    keys = 2 * groups * config["linear_key_head_dim"]
    last = name.partition(".linear_attn.")[2].partition(".")[0]
    if last in ("in_proj_qkv", "conv1d"):
        return torch.cat((value[:keys], _tile(value[keys:], groups, heads, size)))
    if last == "out_proj":
        return _tile(value.t(), groups, heads, size).t()
    sizes = {"in_proj_z": size, **dict.fromkeys(("in_proj_a", "in_proj_b", "A_log", "dt_bias"), 1)}
    return _tile(value, groups, heads, sizes[last]) if last in sizes else value


def _multiply(name: str, value: Tensor, config: dict[str, Any]) -> Tensor:
    """Falcon-H1's multipliers, which the converter puts into the weights."""

    def factor(*names: str) -> float:
        return math.prod(config.get(f"{name}_multiplier", 1.0) for name in names)

    module = name.split(".")[-2]
    gate, down = config.get("mlp_multipliers", (1.0, 1.0))
    factors = {
        "embed_tokens": factor("embedding"),
        "lm_head": factor("lm_head"),
        **{f"{letter}_proj": factor("attention_in") for letter in "qv"},
        "k_proj": factor("attention_in", "key"),
        "o_proj": factor("attention_out"),
        "out_proj": factor("ssm_out"),
        "gate_proj": gate,
        "down_proj": down,
    }
    if module != "in_proj":
        return value * factors.get(module, 1.0)
    inner, groups = config["mamba_d_ssm"], config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = torch.tensor((inner, inner, groups, groups, config["mamba_n_heads"]))
    parts = [factor("ssm_in") * part for part in config.get("ssm_multipliers", (1.0,) * 5)]
    return value * torch.tensor(parts).repeat_interleave(sizes)[:, None]


def _tile(rows: Tensor, groups: int, heads: int, size: int) -> Tensor:
    """Rows of heads in groups -> the first head of each group, the second of each, ..."""
    return rows.reshape(groups, heads // groups, size, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def quantize(value: Array, kind: Kind) -> Array:
    """[N, K] -> blocks of this type, bytes [N, bytes of a row]; floats stay floats.

    The types of SCALE_PLACES get random codes, and scales that keep the size of the values.
    """
    if kind in SCALE_PLACES:
        return _random_codes(value, kind).reshape(*value.shape[:-1], -1)
    return gguf.quantize(np.ascontiguousarray(value), kind)


def _random_codes(value: Array, kind: Kind) -> Array:
    """uint8 [blocks, bytes of a block], each a function of its own values."""
    length, size = gguf.GGML_QUANT_SIZES[kind]
    rows = np.ascontiguousarray(value, np.float32).reshape(-1, length)
    blocks = (rows.view(np.uint32) * np.uint32(2654435761) >> 24).astype(np.uint8)[:, :size]
    scale_place, minimum_place, minimum = SCALE_PLACES[kind]

    def set_scales(scales: Array) -> None:
        for place, values in ((scale_place, scales), (minimum_place, minimum * scales)):
            if place is not None:
                blocks[:, place : place + 2] = values.astype(np.float16)[:, None].view(np.uint8)

    set_scales(np.ones(len(rows), np.float32))
    set_scales(rows.std(1) / gguf.dequantize(blocks, kind).std(1))
    return blocks


def write_byte_level(
    writer: gguf.GGUFWriter,
    backend: tokenizers.Tokenizer,
    pre: str,
    *,
    bos: str | None = None,
    eos: str | None = None,
    add_bos: bool | None = None,
    template: str | None = None,
    size: int | None = None,
) -> None:
    """A byte-level BPE as the converter writes it; ids without a token become unused tokens."""
    model = json.loads(backend.to_str())["model"]
    tokens = {index: token for token, index in backend.get_vocab(with_added_tokens=True).items()}
    added = backend.get_added_tokens_decoder()
    total = size or max(tokens) + 1
    kinds = [_token_type(added.get(index)) if index in tokens else TokenType.UNUSED for index in range(total)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list([tokens.get(index, f"[PAD{index}]") for index in range(total)])
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    _write_specials(writer, backend, bos, eos, add_bos, template)


def write_sentencepiece(
    writer: gguf.GGUFWriter,
    pieces: list[tuple[str, float, TokenType]],
    *,
    bos: int | None = 1,
    eos: int | None = 2,
    unknown: int | None = 0,
    add_space_prefix: bool | None = None,
    template: str | None = None,
    merges: Sequence[str] = (),
) -> None:
    """A SentencePiece model as the converter writes it; with merges that of Gemma 4."""
    tokens, scores, kinds = zip(*pieces, strict=True)
    writer.add_tokenizer_model("gemma4" if merges else "llama")
    if merges:
        writer.add_token_merges(merges)
    else:
        writer.add_tokenizer_pre("default")
    writer.add_token_list(list(tokens))
    writer.add_token_scores(list(scores))
    writer.add_token_types(list(kinds))
    for index, add in (
        (bos, writer.add_bos_token_id),
        (eos, writer.add_eos_token_id),
        (unknown, writer.add_unk_token_id),
    ):
        if index is not None:
            add(index)
    if add_space_prefix is not None:
        writer.add_add_space_prefix(add_space_prefix)
    if template is not None:
        writer.add_chat_template(template)


def _token_type(added: Any) -> TokenType:
    if added is None:
        return TokenType.NORMAL
    return TokenType.CONTROL if added.special else TokenType.USER_DEFINED


def _write_specials(
    writer: gguf.GGUFWriter,
    backend: tokenizers.Tokenizer,
    bos: str | None,
    eos: str | None,
    add_bos: bool | None,
    template: str | None,
) -> None:
    for token, add in ((bos, writer.add_bos_token_id), (eos, writer.add_eos_token_id)):
        if token is not None:
            add(backend.token_to_id(token))
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    if template is not None:
        writer.add_chat_template(template)


class RawGGUF:
    """Bytes of a GGUF file. `text`, `pair` and `tensor` make its parts."""

    def __init__(self, pairs: list[bytes], tensors: list[bytes], data: bytes = b"") -> None:
        self.pairs, self.tensors, self.data = pairs, tensors, data
        self.magic, self.version, self.alignment = b"GGUF", 3, 32

    def bytes(self, num_tensors: int | None = None, num_pairs: int | None = None) -> bytes:
        counts = (
            len(self.tensors) if num_tensors is None else num_tensors,
            len(self.pairs) if num_pairs is None else num_pairs,
        )
        head = (
            self.magic
            + struct.pack("<IQQ", self.version, *counts)
            + b"".join(self.pairs)
            + b"".join(self.tensors)
        )
        return head + bytes(-len(head) % self.alignment) + self.data

    @staticmethod
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    @classmethod
    def pair(cls, key: str, value_type: int, value: bytes) -> bytes:
        return cls.text(key) + struct.pack("<I", value_type) + value

    @classmethod
    def tensor(cls, name: str, dims: tuple[int, ...], tensor_type: int = 0, offset: int = 0) -> bytes:
        """dims as in the file: innermost first"""
        return cls.text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor_type, offset)

    @classmethod
    def sample(cls, metadata: Mapping[str, str] | None = None) -> RawGGUF:
        """A valid file with two strings, a list of each kind and two tensors."""
        pairs = [
            cls.pair(key, 8, cls.text(value))
            for key, value in (metadata or {"general.architecture": "llama", "b": "ü"}).items()
        ]
        pairs.append(cls.pair("texts", 9, struct.pack("<IQ", 8, 2) + cls.text("x") + cls.text("yz")))
        pairs.append(cls.pair("numbers", 9, struct.pack("<IQ3f", 6, 3, 0.5, 1, 2)))
        pairs.append(cls.pair("flag", 7, b"\x01"))
        tensors = [cls.tensor("one", (4, 2)), cls.tensor("two", (32, 3), 8, 32)]
        return cls(pairs, tensors, np.arange(8, dtype=np.float32).tobytes() + bytes(3 * 34))
