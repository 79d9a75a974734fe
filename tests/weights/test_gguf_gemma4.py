"""GGUF files of Gemma 4, where sizes differ by layer."""

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
from tests.support import gemma4_checkpoints as gemma4
from tests.support.checkpoints import write_checkpoint
from tests.support.cpu_kernels import FORCED_ISA
from tests.support.forward_helpers import ForwardHelper
from tests.support.gguf_files import Kind, check_same_model, quantize, write_gguf

PROMPT = torch.randint(0, 256, (90,), generator=torch.Generator().manual_seed(7)).tolist()
WIDE: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "global_head_dim": 64}
# Family, options of the checkpoint, keys of the file beyond the usual
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "experts": ("gemma4_text", gemma4.EXPERTS, {}),
    "one-kv-head-count": ("gemma4_unified_text", {"num_global_key_value_heads": 2}, {}),
    "own-values-in-global-layers": ("gemma4_unified_text", {"attention_k_eq_v": False}, {}),
    "pattern": (
        "gemma4_unified_text",
        {"num_hidden_layers": 6, "layer_types": [gemma4.SLIDING] * 5 + [gemma4.FULL]},
        {"attention__sliding_window_pattern": None},
    ),
    "all-angles": (
        "gemma4_unified_text",
        {
            "rope_parameters": {
                gemma4.FULL: {**gemma4.ROPES[gemma4.FULL], "partial_rotary_factor": 1.0},
                gemma4.SLIDING: {"rope_type": "default", "rope_theta": 500.0},
            }
        },
        {},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_float32_gguf_has_the_checkpoints_bits(case: str, tmp_path: Path) -> None:
    family, options, keys = CASES[case]
    checkpoint = write_checkpoint(tmp_path / "checkpoint", family, **options)
    check_same_model(checkpoint, write_gguf(checkpoint, tmp_path / "model.gguf", **keys))


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_0])
@pytest.mark.parametrize("name", ["shared-kv", "experts"])
def test_quantized_gguf_equals_rounded_checkpoint(name: str, kind: Kind, tmp_path: Path) -> None:
    all_experts = {**gemma4.EXPERTS, "top_k_experts": 8}  # a rounded router may choose others
    more = {"hidden_size_per_layer_input": 32} if name == "shared-kv" else all_experts
    options = {**more, "moe_intermediate_size": 64, **WIDE}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "gemma4_text", **options)
    file = write_gguf(checkpoint, tmp_path / "model.gguf", kind)
    tensors = load_file(checkpoint / "model.safetensors")
    for tensor_name, tensor in tensors.items():
        if tensor.ndim > 1 and "router" not in tensor_name:
            values = gguf.dequantize(quantize(tensor.numpy(), kind), kind)
            tensors[tensor_name] = torch.from_numpy(values).view(tensor.shape)
    save_file(tensors, checkpoint / "model.safetensors")
    theirs = ForwardHelper(checkpoint).logits(PROMPT)
    assert torch.equal(ForwardHelper(file).logits(PROMPT), theirs)
    native = ForwardHelper(file, ops=CpuOps(FORCED_ISA, threads=1)).logits(PROMPT)
    assert (native - theirs).std() < 0.1 * theirs.std()  # native kernels round activations


def test_memory_of_per_layer_embeddings_is_that_of_an_embedding(tmp_path: Path) -> None:
    options = {**WIDE, "hidden_size_per_layer_input": 32}
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "gemma4_text", **options)
    info = read_model_info(write_gguf(checkpoint, tmp_path / "model.gguf", Kind.Q8_0))
    assert info.packed_embedding_parameters == info.embedding_parameters == 272 * (128 + 5 * 32)
    sizes = {"head_dim": 32, "num_key_value_heads": 2}, {"head_dim": 64, "num_key_value_heads": 2}
    own = sum(2 * size["head_dim"] * size["num_key_value_heads"] for size in (*sizes, sizes[0]))
    assert info.kv_values_per_token == own  # two of five layers read those of others


def test_unread_keys_and_values_of_shared_layers_are_ignored(tmp_path: Path) -> None:
    """The converter writes what the checkpoint has."""

    def more(writer: gguf.GGUFWriter) -> None:
        for name in ("attn_k", "attn_v"):
            writer.add_tensor(f"blk.4.{name}.weight", np.full((64, 64), np.nan, np.float32))
        writer.add_tensor("blk.4.attn_k_norm.weight", np.ones(32, np.float32))

    checkpoint = write_checkpoint(tmp_path / "checkpoint", "gemma4_text")
    plain, file = write_gguf(checkpoint, tmp_path / "plain.gguf"), tmp_path / "model.gguf"
    write_gguf(checkpoint, file, more=more)
    assert torch.equal(ForwardHelper(file).logits(PROMPT), ForwardHelper(plain).logits(PROMPT))
    assert read_model_info(file) == read_model_info(plain)


def test_unsupported_keys_are_named(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "gemma4_text")
    for keys, message in (
        ({"attention__key_length_swa": 24}, "value_length_swa` must be 24"),
        ({"rope__dimension_count": 16}, "rope.dimension_count` must be 32"),
        ({"attention__head_count_kv": [2, 1]}, "head_count_kv` must be a number or 5 numbers"),
        ({"attention__head_count_kv": 4}, "head_count_kv` makes 64 rows"),
        ({"feed_forward_length": [96, 96, 96, 96, 192]}, "feed_forward_length` must be one size"),
        ({"attention__shared_kv_layers": 4}, "shared_kv_layers` is 4: no layer before them is like 1"),
        ({"expert_count": 8}, "expert_feed_forward_length"),
        ({"attention__scale": 0.5}, "attention.scale"),
        ({"embedding_length_per_layer_input": 16}, "embedding_length_per_layer_input` makes 80 columns"),
        ({"embedding_length_per_layer_input": 0}, "embedding_length_per_layer_input` is 0, but"),
        ({"attention__shared_kv_layers": 1}, "shared_kv_layers` is 1, but `blk.3.attn_k.weight` is missing"),
        ({"attention__sliding_window_pattern": 2}, "head_count` makes"),
    ):
        file = write_gguf(checkpoint, tmp_path / "model.gguf", **keys)
        with pytest.raises(CheckpointError, match=message):
            check_weights(file)


@pytest.mark.parametrize(
    "divisors", [[1.0] * 8, [2.0] * 4 + [1e30] * 12, [1.0] * 3 + [1e30, 1.0] + [1e30] * 11]
)
def test_angles_of_another_rope_are_refused(
    divisors: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemma4, "rope_divisors", lambda config: divisors)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", "gemma4_text")
    with pytest.raises(CheckpointError, match="rope_freqs"):
        read_model_info(write_gguf(checkpoint, tmp_path / "model.gguf"))
