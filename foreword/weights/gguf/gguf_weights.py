"""Tensors of a GGUF file by their names in Hugging Face's format."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from foreword.core.states import StateShape
from foreword.errors import CheckpointError
from foreword.kernels.ops import Matrix, QuantizedBlocks
from foreword.kernels.quantization import QUANT_BLOCKS
from foreword.layers.lora import deinterleave_heads
from foreword.layers.weights import Weights
from foreword.planning.memory import ModelInfo, PackedFormat
from foreword.weights.file_to_device import DeviceLoader, FileSpan
from foreword.weights.gguf.header import EMBEDDING_TENSOR, GGUFFile, TensorInfo
from foreword.weights.gguf.metadata import ROPE_TENSORS
from foreword.weights.gguf.tensor_names import HEAD_TENSOR, PER_LAYER_EMBEDDING_TENSOR, gguf_name
from foreword.weights.mapped_file import MappedFile
from foreword.weights.renamed_weights import PrefixedWeights
from foreword.weights.safetensors_weights import unexpected_tensors_error

FLOAT_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
)

# Their codebooks and unpacking are those of the `gguf` package, an optional dependency.
GGUF_PACKAGE_TYPES = (
    "iq1_s",
    "iq1_m",
    "iq2_xxs",
    "iq2_xs",
    "iq2_s",
    "iq3_xxs",
    "iq3_s",
    "tq1_0",
    "tq2_0",
    "nvfp4",
)
DEQUANTIZED_TYPES = ("q8_k", *GGUF_PACKAGE_TYPES)
Q8_K_BYTES = 292  # a float32 scale, 256 values, and sums of values, which serve dot products


@dataclass(frozen=True, slots=True)
class PackedType:
    """The packed layout of a type with CPU kernels: csrc/quantized/quantized_tile_layout.h."""

    bits: int  # per value
    scale_bytes: int  # scales and minimums of `scale_blocks` blocks of a tile
    scale_blocks: int = 1


PACKED_TYPES: Mapping[str, PackedType] = MappingProxyType(
    {
        "q8_0": PackedType(8, 64, 2),
        "q5_0": PackedType(5, 64, 2),
        "q4_0": PackedType(4, 64, 2),
        "q4_1": PackedType(4, 128, 2),
        "q5_1": PackedType(5, 128, 2),
        "iq4_nl": PackedType(4, 64, 2),
        "mxfp4": PackedType(4, 64, 4),
        "q4_k": PackedType(4, 320),
        "q5_k": PackedType(5, 320),
        "q6_k": PackedType(6, 320),
        "q2_k": PackedType(2, 320),
        "q3_k": PackedType(3, 320),
        "iq4_xs": PackedType(4, 192),
    }
)
# Bytes per value of types with GPU kernels.
GPU_BYTES_PER_VALUE: Mapping[str, float] = MappingProxyType(
    {"q8_0": 34 / 32, "q4_0": 18 / 32, "mxfp4": 17 / 32}
)
TILE_ROWS = 16  # rows of a packed tile; the last tile is padded
# The converter reorders rows of q and k.
TILED_VALUE_ARCHITECTURES = ("qwen35", "qwen35moe")  # see TiledValueHeads
SCALED_ARCHITECTURES = ("falcon-h1",)  # the converter multiplies weights, and the file does not say by what
PERMUTED_QK_ARCHITECTURES = (
    "arcee",
    "granite",
    "granitehybrid",
    "granitemoe",
    "llama",
    "mistral3",
    "nemotron_h",
    "nemotron_h_moe",
    "smollm3",
)
# Tensors of a Gated DeltaNet by what their rows are
DELTA_NET_TENSOR = re.compile(r".+\.linear_attn\.(\w+?)(?:\.weight)?")
CHANNELS, VALUES, HEADS = (
    ("in_proj_qkv", "conv1d"),  # rows of q and k, then those of values
    ("in_proj_z",),
    ("in_proj_a", "in_proj_b", "A", "dt_bias"),
)
EXPERTS_MARK = "_exps."  # in names of tensors
OUTER_TENSORS = (EMBEDDING_TENSOR, HEAD_TENSOR, PER_LAYER_EMBEDDING_TENSOR)


def with_memory_info(model_info: ModelInfo, gguf: GGUFFile) -> ModelInfo:
    """Add the memory of quantized tensors, which stay packed; the rest gets a data type."""
    packed = [info for info in gguf.tensors.values() if info.tensor_type.name in PACKED_TYPES]
    if not packed:
        return model_info
    outer = [info for info in packed if info.name in OUTER_TENSORS]
    formats = [_packed_format(name, packed) for name in {info.tensor_type.name for info in packed}]
    on_gpu = [info for info in packed if info.tensor_type.name in GPU_BYTES_PER_VALUE]
    return replace(
        model_info,
        packed_bytes=sum(map(_packed_bytes, packed)),
        packed_parameters=sum(info.num_values for info in packed),
        packed_embedding_parameters=sum(info.num_values for info in outer),
        gpu_packed_bytes=sum(
            int(info.num_values * GPU_BYTES_PER_VALUE[info.tensor_type.name]) for info in on_gpu
        ),
        gpu_packed_parameters=sum(info.num_values for info in on_gpu),
        packed_formats=tuple(sorted(formats, key=lambda each: (-each.num_bytes, each.name))),
    )


def _packed_format(name: str, tensors: Sequence[TensorInfo]) -> PackedFormat:
    """Memory of the tensors of a type."""
    sizes = {info.name: _packed_bytes(info) for info in tensors if info.tensor_type.name == name}
    experts = sum(size for tensor, size in sizes.items() if EXPERTS_MARK in tensor)
    return PackedFormat(name, sum(sizes.values()), experts)


def _packed_bytes(info: TensorInfo) -> int:
    """Bytes in the layout of the CPU kernels, slightly more than in the file."""
    if len(info.shape) > 2:  # experts are packed one by one
        return info.shape[0] * _packed_bytes(info.part(0))
    columns, packed = info.shape[-1], PACKED_TYPES[info.tensor_type.name]
    blocks = columns // info.tensor_type.block_values
    scales = -(-blocks // packed.scale_blocks) * packed.scale_bytes
    tiles = -(-info.num_values // columns // TILE_ROWS)
    return tiles * (scales + columns * TILE_ROWS * packed.bits // 8)


def check_tensor_types(gguf: GGUFFile, allow_dequantize: bool) -> None:
    """Raises CheckpointError that names every type without kernels."""
    kernels = (*FLOAT_DTYPES, *PACKED_TYPES)
    types = Counter(info.tensor_type.name for info in gguf.tensors.values())
    counts = {name: count for name, count in types.most_common() if name not in kernels}
    unknown = [name for name in counts if name not in DEQUANTIZED_TYPES]
    if unknown:
        hint = f"known: {', '.join((*kernels, *DEQUANTIZED_TYPES))}"
    elif counts and not allow_dequantize:
        hint = "--gguf-dequantize converts them to floats"
    elif not has_gguf_package() and not counts.keys().isdisjoint(GGUF_PACKAGE_TYPES):
        hint = "--gguf-dequantize needs the `gguf` package for them: pip install 'foreword[gguf]'"
    else:
        return
    names = unknown or counts
    text = ", ".join(f"{name} ({counts[name]} tensor{'s' * (counts[name] > 1)})" for name in names)
    raise CheckpointError(f"{gguf.path}: tensor types without kernels: {text}; {hint}", "model")


def read_rope_factors(gguf: GGUFFile, name: str) -> list[float]:
    """Values of a small tensor of RoPE, by its name in the file."""
    info = gguf.tensors[name]
    if info.tensor_type.name != "f32" or len(info.shape) != 1:
        problem = f"tensor `{name}` {list(info.shape)} must be one row of type f32"
        raise CheckpointError(f"{info.file}: {problem}", "model")
    return MappedFile(info.file).tensor(torch.float32, info.offset, info.num_values).tolist()


class TiledValueHeads:
    """Undoes the order of files: the first value head of each key head, then the second of each, and so on.

    Checkpoints keep the value heads of a key head together.
    """

    def __init__(self, shape: StateShape) -> None:
        self._shape = shape
        group = shape.value_heads // shape.key_heads
        self._heads = torch.arange(shape.value_heads).view(group, shape.key_heads).t().flatten()

    def restore_rows(self, name: str, rows: Tensor) -> Tensor:
        """Rows [N, ...] of the tensor called `name`, in the order of checkpoints."""
        match, shape = DELTA_NET_TENSOR.fullmatch(name), self._shape
        if match is None or match[1] not in (*CHANNELS, *VALUES, *HEADS):
            return rows
        order = self._heads
        if match[1] not in HEADS:
            order = self._order(shape.value_dim)
        if match[1] in CHANNELS:
            num_keys = shape.channels - len(order)
            order = torch.cat((torch.arange(num_keys), order + num_keys))
        return rows[order.to(rows.device)]

    def restore_columns(self, name: str, matrix: Matrix) -> Matrix:
        """Columns of out_proj. Heads that do not fill blocks stay, and inputs get an order."""
        match, size = DELTA_NET_TENSOR.fullmatch(name), self._shape.value_dim
        if match is None or match[1] != "out_proj":
            return matrix
        if isinstance(matrix, Tensor):
            return matrix[:, self._order(size).to(matrix.device)]
        assert isinstance(matrix, QuantizedBlocks)
        block = QUANT_BLOCKS[matrix.format]
        if size % block.num_values:
            return replace(matrix, input_order=self._order(size).argsort().to(matrix.data.device))
        order = self._order(size // block.num_values * block.num_bytes)
        return replace(matrix, data=matrix.data[:, order.to(matrix.data.device)])

    def _order(self, size: int) -> Tensor:
        """The place in files of each of our values, int64 [heads * size]; size: of a head."""
        return (self._heads[:, None] * size + torch.arange(size)).flatten()


class GGUFWeights:
    """Tensors of a GGUF file, see `layers.weights.Weights`. They are mapped if there is no device loader.

    num_heads    of queries and keys
    state_shape  of layers with state, if there are any
    progress     called with bytes done and bytes in total
    Raises CheckpointError for tensor types, missing tensors, wrong shapes, and tensors that are not read.
    """

    def __init__(
        self,
        gguf: GGUFFile,
        num_heads: tuple[int, int],
        allow_dequantize: bool = False,
        progress: Callable[[int, int], None] | None = None,
        device_loader: DeviceLoader | None = None,
        state_shape: StateShape | None = None,
    ) -> None:
        check_tensor_types(gguf, allow_dequantize)
        self._gguf = gguf
        self._architecture: str = gguf.metadata["general.architecture"]
        self._device_loader = device_loader
        self._num_heads = num_heads if self._architecture in PERMUTED_QK_ARCHITECTURES else None
        self._value_heads = None
        if state_shape is not None and self._architecture in TILED_VALUE_ARCHITECTURES:
            self._value_heads = TiledValueHeads(state_shape)
        self._progress = progress
        self._files: dict[Path, MappedFile] = {file: MappedFile(file) for file in gguf.files}
        self._bytes_total = sum(info.num_bytes for info in gguf.tensors.values())
        self._bytes_done = 0
        self._read_names: set[str] = set()
        self.num_parameters = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        """float32 tensor of this shape, a copy."""
        info = self.check_shape(name, shape)
        if info.tensor_type.name not in FLOAT_DTYPES:
            raise self._tensor_error(info, f"must be of type {', '.join(FLOAT_DTYPES)}")
        self.num_parameters += info.num_values
        tensor = self._restore_rows(name, self._read_floats(info)).to(torch.float32, copy=True)
        self._release(info)
        return tensor.view(shape)

    @contextmanager
    def weights(self, out_features: Mapping[str, int], in_features: int) -> Iterator[Sequence[Matrix]]:
        """Matrices as they are in the file; their pages are released at the end."""
        infos = {name: self.check_shape(name, (size, in_features)) for name, size in out_features.items()}
        yield [self._matrix(name, info) for name, info in infos.items()]
        for info in infos.values():
            self._release(info)

    def has(self, name: str) -> bool:
        return self._find(name) is not None

    @contextmanager
    def stacked(self, name: str, index: int, *shape: int) -> Iterator[Matrix]:
        """One matrix as it is in the file; its pages are released at the end."""
        info = self.check_shape(name, shape).part(index)
        yield self._matrix(name, info)
        self._release(info)

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self, prefix)

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._gguf.tensors)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors."""
        return self._bytes_total

    def check_all_read(self, ignored: Collection[str] = ()) -> None:
        """Raises CheckpointError for tensors that were neither read nor ignored."""
        left = sorted(self._gguf.tensors.keys() - self._read_names - {*ROPE_TENSORS, *ignored})
        if left:
            raise unexpected_tensors_error(self._gguf.path, left)
        if self._progress is not None:
            self._progress(self._bytes_total, self._bytes_total)

    def check_shape(self, name: str, shape: Sequence[int]) -> TensorInfo:
        """The tensor's entry in the header. Raises CheckpointError if it is missing or has another shape."""
        info = self._find(name)
        if info is None:
            file_name = gguf_name(name, self._architecture)
            raise CheckpointError(
                f"{self._gguf.path}: tensor `{file_name}` {list(shape)} is missing", "model"
            )
        # A single row may be a vector, and a vector several rows; convolutions lack their inputs' dimension.
        same = info.shape, (1, *info.shape), (*info.shape[:1], 1, *info.shape[1:]), (info.num_values,)
        if tuple(shape) not in same:
            raise self._tensor_error(info, f"is {list(info.shape)}, the metadata says {list(shape)}")
        self._read_names.add(info.name)
        return info

    def _find(self, name: str) -> TensorInfo | None:
        return self._gguf.tensors.get(gguf_name(name, self._architecture))

    def _matrix(self, name: str, info: TensorInfo) -> Matrix:
        self.num_parameters += info.num_values
        type_name = info.tensor_type.name
        if type_name in FLOAT_DTYPES:
            return self._restore_order(name, self._read_floats(info))
        blocks = self._read_tensor(info, torch.uint8, (info.num_bytes // info.row_bytes, info.row_bytes))
        if type_name in PACKED_TYPES:
            return self._restore_order(name, QuantizedBlocks(type_name, blocks, info.shape[-1]))
        values = torch.from_numpy(dequantize(type_name, blocks.cpu().numpy()))
        return self._restore_order(name, values.to(blocks.device))

    def _read_floats(self, info: TensorInfo) -> Tensor:
        return self._read_tensor(info, FLOAT_DTYPES[info.tensor_type.name], info.shape)

    def _read_tensor(self, info: TensorInfo, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """The tensor's bytes on the engine's device, viewed as `dtype`."""
        if self._device_loader is not None:
            return self._device_loader.tensor(FileSpan(info.file, info.offset, info.num_bytes), dtype, shape)
        count = info.num_bytes // dtype.itemsize
        return self._files[info.file].tensor(dtype, info.offset, count).view(shape)

    def _restore_order(self, name: str, matrix: Matrix) -> Matrix:
        """Rows and columns in the checkpoint's order."""
        if isinstance(matrix, QuantizedBlocks):
            matrix = replace(matrix, data=self._restore_rows(name, matrix.data))
        elif isinstance(matrix, Tensor):
            matrix = self._restore_rows(name, matrix)
        return matrix if self._value_heads is None else self._value_heads.restore_columns(name, matrix)

    def _restore_rows(self, name: str, rows: Tensor) -> Tensor:
        """Rows in the checkpoint's order; of q and k the two halves of each head, not interleaved."""
        if self._value_heads is not None:
            return self._value_heads.restore_rows(name, rows)
        is_permuted = name.endswith((".q_proj.weight", ".k_proj.weight", ".q_proj.bias", ".k_proj.bias"))
        if self._num_heads is None or not is_permuted:
            return rows
        return deinterleave_heads(rows, self._num_heads[".k_proj." in name])

    def _release(self, info: TensorInfo) -> None:
        self._files[info.file].release(info.offset, info.num_bytes)
        self._bytes_done += info.num_bytes
        if self._progress is not None:
            self._progress(self._bytes_done, self._bytes_total)

    def _tensor_error(self, info: TensorInfo, reason: str) -> CheckpointError:
        return CheckpointError(f"{info.file}: tensor `{info.name}` {reason}", "model")


def has_gguf_package() -> bool:
    return find_spec("gguf") is not None


def dequantize(type_name: str, rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """uint8 [N, bytes of a row] -> float32 [N, K]; type_name is one of DEQUANTIZED_TYPES."""
    if type_name == "q8_k":
        return _dequantize_q8_k(rows)
    gguf: Any = import_module("gguf")
    with np.errstate(all="ignore"):  # scales that are not finite
        values: npt.NDArray[np.float32] = gguf.quants.dequantize(
            rows, gguf.GGMLQuantizationType[type_name.upper()]
        )
    return values


def _dequantize_q8_k(rows: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    blocks = rows.reshape(-1, Q8_K_BYTES)
    scales = np.ascontiguousarray(blocks[:, :4]).view(np.float32)
    values: npt.NDArray[np.float32] = scales * blocks[:, 4:260].view(np.int8)
    return values.reshape(len(rows), -1)
