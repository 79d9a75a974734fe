"""Memory-mapped safetensors files: an 8-byte header length, a JSON header of tensor entries, data."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.weights.file_to_device import FileSpan
from foreword.weights.mapped_file import MappedFile

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
