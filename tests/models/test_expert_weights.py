"""Experts in every layout of checkpoints: the same weights, one expert at a time, or a clear error."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from foreword import LLM, SamplingParams
from foreword.errors import CheckpointError
from foreword.kernels.quantization import dequantize
from foreword.kernels.reference.backend import ReferenceOps
from foreword.models.interfaces import Precision
from foreword.models.model_loader import check_weights, load_model, read_model_info
from foreword.weights.file_to_device import DeviceLoader
from foreword.weights.safetensors_weights import SafetensorsWeights, join_mxfp4
from tests.support.budget import some_of
from tests.support.checkpoints import MOE_FAMILIES, change_config, replace_by_mxfp4, write_checkpoint
from tests.support.forward_helpers import ForwardHelper
from tests.support.gguf_files import quantize, write_gguf
from tests.support.quantized_checkpoints import FORMATS, write_quantized

PROMPT = torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(7)).tolist()
WIDE = {"hidden_size": 256, "num_attention_heads": 8, "head_dim": 32}
INNER = {"intermediate_size": 256, "moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
Tensors = dict[str, Tensor]


def load(path: Path) -> Any:
    return load_model(path, ReferenceOps(), Precision.from_dtypes("float32"), "cpu", 64)


def change(path: Path, edit: Callable[[Tensors], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


def write_wide(path: Path, family: str) -> Path:
    """A checkpoint whose rows are whole blocks of every GGUF type."""
    known = {"qwen3_moe", "qwen2_moe"}
    inner = {name: 256 for name in INNER if family in known or name == "intermediate_size"}
    if family == "qwen3_moe":
        del inner["shared_expert_intermediate_size"]
    if family == "granitemoeshared":
        inner["shared_intermediate_size"] = 256
    return write_checkpoint(path, family, **{**WIDE, **inner})


def stack(tensors: Tensors) -> None:
    """As transformers 5 holds them: gate and up of all experts in one tensor, and down."""
    parts: dict[str, dict[int, Tensor]] = {}
    for name in [name for name in tensors if ".experts." in name]:
        module, expert, kind = re.fullmatch(r"(.+)\.(\d+)\.(\w+)_proj\.weight", name).groups()  # type: ignore[union-attr]
        parts.setdefault(f"{module} {kind}", {})[int(expert)] = tensors.pop(name)
    for key in {key.split()[0] for key in parts}:
        gate, up, down = (
            torch.stack([parts[f"{key} {kind}"][i] for i in range(8)]) for kind in ("gate", "up", "down")
        )
        tensors[f"{key}.gate_up_proj"], tensors[f"{key}.down_proj"] = torch.cat((gate, up), 1), down


def to_mxfp4(tensors: Tensors) -> Tensors:
    """Replace gpt-oss's float experts by random blocks; returns the weights that transformers reads."""
    floats = dict(tensors)
    for name in replace_by_mxfp4(tensors):
        parts = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
        floats[name] = convert_moe_packed_tensors(*parts, dtype=torch.float32)
    return floats


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("qwen"), "qwen3_moe")


def copy(path: Path, target: Path) -> Path:
    target.mkdir()
    for file in path.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def test_stacked_experts_have_the_bits_of_single_ones(qwen: Path, tmp_path: Path) -> None:
    stacked = copy(qwen, tmp_path / "stacked")
    change(stacked, stack)
    ours = ForwardHelper(stacked)
    assert torch.equal(ours.logits(PROMPT), ForwardHelper(qwen).logits(PROMPT))
    assert ours.model.info == read_model_info(qwen)
    assert check_weights(stacked) == (stacked / "model.safetensors").stat().st_size


def test_one_matrix_of_a_stacked_tensor_is_read(qwen: Path, tmp_path: Path) -> None:
    """Mapped, or copied by a device loader; other experts are not touched."""
    stacked = copy(qwen, tmp_path / "stacked")
    change(stacked, stack)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    expected = load_file(stacked / "model.safetensors")[name]
    with DeviceLoader("cpu", buffer_bytes=1000) as device_loader:
        for loader in (None, device_loader):
            weights = SafetensorsWeights(stacked, device_loader=loader)
            for expert in (0, 7):
                with weights.stacked(name, expert, *expected.shape) as matrix:
                    assert isinstance(matrix, Tensor) and torch.equal(matrix, expected[expert])
            assert weights.num_parameters == 2 * expected[0].numel()


