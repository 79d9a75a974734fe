"""Tiny random checkpoints in Hugging Face's format with a byte-level tokenizer, written without transformers.

Weights are scaled so that greedy outputs vary and do not loop: a sharp head and strong attention.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from tests.support import gemma4_checkpoints as gemma4
from tests.support.layouts import GRANITE, LAYOUT_OPTIONS, LAYOUTS, YARN, Shapes, layout_shapes, linear_shapes

SPECIAL_TOKENS = ("<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
MERGES = ("t h", "i n", "th e", "Ġ the", "a n", "e r", "o n", "Ġ a", "in g", "Ġ t")
EOS = 257  # after the 256 bytes and <bos>
VOCAB_SIZE = 272
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# IMAGE is to be replaced by the family's placeholder.
IMAGE_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
    "torch_dtype": "float32",
}
GEMMA: dict[str, Any] = {
    "head_dim": 16,
    "hidden_act": ...,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
    "sliding_window": 24,
    "tie_word_embeddings": True,
}
EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3}
DELTA_NET: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
DELTA_NET_EXPERTS: dict[str, Any] = {
    **DELTA_NET,
    **EXPERTS,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
MAMBA2: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 32,
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.3,
}
LATENT_YARN: dict[str, Any] = {**YARN, "mscale": 0.9, "mscale_all_dim": 0.9}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "max_window_layers": 2},
    "qwen3": {"head_dim": 16, "use_sliding_window": False, "max_window_layers": 2},
    "phi3": {"original_max_position_embeddings": 512, "sliding_window": None},
    "gemma2": {**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": {
        **GEMMA,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "sliding_window_pattern": 2,
    },
    "gemma4_text": gemma4.SHARED_KV,
    "gemma4_unified_text": gemma4.DENSE,
    "smollm3": {"num_hidden_layers": 4, "use_sliding_window": False},
    "granite": GRANITE,
    "olmo2": {},
    "olmo3": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 24,
        "rope_theta": ...,
        "rope_parameters": {
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "ministral3": {
        "head_dim": 16,
        "rope_theta": ...,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
    },
    "exaone4": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24},
    "ernie4_5": {"head_dim": 16, "use_bias": False},
    "hunyuan_v1_dense": {
        "head_dim": 16,
        "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
    },
    "qwen3_moe": {**EXPERTS, "head_dim": 16, "moe_intermediate_size": 48, "norm_topk_prob": True},
    "qwen2_moe": {**EXPERTS, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": {**EXPERTS, "intermediate_size": 48},
    "gpt_oss": {
        **EXPERTS,
        "num_experts": ...,
        "num_local_experts": 8,
        "intermediate_size": 48,
        "head_dim": 16,
        "sliding_window": 24,
        "rope_theta": ...,
        "rope_parameters": {**YARN, "truncate": False},
    },
    "granitemoe": {
        **GRANITE,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 48,
    },
    "granitemoeshared": {
        **GRANITE,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 48,
        "shared_intermediate_size": 80,
    },
    "granitemoehybrid": {
        **GRANITE,
        **MAMBA2,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "intermediate_size": 48,
        "shared_intermediate_size": 80,
    },
    "falcon_h1": {
        **MAMBA2,
        "num_hidden_layers": 2,
        "layer_types": ...,
        "mamba_d_ssm": 128,
        "mamba_n_groups": 2,
        "mamba_rms_norm": False,
        "projectors_bias": False,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.5,
        "attention_in_multiplier": 1.2,
        "attention_out_multiplier": 0.9,
        "key_multiplier": 0.7,
        "ssm_in_multiplier": 1.3,
        "ssm_out_multiplier": 0.8,
        "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
        "mlp_multipliers": [0.9, 0.8],
    },
    "nemotron_h": {
        **dict.fromkeys(("rms_norm_eps", "rope_theta", "hidden_act"), ...),
        "num_hidden_layers": 5,
        "hybrid_override_pattern": "M*EME",
        "layer_norm_epsilon": 1e-5,
        "head_dim": 16,
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 80,
        "routed_scaling_factor": 1.3,
    },
    "lfm2": {
        "num_hidden_layers": 3,
        "layer_types": ["conv", "full_attention", "conv"],
        "rms_norm_eps": ...,
        "hidden_act": ...,
        "norm_eps": 1e-5,
        "block_multiple_of": 16,
    },
    "lfm2_moe": {
        **EXPERTS,
        "num_hidden_layers": 3,
        "num_dense_layers": 1,
        "layer_types": ["conv", "full_attention", "conv"],
        "rms_norm_eps": ...,
        "hidden_act": ...,
        "norm_eps": 1e-5,
        "moe_intermediate_size": 48,
        "routed_scaling_factor": 1.3,
    },
    "deepseek_v2": {**LATENT, "q_lora_rank": None, "rope_theta": ..., "rope_parameters": LATENT_YARN},
    "deepseek_v3": {
        **LATENT,
        "n_group": 4,
        "topk_group": 2,
        "rope_theta": ...,
        "rope_parameters": LATENT_YARN,
    },
    "glm4_moe_lite": {**LATENT, "first_k_dense_replace": ..., "mlp_layer_types": ["dense", "sparse"]},
    "mistral4": {
        **LATENT,
        "n_shared_experts": 1,
        "rope_theta": ...,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.3},
    },
    "qwen3_5_text": DELTA_NET,
    "qwen3_next": DELTA_NET_EXPERTS,
    "qwen3_5_moe_text": DELTA_NET_EXPERTS,
    **LAYOUT_OPTIONS,
}
MOE_FAMILIES = tuple(
    family
    for family, options in FAMILIES.items()
    if {"num_experts_per_tok", "moe_topk", "moe_k"} & options.keys()
)
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "granite": "GraniteForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "mistral4": "Mistral4ForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    **{family: layout.architecture for family, layout in LAYOUTS.items()},
}
LFM2_FAMILIES = ("lfm2", "lfm2_moe")
DELTA_NET_FAMILIES = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
MAMBA2_FAMILIES = ("granitemoehybrid", "falcon_h1", "nemotron_h")
STATE_FAMILIES = (*LFM2_FAMILIES, *DELTA_NET_FAMILIES, *MAMBA2_FAMILIES)
LATENT_FAMILIES = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
POST_NORM_FAMILIES = ("olmo2", "olmo3", "exaone4")


def write_checkpoint(
    path: Path, family: str = "llama", seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """A checkpoint directory with options of config.json overridden (... removes one, None writes null)."""
    config = write_config(path, family, dtype, **overrides)
    tensors = {name: value.to(getattr(torch, dtype)) for name, value in random_weights(config, seed).items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(path)
    return path


def write_config(
    path: Path, family: str = "llama", dtype: str = "float32", **overrides: Any
) -> dict[str, Any]:
    """The config.json of write_checkpoint() alone; returns its values."""
    path.mkdir(parents=True, exist_ok=True)
    config = {**COMMON, **FAMILIES[family], "torch_dtype": dtype, **overrides}
    config |= {"model_type": family, "architectures": [ARCHITECTURES[family]]}
    config = {key: value for key, value in config.items() if value is not ...}
    write_json(path / "config.json", config)
    return config


def change_config(path: Path, **options: Any) -> None:
    """Change options of config.json; ... removes one."""
    config = json.loads((path / "config.json").read_text()) | options
    write_json(path / "config.json", {key: value for key, value in config.items() if value is not ...})


def change_tensors(path: Path, **tensors: Any) -> None:
    """Replace tensors by name, with a tensor or a function of the old one; None removes one."""
    file = path / "model.safetensors"
    stored = load_file(file)
    for name, value in tensors.items():
        if value is None:
            del stored[name]
        else:
            stored[name] = value(stored[name].clone()) if callable(value) else value
    save_file(stored, file, metadata={"format": "pt"})


def write_drafter(path: Path, seed: int = 1, **overrides: Any) -> Path:
    """A smaller Llama with the same tokenizer."""
    shape = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    return write_checkpoint(path, "llama", seed, **{**shape, **overrides})


def write_related_drafter(path: Path, model: Path) -> Path:
    """A Llama of one layer with the model's embedding and head."""
    tensors = load_file(model / "model.safetensors")
    names = ("model.embed_tokens.weight", "backbone.embeddings.weight", "transformer.wte.weight")
    embedding = next(tensors[name] for name in names if name in tensors)
    write_checkpoint(path, "llama", seed=1, num_hidden_layers=1, hidden_size=embedding.shape[1])
    change_tensors(path, **{names[0]: embedding, "lm_head.weight": tensors["lm_head.weight"]})
    return path


