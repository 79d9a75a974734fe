"""Names that llama.cpp's converter writes for the families of tests, not derived from the reader's tables.

Source: llama.cpp's conversion/*.py with gguf-py/gguf/constants.py and tensor_mapping.py (2026-11), run on
checkpoints of tests/support/checkpoints.py without their vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Tensors, those of blocks without `blk.N.`
OUTER = "token_embd.weight output_norm.weight output.weight"
ATTENTION = "attn_q.weight attn_k.weight attn_v.weight attn_output.weight"
QK_NORMS = "attn_q_norm.weight attn_k_norm.weight"
NORMS = "attn_norm.weight ffn_norm.weight"
POST_NORMS = "post_attention_norm.weight post_ffw_norm.weight"
MLP = "ffn_gate.weight ffn_up.weight ffn_down.weight"
EXPERTS = "ffn_gate_inp.weight ffn_gate_exps.weight ffn_up_exps.weight ffn_down_exps.weight"
SHARED = "ffn_gate_shexp.weight ffn_up_shexp.weight ffn_down_shexp.weight"
MAMBA = (
    "ssm_in.weight ssm_conv1d.weight ssm_conv1d.bias ssm_dt.bias ssm_a ssm_d ssm_norm.weight ssm_out.weight"
)
DELTA = "attn_gate.weight attn_qkv.weight ssm_a ssm_conv1d.weight ssm_dt.bias ssm_norm.weight ssm_out.weight"
LATENT = (
    "attn_q_a.weight attn_q_a_norm.weight attn_q_b.weight "
    "attn_kv_a_mqa.weight attn_kv_a_norm.weight attn_k_b.weight attn_v_b.weight"
)
# Keys without the architecture before them
SIZES = (
    "block_count context_length embedding_length "
    "feed_forward_length attention.head_count attention.head_count_kv"
)
RMS = "attention.layer_norm_rms_epsilon rope.freq_base"
HEADS = "attention.key_length attention.value_length"
USED = "expert_count expert_used_count"
GROUPS = "expert_group_count expert_group_used_count"
SCALES = "attention.scale embedding_scale residual_scale logit_scale"
SSM = "ssm.conv_kernel ssm.state_size ssm.group_count ssm.inner_size ssm.time_step_rank"


@dataclass(frozen=True, slots=True)
class Written:
    """The architecture of a file, and the names in it, of all blocks together."""

    architecture: str
    tensors: str
    keys: str


WRITTEN: Mapping[str, Written] = MappingProxyType(
    {
        "apertus": Written(
            "apertus",
            f"{OUTER} {ATTENTION} {QK_NORMS} {NORMS} ffn_down.weight ffn_up.weight rope_freqs.weight",
            (
                f"{SIZES} {RMS} rope.dimension_count vocab_size xielu.alpha_n xielu.alpha_p xielu.beta "
                "xielu.eps"
            ),
        ),
        "arcee": Written(
            "arcee",
            f"{OUTER} {ATTENTION} {NORMS} ffn_down.weight ffn_up.weight",
            f"{SIZES} {RMS} {HEADS} rope.dimension_count vocab_size",
        ),
        "bailing_moe_v2": Written(
            "bailingmoe2",
            (
                f"{OUTER} {QK_NORMS} {NORMS} {MLP} {EXPERTS} {SHARED} attn_output.weight attn_qkv.weight "
                "exp_probs_b.bias"
            ),
            (
                f"{SIZES} {RMS} {HEADS} {USED} {GROUPS} expert_feed_forward_length expert_gating_func "
                "expert_shared_count expert_shared_feed_forward_length expert_weights_norm "
                "expert_weights_scale leading_dense_block_count rope.dimension_count vocab_size"
            ),
        ),
        "cohere": Written(
            "command-r",
            f"{ATTENTION} {MLP} attn_norm.weight output_norm.weight token_embd.weight",
            f"{SIZES} attention.layer_norm_epsilon logit_scale rope.freq_base rope.scaling.type",
        ),
        "cohere2": Written(
            "cohere2",
            f"{ATTENTION} {MLP} attn_norm.weight output_norm.weight token_embd.weight",
            (
                f"{SIZES} {HEADS} attention.layer_norm_epsilon attention.sliding_window logit_scale "
                "rope.dimension_count rope.freq_base rope.scaling.type vocab_size"
            ),
        ),
        "deepseek_v2": Written(
            "deepseek2",
            (
                f"{OUTER} {NORMS} {MLP} {EXPERTS} {SHARED} attn_k_b.weight attn_kv_a_mqa.weight "
                "attn_kv_a_norm.weight attn_output.weight attn_q.weight attn_v_b.weight"
            ),
            (
                f"{SIZES} {RMS} {HEADS} {USED} attention.key_length_mla attention.kv_lora_rank "
                "attention.value_length_mla expert_feed_forward_length expert_shared_count "
                "expert_weights_scale leading_dense_block_count rope.dimension_count rope.scaling.factor "
                "rope.scaling.original_context_length rope.scaling.type rope.scaling.yarn_log_multiplier "
                "vocab_size"
            ),
        ),
        "deepseek_v3": Written(
            "deepseek2",
            f"{OUTER} {NORMS} {MLP} {EXPERTS} {SHARED} {LATENT} attn_output.weight exp_probs_b.bias",
            (
                f"{SIZES} {RMS} {HEADS} {USED} {GROUPS} attention.key_length_mla attention.kv_lora_rank "
                "attention.q_lora_rank attention.value_length_mla expert_feed_forward_length "
                "expert_shared_count expert_weights_norm expert_weights_scale leading_dense_block_count "
                "rope.dimension_count rope.scaling.factor rope.scaling.original_context_length "
                "rope.scaling.type rope.scaling.yarn_log_multiplier vocab_size"
            ),
        ),
        "dots1": Written(
            "dots1",
            f"{OUTER} {ATTENTION} {QK_NORMS} {NORMS} {MLP} {EXPERTS} {SHARED} exp_probs_b.bias",
            (
                f"{SIZES} {RMS} {USED} {GROUPS} expert_feed_forward_length expert_shared_count "
                "expert_weights_norm expert_weights_scale leading_dense_block_count"
            ),
        ),
        "ernie4_5": Written(
            "ernie4_5",
            f"{OUTER} {ATTENTION} {NORMS} {MLP}",
            f"{SIZES} {RMS} {HEADS}",
        ),
        "ernie4_5_moe": Written(
            "ernie4_5-moe",
            f"{OUTER} {ATTENTION} {NORMS} {MLP} {EXPERTS} {SHARED} exp_probs_b.bias",
            (
                f"{SIZES} {RMS} {USED} expert_feed_forward_length expert_shared_count "
                "expert_shared_feed_forward_length interleave_moe_layer_step leading_dense_block_count"
            ),
        ),
        "exaone": Written(
            "exaone",
            f"{OUTER} {ATTENTION} {NORMS} {MLP} rope_freqs.weight",
            f"{SIZES} {RMS} attention.layer_norm_epsilon rope.dimension_count",
        ),
        "exaone4": Written(
            "exaone4",
            f"{OUTER} {ATTENTION} {QK_NORMS} {POST_NORMS} {MLP}",
            f"{SIZES} {RMS} attention.sliding_window attention.sliding_window_pattern vocab_size",
        ),
        "falcon_h1": Written(
            "falcon-h1",
            (
                f"{OUTER} {ATTENTION} {MLP} attn_norm.weight ffn_norm ssm_a ssm_conv1d.bias "
                "ssm_conv1d.weight ssm_d ssm_dt.bias ssm_in.weight ssm_out.weight"
            ),
            f"{SIZES} {RMS} {HEADS} {SSM} vocab_size",
        ),
        "gemma": Written(
            "gemma",
            f"{ATTENTION} {NORMS} {MLP} output_norm.weight token_embd.weight",
            f"{SIZES} {HEADS} attention.layer_norm_rms_epsilon",
        ),
        "gemma2": Written(
            "gemma2",
            f"{ATTENTION} {NORMS} {POST_NORMS} {MLP} output_norm.weight token_embd.weight",
            (
                f"{SIZES} {HEADS} attention.layer_norm_rms_epsilon attention.sliding_window "
                "attn_logit_softcapping final_logit_softcapping"
            ),
        ),
        "gemma3_text": Written(
            "gemma3",
            f"{ATTENTION} {QK_NORMS} {NORMS} {POST_NORMS} {MLP} output_norm.weight token_embd.weight",
            f"{SIZES} {RMS} {HEADS} attention.sliding_window rope.freq_base_swa",
        ),
        "gemma4_text": Written(
            "gemma4",
            (
                f"{ATTENTION} {QK_NORMS} {NORMS} {POST_NORMS} {MLP} inp_gate.weight "
                "layer_output_scale.weight output_norm.weight per_layer_model_proj.weight "
                "per_layer_proj_norm.weight per_layer_token_embd.weight post_norm.weight proj.weight "
                "rope_freqs.weight token_embd.weight"
            ),
            (
                f"{SIZES} {RMS} {HEADS} attention.key_length_swa attention.shared_kv_layers "
                "attention.sliding_window attention.sliding_window_pattern attention.value_length_swa "
                "embedding_length_per_layer_input final_logit_softcapping rope.dimension_count "
                "rope.dimension_count_swa rope.freq_base_swa"
            ),
        ),
        "gemma4_unified_text": Written(
            "gemma4",
            (
                f"{ATTENTION} {QK_NORMS} {NORMS} {POST_NORMS} {MLP} layer_output_scale.weight "
                "output_norm.weight rope_freqs.weight token_embd.weight"
            ),
            (
                f"{SIZES} {RMS} {HEADS} attention.key_length_swa attention.shared_kv_layers "
                "attention.sliding_window attention.sliding_window_pattern attention.value_length_swa "
                "embedding_length_per_layer_input final_logit_softcapping rope.dimension_count "
                "rope.dimension_count_swa rope.freq_base_swa"
            ),
        ),
        "glm4": Written(
            "glm4",
            (
                f"{OUTER} {ATTENTION} {NORMS} {POST_NORMS} attn_k.bias attn_q.bias attn_v.bias "
                "ffn_down.weight ffn_up.weight"
            ),
            f"{SIZES} {RMS} {HEADS} rope.dimension_count",
        ),
        "glm4_moe": Written(
            "glm4moe",
            (
                f"{OUTER} {ATTENTION} {QK_NORMS} {MLP} {EXPERTS} {SHARED} attn_k.bias attn_norm.weight "
                "attn_q.bias attn_v.bias exp_probs_b.bias post_attention_norm.weight"
            ),
            (
                f"{SIZES} {RMS} {HEADS} {USED} {GROUPS} expert_feed_forward_length expert_gating_func "
                "expert_shared_count expert_weights_norm expert_weights_scale leading_dense_block_count "
                "rope.dimension_count"
            ),
        ),
        "glm4_moe_lite": Written(
            "deepseek2",
            f"{OUTER} {NORMS} {MLP} {EXPERTS} {SHARED} {LATENT} attn_output.weight exp_probs_b.bias",
            (
                f"{SIZES} {RMS} {HEADS} {USED} {GROUPS} attention.key_length_mla attention.kv_lora_rank "
                "attention.q_lora_rank attention.value_length_mla expert_feed_forward_length "
                "expert_shared_count expert_weights_norm expert_weights_scale leading_dense_block_count "
                "rope.dimension_count vocab_size"
            ),
        ),
        "gpt_oss": Written(
            "gpt-oss",
            (
                f"{OUTER} {ATTENTION} {EXPERTS} attn_k.bias attn_norm.weight attn_output.bias attn_q.bias "
                "attn_sinks.weight attn_v.bias ffn_down_exps.bias ffn_gate_exps.bias ffn_gate_inp.bias "
                "ffn_up_exps.bias post_attention_norm.weight"
            ),
            (
                f"{SIZES} {RMS} {HEADS} {USED} attention.sliding_window expert_feed_forward_length "
                "rope.scaling.factor rope.scaling.original_context_length rope.scaling.type"
            ),
        ),
        "granite": Written(
            "granite",
            f"{OUTER} {ATTENTION} {NORMS} {MLP}",
            f"{SIZES} {RMS} {SCALES} rope.dimension_count vocab_size",
        ),
        "granitemoe": Written(
            "granitemoe",
            f"{OUTER} {ATTENTION} {NORMS} {EXPERTS}",
            f"{SIZES} {RMS} {USED} {SCALES} rope.dimension_count vocab_size",
        ),
        "granitemoehybrid": Written(
            "granitehybrid",
            f"{OUTER} {ATTENTION} {NORMS} {EXPERTS} {SHARED} {MAMBA}",
            (
                f"{SIZES} {RMS} {USED} {SCALES} {SSM} expert_shared_feed_forward_length "
                "rope.dimension_count rope.scaling.finetuned vocab_size"
            ),
        ),
        "granitemoeshared": Written(
            "granitemoe",
            f"{OUTER} {ATTENTION} {NORMS} {EXPERTS} {SHARED}",
            (
                f"{SIZES} {RMS} {USED} {SCALES} expert_shared_feed_forward_length rope.dimension_count "
                "vocab_size"
            ),
        ),
        "hunyuan_v1_dense": Written(
            "hunyuan-dense",
            f"{OUTER} {ATTENTION} {QK_NORMS} {NORMS} {MLP}",
            (
                f"{SIZES} {RMS} {HEADS} rope.scaling.factor rope.scaling.original_context_length "
                "rope.scaling.type"
            ),
        ),
        "hunyuan_v1_moe": Written(
            "hunyuan-moe",
            f"{OUTER} {ATTENTION} {QK_NORMS} {NORMS} {EXPERTS} {SHARED}",
            (
                f"{SIZES} {RMS} {HEADS} {USED} expert_feed_forward_length expert_shared_count "
                "expert_shared_feed_forward_length rope.scaling.factor "
                "rope.scaling.original_context_length rope.scaling.type"
            ),
        ),
        "lfm2": Written(
            "lfm2",
            (
                f"{ATTENTION} {QK_NORMS} {NORMS} {MLP} output.weight shortconv.conv.weight "
                "shortconv.in_proj.weight shortconv.out_proj.weight token_embd.weight "
                "token_embd_norm.weight"
            ),
            f"{SIZES} {RMS} shortconv.l_cache vocab_size",
        ),
        "lfm2_moe": Written(
            "lfm2moe",
            (
                f"{ATTENTION} {QK_NORMS} {NORMS} {MLP} {EXPERTS} exp_probs_b.bias shortconv.conv.weight "
                "shortconv.in_proj.weight shortconv.out_proj.weight token_embd.weight "
                "token_embd_norm.weight"
            ),
            (
                f"{SIZES} {RMS} {USED} expert_feed_forward_length expert_gating_func "
                "leading_dense_block_count shortconv.l_cache vocab_size"
            ),
        ),
        "llama": Written(
            "llama",
            f"{OUTER} {ATTENTION} {NORMS} {MLP}",
            f"{SIZES} {RMS} {HEADS} rope.dimension_count vocab_size",
        ),
        "minimax_m2": Written(
            "minimax-m2",
            f"{OUTER} {ATTENTION} {QK_NORMS} {NORMS} {EXPERTS} exp_probs_b.bias",
            f"{SIZES} {RMS} {HEADS} {USED} expert_feed_forward_length rope.dimension_count",
        ),
        "ministral3": Written(
            "mistral3",
            f"{OUTER} {ATTENTION} {NORMS} {MLP}",
            (
                f"{SIZES} {RMS} {HEADS} attention.temperature_scale rope.dimension_count "
                "rope.scaling.factor rope.scaling.original_context_length rope.scaling.type "
                "rope.scaling.yarn_log_multiplier vocab_size"
            ),
        ),
        "mistral": Written(
            "llama",
            f"{OUTER} {ATTENTION} {NORMS} {MLP}",
            f"{SIZES} {RMS} {HEADS} rope.dimension_count vocab_size",
        ),
        "mixtral": Written(
            "llama",
            f"{OUTER} {ATTENTION} {NORMS} {EXPERTS}",
            f"{SIZES} {RMS} {USED} rope.dimension_count vocab_size",
        ),
        "nemotron": Written(
            "nemotron",
            (
                f"{OUTER} {ATTENTION} {NORMS} attn_norm.bias ffn_down.weight ffn_norm.bias ffn_up.weight "
                "output_norm.bias"
            ),
            (
                f"{SIZES} {RMS} {HEADS} attention.layer_norm_epsilon rope.dimension_count "
                "rope.scaling.type vocab_size"
            ),
        ),
        "nemotron_h": Written(
            "nemotron_h_moe",
            (
                f"{OUTER} {ATTENTION} {MAMBA} attn_norm.weight exp_probs_b.bias ffn_down_exps.weight "
                "ffn_down_shexp.weight ffn_gate_inp.weight ffn_up_exps.weight ffn_up_shexp.weight"
            ),
            (
                f"{SIZES} {HEADS} {USED} {GROUPS} {SSM} attention.layer_norm_epsilon "
                "attention.layer_norm_rms_epsilon expert_feed_forward_length expert_shared_count "
                "expert_shared_feed_forward_length expert_weights_norm expert_weights_scale "
                "rope.dimension_count rope.scaling.finetuned vocab_size"
            ),
        ),
        "olmo2": Written(
            "olmo2",
            f"{OUTER} {ATTENTION} {QK_NORMS} {POST_NORMS} {MLP}",
            f"{SIZES} {RMS}",
        ),
        "olmo3": Written(
            "olmo2",
            f"{OUTER} {ATTENTION} {QK_NORMS} {POST_NORMS} {MLP}",
            (
                f"{SIZES} {RMS} attention.sliding_window attention.sliding_window_pattern "
                "rope.freq_base_swa rope.scaling.factor rope.scaling.original_context_length "
                "rope.scaling.type"
            ),
        ),
        "olmoe": Written(
            "olmoe",
            f"{OUTER} {ATTENTION} {QK_NORMS} {NORMS} {EXPERTS}",
            f"{SIZES} {RMS} {USED}",
        ),
        "phi": Written(
            "phi2",
            (
                f"{OUTER} {ATTENTION} attn_k.bias attn_norm.bias attn_norm.weight attn_output.bias "
                "attn_q.bias attn_v.bias ffn_down.bias ffn_down.weight ffn_up.bias ffn_up.weight "
                "output.bias output_norm.bias"
            ),
            f"{SIZES} attention.layer_norm_epsilon rope.dimension_count",
        ),
        "phi3": Written(
            "phi3",
            f"{OUTER} {NORMS} attn_output.weight attn_qkv.weight ffn_down.weight ffn_up.weight",
            (
                f"{SIZES} {RMS} attention.sliding_window rope.dimension_count "
                "rope.scaling.original_context_length"
            ),
        ),
        "qwen2": Written(
            "qwen2",
            f"{OUTER} {ATTENTION} {NORMS} {MLP} attn_k.bias attn_q.bias attn_v.bias",
            f"{SIZES} {RMS}",
        ),
        "qwen2_moe": Written(
            "qwen2moe",
            (
                f"{OUTER} {ATTENTION} {NORMS} {EXPERTS} {SHARED} attn_k.bias attn_q.bias attn_v.bias "
                "ffn_gate_inp_shexp.weight"
            ),
            f"{SIZES} {RMS} {USED} expert_feed_forward_length expert_shared_feed_forward_length",
        ),
        "qwen3": Written(
            "qwen3",
            f"{OUTER} {ATTENTION} {QK_NORMS} {NORMS} {MLP}",
            f"{SIZES} {RMS} {HEADS}",
        ),
        "qwen3_5_moe_text": Written(
            "qwen35moe",
            (
                f"{OUTER} {ATTENTION} {QK_NORMS} {EXPERTS} {SHARED} {DELTA} attn_norm.weight "
                "ffn_gate_inp_shexp.weight post_attention_norm.weight ssm_alpha.weight ssm_beta.weight"
            ),
            (
                f"{SIZES} {RMS} {HEADS} {USED} {SSM} attention.recurrent_layers expert_feed_forward_length "
                "expert_shared_feed_forward_length full_attention_interval rope.dimension_count "
                "rope.dimension_sections"
            ),
        ),
        "qwen3_5_text": Written(
            "qwen35",
            (
                f"{OUTER} {ATTENTION} {QK_NORMS} {MLP} {DELTA} attn_norm.weight post_attention_norm.weight "
                "ssm_alpha.weight ssm_beta.weight"
            ),
            (
                f"{SIZES} {RMS} {HEADS} {SSM} attention.recurrent_layers full_attention_interval "
                "rope.dimension_count rope.dimension_sections"
            ),
        ),
        "qwen3_moe": Written(
            "qwen3moe",
            f"{OUTER} {ATTENTION} {QK_NORMS} {NORMS} {EXPERTS}",
            f"{SIZES} {RMS} {HEADS} {USED} expert_feed_forward_length",
        ),
        "qwen3_next": Written(
            "qwen3next",
            (
                f"{OUTER} {ATTENTION} {QK_NORMS} {EXPERTS} {SHARED} {DELTA} attn_norm.weight "
                "ffn_gate_inp_shexp.weight post_attention_norm.weight ssm_ba.weight"
            ),
            (
                f"{SIZES} {RMS} {HEADS} {USED} {SSM} attention.recurrent_layers expert_feed_forward_length "
                "expert_shared_feed_forward_length full_attention_interval rope.dimension_count"
            ),
        ),
        "seed_oss": Written(
            "seed_oss",
            (
                f"{OUTER} {ATTENTION} {MLP} attn_k.bias attn_norm.weight attn_q.bias attn_v.bias "
                "post_attention_norm.weight"
            ),
            f"{SIZES} {RMS} {HEADS}",
        ),
        "smollm3": Written(
            "smollm3",
            f"{OUTER} {ATTENTION} {NORMS} {MLP}",
            f"{SIZES} {RMS} rope.dimension_count vocab_size",
        ),
        "solar_open": Written(
            "glm4moe",
            (
                f"{OUTER} {ATTENTION} {EXPERTS} {SHARED} attn_norm.weight exp_probs_b.bias "
                "post_attention_norm.weight"
            ),
            (
                f"{RMS} {HEADS} {USED} {GROUPS} attention.head_count attention.head_count_kv block_count "
                "context_length embedding_length expert_feed_forward_length expert_gating_func "
                "expert_shared_count expert_weights_norm expert_weights_scale rope.dimension_count "
                "rope.scaling.factor rope.scaling.original_context_length rope.scaling.type"
            ),
        ),
        "stablelm": Written(
            "stablelm",
            (
                f"{OUTER} {ATTENTION} {NORMS} {MLP} attn_k.bias attn_norm.bias attn_q.bias attn_v.bias "
                "ffn_norm.bias output_norm.bias"
            ),
            f"{SIZES} attention.layer_norm_epsilon rope.dimension_count use_parallel_residual",
        ),
        "starcoder2": Written(
            "starcoder2",
            (
                f"{ATTENTION} {NORMS} attn_k.bias attn_norm.bias attn_output.bias attn_q.bias attn_v.bias "
                "ffn_down.bias ffn_down.weight ffn_norm.bias ffn_up.bias ffn_up.weight output_norm.bias "
                "output_norm.weight token_embd.weight"
            ),
            f"{SIZES} attention.layer_norm_epsilon rope.freq_base",
        ),
    }
)
