"""Tensors of a checkpoint's safetensors files: an 8-byte header length, a JSON header of entries, data."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.kernels.ops import Matrix, QuantizedBlocks
from foreword.layers.weights import Weights
from foreword.weights.config_reader import read_json
from foreword.weights.file_to_device import DeviceLoader, FileSpan
from foreword.weights.mapped_file import MappedFile
from foreword.weights.renamed_weights import PrefixedWeights

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
SHARD_PATTERN = re.compile(r".+-\d+-of-(\d+)\.safetensors")
PICKLE_PATTERNS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
MXFP4_DTYPES = {"U8": torch.uint8}
MXFP4_PARTS = ("blocks", "scales")  # suffixes of the two tensors of a matrix in MXFP4
MXFP4_BLOCK = 32  # values with one scale
DERIVED_SUFFIXES = ("rotary_emb.inv_freq", ".masked_bias", ".attn.bias")  # buffers in old checkpoints

DTYPES = MappingProxyType({"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16})
# Of the parts of quantized matrices.
QUANTIZED_DTYPES = MappingProxyType(
    {
        **DTYPES,
        "F8_E4M3": torch.float8_e4m3fn,
        "I64": torch.int64,
        "I32": torch.int32,
        "I8": torch.int8,
        "U8": torch.uint8,
    }
)
INT_DTYPES = MappingProxyType({"I64": torch.int64, "I32": torch.int32})
MAX_DIMS = 8
MAX_HEADER_BYTES = 100 << 20  # limit of the reference implementation
LFS_MARK = b"version https://git-lfs"
METADATA_KEY = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in bytes [start, start + num_bytes) of the file."""

    dtype_name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int

    def part(self, index: int | None) -> TensorEntry:
        """Entry `index` of the first dimension; None for the whole tensor."""
        if index is None:
            return self
        size = self.num_bytes // self.shape[0]
        return replace(self, shape=self.shape[1:], start=self.start + index * size, num_bytes=size)