def write_tokenizer(path: Path, special_tokens: Sequence[str] = (), template: str = CHAT_TEMPLATE) -> None:
    """tokenizer.json, tokenizer_config.json with a chat template, generation_config.json."""
    backend = tokenizer()
    backend.add_special_tokens(list(special_tokens))
    backend.save(str(path / "tokenizer.json"))
    options = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "chat_template": template,
        "add_bos_token": False,
    }
    write_json(path / "tokenizer_config.json", options)
    write_json(path / "generation_config.json", {"bos_token_id": 256, "eos_token_id": EOS})


def tokenizer() -> Tokenizer:
    """Ids 0..255 are the bytes (sorted alphabet of ByteLevel), then special tokens, then merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: index for index, text in enumerate([*alphabet, *SPECIAL_TOKENS])}
    merges = [(left, right) for left, right in (merge.split() for merge in MERGES)]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    result = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens(list(SPECIAL_TOKENS))
    return result


def random_weights(config: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """float32 tensors of a checkpoint, by name."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scaled_weight(name, torch.randn(shape, generator=generator), config)
        for name, shape in shapes(config).items()
    }


def replace_by_mxfp4(tensors: dict[str, Tensor]) -> list[str]:
    """Replace gpt-oss's float experts by random blocks; returns the names of what was replaced."""
    generator = torch.Generator().manual_seed(5)
    names = [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]
    for name in names:
        experts, columns, rows = tensors.pop(name).shape
        shape = experts, rows, columns // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 123, shape, generator=generator, dtype=torch.uint8)
    return names


