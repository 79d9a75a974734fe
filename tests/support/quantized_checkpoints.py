"""Small quantized checkpoints of every format, and the float32 weights that they stand for.

Values are packed field by field in numpy, from the formats' descriptions; nothing here is the package's.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.checkpoints import change_config

GROUP = 32
BLOCK = (48, 128)  # rows and columns of an FP8 block: the last ones of most matrices are cut off
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
COMPRESSED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "global_compression_ratio": None,
}
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class QuantizedFormat:
    """A format: its config, and the tensors (by suffix) and float32 values of a matrix."""

    config: dict[str, Any]
    quantize: Callable[[Tensor, np.random.Generator], tuple[Tensors, np.ndarray]]


@dataclass(frozen=True)
class Ints:
    """(values - zeros) * scales; column k is of group groups[k]."""

    values: np.ndarray  # [N, K], from 0
    zeros: np.ndarray  # [N, G]
    scales: np.ndarray  # [N, G]
    groups: np.ndarray  # [K]

    def floats(self) -> np.ndarray:
        difference = self.values - self.zeros[:, self.groups]
        return difference.astype(np.float32) * self.scales.astype(np.float32)[:, self.groups]


def round_to_ints(
    weight: Tensor, bits: int, groups: np.ndarray, symmetric: bool, scale_dtype: Any = np.float16
) -> Ints:
    matrix = weight.float().numpy()
    largest = 2**bits - 1
    scales, zeros = (np.empty((len(matrix), groups.max() + 1), np.float32) for _ in range(2))
    for group in range(groups.max() + 1):
        part = matrix[:, groups == group]
        if symmetric:
            scales[:, group] = np.abs(part).max(1) / (2 ** (bits - 1) - 0.5)
            zeros[:, group] = 2 ** (bits - 1)
        else:
            scales[:, group] = (part.max(1) - part.min(1)) / largest
    scales = scales.astype(scale_dtype).astype(np.float32)
    if not symmetric:
        for group in range(groups.max() + 1):
            zeros[:, group] = np.round(-matrix[:, groups == group].min(1) / scales[:, group])
    zeros = zeros.clip(0, largest).astype(np.int64)
    values = np.round(matrix / scales[:, groups]).astype(np.int64) + zeros[:, groups]
    return Ints(values.clip(0, largest), zeros, scales, groups)


def pack_words(fields: np.ndarray, bits: int) -> np.ndarray:
    """[A, B] -> int32 [A, ceil(B * bits / 32)], the first field in the lowest bits."""
    per_word = 32 // bits
    fields = np.pad(fields, ((0, 0), (0, -fields.shape[1] % per_word))).astype(np.uint64)
    words = np.zeros((len(fields), fields.shape[1] // per_word), np.uint64)
    for position in range(per_word):
        words |= fields[:, position::per_word] << np.uint64(bits * position)
    return words.astype(np.uint32).view(np.int32)


def to_tensor(array: np.ndarray, dtype: torch.dtype | None = None) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if dtype is None else tensor.to(dtype)


def awq(weight: Tensor, chance: np.random.Generator) -> tuple[Tensors, np.ndarray]:
    ints = round_to_ints(weight, 4, plain_groups(weight), symmetric=False)

    def pack(columns: np.ndarray) -> Tensor:
        """[A, N] -> [A, N / 8]"""
        ordered = np.concatenate([columns[:, first::8] for first in AWQ_ORDER], 1)
        return to_tensor(
            pack_words(ordered.reshape(len(columns), 8, -1).swapaxes(1, 2).reshape(columns.shape), 4)
        )

    return {
        "qweight": pack(ints.values.T),
        "qzeros": pack(ints.zeros.T),
        "scales": to_tensor(ints.scales.T, torch.float16),
    }, ints.floats()


def gptq(
    bits: int, version: int, symmetric: bool = False, act_order: bool = False, group: int = GROUP
) -> Callable[[Tensor, np.random.Generator], tuple[Tensors, np.ndarray]]:
    def quantize(weight: Tensor, chance: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        groups = plain_groups(weight, group)
        if act_order:
            groups = chance.permutation(groups)
        ints = round_to_ints(weight, bits, groups, symmetric)
        zeros = pack_words(ints.zeros.T, bits)
        if version == 1:  # one less in every field, with borrows
            zeros = (zeros.astype(np.int64) - sum(1 << at for at in range(0, 32, bits))).astype(np.int32)
        return {
            "qweight": to_tensor(pack_words(ints.values, bits).T),
            "qzeros": to_tensor(zeros),
            "scales": to_tensor(ints.scales.T, torch.float16),
            "g_idx": to_tensor(groups.astype(np.int32)),
        }, ints.floats()

    return quantize


def packed_ints(
    bits: int, symmetric: bool, group: int | None = GROUP
) -> Callable[[Tensor, np.random.Generator], tuple[Tensors, np.ndarray]]:
    def quantize(weight: Tensor, chance: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        ints = round_to_ints(weight, bits, plain_groups(weight, group), symmetric)
        tensors = {
            "weight_packed": to_tensor(pack_words(ints.values, bits)),
            "weight_scale": to_tensor(ints.scales, torch.float32),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            tensors["weight_zero_point"] = to_tensor(pack_words(ints.zeros.T, bits).T)
        return tensors, ints.floats()

    return quantize


def plain_ints(symmetric: bool) -> Callable[[Tensor, np.random.Generator], tuple[Tensors, np.ndarray]]:
    def quantize(weight: Tensor, chance: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        ints = round_to_ints(weight, 8, plain_groups(weight, None), symmetric)
        tensors = {
            "weight": to_tensor((ints.values - 128).astype(np.int8)),
            "weight_scale": to_tensor(ints.scales, torch.float32),
        }
        if not symmetric:
            tensors["weight_zero_point"] = to_tensor((ints.zeros - 128).astype(np.int8))
        return tensors, ints.floats()

    return quantize


def float8(
    scale_name: str, block: tuple[int, int] | None, per_tensor: bool = False
) -> Callable[[Tensor, np.random.Generator], tuple[Tensors, np.ndarray]]:
    def quantize(weight: Tensor, chance: np.random.Generator) -> tuple[Tensors, np.ndarray]:
        rows, columns = weight.shape
        size = (rows, columns) if per_tensor else block or (1, columns)
        matrix = weight.float().numpy()
        scales = np.empty((-(-rows // size[0]), -(-columns // size[1])), np.float32)
        values, floats = np.empty(matrix.shape, np.uint8), np.empty(matrix.shape, np.float32)
        for row in range(scales.shape[0]):
            for column in range(scales.shape[1]):
                part = np.s_[row * size[0] : (row + 1) * size[0], column * size[1] : (column + 1) * size[1]]
                scale = np.float32(np.abs(matrix[part]).max() / 448)
                rounded = torch.from_numpy(matrix[part] / scale).to(torch.float8_e4m3fn)
                values[part] = rounded.view(torch.uint8).numpy()
                floats[part] = rounded.float().numpy() * scale
                scales[row, column] = scale
        tensors = {
            "weight": to_tensor(values).view(torch.float8_e4m3fn),
            scale_name: to_tensor(scales.reshape(()) if per_tensor else scales),
        }
        if per_tensor:
            tensors["input_scale"] = torch.tensor(0.5)
        return tensors, floats

    return quantize


def plain_groups(weight: Tensor, group: int | None = GROUP) -> np.ndarray:
    return np.arange(weight.shape[1]) // (group or weight.shape[1])


def compressed(storage: str, **weights: Any) -> dict[str, Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, **weights},
        "input_activations": None,
        "output_activations": None,
    }
    return {**COMPRESSED, "format": storage, "config_groups": {"group_0": group}}


def gptq_config(bits: int = 4, version: str = "gptq", **options: Any) -> dict[str, Any]:
    config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": False, "sym": False}
    return {**config, "checkpoint_format": version, "lm_head": False, "damp_percent": 0.01, **options}


FORMATS: dict[str, QuantizedFormat] = {
    "awq": QuantizedFormat(
        {
            "quant_method": "awq",
            "bits": 4,
            "group_size": GROUP,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": None,
        },
        awq,
    ),
    "gptq": QuantizedFormat(gptq_config(), gptq(4, 1)),
    "gptq-8-bit": QuantizedFormat(gptq_config(8, sym=True), gptq(8, 1, symmetric=True)),
    "gptq-v2": QuantizedFormat(gptq_config(version="gptq_v2"), gptq(4, 2)),
    "gptq-act-order": QuantizedFormat(gptq_config(desc_act=True), gptq(4, 1, act_order=True)),
    "gptq-act-order-8-bit": QuantizedFormat(gptq_config(8, desc_act=True), gptq(8, 1, act_order=True)),
    "pack-quantized": QuantizedFormat(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP), packed_ints(4, True)
    ),
    "pack-quantized-asymmetric": QuantizedFormat(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=GROUP, symmetric=False),
        packed_ints(4, False),
    ),
    "pack-quantized-8-bit": QuantizedFormat(
        compressed("pack-quantized", strategy="channel", group_size=-1), packed_ints(8, True, None)
    ),
    "pack-quantized-8-bit-asymmetric": QuantizedFormat(
        compressed("pack-quantized", strategy="group", group_size=GROUP, symmetric=False),
        packed_ints(8, False),
    ),
    "int-quantized": QuantizedFormat(compressed("int-quantized", strategy="channel"), plain_ints(True)),
    "int-quantized-asymmetric": QuantizedFormat(
        compressed("int-quantized", strategy="channel", symmetric=False), plain_ints(False)
    ),
    "float-quantized-channel": QuantizedFormat(
        compressed("float-quantized", type="float", strategy="channel"), float8("weight_scale", None)
    ),
    "float-quantized-tensor": QuantizedFormat(
        compressed("float-quantized", type="float", strategy="tensor"), float8("weight_scale", None, True)
    ),
    "float-quantized-block": QuantizedFormat(
        compressed("float-quantized", type="float", strategy="block", block_structure=[*BLOCK]),
        float8("weight_scale", BLOCK),
    ),
    "fp8-block": QuantizedFormat(
        {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [*BLOCK],
            "modules_to_not_convert": ["lm_head"],
        },
        float8("weight_scale_inv", BLOCK),
    ),
    "fp8-tensor": QuantizedFormat(
        {"quant_method": "fp8", "activation_scheme": "static"}, float8("weight_scale", None, True)
    ),
    "fbgemm-fp8": QuantizedFormat(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, float8("weight_scale", None)
    ),
}


def write_quantized(
    source: Path, path: Path, kind: str, plain: Path | None = None, extra: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """Quantize the layers of a checkpoint, and the `extra` matrices.

    Returns the float32 weights by name; `plain` is a checkpoint of them.
    """
    known = FORMATS[kind]
    chance = np.random.default_rng(0)
    stored, floats = {}, {}
    for name, value in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight") and name not in extra:
            stored[name] = floats[name] = value
            continue
        tensors, matrix = known.quantize(value, chance)
        stored |= {name.removesuffix("weight") + suffix: tensor for suffix, tensor in tensors.items()}
        floats[name] = to_tensor(matrix)
    _copy(source, path, stored, kind)
    change_config(path, quantization_config=known.config)
    if plain is not None:
        _copy(source, plain, {name: value.to(torch.float32) for name, value in floats.items()}, "plain")
        change_config(plain, torch_dtype="float32")
    return floats


def _copy(source: Path, path: Path, tensors: Tensors, kind: str) -> None:
    shutil.copytree(source, path)
    (path / "model.safetensors").unlink()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt", "kind": kind})
