"""Unsupported and damaged checkpoints are refused by name."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword.errors import CheckpointError
from foreword.kernels.reference.backend import ReferenceOps
from foreword.models.architectures import read_decoder
from foreword.models.interfaces import Precision
from foreword.models.model_loader import check_weights, load_model, read_model_info
from foreword.weights.config_reader import ConfigReader
from tests.support import gemma4_checkpoints as gemma4
from tests.support.checkpoints import change_tensors, write_checkpoint, write_config
from tests.support.forward_helpers import ForwardHelper
from tests.support.layouts import YARN


def load(path: Path) -> Any:
    return load_model(path, ReferenceOps(), Precision.from_dtypes("float32"), "cpu", 64)


def shard(path: Path) -> list[Path]:
    """Split the checkpoint into two files with an index."""
    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    files = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, part in files.items():
        save_file({name: tensors[name].clone() for name in part}, path / file)
    weight_map = {name: file for file, part in files.items() for name in part}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "model.safetensors").unlink()
    return [path / file for file in files]


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "relu6"}, "hidden_act"),
    ("llama", {"rope_scaling": {"type": "spiral", "factor": 2}}, "type"),
    ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "twist": 3}}, "twist"),
    ("llama", {"rope_scaling": {"type": "linear"}}, "factor"),
    ("llama", {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}}, "type"),
    (
        "llama",
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        "short_factor",
    ),
    ("llama", {"num_key_value_heads": 3}, "num_key_value_heads"),
    ("llama", {"hidden_size": "64"}, "hidden_size"),
    ("llama", {"hidden_size": ...}, "hidden_size"),
    ("llama", {"num_hidden_layers": 0}, "num_hidden_layers"),
    ("llama", {"num_hidden_layers": 2_000_000_000}, "num_hidden_layers"),
    ("gemma2", {"num_hidden_layers": 2_000_000_000}, "num_hidden_layers"),
    ("llama", {"num_hidden_layers": 1025}, "num_hidden_layers"),
    ("llama", {"hidden_size": 4_000_000_000}, "hidden_size"),
    ("llama", {"intermediate_size": 4_000_000_000}, "intermediate_size"),
    ("llama", {"head_dim": 4_000_000_000}, "head_dim"),
    ("llama", {"num_attention_heads": 2**20, "head_dim": 2**10}, "num_attention_heads"),
    ("llama", {"max_position_embeddings": 2**62}, "max_position_embeddings"),
    ("llama", {"rms_norm_eps": float("nan")}, "rms_norm_eps"),
    ("llama", {"rms_norm_eps": 10**400}, "rms_norm_eps"),
    ("llama", {"rope_theta": float("inf")}, "rope_theta"),
    ("llama", {"rope_theta": 1.0, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_theta"),
    ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 1e-320}}, "beta_fast"),
    ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "head_dim": 2}, "rope_type"),
    (
        "llama",
        {"rope_scaling": {"type": "llama3", "factor": 2.0, "low_freq_factor": 2, "high_freq_factor": 2}},
        "high_freq_factor",
    ),
    (
        "phi3",
        {"rope_scaling": {"type": "longrope", "short_factor": [float("nan")] * 8, "long_factor": [1.0] * 8}},
        "short_factor",
    ),
    (
        "llama",
        {
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8},
            "original_max_position_embeddings": 1,
        },
        "original_max_position_embeddings",
    ),
    ("gemma2", {"attn_logit_softcapping": float("nan")}, "attn_logit_softcapping"),
    ("llama", {"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
    ("llama", {"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
    ("llama", {"partial_rotary_factor": 1.5}, "partial_rotary_factor"),
    ("llama", {"sliding_window": 32}, "sliding_window"),
    ("llama", {"num_experts": 8}, "num_experts"),
    ("mistral", {"attention_bias": True}, "attention_bias"),
    (
        "mistral",
        {"sliding_window": 32, "layer_types": ["full_attention", "chunked_attention"]},
        "layer_types",
    ),
    (
        "mistral",
        {"sliding_window": None, "layer_types": ["full_attention", "sliding_attention"]},
        "layer_types",
    ),
    ("mistral", {"layer_types": ["full_attention"]}, "layer_types"),
    ("qwen2", {"use_mrope": True}, "use_mrope"),
    ("phi3", {"attention_bias": True}, "attention_bias"),
    ("smollm3", {"no_rope_layers": [1, 1, 0]}, "no_rope_layers"),
    ("smollm3", {"no_rope_layers": [1, 1, 2, 0]}, "no_rope_layers"),
    ("granite", {"residual_multiplier": 0.0}, "residual_multiplier"),
    ("olmo2", {"clip_qkv": 8.0}, "clip_qkv"),
    ("olmo3", {"rope_parameters": {"chunked_attention": {"rope_type": "default"}}}, "chunked_attention"),
    ("ministral3", {"rope_parameters": ...}, "rope_parameters"),
    ("ministral3", {"rope_parameters": YARN}, "llama_4_scaling_beta"),
    ("ministral3", {"rope_parameters": {"rope_type": "default", "llama_4_scaling_beta": 0.1}}, "rope_type"),
    (
        "ministral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.1, "max_position_embeddings": 64}},
        "max_position_embeddings",
    ),
    ("exaone4", {"layer_types": ..., "sliding_window_pattern": "LLLG"}, "sliding_window_pattern"),
    ("exaone4", {"attention_bias": True}, "attention_bias"),
    ("ernie4_5", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("hunyuan_v1_dense", {"use_cla": True}, "use_cla"),
    ("hunyuan_v1_dense", {"use_qk_norm": False}, "use_qk_norm"),
    ("hunyuan_v1_dense", {"num_experts": 16}, "num_experts"),
    ("hunyuan_v1_dense", {"rope_scaling": {"type": "linear", "alpha": 3.0, "factor": 2.0}}, "type"),
    ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 1e-9}}, "alpha"),
    ("hunyuan_v1_dense", {"rope_scaling": {"type": "dynamic", "alpha": 9.0}, "head_dim": 2}, "head_dim"),
    ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3_text", {"rope_parameters": {"linear_attention": {"rope_type": "default"}}}, "linear_attention"),
    ("qwen3_moe", {"num_experts": 0}, "num_experts"),
    ("qwen3_moe", {"num_experts": ...}, "num_experts"),
    ("qwen3_moe", {"num_experts": 1 << 20}, "num_experts"),
    ("qwen3_moe", {"num_local_experts": 4}, "num_local_experts"),
    ("qwen3_moe", {"num_experts_per_tok": 9}, "num_experts_per_tok"),
    ("qwen3_moe", {"num_experts_per_tok": 0}, "num_experts_per_tok"),
    ("qwen3_moe", {"moe_intermediate_size": ...}, "moe_intermediate_size"),
    ("qwen3_moe", {"mlp_only_layers": [True]}, "mlp_only_layers"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step"),
    ("qwen3_moe", {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size"),
    ("qwen3_moe", {"n_group": 4}, "n_group"),
    ("qwen2_moe", {"shared_expert_intermediate_size": ...}, "shared_expert_intermediate_size"),
    ("mixtral", {"attention_bias": True}, "attention_bias"),
    ("olmoe", {"clip_qkv": 8.0}, "clip_qkv"),
    ("gpt_oss", {"swiglu_limit": 5.0}, "swiglu_limit"),
    ("gpt_oss", {"swiglu_alpha": 1.0}, "swiglu_alpha"),
    ("gpt_oss", {"experts_per_token": 2}, "experts_per_token"),
    ("gpt_oss", {"rope_parameters": ...}, "rope_scaling"),
    ("granitemoe", {"num_local_experts": 8.0}, "num_local_experts"),
    *((family, {"sliding_window": 0}, "layer_types") for family in ("olmo3", "exaone4", "gemma3_text")),
    ("lfm2", {"conv_L_cache": 1}, "conv_L_cache"),
    ("lfm2", {"conv_L_cache": 17}, "conv_L_cache"),
    ("lfm2", {"conv_bias": 1}, "conv_bias"),
    ("lfm2", {"layer_types": ["conv", "conv", "conv"]}, "layer_types"),
    ("lfm2", {"layer_types": ["conv", "linear_attention", "full_attention"]}, "layer_types"),
    ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layer_types"),
    ("lfm2", {"layer_types": ..., "full_attn_idxs": []}, "layer_types"),
    ("lfm2", {"layer_types": ..., "full_attn_idxs": [True]}, "full_attn_idxs"),
    ("lfm2", {"conv_dim": 32}, "conv_dim"),
    ("lfm2", {"use_pos_enc": False}, "use_pos_enc"),
    ("lfm2", {"block_ffn_dim_multiplier": 1e-9}, "block_ffn_dim_multiplier"),
    ("lfm2_moe", {"num_dense_layers": -1}, "num_dense_layers"),
    ("lfm2_moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor"),
    ("qwen3_5_text", {"linear_num_value_heads": 3}, "linear_num_value_heads"),
    ("qwen3_5_text", {"linear_num_key_heads": 0}, "linear_num_key_heads"),
    ("qwen3_5_text", {"linear_key_head_dim": 24}, "linear_key_head_dim"),
    ("qwen3_5_text", {"linear_value_head_dim": 40}, "linear_value_head_dim"),
    ("qwen3_5_text", {"linear_num_value_heads": 2**20}, "linear_num_value_heads"),
    ("qwen3_5_text", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
    ("qwen3_5_text", {"linear_conv_kernel_dim": 17}, "linear_conv_kernel_dim"),
    ("qwen3_5_text", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
    ("qwen3_5_text", {"layer_types": ["conv", "full_attention", "conv"]}, "layer_types"),
    ("qwen3_5_text", {"layer_types": ..., "full_attention_interval": 4}, "layer_types"),
    ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act"),
    ("qwen3_5_text", {"num_experts": 8}, "num_experts"),
    ("qwen3_5_text", {"mlp_only_layers": [0]}, "mlp_only_layers"),
    ("nemotron_h", {"hybrid_override_pattern": "MEMEM"}, "hybrid_override_pattern"),
    ("nemotron_h", {"hybrid_override_pattern": "M*XME"}, "hybrid_override_pattern"),
    ("nemotron_h", {"num_hidden_layers": 4}, "num_hidden_layers"),
    ("nemotron_h", {"moe_latent_size": 32}, "moe_latent_size"),
    ("nemotron_h", {"n_groups": 3}, "mamba_num_heads"),
    ("granitemoehybrid", {"mamba_d_state": 24}, "mamba_d_state"),
    ("granitemoehybrid", {"mamba_n_heads": 4}, "mamba_n_heads"),
    ("granitemoehybrid", {"time_step_limit": [1.0, 0.5]}, "time_step_limit"),
    ("granitemoehybrid", {"layer_types": ["mamba"] * 3}, "layer_types"),
    ("falcon_h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers"),
    ("falcon_h1", {"hidden_act": "gelu"}, "hidden_act"),
    ("qwen3_next", {"full_attention_interval": 0}, "full_attention_interval"),
    ("qwen3_next", {"shared_expert_intermediate_size": ...}, "shared_expert_intermediate_size"),
    ("qwen3_5_moe_text", {"linear_attention_bias": True}, "linear_attention_bias"),
    ("apertus", {"hidden_act": "silu"}, "hidden_act"),
    ("apertus", {"rope_parameters": ...}, "rope_scaling"),
    ("arcee", {"mlp_bias": 1}, "mlp_bias"),
    ("bailing_moe", {"use_qk_norm": True}, "use_qk_norm"),
    ("bailing_moe", {"norm_head": True}, "norm_head"),
    ("bailing_moe_v2", {"score_function": "softmax"}, "score_function"),
    ("bailing_moe_v2", {"moe_shared_expert_intermediate_size": 96}, "moe_shared_expert_intermediate_size"),
    ("cohere2", {"use_qk_norm": True}, "use_qk_norm"),
    ("phimoe", {"num_experts_per_tok": 3}, "num_experts_per_tok"),
    ("cohere", {"logit_scale": 0.0}, "logit_scale"),
    ("cohere2", {"use_parallel_block": False}, "use_parallel_block"),
    ("cohere2", {"sliding_window_pattern": 0}, "sliding_window_pattern"),
    ("cohere2_moe", {"expert_selection_fn": "tanh"}, "expert_selection_fn"),
    ("cohere2_moe", {"shared_expert_combination_strategy": "concat"}, "shared_expert_combination_strategy"),
    ("cohere2_moe", {"mlp_layer_types": ["dense", "sparse", "both"]}, "mlp_layer_types"),
    ("dots1", {"scoring_func": "softmax"}, "scoring_func"),
    ("exaone_moe", {"n_group": 3}, "n_group"),
    ("gemma", {"hidden_activation": "silu"}, "hidden_activation"),
    ("glm", {"rope_scaling": {"type": "novel"}}, "type"),
    ("glm4_moe", {"topk_method": "greedy"}, "topk_method"),
    ("glm4_moe", {"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
    ("glm4_moe", {"topk_group": 1, "num_experts_per_tok": 3}, "topk_group"),
    ("granite_swa", {"layer_rope_theta": [10000.0, 0]}, "layer_rope_theta"),
    ("granite_swa", {"layer_rope_theta": [10000.0, 0.5, True]}, "layer_rope_theta"),
    ("hunyuan_v1_moe", {"moe_topk": [3, 2]}, "moe_topk"),
    ("hunyuan_v1_moe", {"moe_intermediate_size": [48, 96]}, "moe_intermediate_size"),
    ("hunyuan_v1_moe", {"use_mixed_mlp_moe": False}, "use_mixed_mlp_moe"),
    ("mellum", {"rope_parameters": {"chunked_attention": {"rope_type": "default"}}}, "chunked_attention"),
    ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list"),
    ("minimax_m2", {"rotary_dim": 17}, "rotary_dim"),
    ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type"),
    ("nemotron", {"hidden_act": "quick_gelu"}, "hidden_act"),
    ("phi", {"qk_layernorm": True}, "qk_layernorm"),
    ("seed_oss", {"attention_out_bias": "no"}, "attention_out_bias"),
    ("solar_open", {"use_qk_norm": True}, "use_qk_norm"),
    ("stablelm", {"use_parallel_residual": True}, "use_parallel_residual"),
    ("starcoder2", {"mlp_type": "gated"}, "mlp_type"),
    ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method"),
    ("deepseek_v2", {"scoring_func": "sigmoid"}, "scoring_func"),
    ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob"),
    ("deepseek_v2", {"moe_layer_freq": 2}, "moe_layer_freq"),
    ("deepseek_v2", {"num_key_value_heads": 2}, "num_key_value_heads"),
    ("deepseek_v2", {"head_dim": 24}, "head_dim"),
    ("deepseek_v2", {"topk_method": "group_limited_greedy", "n_group": 3}, "n_group"),
    ("deepseek_v3", {"kv_lora_rank": 40}, "kv_lora_rank"),
    ("deepseek_v3", {"qk_rope_head_dim": 7}, "qk_rope_head_dim"),
    ("deepseek_v3", {"qk_head_dim": 32}, "qk_head_dim"),
    ("deepseek_v3", {"kv_lora_rank": 1 << 16, "num_attention_heads": 4}, "num_attention_heads"),
    ("deepseek_v3", {"n_group": 8}, "n_group"),
    ("deepseek_v3", {"topk_group": 5}, "topk_group"),
    ("deepseek_v3", {"num_experts_per_tok": 5}, "topk_group"),
    ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
    ("deepseek_v3", {"mlp_bias": True}, "mlp_bias"),
    ("deepseek_v3", {"index_topk": 2048}, "index_topk"),
    ("deepseek_v3", {"mlp_layer_types": ["dense", "sparse"]}, "mlp_layer_types"),
    ("glm4_moe", {"aux_loss_alpha": 0.1}, "aux_loss_alpha"),
    ("deepseek_v3", {"n_shared_experts": 1 << 16}, "n_shared_experts"),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense", "linear"]}, "mlp_layer_types"),
    ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
    ("mistral4", {"n_group": 2}, "n_group"),
    ("mistral4", {"rope_parameters": YARN}, "llama_4_scaling_beta"),
    ("mistral4", {"sliding_window": 32}, "sliding_window"),
    ("gemma4_text", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ("gemma4_text", {"layer_types": [gemma4.FULL] * 4 + [gemma4.SLIDING]}, "layer_types"),
    ("gemma4_text", {"sliding_window": 0}, "layer_types"),
    ("gemma4_text", {"num_kv_shared_layers": 5}, "num_kv_shared_layers"),
    ("gemma4_text", {"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
    ("gemma4_text", {"per_layer_config": {"4": {"head_dim": 48}}}, "num_kv_shared_layers"),
    ("gemma4_text", {"per_layer_config": {"5": {"head_dim": 48}}}, "per_layer_config"),
    ("gemma4_text", {"per_layer_config": {"full_attention": {"head_dim": 48}}}, "per_layer_config"),
    ("gemma4_text", {"per_layer_config": {"4": {"num_attention_heads": 2}}}, "num_attention_heads"),
    ("gemma4_text", {"per_layer_config": {"4": 3}}, "4"),
    ("gemma4_text", {"global_head_dim": 2**17}, "num_attention_heads"),
    ("gemma4_text", {"vocab_size_per_layer_input": 100}, "vocab_size_per_layer_input"),
    ("gemma4_text", {"hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input"),
    ("gemma4_text", {"hidden_size_per_layer_input": 2**16}, "hidden_size_per_layer_input"),
    ("gemma4_text", {"hidden_activation": "silu"}, "hidden_activation"),
    ("gemma4_text", {"attention_k_eq_v": "yes"}, "attention_k_eq_v"),
    ("gemma4_text", {"query_pre_attn_scalar": 16}, "query_pre_attn_scalar"),
    ("gemma4_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma4_text", {"rope_parameters": {"linear_attention": {}}, "rope_theta": 1e4}, "rope_theta"),
    (
        "gemma4_text",
        {"rope_parameters": {gemma4.FULL: {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
        "partial_rotary_factor",
    ),
    ("gemma4_text", {**gemma4.EXPERTS, "top_k_experts": 9}, "top_k_experts"),
    ("gemma4_text", {**gemma4.EXPERTS, "num_experts": None}, "num_experts"),
    ("gemma4_unified_text", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input"),
    ("gemma4_unified_text", {"num_global_key_value_heads": 3}, "num_attention_heads"),
    ("gemma4_unified_text", {"enable_moe_block": True}, "enable_moe_block"),
]


@pytest.mark.parametrize("family", dict.fromkeys(family for family, _, _ in REFUSED))
def test_unsupported_options_are_named(family: str, tmp_path: Path):
    for overrides, name in ((changes, name) for of, changes, name in REFUSED if of == family):
        write_config(tmp_path, family, **overrides)
        with pytest.raises(CheckpointError, match=f"`{name}`"):
            read_model_info(tmp_path)


STATE_TENSORS = {
    "qwen3_5_text": (
        "linear_attn.conv1d.weight linear_attn.A_log linear_attn.dt_bias linear_attn.norm.weight "
        "linear_attn.in_proj_qkv.weight linear_attn.in_proj_z.weight linear_attn.in_proj_a.weight "
        "linear_attn.in_proj_b.weight"
    ),
    "qwen3_next": "linear_attn.in_proj_qkvz.weight linear_attn.in_proj_ba.weight",
    "lfm2": "conv.conv.weight conv.in_proj.weight conv.out_proj.weight",
    "lfm2_moe": "conv.conv.weight",
}


@pytest.mark.parametrize("family", STATE_TENSORS)
def test_missing_and_wrong_tensors_of_states_are_named(family: str, tmp_path: Path):
    path = write_checkpoint(tmp_path, family)
    stored = load_file(path / "model.safetensors")
    for name in (f"model.layers.0.{name}" for name in STATE_TENSORS[family].split()):
        for value, message in (
            (torch.cat((stored[name], stored[name])), "is .*, the config says"),
            (None, ".* is missing"),
        ):
            change_tensors(path, **{name: value})
            for open_ in (check_weights, load):
                with pytest.raises(CheckpointError, match=f"`{re.escape(name)}` {message}"):
                    open_(path)
        change_tensors(path, **{name: stored[name]})


@pytest.mark.parametrize(
    ("family", "prefix"),
    [("glm4_moe", "model.layers.2."), ("mellum", "mtp.layers.0."), ("exaone_moe", "mtp.")],
)
def test_mtp_heads_are_named_and_left_out(family: str, prefix: str, tmp_path: Path):
    path = write_checkpoint(tmp_path, family, num_nextn_predict_layers=1)
    expected = ForwardHelper(path).logits([1, 2, 3])
    assert read_model_info(path).unused_parts == ()
    change_tensors(
        path, **{f"{prefix}{name}.weight": torch.ones(64, 128) for name in ("eh_proj", "mlp.up_proj")}
    )
    size = 2 * 64 * 128 / 1e6
    assert read_model_info(path).unused_parts == (
        f"the MTP head, which drafts, is not used yet ({size:.1f} M values)",
    )
    check_weights(path)
    assert torch.equal(ForwardHelper(path).logits([1, 2, 3]), expected)
    other = {"model.layers.3.eh_proj.weight": torch.ones(64, 128)}
    change_tensors(path, **other)
    with pytest.raises(CheckpointError, match=r"unexpected tensors: model\.layers\.3\.eh_proj"):
        load(path)


@pytest.mark.parametrize(
    ("constants", "message"),
    [
        ({"beta": 0.25}, r"beta must be 0\.5 here"),
        ({"beta": float("nan")}, r"beta must be 0\.5 here"),
        ({"beta": 0.0, "eps": 0.0}, r"beta must be 0\.5 here"),
        ({"eps": 1e-6}, "eps must be between -1e-05 and 0 here"),
        ({"eps": -0.1}, "eps must be between -1e-05 and 0 here"),
    ],
)
def test_xielu_of_other_constants_is_refused(constants: dict[str, float], message: str, tmp_path: Path):
    path = write_checkpoint(tmp_path, "apertus")
    tensors = {f"model.layers.1.mlp.act_fn.{name}": torch.tensor(x) for name, x in constants.items()}
    change_tensors(path, **tensors)
    with pytest.raises(CheckpointError, match=f"xIELU's {message}"):
        load(path)


def test_irrelevant_and_unset_options_are_ignored(tmp_path: Path):
    extra = {
        "transformers_version": "4.40.0",
        "use_cache": True,
        "_name_or_path": "x",
        "novelty": None,
        "initializer_range": 0.02,
    }
    write_config(tmp_path, **extra)
    assert read_model_info(tmp_path).parameters > 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "JSON object"),
        ("{}", "`model_type`"),
        (None, "no config.json"),
        ('{"model_type": ["llama"]}', r"model_type \['llama'\] is not supported"),
        ('{"model_type": "novel"}', "'novel' is not supported; known: apertus, .*llama"),
        ('{"model_type": "deepseek_v4"}', r"not supported \(it needs a sparse indexer"),
        ('{"model_type": "qwen3_5_moe"}', "`text_config` is missing"),
        ('{"model_type": "mamba2"}', r"not supported \(it needs Mamba, RWKV or other recurrent layers"),
        ('{"model_type": "gemma3n_text"}', r"not supported \(it needs Gemma 3n's AltUp"),
        ('{"model_type": "gemma4_assistant"}', r"not supported \(it needs trained heads"),
        ('{"model_type": "eagle"}', r"not supported \(it needs trained heads"),
    ],
)
def test_broken_and_unknown_configs_are_refused(text: str | None, message: str, tmp_path: Path):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        read_model_info(tmp_path)


def test_shards_load_the_same_model(tmp_path: Path):
    path = write_checkpoint(tmp_path)
    whole = ForwardHelper(path).logits([1, 2, 3])
    shard(path)
    assert torch.equal(ForwardHelper(path).logits([1, 2, 3]), whole)


def test_missing_shard_is_named(tmp_path: Path):
    first, _ = shard(write_checkpoint(tmp_path))
    first.unlink()
    with pytest.raises(CheckpointError, match=first.name):
        load(tmp_path)


def test_truncated_file_is_named(tmp_path: Path):
    file = write_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, r"mlp\.up_proj\.weight` \[96, 64\] is missing"),
        (
            "model.layers.0.self_attn.sinks",
            torch.ones(4),
            r"unexpected tensors: model\.layers\.0\.self_attn\.sinks",
        ),
        ("model.norm.weight", torch.ones(65), r"`model\.norm\.weight` is \[65\], the config says \[64\]"),
        ("model.norm.weight", torch.ones(64, dtype=torch.int8), r"`model\.norm\.weight` is of type I8"),
    ],
)
def test_wrong_tensors_are_named(name: str, value: torch.Tensor | None, message: str, tmp_path: Path):
    change_tensors(write_checkpoint(tmp_path), **{name: value})
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path)


def test_buffers_of_old_checkpoints_are_ignored(tmp_path: Path):
    path = write_checkpoint(tmp_path, tie_word_embeddings=True)
    head = load_file(path / "model.safetensors")["model.embed_tokens.weight"].clone()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "lm_head.weight": head}
    change_tensors(path, **extra)
    assert load(tmp_path).info == read_model_info(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt"])
def test_pickled_weights_are_refused(tmp_path: Path, name: str):
    path = write_checkpoint(tmp_path)
    (path / "model.safetensors").rename(path / name)
    with pytest.raises(CheckpointError, match=rf"\({re.escape(name)}\), which can run code"):
        load(path)


def test_checkpoint_without_weights_is_refused(tmp_path: Path):
    (write_checkpoint(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize("weight_map", [None, {}, "x"])
def test_index_without_weight_map_is_refused(weight_map: Any, tmp_path: Path):
    (write_checkpoint(tmp_path) / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": weight_map})
    )
    with pytest.raises(CheckpointError, match="weight_map"):
        load(tmp_path)


@pytest.mark.parametrize(
    "names", [("weights.safetensors",), ("x-00001-of-00002.safetensors", "x-00002-of-00002.safetensors")]
)
def test_files_without_an_index_are_found(tmp_path: Path, names: tuple[str, ...]) -> None:
    path = write_checkpoint(tmp_path)
    expected, tensors = load(path).info, load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    keys = sorted(tensors)
    for index, name in enumerate(names):
        save_file({key: tensors[key] for key in keys[index :: len(names)]}, path / name)
    assert load(path).info == expected
    if len(names) > 1:
        (path / names[0]).rename(path / "x-00001-of-00003.safetensors")
        with pytest.raises(CheckpointError, match=r"holds neither .*it holds x-00001-of-00003.safetensors, "):
            load(path)


WINDOWED = (
    *("mistral", "qwen2", "phi3", "mixtral", "qwen2_moe", "qwen3_moe", "smollm3", "ministral3", "gemma2"),
    "gpt_oss",
)


def test_window_of_0_is_none(tmp_path: Path):
    """Transformers 5 writes it for Qwen2-MoE with windows off."""
    for family in WINDOWED:
        values = write_config(tmp_path, family, sliding_window=0)
        _, config = read_decoder(ConfigReader(values, family))
        assert [layer_type.window for layer_type in config.layer_types] == [None] * len(config.layer_types)