def scaled_weight(name: str, value: Tensor, config: dict[str, Any]) -> Tensor:
    """Layers must outweigh a tied embedding, or every token would repeat itself."""
    constants = {"act_fn.beta": 0.5, "act_fn.eps": -1e-6}
    for ending, constant in constants.items():
        if name.endswith(ending):
            return torch.full_like(value, constant)
    if name.endswith(("norm.weight", "norm_f.weight", "ln_1.weight", "ln_2.weight", "ln_f.weight")):
        return 0.2 * value + _norm_center(name, config["model_type"])
    if name.endswith("A_log"):
        return 0.5 * value - 1.0  # states that fade over some tens of tokens
    if name.endswith(".D"):
        return value
    if name.endswith(gemma4.SCALES):
        return 1.0 + 0.2 * value
    if name.endswith(("bias", "sinks")):
        return 0.3 * value
    if "embed" in name or "wte" in name or "lm_head" in name:
        return value * (0.3 if config["tie_word_embeddings"] else 1.0)
    return value * (1.6 / math.sqrt(value.shape[-1]))


def _norm_center(name: str, family: str) -> float:
    if family in ("gemma", "starcoder2"):
        return 3.0  # the layers outweigh the tied embedding
    if family == "nemotron" or (family in DELTA_NET_FAMILIES and "linear_attn" not in name):
        return 0.0
    if not family.startswith("gemma"):
        is_branch_end = family in POST_NORM_FAMILIES and "post_" in name
        return (0.7 if "attention" in name else 2.0) if is_branch_end else 1.0
    if "post_" in name:
        return 40.0 if "attention" in name and not family.startswith("gemma4") else 20.0
    if family.startswith("gemma4"):  # no offset; scores have no scale
        return 0.6 if "q_norm" in name or "k_norm" in name else 1.0
    return 1.0 if "q_norm" in name or "k_norm" in name else 0.0


