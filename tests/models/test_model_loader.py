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
from tests.support.checkpoints import YARN, change_tensors, write_checkpoint, write_config
from tests.support.forward_helpers import ForwardHelper


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
]


@pytest.mark.parametrize("family, overrides, name", REFUSED)
def test_unsupported_options_are_named(family: str, overrides: dict[str, Any], name: str, tmp_path: Path):
    write_config(tmp_path, family, **overrides)
    with pytest.raises(CheckpointError, match=f"`{name}`"):
        read_model_info(tmp_path)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(
            ("qwen3_5_text", f"linear_attn.{name}")
            for name in ("conv1d.weight", "A_log", "dt_bias", "norm.weight")
        ),
        *(("qwen3_5_text", f"linear_attn.in_proj_{name}.weight") for name in ("qkv", "z", "a", "b")),
        *(("qwen3_next", f"linear_attn.in_proj_{name}.weight") for name in ("qkvz", "ba")),
        *(("lfm2", f"conv.{name}.weight") for name in ("conv", "in_proj", "out_proj")),
        ("lfm2_moe", "conv.conv.weight"),
    ],
)
def test_missing_and_wrong_tensors_of_states_are_named(family: str, name: str, tmp_path: Path):
    path, full_name = write_checkpoint(tmp_path, family), f"model.layers.0.{name}"
    change_tensors(path, **{full_name: lambda value: torch.cat((value, value))})
    for open_ in (check_weights, load):
        with pytest.raises(CheckpointError, match=rf"`{re.escape(full_name)}` is \[.*\], the config says"):
            open_(path)
    change_tensors(path, **{full_name: None})
    for open_ in (check_weights, load):
        with pytest.raises(CheckpointError, match=rf"`{re.escape(full_name)}` \[.*\] is missing"):
            open_(path)


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


@pytest.mark.parametrize("family", WINDOWED)
def test_window_of_0_is_none(family: str, tmp_path: Path):
    """Transformers 5 writes it for Qwen2-MoE with windows off."""
    values = write_config(tmp_path, family, sliding_window=0)
    _, config = read_decoder(ConfigReader(values, family))
    assert [layer_type.window for layer_type in config.layer_types] == [None] * len(config.layer_types)
