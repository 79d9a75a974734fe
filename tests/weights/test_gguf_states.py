"""GGUF files of families whose layers have states: the bits of the checkpoints they were converted from."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from foreword import LLM, SamplingParams
from foreword.errors import CheckpointError
from foreword.kernels.cpu.backend import CpuOps
from foreword.kernels.ops import QuantizedBlocks
from foreword.kernels.quantization import dequantize
from foreword.models.model_loader import check_weights, read_model_info
from foreword.weights.gguf.tensor_names import gguf_name
from tests.support.budget import some_of
from tests.support.checkpoints import STATE_FAMILIES, write_checkpoint
from tests.support.cpu_kernels import FORCED_ISA
from tests.support.forward_helpers import ForwardHelper
from tests.support.gguf_files import Kind, check_same_model, quantize, to_gguf_layout, write_gguf

PROMPT = torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(7)).tolist()
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
WIDE_FAMILIES: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        **WIDE,
        "mamba_num_heads": 16,
        "mamba_head_dim": 16,
        "moe_intermediate_size": 256,
        "moe_shared_expert_intermediate_size": 256,
    },
    "falcon_h1": {
        **WIDE,
        "mamba_d_ssm": 256,
        "mamba_n_heads": 16,
        "embedding_multiplier": 1.0,
        "lm_head_multiplier": 1.0,
        "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 1.0,
        "key_multiplier": 1.0,
        "ssm_in_multiplier": 1.0,
        "ssm_out_multiplier": 1.0,
        "ssm_multipliers": ...,
        "mlp_multipliers": ...,
    },
    "granitemoehybrid": {
        "hidden_size": 256,
        "intermediate_size": 256,
        "shared_intermediate_size": 256,
        "mamba_n_heads": 16,
        "mamba_d_head": 32,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
    },
    "lfm2": {"hidden_size": 256, "intermediate_size": 384, "block_multiple_of": 256},
    "qwen3_5_text": {**WIDE, "linear_num_value_heads": 8},
    "qwen3_5_moe_text": {
        **WIDE,
        "linear_num_value_heads": 8,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "qwen3_next": {
        **WIDE,
        "linear_num_value_heads": 8,
        "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 256,
    },
    "lfm2_moe": {
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "routed_scaling_factor": 1.0,
    },
}
SCALING = {"lfm2_moe": {"routed_scaling_factor": 1.0}}  # no other in files
MTP_SHAPES = {"nextn.eh_proj": (64, 128), "nextn.enorm": (64,), "attn_norm": (64,), "attn_k": (64, 64)}
FIVE_LAYERS: dict[str, Any] = {"layer_types": ..., "num_hidden_layers": 5}
# Family, options of the checkpoint, keys of the file beyond the usual.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen35-default-interval": ("qwen3_5_text", FIVE_LAYERS, {}),
    "qwen35-interval": ("qwen3_5_text", {**FIVE_LAYERS, "full_attention_interval": 2}, {}),
    "qwen35-flags-win": ("qwen3_5_text", {}, {"full_attention_interval": 1}),
    "qwen35-as-many-key-heads": ("qwen3_5_text", {"linear_num_key_heads": 4}, {}),
    "qwen35-six-value-heads": ("qwen3_5_text", {"linear_num_value_heads": 6}, {}),
    "qwen35-full-rope": ("qwen3_5_text", {"partial_rotary_factor": 1.0}, {"rope__dimension_count": None}),
    "qwen35-tied": ("qwen3_5_text", {"tie_word_embeddings": True}, {"rope__dimension_sections": None}),
    "qwen35moe-fused-experts": ("qwen3_5_moe_text", {}, {"fuse_experts": True}),
    "qwen3next-joined": ("qwen3_next", {}, {"join_qkvz": True}),
    "falcon-h1": ("falcon_h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False}, {}),
    "nemotron-h": (
        "nemotron_h",
        {
            "num_hidden_layers": 5,
            "hybrid_override_pattern": "M-*M-",
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
        },
        {"architecture": "nemotron_h"},
    ),
    "falcon-h1-biases": (
        "falcon_h1",
        {"mamba_conv_bias": False, "mamba_d_conv": 3, "tie_word_embeddings": True, "lm_head_multiplier": 2.0},
        {},
    ),
    "granitehybrid-dense": ("granitemoehybrid", {"num_local_experts": 0, "num_experts_per_tok": 0}, {}),
    "granitehybrid-biases": (
        "granitemoehybrid",
        {
            "attention_bias": True,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_d_conv": 3,
        },
        {},
    ),
    "lfm2-attention-only": ("lfm2", {"layer_types": ["full_attention"] * 3}, {}),
    "lfm2-kernel": ("lfm2", {"conv_L_cache": 5}, {}),
    "lfm2moe-two-dense": ("lfm2_moe", {"num_dense_layers": 2, "routed_scaling_factor": 1.0}, {}),
    "lfm2moe-no-dense": ("lfm2_moe", {"num_dense_layers": 0, "routed_scaling_factor": 1.0}, {}),
}


def write_mtp_head(writer: gguf.GGUFWriter) -> None:
    for name, shape in MTP_SHAPES.items():
        writer.add_tensor(f"blk.3.{name}.weight", np.ones(shape, np.float32))


@pytest.mark.parametrize("case", some_of(CASES, 4))
def test_float32_gguf_has_the_checkpoints_bits(case: str, tmp_path: Path) -> None:
    family, options, keys = CASES[case]
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, **options)
    check_same_model(checkpoint, write_gguf(checkpoint, tmp_path / "model.gguf", **keys))


def to_rounded(checkpoint: Path, kind: Callable[[str], Kind]) -> None:
    """Give weights the values of a GGUF file: rounded in the order of the file."""
    config = json.loads((checkpoint / "config.json").read_text())
    architecture = {"qwen3_5_moe_text": "qwen35moe"}.get(config["model_type"], "")
    tensors = load_file(checkpoint / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim != 2 or name.endswith(("gate.weight", "shared_expert_gate.weight")):
            continue
        named = kind(gguf_name(name, architecture))
        values = gguf.dequantize(quantize(to_gguf_layout(name, tensor, config), named), named)
        places = torch.arange(tensor.numel(), dtype=torch.float32).view(tensor.shape)
        order = torch.from_numpy(to_gguf_layout(name, places, config)).to(torch.int64).flatten()
        rounded = torch.empty(tensor.numel()).index_copy_(0, order, torch.from_numpy(values).flatten())
        tensors[name] = rounded.view(tensor.shape)
    save_file(tensors, checkpoint / "model.safetensors")


@pytest.mark.parametrize(
    ("family", "kind"),
    some_of(
        [
            *((family, Kind.Q8_0) for family in STATE_FAMILIES),
            *(("qwen3_5_text", kind) for kind in (Kind.Q4_0, Kind.Q4_K)),
            ("qwen3_next", Kind.Q4_K),
        ],
        4,
    ),
)
def test_quantized_gguf_equals_rounded_checkpoint(family: str, kind: Kind, tmp_path: Path) -> None:
    """Blocks of Q4_K span several value heads of Qwen3.5: inputs get their order."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, **WIDE_FAMILIES[family])
    file = write_gguf(checkpoint, tmp_path / "model.gguf", kind, join_qkvz=True)
    to_rounded(checkpoint, lambda name: kind)
    assert torch.equal(ForwardHelper(file).logits(PROMPT), ForwardHelper(checkpoint).logits(PROMPT))