def norm_shapes(name: str, size: int) -> Shapes:
    return {f"{name}.weight": (size,), f"{name}.bias": (size,)}


def shapes(config: dict[str, Any]) -> Shapes:
    """Names and shapes of a checkpoint's tensors."""
    if config["model_type"] in LAYOUTS:
        return layout_shapes(LAYOUTS[config["model_type"]], config)
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    family = config["model_type"]
    if family == "nemotron_h":
        return _nemotron_h_shapes(config)
    last_norm = {"falcon_h1": "final_layernorm", **dict.fromkeys(LFM2_FAMILIES, "embedding_norm")}.get(
        family, "norm"
    )
    result: Shapes = {"model.embed_tokens.weight": (vocab, hidden), f"model.{last_norm}.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        result["lm_head.weight"] = (vocab, hidden)
    if config["model_type"].startswith("gemma4"):
        result |= gemma4.outer_shapes(config)
    for index in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        if config["model_type"].startswith("gemma4"):
            result |= {prefix + name: shape for name, shape in gemma4.layer_shapes(config, index).items()}
            continue
        is_sparse = (index + 1) % config.get("decoder_sparse_step", 1) == 0
        is_dense = config["model_type"] not in MOE_FAMILIES or index in config.get("mlp_only_layers", [])
        is_dense |= not is_sparse or index < config.get("num_dense_layers", 0)
        is_dense |= index < config.get("first_k_dense_replace", 0)
        is_dense |= config.get("mlp_layer_types", ["sparse"] * (index + 1))[index] == "dense"
        feed_forward = _mlp_shapes(config) if is_dense else _moe_shapes(config)
        layer_type = _layer_type(config, index)
        is_mamba = config["model_type"] in MAMBA2_FAMILIES
        branch = {
            "conv": _short_conv_shapes,
            "linear_attention": _mamba2_shapes if is_mamba else _delta_net_shapes,
        }
        attention = _latent_shapes if family in LATENT_FAMILIES else _attention_shapes
        mixer = branch.get(layer_type, attention)(config)
        if family == "falcon_h1":
            mixer |= _mamba2_shapes(config)
        layer = {**_norm_shapes(config), **mixer, **feed_forward}
        result |= {prefix + name: shape for name, shape in layer.items()}
    return result


def _layer_type(config: dict[str, Any], index: int) -> str:
    family = config["model_type"]
    if "layer_types" in config:
        layer_type = str(config["layer_types"][index])
        return {"mamba": "linear_attention", "attention": "full_attention"}.get(layer_type, layer_type)
    if family in LFM2_FAMILIES:
        return "full_attention" if index in config["full_attn_idxs"] else "conv"
    if family not in DELTA_NET_FAMILIES or (index + 1) % config.get("full_attention_interval", 4) == 0:
        return "full_attention"
    return "linear_attention"


def _norm_shapes(config: dict[str, Any]) -> Shapes:
    if config["model_type"] in LFM2_FAMILIES:
        names = ["operator_norm", "ffn_norm"]
    elif config["model_type"] == "falcon_h1":
        names = ["input_layernorm", "pre_ff_layernorm"]
    elif config["model_type"] in POST_NORM_FAMILIES:
        names = ["post_attention_layernorm", "post_feedforward_layernorm"]
    else:
        names = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"].startswith("gemma"):
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return {f"{name}.weight": (config["hidden_size"],) for name in names}


def _short_conv_shapes(config: dict[str, Any]) -> Shapes:
    hidden, bias = config["hidden_size"], config.get("conv_bias", False)
    result = linear_shapes("conv.in_proj", 3 * hidden, hidden, bias)
    result |= linear_shapes("conv.out_proj", hidden, hidden, bias)
    result["conv.conv.weight"] = (hidden, 1, config.get("conv_L_cache", 3))
    return {**result, "conv.conv.bias": (hidden,)} if bias else result


def _nemotron_h_shapes(config: dict[str, Any]) -> Shapes:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    result: Shapes = {
        "backbone.embeddings.weight": (vocab, hidden),
        "backbone.norm_f.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    as_others = {
        **config,
        "mamba_n_heads": config["mamba_num_heads"],
        "mamba_d_ssm": config["mamba_num_heads"] * config["mamba_head_dim"],
        "mamba_n_groups": config["n_groups"],
        "mamba_d_state": config["ssm_state_size"],
        "mamba_d_conv": config.get("conv_kernel", 4),
        "mamba_conv_bias": config.get("use_conv_bias", True),
        "mamba_proj_bias": config.get("use_bias", False),
        "use_bias": False,
    }
    for index, kind in enumerate(config["hybrid_override_pattern"]):
        layer: Shapes = {"norm.weight": (hidden,)}
        if kind == "M":
            branch = _mamba2_shapes(as_others)
            layer |= {name.replace("mamba.", "mixer."): shape for name, shape in branch.items()}
        elif kind == "*":
            branch = _attention_shapes(as_others)
            layer |= {name.replace("self_attn.", "mixer."): shape for name, shape in branch.items()}
        elif kind == "-":
            layer |= _ungated_shapes(
                "mixer", hidden, config["intermediate_size"], config.get("mlp_bias", False)
            )
        else:
            layer |= {
                "mixer.gate.weight": (config["n_routed_experts"], hidden),
                "mixer.gate.e_score_correction_bias": (config["n_routed_experts"],),
                **_ungated_shapes(
                    "mixer.shared_experts", hidden, config["moe_shared_expert_intermediate_size"]
                ),
            }
            for expert in range(config["n_routed_experts"]):
                layer |= _ungated_shapes(f"mixer.experts.{expert}", hidden, config["moe_intermediate_size"])
        result |= {f"backbone.layers.{index}.{name}": shape for name, shape in layer.items()}
    return result


def _ungated_shapes(module: str, hidden: int, size: int, bias: bool = False) -> Shapes:
    return linear_shapes(f"{module}.up_proj", size, hidden, bias) | linear_shapes(
        f"{module}.down_proj", hidden, size, bias
    )


def _mamba2_shapes(config: dict[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["mamba_n_heads"]
    inner = config.get("mamba_d_ssm") or config.get("mamba_expand", 2) * hidden
    channels, name = inner + 2 * config["mamba_n_groups"] * config["mamba_d_state"], "mamba"
    bias = config.get("mamba_proj_bias", False)
    result = {
        **linear_shapes(f"{name}.in_proj", inner + channels + heads, hidden, bias),
        **linear_shapes(f"{name}.out_proj", hidden, inner, config.get("projectors_bias", bias)),
        f"{name}.conv1d.weight": (channels, 1, config.get("mamba_d_conv", 4)),
        **{f"{name}.{vector}": (heads,) for vector in ("A_log", "dt_bias", "D")},
        **({f"{name}.norm.weight": (inner,)} if config.get("mamba_rms_norm", True) else {}),
    }
    return {**result, f"{name}.conv1d.bias": (channels,)} if config.get("mamba_conv_bias", True) else result


def _delta_net_shapes(config: dict[str, Any]) -> Shapes:
    hidden, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys = config["linear_num_key_heads"] * config["linear_key_head_dim"]
    values, value_dim = heads * config["linear_value_head_dim"], config["linear_value_head_dim"]
    outputs = {"in_proj_qkv": 2 * keys + values, "in_proj_z": values, "in_proj_a": heads, "in_proj_b": heads}
    if config["model_type"] == "qwen3_next":
        outputs = {"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * heads}
    return {
        **{f"linear_attn.{name}.weight": (size, hidden) for name, size in outputs.items()},
        "linear_attn.conv1d.weight": (2 * keys + values, 1, config.get("linear_conv_kernel_dim", 4)),
        "linear_attn.A_log": (heads,),
        "linear_attn.dt_bias": (heads,),
        "linear_attn.norm.weight": (value_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _attention_shapes(config: dict[str, Any]) -> Shapes:
    family, hidden, heads = config["model_type"], config["hidden_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    q, kv = heads * head_dim, (config["num_key_value_heads"] or heads) * head_dim
    outputs = {"qkv_proj": q + 2 * kv} if family == "phi3" else {"q_proj": q, "k_proj": kv, "v_proj": kv}
    if family in DELTA_NET_FAMILIES:
        outputs["q_proj"] = 2 * q
    result: Shapes = {f"self_attn.{name}.weight": (size, hidden) for name, size in outputs.items()}
    result[f"self_attn.{'out_proj' if family in LFM2_FAMILIES else 'o_proj'}.weight"] = (hidden, q)
    has_bias = config.get("attention_bias", family == "gpt_oss") or config.get("use_bias")
    if family in ("qwen2", "qwen2_moe") or has_bias:
        result |= {f"self_attn.{name}.bias": (size,) for name, size in outputs.items()}
    if has_bias:
        result["self_attn.o_proj.bias"] = (hidden,)
    if family in LFM2_FAMILIES:
        result |= {f"self_attn.{name}_layernorm.weight": (head_dim,) for name in ("q", "k")}
    if family in ("qwen3", "qwen3_moe", "gemma3_text", "exaone4", *DELTA_NET_FAMILIES):
        result |= {f"self_attn.{name}.weight": (head_dim,) for name in ("q_norm", "k_norm")}
    if family in ("olmo2", "olmo3", "olmoe"):
        result |= {"self_attn.q_norm.weight": (q,), "self_attn.k_norm.weight": (kv,)}
    if family == "gpt_oss":
        result["self_attn.sinks"] = (heads,)
    if family == "hunyuan_v1_dense":
        result |= {f"self_attn.{name}_layernorm.weight": (head_dim,) for name in ("query", "key")}
    return result


def _latent_shapes(config: dict[str, Any]) -> Shapes:
    hidden, heads, bias = (
        config["hidden_size"],
        config["num_attention_heads"],
        config.get("attention_bias", False),
    )
    rank, nope, rope = config["kv_lora_rank"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
    value_dim, q_rank = config["v_head_dim"], config["q_lora_rank"]
    q_rows = heads * (nope + rope)
    result = linear_shapes("self_attn.kv_a_proj_with_mqa", rank + rope, hidden, bias)
    result |= linear_shapes("self_attn.kv_b_proj", heads * (nope + value_dim), rank, False)
    result |= linear_shapes("self_attn.o_proj", hidden, heads * value_dim, bias)
    result["self_attn.kv_a_layernorm.weight"] = (rank,)
    if q_rank is None:
        return result | linear_shapes("self_attn.q_proj", q_rows, hidden, False)
    result |= linear_shapes("self_attn.q_a_proj", q_rank, hidden, bias)
    result["self_attn.q_a_layernorm.weight"] = (q_rank,)
    return result | linear_shapes("self_attn.q_b_proj", q_rows, q_rank, False)


def _mlp_shapes(config: dict[str, Any]) -> Shapes:
    hidden, size = config["hidden_size"], config.get("block_ff_dim") or config["intermediate_size"]
    if config["model_type"] in LFM2_FAMILIES:
        if "block_multiple_of" in config:
            multiple = config["block_multiple_of"]
            size = -(-(2 * size // 3) // multiple) * multiple
        names = {"w1": (size, hidden), "w2": (hidden, size), "w3": (size, hidden)}
        return {f"feed_forward.{name}.weight": shape for name, shape in names.items()}
    outputs = (
        {"gate_up_proj": 2 * size} if config["model_type"] == "phi3" else {"gate_proj": size, "up_proj": size}
    )
    module = "feed_forward" if config["model_type"] == "falcon_h1" else "mlp"
    result: Shapes = {f"{module}.{name}.weight": (width, hidden) for name, width in outputs.items()}
    result[f"{module}.down_proj.weight"] = (hidden, size)
    if config.get("mlp_bias") or config.get("use_bias"):
        widths = {**outputs, "down_proj": hidden}
        result |= {f"{module}.{name}.bias": (width,) for name, width in widths.items()}
    return result


def _moe_shapes(config: dict[str, Any]) -> Shapes:
    """Experts as on the hub: one by one, or all in one tensor (gpt-oss and Granite)."""
    family, hidden = config["model_type"], config["hidden_size"]
    experts = next(
        config[key] for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in config
    )
    size = config.get("moe_intermediate_size", config["intermediate_size"])
    shared = config.get("shared_expert_intermediate_size") or config.get("shared_intermediate_size")
    if family == "gpt_oss":
        return {
            **linear_shapes("mlp.router", experts, hidden),
            "mlp.experts.gate_up_proj": (experts, hidden, 2 * size),
            "mlp.experts.gate_up_proj_bias": (experts, 2 * size),
            "mlp.experts.down_proj": (experts, size, hidden),
            "mlp.experts.down_proj_bias": (experts, hidden),
        }
    if family.startswith("granite"):
        result: Shapes = _granite_shared_shapes(config)
        if not experts:
            return result
        return result | {
            "block_sparse_moe.router.layer.weight": (experts, hidden),
            "block_sparse_moe.input_linear.weight": (experts, 2 * size, hidden),
            "block_sparse_moe.output_linear.weight": (experts, hidden, size),
        }
    has_short_names = family in ("mixtral", "lfm2_moe")
    module = {"mixtral": "block_sparse_moe", "lfm2_moe": "feed_forward"}.get(family, "mlp")
    result = {f"{module}.gate.weight": (experts, hidden)}
    if family == "lfm2_moe" and config.get("use_expert_bias", True):
        result[f"{module}.expert_bias"] = (experts,)
    gate, up, down = ("w1", "w3", "w2") if has_short_names else ("gate_proj", "up_proj", "down_proj")
    if family == "mistral4":
        result |= {"mlp.experts.gate_up_proj": (experts, 2 * size, hidden)}
        result |= {"mlp.experts.down_proj": (experts, hidden, size)}
        return result | _shared_experts_shapes(config, size)
    for expert in range(experts):
        for name, shape in ((gate, (size, hidden)), (up, (size, hidden)), (down, (hidden, size))):
            result[f"{module}.experts.{expert}.{name}.weight"] = shape
    if family in ("deepseek_v3", "glm4_moe_lite"):
        result["mlp.gate.e_score_correction_bias"] = (experts,)
    result |= _shared_experts_shapes(config, size)
    if shared:
        result |= {f"mlp.shared_expert.{name}_proj.weight": (shared, hidden) for name in ("gate", "up")}
        result["mlp.shared_expert.down_proj.weight"] = (hidden, shared)
        result["mlp.shared_expert_gate.weight"] = (1, hidden)
    return result


def _granite_shared_shapes(config: dict[str, Any]) -> Shapes:
    """The shared expert, or the MLP."""
    hidden, size = config["hidden_size"], config.get("shared_intermediate_size")
    if not size:
        return {}
    return {
        "shared_mlp.input_linear.weight": (2 * size, hidden),
        "shared_mlp.output_linear.weight": (hidden, size),
    }


def _shared_experts_shapes(config: dict[str, Any], size: int) -> Shapes:
    """As in DeepSeek's families: one MLP."""
    if not config.get("n_shared_experts"):
        return {}
    hidden, shared = config["hidden_size"], config["n_shared_experts"] * size
    result: Shapes = {}
    for name, shape in (("gate", (shared, hidden)), ("up", (shared, hidden)), ("down", (hidden, shared))):
        result |= linear_shapes(f"mlp.shared_experts.{name}_proj", *shape, bool(config.get("mlp_bias")))
    return result


def write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")
