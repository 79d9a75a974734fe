"""Names of tensors in GGUF files, by those in Hugging Face's format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from foreword.weights.gguf.header import EMBEDDING_TENSOR

LAYER_TENSOR_PATTERN = re.compile(r"model\.layers\.(\d+)\.(.+?)(?:[._](weight|bias))?")
HEAD_TENSOR, PER_LAYER_EMBEDDING_TENSOR = "output.weight", "per_layer_token_embd.weight"
MODEL_TENSOR_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "model.embed_tokens.weight": EMBEDDING_TENSOR,
        "model.word_embeddings.weight": EMBEDDING_TENSOR,
        "model.norm.weight": "output_norm.weight",
        "model.embeddings.weight": EMBEDDING_TENSOR,
        "model.norm_f.weight": "output_norm.weight",
        "model.final_layernorm.weight": "output_norm.weight",
        "model.norm.bias": "output_norm.bias",
        "model.embedding_norm.weight": "token_embd_norm.weight",  # LFM2's last norm
        "model.embed_tokens_per_layer.weight": PER_LAYER_EMBEDDING_TENSOR,
        "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
        "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
        "model.final_layernorm.bias": "output_norm.bias",
        "lm_head.weight": HEAD_TENSOR,
        "lm_head.bias": "output.bias",
    }
)
ROUTERS = (
    "feed_forward.gate",
    "mlp.gate",
    "mlp.router",
    "block_sparse_moe.gate",
    "block_sparse_moe.router.layer",
    "router.proj",
    "mlp.gate.wg",
)
SHARED_EXPERTS = ("mlp.shared_expert", "mlp.shared_experts", "mlp.shared_mlp", "shared_mlp")
SCORE_BIASES = (  # without ".bias"
    *("feed_forward.expert", "mlp.gate.expert"),
    *("mlp.gate.e_score_correction", "block_sparse_moe.e_score_correction"),
    "mlp.moe_statics.e_score_correction",
)
EXPERT_MODULES = ("mlp.experts", "block_sparse_moe.experts", "feed_forward.experts", "experts")
EXPERT_TENSORS: Mapping[str, str] = MappingProxyType(
    {
        "gate_proj": "ffn_gate_exps",
        "up_proj": "ffn_up_exps",
        "gate_up_proj": "ffn_gate_up_exps",
        "down_proj": "ffn_down_exps",
    }
)
MAMBA2_MODULES = ("mamba", "mixer")
MAMBA2_TENSORS: Mapping[str, str] = MappingProxyType(
    {
        "in_proj": "ssm_in",
        "conv1d": "ssm_conv1d",
        "dt": "ssm_dt",
        "norm": "ssm_norm",
        "out_proj": "ssm_out",
    }
)
LATENT_TENSOR_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "self_attn.q_a_proj": "attn_q_a",
        "self_attn.q_a_layernorm": "attn_q_a_norm",
        "self_attn.q_b_proj": "attn_q_b",
        "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
        "self_attn.kv_a_layernorm": "attn_kv_a_norm",
        "self_attn.kv_b_proj": "attn_kv_b",
        "self_attn.k_b_proj": "attn_k_b",
        "self_attn.v_b_proj": "attn_v_b",
    }
)
STATE_TENSOR_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "operator_norm": "attn_norm",
        "self_attn.out_proj": "attn_output",
        "self_attn.q_layernorm": "attn_q_norm",
        "self_attn.k_layernorm": "attn_k_norm",
        **{f"feed_forward.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")},
        "feed_forward.w1": "ffn_gate",
        "feed_forward.w3": "ffn_up",
        "feed_forward.w2": "ffn_down",
        "conv.in_proj": "shortconv.in_proj",
        "conv.conv": "shortconv.conv",
        "conv.out_proj": "shortconv.out_proj",
        "linear_attn.in_proj_qkvz": "ssm_in",
        "linear_attn.in_proj_qkv": "attn_qkv",
        "linear_attn.in_proj_z": "attn_gate",
        "linear_attn.in_proj_ba": "ssm_ba",
        "linear_attn.in_proj_b": "ssm_beta",
        "linear_attn.in_proj_a": "ssm_alpha",
        "linear_attn.conv1d": "ssm_conv1d",
        "linear_attn.dt": "ssm_dt",
        "linear_attn.norm": "ssm_norm",
        "linear_attn.out_proj": "ssm_out",
        **{
            f"{module}.{ours}": theirs for module in MAMBA2_MODULES for ours, theirs in MAMBA2_TENSORS.items()
        },
        "norm": "attn_norm",
        **{f"mixer.{name}_proj": f"attn_{name}" for name in "qkv"},
        "mixer.o_proj": "attn_output",
        "mixer.gate": "ffn_gate_inp",
        "mixer.gate.e_score_correction": "exp_probs_b",
        **{
            f"mixer.{part}{name}_proj": f"ffn_{name}{suffix}"
            for part, suffix in (("", ""), ("experts.", "_exps"), ("shared_experts.", "_shexp"))
            for name in ("up", "down")
        },
    }
)
# Names without the usual suffix; the file has -exp(A_log). Falcon-H1's norm before the MLP is one of them.
BARE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        **{
            f"{module}.A{suffix}": "ssm_a"
            for module in ("linear_attn", *MAMBA2_MODULES)
            for suffix in ("", "_log")
        },
        **{f"{module}.D": "ssm_d" for module in MAMBA2_MODULES},
        "pre_ff_layernorm": "ffn_norm",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
    }
)
LAYER_TENSOR_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "input_layernorm": "attn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.qkv_proj": "attn_qkv",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
        "self_attn.query_layernorm": "attn_q_norm",
        "self_attn.key_layernorm": "attn_k_norm",
        "post_attention_layernorm": "ffn_norm",
        "attention_layernorm": "attn_norm",
        "feedforward_layernorm": "ffn_norm",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.gate_up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "self_attn.sinks": "attn_sinks",
        "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
        "layer_scalar": "layer_output_scale",
        "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
        "post_feedforward_layernorm_1": "post_ffw_norm_1",
        "post_feedforward_layernorm_2": "post_ffw_norm_2",
        "per_layer_input_gate": "inp_gate",
        "per_layer_projection": "proj",
        "post_per_layer_input_norm": "post_norm",
        **{name: f"nextn.{name}" for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")},
        **{f"shared_head.{name}": f"nextn.shared_head_{name}" for name in ("norm", "head")},
        "self_attn.dense": "attn_output",
        "mlp.fc1": "ffn_up",
        "mlp.fc2": "ffn_down",
        "mlp.c_fc": "ffn_up",
        "mlp.c_proj": "ffn_down",
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
        "attention.query_key_value": "attn_qkv",
        "attention.dense": "attn_output",
        "attention.query_layernorm": "attn_q_norm",
        "attention.key_layernorm": "attn_k_norm",
        **dict.fromkeys(SCORE_BIASES, "exp_probs_b"),
        **LATENT_TENSOR_NAMES,
        **STATE_TENSOR_NAMES,
        **dict.fromkeys(ROUTERS, "ffn_gate_inp"),
        **{f"{module}.{name}": EXPERT_TENSORS[name] for module in EXPERT_MODULES for name in EXPERT_TENSORS},
        **{
            f"{module}.{name}_proj": f"ffn_{name}_shexp"
            for module in SHARED_EXPERTS
            for name in ("gate", "up", "down")
        },
    }
)
POST_NORM_ARCHITECTURES = ("exaone4", "olmo2")  # no norms before the branches
POST_ATTENTION_NORM_ARCHITECTURES = (  # by name
    *(*POST_NORM_ARCHITECTURES, "glm4moe", "gpt-oss", "seed_oss"),
    *("qwen35", "qwen35moe", "qwen3next"),
)
POST_NORM_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    }
)


def gguf_name(name: str, architecture: str) -> str:
    """Name in GGUF files of the tensor called `name` in Hugging Face's format."""
    match = LAYER_TENSOR_PATTERN.fullmatch(name)
    if match is None:
        return MODEL_TENSOR_NAMES.get(name, name)
    if match[2] in BARE_NAMES:
        return f"blk.{match[1]}.{BARE_NAMES[match[2]]}"
    has_post_norms = architecture.startswith("gemma") and architecture != "gemma"
    has_post_norms |= architecture in POST_ATTENTION_NORM_ARCHITECTURES
    inner = POST_NORM_NAMES.get(match[2]) if has_post_norms else None
    inner = inner or LAYER_TENSOR_NAMES.get(match[2], match[2])
    return f"blk.{match[1]}.{inner}.{match[3] or 'weight'}"
