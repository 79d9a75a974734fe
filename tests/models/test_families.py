"""Every architecture against transformers, in float32: logits and greedy tokens."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.reference.backend import ReferenceOps
from foreword.models.architectures import ARCHITECTURES
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model, read_model_info
from tests.support import gemma4_checkpoints as gemma4
from tests.support.budget import some_of
from tests.support.checkpoints import (
    DELTA_NET_FAMILIES,
    FAMILIES,
    MOE_FAMILIES,
    VOCAB_SIZE,
    write_checkpoint,
    write_config,
)
from tests.support.cpu_kernels import isas_under_test
from tests.support.forward_helpers import ForwardHelper

ISAS = isas_under_test()
DTYPES = ("float32", "bfloat16", "float16")
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "type": "longrope",
    "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0, 2.2, 2.5],
    "long_factor": [4.0] * 8,
}
ODD = {
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 20,
    "hidden_size": 72,
    "intermediate_size": 100,
}

SEEDS = {"apertus": 6, "glm4_moe": 1, "nemotron": 3}  # greedy tokens do not loop
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {"seed": SEEDS[family]} if family in SEEDS else {}) for family in FAMILIES},
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-odd-shape": ("llama", {**ODD, "hidden_size": 72}),
    "llama-no-groups": ("llama", {"num_key_value_heads": None}),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}),
    "llama-llama3": ("llama", {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32}}),
    "llama-linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.5}}),
    "llama-dynamic": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
    "llama-yarn": ("llama", {"rope_scaling": YARN}),
    "llama-yarn-fine": (
        "llama",
        {"rope_scaling": {**YARN, "beta_fast": 16, "beta_slow": 2, "attention_factor": 1.2}},
    ),
    "llama-longrope": ("llama", {"rope_scaling": {**LONG, "original_max_position_embeddings": 512}}),
    "llama-rope-parameters": (
        "llama",
        {"rope_theta": ..., "rope_parameters": {**YARN, "rope_theta": 5000.0, "rope_type": "yarn"}},
    ),
    "mistral-window": ("mistral", {"sliding_window": 20}),
    "mistral-odd-shape": ("mistral", {**ODD, "sliding_window": 33}),
    "qwen2-odd-shape": ("qwen2", {**ODD, "head_dim": ...}),
    "qwen2-windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen2-tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3-odd-shape": ("qwen3", ODD),
    "qwen3-biases": ("qwen3", {"attention_bias": True}),
    "phi3-partial": ("phi3", {"partial_rotary_factor": 0.5}),
    "phi3-long": (
        "phi3",
        {"rope_scaling": LONG, "max_position_embeddings": 1024, "original_max_position_embeddings": 512},
    ),
    "phi3-window": ("phi3", {"sliding_window": 30}),
    "gemma2-odd-shape": ("gemma2", {**ODD, "query_pre_attn_scalar": 30, "num_hidden_layers": 3}),
    "gemma2-layer-types": ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}),
    "gemma3-odd-shape": ("gemma3_text", {**ODD, "num_hidden_layers": 3}),
    "gemma3-scaled": ("gemma3_text", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}),
    "gemma3-rope-parameters": (
        "gemma3_text",
        {
            "rope_theta": ...,
            "rope_local_base_freq": ...,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "gemma4-experts": ("gemma4_text", gemma4.EXPERTS),
    "gemma4-per-layer-config": (  # as transformers writes it
        "gemma4_text",
        {
            "global_head_dim": ...,
            "attention_k_eq_v": True,
            "per_layer_config": {str(index): {"head_dim": 48, "num_key_value_heads": 1} for index in (1, 4)},
        },
    ),
    "gemma4-defaults": (
        "gemma4_unified_text",
        {"num_hidden_layers": 6, "layer_types": ..., "rope_parameters": ..., "final_logit_softcapping": None},
    ),
    "gemma4-scaled-rope": (
        "gemma4_unified_text",
        {
            "attention_bias": True,
            "seed": 5,
            "rope_parameters": {
                **gemma4.ROPES,
                "full_attention": {
                    **gemma4.ROPES["full_attention"],
                    "factor": 4.0,
                    "partial_rotary_factor": 0.6,
                },
            },
        },
    ),
    "smollm3-listed-layers": ("smollm3", {"num_hidden_layers": 2, "no_rope_layers": [0, 1, 1]}),
    "smollm3-windows": (
        "smollm3",
        {
            "num_hidden_layers": 3,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 20,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3-yarn": ("smollm3", {"rope_scaling": YARN, "tie_word_embeddings": True}),
    "granite-tied": (
        "granite",
        {"tie_word_embeddings": True, "rms_norm_eps": 0.1, "embedding_multiplier": 1.0},
    ),
    "granite-biases": ("granite", {"attention_bias": True, "mlp_bias": True}),
    "olmo2-odd-shape": ("olmo2", {**ODD, "head_dim": ..., "attention_bias": True}),
    "olmo3-older-layout": (
        "olmo3",
        {
            "num_hidden_layers": 4,
            "layer_types": ...,
            "rope_parameters": ...,
            "rope_theta": 500000.0,
            "rope_scaling": {**YARN, "rope_type": "yarn", "attention_factor": 1.2},
        },
    ),
    "ministral3-window": ("ministral3", {"sliding_window": 20}),
    "ministral3-odd-shape": ("ministral3", ODD),
    "exaone4-default-pattern": ("exaone4", {"layer_types": ..., "num_hidden_layers": 5}),
    "exaone4-no-window": (
        "exaone4",
        {
            "layer_types": ["full_attention"] * 2,
            "sliding_window": None,
            "rope_scaling": {**LLAMA3, "original_max_position_embeddings": 32},
        },
    ),
    "ernie-odd-shape": ("ernie4_5", {**ODD, "use_bias": True, "tie_word_embeddings": True}),
    "hunyuan-odd-shape": ("hunyuan_v1_dense", ODD),
    "hunyuan-plain-rope": ("hunyuan_v1_dense", {"rope_scaling": ..., "attention_bias": True}),
    "hunyuan-rope-parameters": (
        "hunyuan_v1_dense",
        {
            "rope_theta": ...,
            "rope_scaling": ...,
            "rope_parameters": {"rope_type": "dynamic", "alpha": 7.0, "factor": 1.0, "rope_theta": 5000.0},
        },
    ),
    "qwen3-moe-dense-layers": (
        "qwen3_moe",
        {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [1], "norm_topk_prob": False},
    ),
    "qwen3-moe-window": (
        "qwen3_moe",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "attention_bias": True},
    ),
    "qwen3-moe-odd-shape": ("qwen3_moe", {**ODD, "moe_intermediate_size": 36, "num_experts": 5}),
    "qwen3-moe-all-experts": ("qwen3_moe", {"num_experts_per_tok": 8}),
    "qwen2-moe-renormalized": ("qwen2_moe", {"norm_topk_prob": True, "qkv_bias": True}),
    "qwen2-moe-windows": (
        "qwen2_moe",
        {"num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 2},
    ),
    "mixtral-window": ("mixtral", {"sliding_window": 20, "num_experts_per_tok": 1}),
    "olmoe-biases": ("olmoe", {"norm_topk_prob": True, "attention_bias": True, "clip_qkv": None}),
    "gpt-oss-no-window": ("gpt_oss", {"sliding_window": 24, "layer_types": ["full_attention"] * 2}),
    "gpt-oss-hub": (  # the keys of the published files
        "gpt_oss",
        {
            "experts_per_token": 3,
            "initial_context_length": 64,
            "swiglu_limit": 7.0,
            "rope_parameters": ...,
            "rope_theta": 150000.0,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
            },
        },
    ),
    "nemotron-h-dense": (
        "nemotron_h",
        {
            "num_hidden_layers": 5,
            "hybrid_override_pattern": "M-*M-",
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "conv_kernel": 3,
            "layer_norm_epsilon": 0.01,
        },
    ),
    "nemotron-h-all-kinds": (
        "nemotron_h",
        {
            "num_hidden_layers": 6,
            "hybrid_override_pattern": "EM-*ME",
            "n_group": 4,
            "topk_group": 2,
            "n_groups": 4,
            "norm_topk_prob": False,
            "tie_word_embeddings": False,
        },
    ),
    "falcon-h1-norm-first": (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": True,
            "attention_bias": True,
            "mlp_bias": True,
            "mamba_proj_bias": True,
            "projectors_bias": True,
        },
    ),
    "falcon-h1-plain": (
        "falcon_h1",
        {
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_conv_bias": False,
            "mlp_multipliers": ...,
            "ssm_multipliers": ...,
            "mamba_d_head": "auto",
        },
    ),
    "granite-hybrid-older-names": (
        "granitemoehybrid",
        {"layer_types": ["mamba", "attention", "mamba"], "position_embedding_type": "nope"},
    ),
    "granite-hybrid-dense": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_d_head": "auto",
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "mamba_d_conv": 3,
            "rms_norm_eps": 0.01,
        },
    ),
    "granite-hybrid-attention-only": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "layer_types": ["full_attention"] * 3,
            "position_embedding_type": "rope",
        },
    ),
    "granitemoe-tied": (
        "granitemoe",
        {
            "tie_word_embeddings": True,
            "rms_norm_eps": 0.1,
            "embedding_multiplier": 1.0,
            "attention_bias": True,
            "seed": 1,
        },
    ),
    "lfm2-hub": (  # the keys of the published files
        "lfm2",
        {
            "layer_types": ...,
            "full_attn_idxs": [1],
            "intermediate_size": ...,
            "block_ff_dim": 96,
            "block_dim": 64,
            "block_auto_adjust_ff_dim": True,
            "block_ffn_dim_multiplier": 1.0,
            "block_norm_eps": 1e-5,
            "block_use_swiglu": True,
            "block_mlp_init_scale": 1.0,
            "conv_dim": 64,
            "conv_dim_out": 64,
            "conv_use_xavier_init": True,
            "num_heads": 4,
            "use_pos_enc": True,
        },
    ),
    "lfm2-biases": ("lfm2", {"conv_bias": True, "conv_L_cache": 5, "tie_embedding": True}),
    "lfm2-moe-plain": ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False}),
    "deepseek-v2-groups": (
        "deepseek_v2",
        {
            "q_lora_rank": 48,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": ...,
            "rope_theta": 5000.0,
        },
    ),
    "deepseek-v2-hub": (  # the keys of the published files
        "deepseek_v2",
        {
            "aux_loss_alpha": 0.001,
            "ep_size": 1,
            "moe_layer_freq": 1,
            "n_group": 1,
            "norm_topk_prob": False,
            "rope_parameters": ...,
            "rope_theta": 10000.0,
            "rope_scaling": {
                **YARN,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
            "scoring_func": "softmax",
            "seq_aux": True,
            "topk_group": 1,
            "topk_method": "greedy",
        },
    ),
    "deepseek-v3-halves": (
        "deepseek_v3",
        {"rope_interleave": False, "q_lora_rank": None, "n_shared_experts": 1, "norm_topk_prob": False},
    ),
    "deepseek-v3-hub": (  # the keys of the published files; Kimi K2 has one group
        "deepseek_v3",
        {
            "n_group": 1,
            "topk_group": 1,
            "ep_size": 1,
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "attention_bias": True,
        },
    ),
    "deepseek-v3-dense": (
        "deepseek_v3",
        {"first_k_dense_replace": 2, "v_head_dim": 20, "qk_nope_head_dim": 24},
    ),
    "glm4-moe-lite-hub": (
        "glm4_moe_lite",
        {
            "mlp_layer_types": ...,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 1.0,
            "topk_method": "noaux_tc",
            "rope_scaling": None,
        },
    ),
    "mistral4-one-projection": ("mistral4", {"q_lora_rank": None, "norm_topk_prob": False}),
    "qwen3-5-pattern": (
        "qwen3_5_text",
        {"num_hidden_layers": 5, "layer_types": ..., "full_attention_interval": 3, "attention_bias": True},
    ),
    "qwen3-5-mrope": (
        "qwen3_5_text",
        {
            "rope_theta": ...,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000000.0,
                "partial_rotary_factor": 0.25,
                "mrope_interleaved": True,
                "mrope_section": [2, 1, 1],
            },
        },
    ),
    "qwen3-5-one-group": ("qwen3_5_text", {"linear_num_value_heads": 2, "linear_conv_kernel_dim": 2}),
    "qwen3-next-dense-layers": ("qwen3_next", {"mlp_only_layers": [0], "norm_topk_prob": False}),
    "apertus-biases": ("apertus", {"attention_bias": True, "seed": 6}),
    "arcee-biases": ("arcee", {"attention_bias": True, "mlp_bias": True}),
    "cohere-biases": ("cohere", {"attention_bias": True}),
    "cohere-plus": ("cohere", {"use_qk_norm": True, "tie_word_embeddings": False}),
    "cohere2-hub": (  # the keys of the published files
        "cohere2",
        {
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window_pattern": ...,
            "order_of_interleaved_layers": "local_attn_first",
            "position_embedding_type": "rope_gptj",
            "rotary_pct": 1.0,
            "use_embedding_sharing": True,
            "use_gated_activation": True,
            "use_parallel_block": True,
            "use_parallel_embedding": False,
            "use_qk_norm": False,
        },
    ),
    "cohere2-moe-sum": (
        "cohere2_moe",
        {
            "shared_expert_combination_strategy": "sum",
            "expert_selection_fn": "softmax",
            "rms_norm_eps": 1e-6,
            "first_k_dense_replace": ...,
            "prefix_dense_intermediate_size": ...,
        },
    ),
    "cohere2-moe-not-shared": ("cohere2_moe", {"num_shared_experts": 0, "norm_topk_prob": False}),
    "dots1-two-shared": ("dots1", {"n_shared_experts": 2, "first_k_dense_replace": 0}),
    "ernie4-5-moe-hub": (  # the keys of the published files
        "ernie4_5_moe",
        {
            "moe_capacity": [64, 64, 64],
            "moe_gate": "topk",
            "moe_layer_end_index": 1,
            "moe_layer_interval": 1,
            "moe_use_aux_free": True,
            "num_nextn_predict_layers": 1,
            "use_rmsnorm": True,
            "tie_word_embeddings": True,
        },
    ),
    "ernie4-5-moe-no-shared": ("ernie4_5_moe", {"moe_num_shared_experts": 0, "moe_layer_start_index": 0}),
    "exaone-hub": (  # the keys of the published files
        "exaone",
        {
            **dict.fromkeys(("num_hidden_layers", "rms_norm_eps", "hidden_act"), ...),
            "activation_function": "silu",
            "embed_dropout": 0.0,
            "layer_norm_epsilon": 1e-5,
            "num_layers": 2,
            "tie_word_embeddings": True,
        },
    ),
    "exaone-biases": ("exaone", {"attention_bias": True, "mlp_bias": True, "rope_scaling": ...}),
    "exaone-moe-hub": (
        "exaone_moe",
        {
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "num_hidden_layers": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "num_nextn_predict_layers": 1,
        },
    ),
    "glm-whole-heads": ("glm", {"partial_rotary_factor": 1.0, "attention_bias": False}),
    "glm4-moe-plain": (
        "glm4_moe",
        {
            "use_qk_norm": False,
            "attention_bias": False,
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "granite-swa-plain": ("granite_swa", {"layer_types": ..., "layer_rope_theta": None}),
    "hunyuan-moe-numbers": ("hunyuan_v1_moe", {"moe_topk": 2, "num_experts": 5, "rope_scaling": ...}),
    "minimax-m2-hub": (
        "minimax_m2",
        {
            "attn_type_list": [1, 1],
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "use_qk_norm": True,
            "qk_norm_type": "per_layer",
            "shared_intermediate_size": 0,
            "use_mtp": True,
            "num_mtp_modules": 3,
            "mtp_transformer_layers": 1,
        },
    ),
    "nemotron-biases": (
        "nemotron",
        {"attention_bias": True, "mlp_bias": True, "partial_rotary_factor": 0.25, "seed": 8},
    ),
    "phi-partial": ("phi", {"partial_rotary_factor": 0.25}),
    "phimoe-no-jitter": ("phimoe", {"router_jitter_noise": 0.0}),
    "phimoe-hub": (  # the keys of the published files
        "phimoe",
        {
            "router_jitter_noise": 0.01,
            "input_jitter_noise": 0.01,
            "hidden_dropout": 0.0,
            "original_max_position_embeddings": 512,
            "sliding_window": 512,
            "rope_scaling": {
                **LONG,
                "original_max_position_embeddings": 512,
                "short_mscale": 1.3,
                "long_mscale": 1.5,
            },
        },
    ),
    "phimoe-no-biases": ("phimoe", {"attention_bias": False, "lm_head_bias": False}),
    "seed-oss-biases": ("seed_oss", {"attention_out_bias": True, "mlp_bias": True, "attention_bias": False}),
    "stablelm-no-biases": ("stablelm", {"use_qkv_bias": False, "partial_rotary_factor": 0.5}),
    "starcoder2-no-window": ("starcoder2", {"sliding_window": None, "use_bias": False}),
    "granitemoeshared-not-shared": ("granitemoeshared", {"shared_intermediate_size": 0}),
}


def peer(path: Path) -> Any:
    transformers.utils.logging.disable_progress_bar()
    (name,) = json.loads((path / "config.json").read_text())["architectures"]
    is_listed = name != "Mistral4ForCausalLM"
    kind = transformers.AutoModelForCausalLM if is_listed else getattr(transformers, name)
    return kind.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


@pytest.fixture
def prompt() -> list[int]:
    return torch.randint(0, 256, (70,), generator=torch.Generator().manual_seed(7)).tolist()


def tolerance_of(family: str) -> float:
    """Two forms of the gated delta rule are far apart, also those of transformers; some values are large."""
    if family in DELTA_NET_FAMILIES:
        return 5e-3
    larger = {"gemma": 5e-3, "starcoder2": 1e-3, "phimoe": 5e-4, "bailing_moe": 3e-4}
    return larger.get(family, 1e-4)


UNKNOWN_TO_TRANSFORMERS = ("bailing_moe", "bailing_moe_v2")
# Buffers that checkpoints hold
STORED_BUFFERS = ("expert_bias", "e_score_correction_bias", "act_fn.beta", "act_fn.eps", "layer_scalar")


def test_every_architecture_has_a_case():
    assert {family for family, _ in CASES.values()} == set(ARCHITECTURES) == set(FAMILIES)
    assert not set(UNKNOWN_TO_TRANSFORMERS) & set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@pytest.mark.parametrize("case", some_of((case for case in CASES if case not in UNKNOWN_TO_TRANSFORMERS), 3))
def test_logits_and_tokens_equal_transformers(case: str, tmp_path: Path, prompt: list[int]):
    family, overrides = CASES[case]
    path = write_checkpoint(tmp_path / family, family, **overrides)
    theirs, ours = peer(path), ForwardHelper(path)
    buffers = [item for name, item in theirs.named_buffers() if name.endswith(STORED_BUFFERS)]
    assert (
        sum(item.numel() for item in (*theirs.parameters(), *buffers))
        == ours.model.info.parameters
        == read_model_info(path).parameters
    )
    with torch.inference_mode():
        expected = theirs(torch.tensor([prompt])).logits[0]
        generated = theirs.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=64,
            do_sample=False,
            eos_token_id=None,
        )
    torch.testing.assert_close(ours.logits(prompt), expected, atol=tolerance_of(family), rtol=0)
    output = ours.greedy(prompt, 64)
    assert output == generated[0, len(prompt) :].tolist()
    assert len(set(output)) > 20, "the output loops, so the comparison is weak"


# Every family in some type, two of them in all: the tests of the kernels have each operation in each type.
TYPED = {
    *zip(FAMILIES, itertools.cycle(DTYPES), strict=False),
    *itertools.product(("llama", "gpt_oss"), DTYPES),
}


@pytest.mark.parametrize(("family", "dtype"), some_of(sorted(TYPED), 5))
def test_chunked_prefill_gives_the_same_bits(family: str, dtype: str, tmp_path: Path, prompt: list[int]):
    path = write_checkpoint(tmp_path / family, family, dtype=dtype)
    check_chunks(ForwardHelper(path, dtype=dtype, block_size=4), prompt)


@pytest.mark.parametrize(
    ("isa", "family"),
    [(isa, family) for isa in ISAS for family in (FAMILIES if isa == ISAS[-1] else ("llama", "gpt_oss"))],
)
def test_native_kernels_agree_with_the_reference(isa: str, family: str, tmp_path: Path, prompt: list[int]):
    path = write_checkpoint(tmp_path / family, family)
    ours = ForwardHelper(path, ops=CpuOps(isa, threads=1), block_size=4)
    expected, tolerance = ForwardHelper(path).logits(prompt), tolerance_of(family)
    torch.testing.assert_close(ours.logits(prompt), expected, atol=tolerance, rtol=0)
    check_chunks(ours, prompt)


LOW_PRECISIONS: tuple[dict[str, str], ...] = (
    {"dtype": "bfloat16"},
    {"weight_dtype": "float16"},
    {"quantization": "int8", "dtype": "bfloat16"},
    {"quantization": "int4"},
    {"kv_dtype": "int8"},
)
# Two precisions for a family and two families for a precision: tests of the kernels have each with each.
LOW_FAMILIES = ("llama", "gemma3_text", "gemma4_text", "qwen2_moe", "gpt_oss")
LOW_CASES = [
    *((ISAS[-1], family, LOW_PRECISIONS[number]) for number, family in enumerate(LOW_FAMILIES)),
    *((ISAS[-1], family, LOW_PRECISIONS[number - 2]) for number, family in enumerate(LOW_FAMILIES)),
    *((isa, "llama", LOW_PRECISIONS[number]) for number, isa in enumerate(ISAS[:-1])),
]


@pytest.mark.parametrize(
    ("isa", "family", "options"),
    LOW_CASES,
    ids=lambda part: part if isinstance(part, str) else "-".join(part.values()),
)
def test_native_kernels_at_low_precision(
    isa: str, family: str, options: dict[str, str], tmp_path: Path, prompt: list[int]
):
    """Within a seventh of the logits' spread: quantized weights round activations too.

    All experts are chosen: a rounded router may choose others, and either choice is right.
    """
    choices = {"num_experts_per_tok": 8} if family in MOE_FAMILIES else {}
    path = write_checkpoint(tmp_path / family, family, **choices)
    ours = ForwardHelper(path, ops=CpuOps(isa, threads=1), block_size=4, **options)
    logits, expected = ours.logits(prompt), ForwardHelper(path, **options).logits(prompt)
    assert (logits - expected).norm() < expected.norm() / 7
    check_chunks(ours, prompt)


# Names of tensors in a checkpoint of bailing_moe_v2, and in one of glm4_moe or granitemoeshared
BAILING_NAMES = {
    "embed_tokens": "word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias",
    "block_sparse_moe.router.layer": "mlp.gate",
    "block_sparse_moe.input_linear": "mlp.experts.gate_up_proj",
    "block_sparse_moe.output_linear": "mlp.experts.down_proj",
    "shared_mlp.output_linear": "mlp.shared_experts.down_proj",
}


@pytest.mark.parametrize("family", ["bailing_moe", "bailing_moe_v2"])
def test_ling_equals_a_known_family_under_other_names(family: str, tmp_path: Path, prompt: list[int]):
    """The second generation is GLM-4.5 with fused q, k and v, the first Granite's without multipliers."""
    if family == "bailing_moe_v2":
        source = write_checkpoint(tmp_path / "source", "glm4_moe", attention_bias=False)
        write_config(tmp_path / "ling", family)
    else:
        plain = {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0}
        plain |= {"attention_multiplier": 0.25, "intermediate_size": 48, "shared_intermediate_size": 96}
        source = write_checkpoint(tmp_path / "source", "granitemoeshared", **plain)
        write_config(tmp_path / "ling", family)
    tensors = load_file(source / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, value in tensors.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            continue
        if name.endswith("q_proj.weight"):
            parts = [tensors[name.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")]
            stored[name.replace("self_attn.q_proj", "attention.query_key_value")] = torch.cat(parts)
        elif name.endswith("shared_mlp.input_linear.weight"):
            for half, part in zip(value.chunk(2), ("gate_proj", "up_proj"), strict=True):
                stored[name.replace("shared_mlp.input_linear", f"mlp.shared_experts.{part}")] = half.clone()
        else:
            for old, new in BAILING_NAMES.items():
                name = name.replace(old, new)
            stored[name.removesuffix(".weight") if ".experts.gate_up" in name else name] = value
    stored = {
        name.removesuffix(".weight")
        if name.endswith("experts.down_proj.weight") and value.ndim == 3
        else name: value
        for name, value in stored.items()
    }
    save_file(stored, tmp_path / "ling" / "model.safetensors")
    expected, actual = ForwardHelper(source).logits(prompt), ForwardHelper(tmp_path / "ling").logits(prompt)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=0)


def check_chunks(ours: ForwardHelper, prompt: list[int]) -> None:
    whole = ours.logits(prompt)
    pieces = torch.cat([ours.logits(prompt[start:end], start) for start, end in [(0, 1), (1, 18), (18, 66)]])
    singles = torch.cat([ours.logits(prompt[index : index + 1], index) for index in range(66, 70)])
    assert torch.equal(torch.cat((pieces, singles)).view(torch.int32), whole.view(torch.int32))
    assert whole.isfinite().all()


def test_ignoring_the_window_changes_logits(tmp_path: Path, prompt: list[int]):
    """Otherwise the comparison with transformers could not detect an ignored window."""
    narrow = ForwardHelper(write_checkpoint(tmp_path / "narrow", "mistral", sliding_window=20))
    wide = ForwardHelper(write_checkpoint(tmp_path / "wide", "mistral", sliding_window=None))
    left, right = narrow.logits(prompt), wide.logits(prompt)
    assert torch.equal(left[:20], right[:20])
    assert (left[30:] - right[30:]).abs().amax() > 0.1


def test_model_info_of_a_checkpoint(tmp_path: Path):
    info = read_model_info(
        write_checkpoint(tmp_path, "qwen3", dtype="bfloat16", head_dim=24, num_hidden_layers=3)
    )
    assert (info.architecture, info.context_len, info.dtype, info.vocab_size) == (
        "qwen3",
        512,
        "bfloat16",
        VOCAB_SIZE,
    )
    assert info.kv_values_per_token == 3 * 2 * 2 * 24


@pytest.mark.parametrize(
    "scaling, context",
    [
        ({"type": "dynamic", "factor": 2.0}, 1024),
        ({"type": "linear", "factor": 2.0}, 512),
        ({**YARN, "original_max_position_embeddings": 256}, 1024),
        ({**LLAMA3, "original_max_position_embeddings": 64}, 512),
    ],
)
def test_context_length_of_scaled_ropes(tmp_path: Path, scaling: dict[str, Any], context: int):
    assert read_model_info(write_checkpoint(tmp_path, rope_scaling=scaling)).context_len == context


def test_dynamic_rope_uses_the_maximum_context(tmp_path: Path, prompt: list[int]):
    """A deliberate difference from transformers, beyond the original length."""
    path = write_checkpoint(
        tmp_path, rope_scaling={"type": "dynamic", "factor": 2.0}, max_position_embeddings=64
    )
    short, long = ForwardHelper(path, max_len=64), ForwardHelper(path, max_len=128)
    assert not torch.equal(short.logits(prompt[:8]), long.logits(prompt[:8]))
    with torch.inference_mode():
        expected = peer(path)(torch.tensor([[*prompt, *prompt][:128]])).logits[0]
    torch.testing.assert_close(long.logits([*prompt, *prompt][:128]), expected, atol=1e-4, rtol=0)


def test_bfloat16_weights_are_not_converted(tmp_path: Path, prompt: list[int]):
    path = write_checkpoint(tmp_path, dtype="bfloat16")
    with torch.inference_mode():
        expected = peer(path)(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(ForwardHelper(path).logits(prompt), expected, atol=1e-4, rtol=0)


def test_progress_ends_at_the_total(tmp_path: Path):
    progress: list[tuple[int, int]] = []
    load_model(
        write_checkpoint(tmp_path),
        ReferenceOps(),
        Precision.from_dtypes("float32"),
        "cpu",
        64,
        lambda done, total: progress.append((done, total)),
    )
    assert [done for done, _ in progress] == sorted(done for done, _ in progress)
    assert progress[-1][0] == progress[-1][1] and len({total for _, total in progress}) == 1