class SafetensorsFile:
    """Raises CheckpointError for a file that is missing, damaged or incomplete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        self.entries = self._read_entries()

    @property
    def num_bytes(self) -> int:
        return self._file.num_bytes

    def tensor(
        self, name: str, index: int | None = None, dtypes: Mapping[str, torch.dtype] = DTYPES
    ) -> Tensor:
        """The mapped tensor, or entry `index` of its first dimension, of one of these types."""
        self.check_type(name, dtypes)
        part = self.entries[name].part(index)
        return self._file.tensor(dtypes[part.dtype_name], part.start, math.prod(part.shape)).view(part.shape)

    def check_type(self, name: str, dtypes: Mapping[str, torch.dtype] = DTYPES) -> None:
        """Raises CheckpointError for a tensor of another type."""
        dtype_name = self.entries[name].dtype_name
        if dtype_name not in dtypes:
            rule = f"weights must be {', '.join(dtypes)}"
            raise CheckpointError(f"{self.path}: tensor `{name}` is of type {dtype_name}; {rule}")

    def span(self, name: str, index: int | None = None) -> FileSpan:
        """Location of the tensor's bytes."""
        entry = self.entries[name].part(index)
        return FileSpan(self.path, entry.start, entry.num_bytes)

    def release(self, name: str, index: int | None = None) -> int:
        """Release the memory of the tensor's pages; returns their bytes."""
        entry = self.entries[name].part(index)
        self._file.release(entry.start, entry.num_bytes)
        return entry.num_bytes

    def _read_entries(self) -> dict[str, TensorEntry]:
        length = int.from_bytes(self._file.read(0, 8), "little")
        begin = 8 + length
        if self.num_bytes < 8 or length > MAX_HEADER_BYTES or begin > self.num_bytes:
            raise self._corrupt_file_error(f"a header of {length} bytes; the file has {self.num_bytes}")
        try:
            header = json.loads(self._file.read(8, length))
        except (ValueError, RecursionError) as error:
            raise self._corrupt_file_error(f"its header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise self._corrupt_file_error("its header is not a JSON object")
        header.pop(METADATA_KEY, None)
        return {name: self._parse_entry(name, value, begin) for name, value in header.items()}

    def _parse_entry(self, name: str, value: Any, begin: int) -> TensorEntry:
        try:
            first, last = (_to_natural(offset) for offset in value["data_offsets"])
            shape = tuple(_to_natural(size) for size in value["shape"])
            entry = TensorEntry(str(value["dtype"]), shape, begin + first, last - first)
        except (KeyError, TypeError, ValueError):
            raise self._corrupt_file_error(f"tensor `{name}` has the entry {value!r:.80}") from None
        if entry.num_bytes < 0 or begin + last > self.num_bytes:
            raise self._corrupt_file_error(f"tensor `{name}` ends at byte {begin + last} of {self.num_bytes}")
        dtype = QUANTIZED_DTYPES.get(entry.dtype_name)
        is_long = len(shape) > MAX_DIMS
        if is_long or (dtype is not None and entry.num_bytes != math.prod(shape) * dtype.itemsize):
            values = f"{list(shape[:MAX_DIMS])}{' and more' * is_long} of type {entry.dtype_name}"
            raise self._corrupt_file_error(f"tensor `{name}` {values} has {entry.num_bytes} bytes")
        return entry

    def _corrupt_file_error(self, reason: str) -> CheckpointError:
        if self._file.read(0, len(LFS_MARK)) == LFS_MARK:
            return CheckpointError(f"{self.path} is a pointer of Git LFS: `git lfs pull` fetches the file")
        return CheckpointError(f"{self.path} is damaged or incomplete: {reason}")


def _to_natural(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError
    return value


class SafetensorsWeights:
    """Tensors of safetensors files, mapped if there is no device loader.

    `progress` gets bytes done and in total.

    Raises CheckpointError for damaged files, missing tensors, wrong shapes, and tensors that are not read.
    """

    def __init__(
        self,
        path: Path,
        progress: Callable[[int, int], None] | None = None,
        device_loader: DeviceLoader | None = None,
    ) -> None:
        self._path = path
        self._progress = progress
        self._device_loader = device_loader
        files = [SafetensorsFile(path / name) for name in _list_files(path)]
        self._file_by_name = {name: file for file in files for name in file.entries}
        self._bytes_total = sum(file.num_bytes for file in files)
        self._bytes_done = 0
        self._read_names: set[str] = set()
        self._mxfp4_shapes: dict[str, tuple[int, ...]] = {}  # [E, N, K] by name, of those that were checked
        self.num_parameters = 0

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._file_by_name)

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return self._bytes_total

    def count_values(self, prefix: str) -> int:
        """Values of the tensors whose names start with the prefix."""
        names = (name for name in self._file_by_name if name.startswith(prefix))
        return sum(math.prod(self._file_by_name[name].entries[name].shape) for name in names)

    def check_shape(self, name: str, shape: Sequence[int]) -> None:
        """Raises CheckpointError if a file's header has no such tensor, or another shape or type."""
        for part, part_shape in self._parts(name, shape).items():
            if part not in self._file_by_name:
                raise CheckpointError(f"{self._path}: tensor `{part}` {list(part_shape)} is missing")
            actual = self._file_by_name[part].entries[part].shape
            if actual != part_shape:
                sizes = f"is {list(actual)}, the config says {list(part_shape)}"
                raise CheckpointError(f"{self._path}: tensor `{part}` {sizes}")
            self._file_by_name[part].check_type(part, DTYPES if part == name else MXFP4_DTYPES)
            self._read_names.add(part)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """float32 tensor of this shape, a copy."""
        tensor = self._read_tensor(name, shape).to(torch.float32, copy=True)
        self._release(name)
        return tensor

    def ints(self, name: str, size: int) -> Tensor:
        """int64 [size] on the host."""
        entry = self._file_by_name[name].entries[name]
        if entry.shape != (size,):
            raise CheckpointError(f"{self._path}: tensor `{name}` is {list(entry.shape)}, not {[size]}")
        self._read_names.add(name)
        tensor = self._file_by_name[name].tensor(name, dtypes=INT_DTYPES)
        return tensor.to(torch.int64, copy=True)

    @contextmanager
    def weights(self, out_features: Mapping[str, int], in_features: int) -> Iterator[Sequence[Matrix]]:
        """Matrices as they are in the file; their pages are released at the end."""
        yield [self._read_tensor(name, (size, in_features)) for name, size in out_features.items()]
        for name in out_features:
            self._release(name)

    def has(self, name: str) -> bool:
        return name in self._file_by_name

    @contextmanager
    def stacked(self, name: str, index: int, *shape: int) -> Iterator[Matrix]:
        """One matrix as it is in the file; its pages are released at the end."""
        self.check_shape(name, shape)
        parts = self._parts(name, shape)
        tensors = [self._load(part, index, DTYPES if part == name else MXFP4_DTYPES) for part in parts]
        self.num_parameters += math.prod(shape[1:])
        yield tensors[0] if len(tensors) == 1 else join_mxfp4(*tensors)
        for part in parts:
            self._release(part, index)

    def prefixed(self, prefix: str) -> Weights:
        return PrefixedWeights(self, prefix)

    def check_all_read(self, ignored: Collection[str] = ()) -> None:
        """Raises CheckpointError for tensors that were neither read nor ignored."""
        left = self._file_by_name.keys() - self._read_names - set(ignored)
        left = {name for name in left if not name.endswith(DERIVED_SUFFIXES)}
        if left:
            raise unexpected_tensors_error(self._path, sorted(left))
        if self._progress is not None:
            self._progress(self._bytes_total, self._bytes_total)

    def _read_tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor on the engine's device."""
        self.check_shape(name, shape)
        self.num_parameters += math.prod(shape)
        return self._load(name)

    def _load(
        self, name: str, index: int | None = None, dtypes: Mapping[str, torch.dtype] = DTYPES
    ) -> Tensor:
        """The tensor, or entry `index` of its first dimension, on the engine's device."""
        file = self._file_by_name[name]
        tensor = file.tensor(name, index, dtypes)  # mapped, not yet read
        if self._device_loader is None:
            return tensor
        return self._device_loader.tensor(file.span(name, index), tensor.dtype, tensor.shape)

    def _parts(self, name: str, shape: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """The tensors that hold this one in the files, and their shapes: itself, or MXFP4's two."""
        blocks, scales = (f"{name}_{part}" for part in MXFP4_PARTS)
        if blocks not in self._file_by_name:
            return {name: tuple(shape)}
        if shape[-1] % MXFP4_BLOCK:
            rule = f"rows of MXFP4 are whole blocks of {MXFP4_BLOCK} values, not {shape[-1]}"
            raise CheckpointError(f"{self._path}: tensor `{blocks}`: {rule}")
        self._mxfp4_shapes[name] = tuple(shape)
        groups = (*shape[:-1], shape[-1] // MXFP4_BLOCK)
        return {blocks: (*groups, MXFP4_BLOCK // 2), scales: groups}

    def _release(self, name: str, index: int | None = None) -> None:
        self._bytes_done += self._file_by_name[name].release(name, index)
        if self._progress is not None:
            self._progress(self._bytes_done, self._bytes_total)


def join_mxfp4(blocks: Tensor, scales: Tensor) -> QuantizedBlocks:
    """A matrix from gpt-oss's tensors: blocks uint8 [N, K / 32, 16], scales uint8 [N, K / 32].

    There the low nibbles are the even values of a block; in GGUF's layout they are its first half.
    """
    values = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    first, second = values[..., : MXFP4_BLOCK // 2], values[..., MXFP4_BLOCK // 2 :]
    data = torch.cat((scales[..., None], first | second << 4), -1)
    return QuantizedBlocks("mxfp4", data.flatten(1), blocks.shape[1] * MXFP4_BLOCK)


def unexpected_tensors_error(path: Path, names: Sequence[str]) -> CheckpointError:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return CheckpointError(f"{path}: unexpected tensors: {', '.join(names[:3])}{more}", "model")


def _list_files(path: Path) -> list[str]:
    """Names of the checkpoint's safetensors files."""
    if (path / INDEX_FILE).is_file():
        weight_map = read_json(path / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path / INDEX_FILE} has no weight_map")
        return sorted({str(name) for name in weight_map.values()})
    if (path / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    names = sorted(item.name for item in path.glob("*.safetensors"))
    shards = [SHARD_PATTERN.fullmatch(name) for name in names]
    if len(names) == 1 or (shards and all(shard and int(shard[1]) == len(names) for shard in shards)):
        return names  # one file of another name, or all parts without their index
    pickles = sorted(item.name for pattern in PICKLE_PATTERNS for item in path.glob(pattern))
    if pickles:
        problem = f"holds pickled weights ({pickles[0]}), which can run code"
        raise CheckpointError(f"{path} {problem}; convert them to safetensors")
    found = f"; it holds {', '.join(names[:3])}" if names else ""
    raise CheckpointError(f"{path} holds neither {SINGLE_FILE} nor {INDEX_FILE}{found}")