def test_mxfp4_has_the_bits_of_transformers_and_gguf() -> None:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (24, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (24, 3), generator=generator, dtype=torch.uint8)
    joined = join_mxfp4(blocks, scales)
    theirs = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].T
    assert torch.equal(dequantize(joined), theirs)
    assert np.array_equal(gguf.dequantize(joined.data.numpy(), Kind.MXFP4), theirs.numpy())


def test_gpt_oss_in_mxfp4_equals_its_floats(tmp_path: Path) -> None:
    """And quantized experts stay packed: they keep their format whatever the data type."""
    path = write_checkpoint(tmp_path / "packed", "gpt_oss", intermediate_size=64)
    plain = copy(path, tmp_path / "plain")
    tensors = load_file(path / "model.safetensors")
    floats = to_mxfp4(tensors)
    save_file(tensors, path / "model.safetensors")
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, plain / "model.safetensors")
    change_config(path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    ours = ForwardHelper(path)
    assert torch.equal(ours.logits(PROMPT), ForwardHelper(plain).logits(PROMPT))
    assert ours.model.info.parameters == read_model_info(path).parameters == read_model_info(plain).parameters
    assert check_weights(path) == (path / "model.safetensors").stat().st_size


def test_memory_of_gpt_oss_in_mxfp4(tmp_path: Path) -> None:
    """Experts stay packed: 4 bits a value and a byte for each 32, in fours."""
    path = write_checkpoint(tmp_path, "gpt_oss", hidden_size=128, intermediate_size=128)
    change(path, replace_by_mxfp4)
    change_config(path, quantization_config={"quant_method": "mxfp4"})
    info = read_model_info(path)
    weights = 2 * 8 * 3 * 128 * 128
    assert (info.packed_parameters, info.packed_bytes) == (weights, weights * 17 // 32)
    assert [(each.name, each.expert_bytes) for each in info.packed_formats] == [("mxfp4", weights * 17 // 32)]


@pytest.mark.parametrize(
    ("family", "kind", "fuse_experts"),
    [
        ("qwen3_moe", Kind.Q8_0, False),
        ("qwen3_moe", Kind.Q4_K, True),
        ("mixtral", Kind.Q4_0, False),
        ("mixtral", Kind.Q6_K, True),
        ("gpt_oss", Kind.Q8_0, False),
        ("gpt_oss", Kind.Q6_K, False),
    ],
)
def test_quantized_gguf_equals_rounded_floats(
    family: str, kind: Kind, fuse_experts: bool, tmp_path: Path
) -> None:
    """Of every tensor; all experts of a GGUF file are in one tensor, gate and up perhaps together."""
    checkpoint = write_wide(tmp_path / "checkpoint", family)
    quantized = write_gguf(checkpoint, tmp_path / "q.gguf", kind, fuse_experts=fuse_experts)
    rounded = copy(checkpoint, tmp_path / "rounded")

    def edit(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            is_router = "gate.weight" in name or "router" in name
            if tensor.ndim > 1 and not is_router and not name.endswith("bias"):
                transposes = family == "gpt_oss" and tensor.ndim == 3
                rows = (tensor.mT if transposes else tensor).contiguous()
                values = torch.from_numpy(gguf.dequantize(quantize(rows.numpy(), kind), kind)).view(
                    rows.shape
                )
                tensors[name] = values.mT if transposes else values

    change(rounded, edit)
    assert torch.equal(ForwardHelper(quantized).logits(PROMPT), ForwardHelper(rounded).logits(PROMPT))
    info = read_model_info(quantized)
    assert info.expert_parameters == read_model_info(checkpoint).expert_parameters


def test_gpt_oss_gguf_in_mxfp4_equals_the_checkpoint(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "checkpoint", "gpt_oss", intermediate_size=64)
    tensors = load_file(path / "model.safetensors")
    floats = to_mxfp4(tensors)
    plain = copy(path, tmp_path / "plain")
    save_file({name: tensor.contiguous() for name, tensor in floats.items()}, plain / "model.safetensors")

    def kind(name: str) -> Kind:
        return Kind.MXFP4 if "_exps" in name else Kind.F32

    file = write_gguf(plain, tmp_path / "model.gguf", kind)
    assert torch.equal(ForwardHelper(file).logits(PROMPT), ForwardHelper(plain).logits(PROMPT))


def halve_experts(tensors: Tensors) -> None:
    for name in tensors:
        if re.search(r"experts(\.\d+)?\.down_proj", name):
            tensors[name] = tensors[name] / 2


@pytest.mark.parametrize("kind", ["floats", "pack-quantized", "fp8-block", "int4"])
def test_averaged_shared_expert_has_the_bits_of_halved_experts(kind: str, tmp_path: Path) -> None:
    """Half of the sum of all experts, or the sum of experts with half the values."""
    shape = {"intermediate_size": 64, "prefix_dense_intermediate_size": 64}
    paths = []
    for strategy in ("average", "sum"):
        options = {**shape, "shared_expert_combination_strategy": strategy}
        path = write_checkpoint(tmp_path / strategy, "cohere2_moe", **options)
        if strategy == "sum":
            change(path, halve_experts)
        if kind in FORMATS:
            write_quantized(path, tmp_path / f"{strategy}-{kind}", kind)
            path = tmp_path / f"{strategy}-{kind}"
        paths.append(path)
    options = {"quantization": kind} if kind == "int4" else {}
    average, total = (ForwardHelper(path, **options).logits(PROMPT) for path in paths)
    assert torch.equal(average, total)


def test_active_parameters(tmp_path: Path) -> None:
    """A token reads 3 of 8 experts, and everything else."""
    info = read_model_info(write_checkpoint(tmp_path, "qwen2_moe"))
    of_one = 3 * 48 * 64
    assert (info.num_experts, info.experts_per_token, info.expert_parameters) == (8, 3, 2 * 8 * of_one)
    assert info.active_parameters == info.parameters - 2 * 5 * of_one
    dense = read_model_info(write_checkpoint(tmp_path, "llama"))
    assert dense.active_parameters == dense.parameters


def rename_expert(tensors: Tensors) -> None:
    del tensors["model.layers.1.mlp.experts.7.up_proj.weight"]


def add_expert(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.experts.8.up_proj.weight"] = torch.zeros(48, 64)


def break_router(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.gate.weight"][3, 5] = torch.nan


def widen_expert(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.experts.2.down_proj.weight"] = torch.zeros(64, 49)


def add_stacked_expert(tensors: Tensors) -> None:
    stack(tensors)
    name = "model.layers.0.mlp.experts.down_proj"
    tensors[name] = torch.cat((tensors[name], tensors[name][:1]))


def drop_stacked_down(tensors: Tensors) -> None:
    stack(tensors)
    del tensors["model.layers.1.mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (rename_expert, r"`model.layers.1.mlp.experts.7.up_proj.weight` \[48, 64\] is missing"),
        (add_expert, "unexpected tensors: model.layers.1.mlp.experts.8.up_proj.weight"),
        (break_router, "`model.layers.1.mlp.gate.weight`.* holds NaN"),
        (widen_expert, r"experts.2.down_proj.weight` is \[64, 49\], the config says \[64, 48\]"),
        (add_stacked_expert, r"experts.down_proj` is \[9, 64, 48\], the config says \[8, 64, 48\]"),
        (drop_stacked_down, r"`model.layers.1.mlp.experts.down_proj` \[8, 64, 48\] is missing"),
    ],
)
def test_wrong_tensors_are_named(
    qwen: Path, edit: Callable[[Tensors], None], message: str, tmp_path: Path
) -> None:
    path = copy(qwen, tmp_path / "changed")
    change(path, edit)
    with pytest.raises(CheckpointError, match=message):
        load(path)
    if edit is not break_router:  # the headers tell
        with pytest.raises(CheckpointError, match=message):
            check_weights(path)


def floats_as_blocks(tensors: Tensors) -> None:
    to_mxfp4(tensors)
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name].float()


def lose_scales(tensors: Tensors) -> None:
    to_mxfp4(tensors)
    del tensors["model.layers.1.mlp.experts.gate_up_proj_scales"]


def lose_blocks(tensors: Tensors) -> None:
    to_mxfp4(tensors)
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    tensors[name] = tensors[name][:, :, :1]


@pytest.mark.parametrize(
    ("edit", "size", "message"),
    [
        (floats_as_blocks, 64, "down_proj_blocks` is of type F32; weights must be U8"),
        (lose_scales, 64, r"`model.layers.1.mlp.experts.gate_up_proj_scales` \[8, 128, 2\] is missing"),
        (lose_blocks, 64, r"down_proj_blocks` is \[8, 64, 1, 16\], the config says \[8, 64, 2, 16\]"),
        (to_mxfp4, 40, "whole blocks of 32 values, not 40"),
    ],
)
def test_wrong_mxfp4_tensors_are_named(
    edit: Callable[[Tensors], Any], size: int, message: str, tmp_path: Path
) -> None:
    path = write_checkpoint(tmp_path, "gpt_oss", intermediate_size=size)
    change(path, edit)
    with pytest.raises(CheckpointError, match=message):
        load(path)


GGUF_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"expert_count": 9}, "`qwen3moe.expert_count` makes 9 matrices of tensor `blk.0.ffn_down_exps.weight`"),
    ({"expert_count": 0}, "`qwen3moe.expert_count` must be a whole number of at least 1"),
    ({"expert_count": None}, "lacks `qwen3moe.expert_count`"),
    ({"expert_used_count": 9}, "`qwen3moe.expert_used_count` must be at most expert_count, 8, got 9"),
    ({"expert_feed_forward_length": 47}, "`qwen3moe.expert_feed_forward_length` makes 47 columns"),
    ({"expert_gating_func": 2}, "`qwen3moe.expert_gating_func` must be 1 here, got 2"),
    ({"expert_weights_norm": False}, "`qwen3moe.expert_weights_norm` must be true here"),
    ({"expert_weights_scale": 2.5}, "`qwen3moe.expert_weights_scale` must be 1.0 here, got 2.5"),
    ({"expert_group_count": 4}, "`qwen3moe.expert_group_count` = 4 is not supported"),
    ({"expert_shared_feed_forward_length": 80}, "`qwen3moe.expert_shared_feed_forward_length` = 80"),
]


def test_wrong_gguf_keys_are_named(qwen: Path, tmp_path: Path) -> None:
    for keys, message in GGUF_REFUSED:
        file = write_gguf(qwen, tmp_path / "model.gguf", **keys)
        with pytest.raises(CheckpointError, match=re.escape(message)):
            read_model_info(file)


def test_gguf_keys_may_repeat_the_rule(qwen: Path, tmp_path: Path) -> None:
    keys = {"expert_gating_func": 1, "expert_weights_norm": True, "expert_weights_scale": 1.0}
    assert read_model_info(write_gguf(qwen, tmp_path / "model.gguf", **keys)).num_experts == 8


def test_gguf_tensors_of_single_experts_are_refused(tmp_path: Path) -> None:
    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.ffn_up.0.weight", np.zeros((96, 64), np.float32))

    checkpoint = write_checkpoint(tmp_path / "checkpoint", "mixtral")
    with pytest.raises(CheckpointError, match=r"`llama.expert_count`.* convert the model again"):
        read_model_info(write_gguf(checkpoint, tmp_path / "model.gguf", more=add))


@pytest.mark.parametrize("family", some_of(MOE_FAMILIES, 3))
def test_dummy_experts_generate(family: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, family)
    (path / "model.safetensors").unlink()
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=8, ignore_eos=True)
    llm = LLM(str(path), load_format="dummy", kv_cache_memory="400tokens", threads=1)
    assert len(llm.generate([{"prompt_token_ids": [1, 2, 3]}], params)[0].token_ids) == 8