def mixed_kind(name: str) -> Kind:
    words = {"ssm_alpha": Kind.F32, "ssm_beta": Kind.F16, "attn_gate": Kind.Q8_0, "ssm_out": Kind.Q5_K}
    return next((kind for word, kind in words.items() if word in name), Kind.Q4_K)


def test_mixed_types_on_native_kernels(tmp_path: Path) -> None:
    """Also of one fused projection; order of inputs included."""
    checkpoint = write_checkpoint(
        tmp_path / "checkpoint", "qwen3_5_text", **WIDE_FAMILIES["qwen3_5_text"], seed=3
    )
    file = write_gguf(checkpoint, tmp_path / "model.gguf", mixed_kind)
    to_rounded(checkpoint, mixed_kind)
    ours = ForwardHelper(file, ops=CpuOps(FORCED_ISA, threads=1)).logits(PROMPT)
    theirs = ForwardHelper(checkpoint).logits(PROMPT)
    assert (ours - theirs).std() < 0.05 * theirs.std()  # native kernels round activations
    llm = LLM(str(file), speculate="off")
    greedy = SamplingParams(temperature=0, max_tokens=24)
    prompts = [{"prompt_token_ids": PROMPT[index : 40 + index]} for index in range(4)]
    alone = llm.generate(prompts[:1], greedy)[0].token_ids
    assert llm.generate(prompts, greedy)[0].token_ids == alone and len(set(alone)) > 10


