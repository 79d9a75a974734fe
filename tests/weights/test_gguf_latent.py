"""GGUF files of deepseek2: the bits of the checkpoints they were converted from."""

import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from foreword.errors import CheckpointError
from foreword.kernels.cpu.backend import CpuOps
from foreword.models.model_loader import check_weights, read_model_info
from tests.support.checkpoints import change_tensors, write_checkpoint
from tests.support.cpu_kernels import FORCED_ISA
from tests.support.forward_helpers import ForwardHelper
from tests.support.gguf_files import Kind, check_same_model, write_gguf

PROMPT = torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(7)).tolist()
GROUPS: dict[str, Any] = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}
WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 256,
    "n_shared_experts": 1,
    "kv_lora_rank": 64,
    "q_lora_rank": 256,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
}
# Family, options of the checkpoint, keys of the file beyond the usual.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "v2-older-file": ("deepseek_v2", {}, {"join_kv_b": True}),
    "v2-groups": ("deepseek_v2", {**GROUPS, "q_lora_rank": 48}, {}),
    "v2-all-experts": ("deepseek_v2", {"first_k_dense_replace": 0, "n_shared_experts": 0}, {}),
    "v3-older-file": ("deepseek_v3", {}, {"join_kv_b": True, "expert_gating_func": None}),
    "v3-fused-experts": ("deepseek_v3", {"rope_parameters": ...}, {"fuse_experts": True}),
    "glm": ("glm4_moe_lite", {"rms_norm_eps": 1e-5}, {"expert_gating_func": None}),
}


@pytest.mark.parametrize("case", CASES)
def test_float32_gguf_has_the_checkpoints_bits(case: str, tmp_path: Path) -> None:
    family, options, keys = CASES[case]
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, **options)
    check_same_model(checkpoint, write_gguf(checkpoint, tmp_path / "model.gguf", **keys))


def rounded(tensor: torch.Tensor, kind: Kind, transposed: bool = False) -> torch.Tensor:
    """The values of a matrix in a GGUF file."""
    values = (tensor.mT if transposed else tensor).contiguous().numpy()
    restored = torch.from_numpy(gguf.dequantize(gguf.quantize(values, kind), kind)).view(values.shape)
    return restored.mT.contiguous() if transposed else restored


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
def test_quantized_gguf_equals_rounded_checkpoint(kind: Kind, tmp_path: Path) -> None:
    """Keys of the latent vector are rounded along their own rows: they are transposed in the file."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "deepseek_v3", **WIDE)
    file = write_gguf(checkpoint, tmp_path / "model.gguf", kind)
    tensors = load_file(checkpoint / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("kv_b_proj.weight"):
            parts = tensor.view(4, 96, 64).split([32, 64], 1)
            keys, values = rounded(parts[0], kind, transposed=True), rounded(parts[1], kind)
            tensors[name] = torch.cat((keys, values), 1).view(tensor.shape)
        elif tensor.ndim == 2 and not name.endswith("gate.weight"):
            tensors[name] = rounded(tensor, kind)
    save_file(tensors, checkpoint / "model.safetensors")
    ours, theirs = ForwardHelper(file), ForwardHelper(checkpoint)
    assert torch.equal(ours.logits(PROMPT), theirs.logits(PROMPT))
    native = ForwardHelper(file, ops=CpuOps(FORCED_ISA, threads=1))
    assert native.logits(PROMPT).isfinite().all()


def write_head(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.2.nextn.eh_proj.weight", np.ones((64, 128), np.float32))
    writer.add_tensor("blk.2.attn_norm.weight", np.ones(64, np.float32))


def test_mtp_head_is_named_and_not_loaded(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "deepseek_v3")
    keys = {"block_count": 3, "nextn_predict_layers": 1}
    file = write_gguf(checkpoint, tmp_path / "model.gguf", more=write_head, **keys)
    assert torch.equal(ForwardHelper(file).logits(PROMPT), ForwardHelper(checkpoint).logits(PROMPT))
    (part,) = read_model_info(file).unused_parts
    assert part.startswith("the MTP head")


def test_bad_keys_are_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "deepseek_v3")
    for keys, message in (
        ({"attention__kv_lora_rank": 48}, "attention.key_length` must be 56"),
        ({"attention__q_lora_rank": 40}, "attention.q_lora_rank` makes 40"),
        ({"attention__key_length_mla": 8}, "attention.key_length_mla` must be above rope.dimension_count, 8"),
        ({"attention__key_length_mla": 26}, "attention.head_count` makes 104 rows of tensor `blk.0.attn_q_b"),
        ({"attention__key_length": 41}, "attention.key_length` must be 40"),
        (
            {"attention__value_length_mla": 13},
            "attention.head_count` makes 52 columns of tensor `blk.0.attn_out",
        ),
        ({"rope__dimension_count": 10, "attention__key_length": 42}, "rope.dimension_count` makes 42 rows"),
        ({"leading_dense_block_count": 0}, "leading_dense_block_count` is 0, but tensor `blk.0.ffn_gate_inp"),
        ({"expert_shared_count": 3}, "expert_shared_count` makes 144 columns"),
        ({"expert_gating_func": 1}, "expert_gating_func` must be 2"),
        ({"expert_group_count": 3}, "expert_group_count` 3 does not divide"),
        ({"expert_group_used_count": 5}, "expert_group_used_count` 5 of 4 groups"),
        ({"expert_weights_norm": 1}, "expert_weights_norm` must be a flag"),
    ):
        file = write_gguf(checkpoint, tmp_path / "model.gguf", **keys)
        with pytest.raises(CheckpointError, match=re.escape(message)):
            read_model_info(file)


def test_missing_head_tensors_are_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "deepseek_v2")
    change_tensors(checkpoint, **{"model.layers.1.self_attn.kv_b_proj.weight": None})
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    with pytest.raises(CheckpointError, match=r"tensor `blk\.1\.attn_kv_b\.weight` .* is missing"):
        check_weights(file)