def test_dequantized_columns_are_in_the_order_of_inputs() -> None:
    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    blocks = QuantizedBlocks("q8_0", torch.from_numpy(gguf.quantize(values.numpy(), Kind.Q8_0)), 64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(2))
    ordered = QuantizedBlocks(blocks.format, blocks.data, blocks.columns, order)
    assert torch.equal(dequantize(ordered)[:, order], dequantize(blocks))


def test_mtp_head_is_not_loaded(tmp_path: Path) -> None:
    """It is the blocks after the layers; memory figures leave it out."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "qwen3_5_text")
    flags: dict[str, Any] = {"attention__recurrent_layers": [True, False, True, False]}
    keys = {"block_count": 4, "nextn_predict_layers": 1, **flags}
    plain = write_gguf(checkpoint, tmp_path / "plain.gguf")
    file = write_gguf(checkpoint, tmp_path / "model.gguf", more=write_mtp_head, **keys)
    assert torch.equal(ForwardHelper(file).logits(PROMPT), ForwardHelper(plain).logits(PROMPT))
    info = read_model_info(file)
    count = sum(map(math.prod, MTP_SHAPES.values())) / 1e6
    assert info.unused_parts == (f"the MTP head, which drafts, is not used yet ({count:.1f} M values)",)
    assert info.parameters == read_model_info(plain).parameters
    assert check_weights(file) == check_weights(plain)


def test_packed_memory_is_without_mtp_head(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "qwen3_5_text", **WIDE_FAMILIES["qwen3_5_text"])

    def more(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.3.attn_norm.weight", np.ones(256, np.float32))
        values = quantize(np.ones((256, 512), np.float32), Kind.Q8_0)
        writer.add_tensor("blk.3.nextn.eh_proj.weight", values, raw_dtype=Kind.Q8_0)

    flags: dict[str, Any] = {"attention__recurrent_layers": [True, False, True, False]}
    keys = {"block_count": 4, "nextn_predict_layers": 1, **flags}
    plain = read_model_info(write_gguf(checkpoint, tmp_path / "plain.gguf", Kind.Q8_0))
    info = read_model_info(write_gguf(checkpoint, tmp_path / "model.gguf", Kind.Q8_0, more, **keys))
    assert info.packed_bytes == plain.packed_bytes and info.packed_formats == plain.packed_formats
    assert plain.packed_parameters is not None and plain.packed_parameters < plain.parameters


# What is refused

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("lfm2", {"attention__head_count_kv": [0, 2]}, "head_count_kv` must be a number or 3 numbers, 0 or all"),
    ("lfm2", {"attention__head_count_kv": [0, 2, 1]}, "head_count_kv` must be a number or 3 numbers"),
    ("lfm2", {"attention__head_count_kv": [0, 0, 0]}, "head_count_kv` must be a whole number of at least 1"),
    (
        "lfm2",
        {"attention__head_count_kv": [2, 2, 0]},
        "head_count_kv` gives layer 0 attention, but tensor `blk.0.attn_k.weight` is missing",
    ),
    ("lfm2", {"attention__head_count_kv": [0, 1, 0]}, "head_count_kv` makes 16 rows of tensor `blk.1.attn_k"),
    ("lfm2", {"shortconv__l_cache": None}, "lacks `lfm2.shortconv.l_cache`"),
    ("lfm2", {"shortconv__l_cache": 4}, "l_cache` makes 4 columns of tensor `blk.0.shortconv.conv.weight`"),
    ("lfm2", {"attention__sliding_window": 8}, "`lfm2.attention.sliding_window` = 8 is not supported"),
    ("lfm2_moe", {"expert_gating_func": 1}, "`lfm2moe.expert_gating_func` must be 2 here, got 1"),
    (
        "lfm2_moe",
        {"expert_weights_scale": 1.3},
        "`lfm2moe.expert_weights_scale` must be 1.0 here, got 1.2999",
    ),
    ("lfm2_moe", {"leading_dense_block_count": 0}, "is 0, but tensor `blk.0.ffn_gate_inp.weight` is missing"),
    ("lfm2_moe", {"leading_dense_block_count": 2}, "is 2, but tensor `blk.1.ffn_up.weight` is missing"),
    ("lfm2_moe", {"feed_forward_length": 100}, "feed_forward_length` makes 100 rows of tensor `blk.0.ffn_up"),
    ("nemotron_h", {"feed_forward_length": [0, 0, 48]}, "feed_forward_length` must be 5 whole numbers"),
    ("nemotron_h", {"feed_forward_length": [0, 0, 48, 0, 0]}, "need tensor `blk.4.ssm_in.weight`, which is"),
    ("nemotron_h", {"feed_forward_length": [0, 0, 48, 0, 96]}, "must be equal in all layers"),
    ("nemotron_h", {"attention__head_count_kv": [0] * 5}, "must be a whole number of at least 1"),
    ("nemotron_h", {"expert_count": 4}, "expert_count` makes 4 matrices of tensor `blk.2.ffn_up_exps"),
    ("nemotron_h", {"expert_feed_forward_length": 64}, "makes 64 rows of tensor `blk.2.ffn_up_exps"),
    ("nemotron_h", {"expert_group_count": 2}, "expert_group_count` must be 1 here"),
    ("falcon_h1", {"ssm__inner_size": 64}, "inner_size` makes 64 columns of tensor `blk.0.ssm_out.weight`"),
    ("falcon_h1", {"ssm__state_size": None}, "lacks `falcon-h1.ssm.state_size`"),
    ("granitemoehybrid", {"rope__scaling__finetuned": True}, "finetuned` must be false here"),
    ("granitemoehybrid", {"ssm__group_count": 3}, "time_step_rank` must be a multiple of ssm.group_count, 3"),
    ("granitemoehybrid", {"ssm__group_count": 2}, "group_count` makes 256 rows of tensor `blk.0.ssm_conv1d"),
    ("granitemoehybrid", {"ssm__inner_size": 64}, "inner_size` makes 64 columns of tensor `blk.0.ssm_out"),
    ("granitemoehybrid", {"ssm__time_step_rank": 4}, "time_step_rank` makes 4 rows of tensor `blk.0.ssm_a`"),
    ("granitemoehybrid", {"ssm__state_size": 16}, "group_count` makes 160 rows of tensor `blk.0.ssm_conv1d"),
    ("granitemoehybrid", {"expert_count": 0}, "expert_count` is 0, but tensor `blk.0.ffn_down_exps"),
    (
        "granitemoehybrid",
        {"attention__head_count_kv": [2, 2, 0]},
        "head_count_kv` gives layer 0 attention, but tensor `blk.0.attn_k.weight` is missing",
    ),
    ("qwen3_5_text", {"ssm__group_count": 1}, "ssm.group_count` makes 160 rows of tensor `blk.0.ssm_conv1d"),
    ("qwen3_5_text", {"ssm__group_count": 3}, "time_step_rank` must be a multiple of ssm.group_count, 3"),
    ("qwen3_5_text", {"ssm__time_step_rank": 8}, "time_step_rank` makes 8 rows of tensor `blk.0.ssm_a`"),
    ("qwen3_5_text", {"ssm__time_step_rank": 6}, "inner_size` must be a multiple of ssm.time_step_rank, 6"),
    ("qwen3_5_text", {"ssm__inner_size": 64}, "inner_size` makes 64 columns of tensor `blk.0.ssm_out.weight"),
    ("qwen3_5_text", {"ssm__conv_kernel": 3}, "conv_kernel` makes 3 columns of tensor `blk.0.ssm_conv1d"),
    ("qwen3_5_text", {"ssm__state_size": None}, "lacks `qwen35.ssm.state_size`"),
    ("qwen3_5_text", {"attention__head_count": 8}, "makes 512 rows of tensor `blk.1.attn_q.weight`"),
    ("qwen3_5_text", {"attention__recurrent_layers": [True, False]}, "recurrent_layers` must be 3 flags"),
    (
        "qwen3_5_text",
        {"attention__recurrent_layers": [True, True, True]},
        "recurrent_layers` gives layer 1 a state, but tensor `blk.1.attn_k.weight` is there",
    ),
    (
        "qwen3_5_text",
        {"nextn_predict_layers": 3},
        "nextn_predict_layers` must be below block_count, 3, got 3",
    ),
    (
        "qwen3_5_text",
        {"rope__dimension_sections": [1, 2, 3, 4, 5]},
        "sections` must be at most 4 whole numbers",
    ),
    ("qwen3_5_text", {"rope__dimension_count": 7}, "dimension_count` must be even and at most 32"),
    ("qwen3_5_moe_text", {"expert_weights_norm": False}, "`qwen35moe.expert_weights_norm` must be true here"),
    (
        "qwen3_5_moe_text",
        {"expert_shared_feed_forward_length": None},
        "lacks `qwen35moe.expert_shared_feed_forward_length`",
    ),
]


@pytest.mark.parametrize("family", dict.fromkeys(family for family, _, _ in REFUSED))
def test_contradicting_keys_are_named(family: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, **SCALING.get(family, {}))
    for keys, message in ((keys, message) for of, keys, message in REFUSED if of == family):
        with pytest.raises(CheckpointError, match=message):
            read_model_info(write_gguf(checkpoint, tmp_path / "x.gguf", **keys))


TENSORS = {  # of layer 0, or of 1
    "granitemoehybrid": "in_proj.weight conv1d.weight norm.weight out_proj.weight A_log dt_bias D",
    "lfm2": "in_proj.weight conv.weight out_proj.weight",
    "lfm2_moe": "expert_bias",
    "qwen3_5_text": (
        "in_proj_qkv.weight in_proj_z.weight in_proj_a.weight A_log dt_bias norm.weight out_proj.weight"
    ),
    "qwen3_next": "in_proj_qkvz.weight in_proj_ba.weight conv1d.weight",
}
MODULES = {"granitemoehybrid": "0.mamba", "lfm2": "0.conv", "lfm2_moe": "1.feed_forward"}


@pytest.mark.parametrize("family", TENSORS)
def test_missing_and_wrongly_shaped_tensors_are_named(family: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, **SCALING.get(family, {}))
    tensors: dict[str, Tensor] = load_file(checkpoint / "model.safetensors")
    for name in TENSORS[family].split():
        full_name = f"model.layers.{MODULES.get(family, '0.linear_attn')}.{name}"
        file_name, shape = gguf_name(full_name, ""), (7, *tensors[full_name].shape[1:])
        others = {other: tensor for other, tensor in tensors.items() if other != full_name}
        save_file(others, checkpoint / "model.safetensors")

        def more(writer: gguf.GGUFWriter, name: str = file_name, shape: tuple[int, ...] = shape) -> None:
            writer.add_tensor(name, np.ones(shape, np.float32))

        for wrong in (None, more):
            with pytest.raises(CheckpointError, match=f"tensor `{file_name}`"):
                check_weights(write_gguf(checkpoint, tmp_path / "x.gguf", more=wrong))
