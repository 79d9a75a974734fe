"""Files in safetensors format, read where they stand.

Eight bytes hold the length of a JSON header; it gives each tensor's type, shape and range within the rest.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.models.device_loader import FileSpan
from foreword.models.mmap_file import MappedFile

__all__ = ["SafetensorsFile", "TensorEntry"]

DTYPES = MappingProxyType({"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16})
MAX_HEADER_BYTES = 100 << 20  # as in the format's own reader
METADATA_KEY = "__metadata__"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor's place: bytes [start, start + size) of the file."""

    dtype_name: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


class SafetensorsFile:
    """Raises CheckpointError for a file that is missing, damaged or incomplete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        self.entries = self._read_entries()

    @property
    def num_bytes(self) -> int:
        """In bytes."""
        return self._file.num_bytes

    def tensor(self, name: str) -> Tensor:
        """The tensor in the mapped file, float32, bfloat16 or float16."""
        entry = self.entries[name]
        if entry.dtype_name not in DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor `{name}` is of type {entry.dtype_name}; weights must be {', '.join(DTYPES)}"
            )
        count = math.prod(entry.shape)
        if entry.num_bytes != count * DTYPES[entry.dtype_name].itemsize:
            raise self._corrupt_file_error(
                f"tensor `{name}` {list(entry.shape)} of type {entry.dtype_name} has {entry.num_bytes} bytes"
            )
        return self._file.tensor(DTYPES[entry.dtype_name], entry.start, count).view(entry.shape)

    def span(self, name: str) -> FileSpan:
        """Where the tensor's bytes are."""
        return FileSpan(self.path, self.entries[name].start, self.entries[name].num_bytes)

    def release(self, name: str) -> None:
        """Give back the memory that the tensor took by being read."""
        self._file.release(self.entries[name].start, self.entries[name].num_bytes)

    def _read_entries(self) -> dict[str, TensorEntry]:
        length = int.from_bytes(self._file.read(0, 8), "little")
        begin = 8 + length
        if self.num_bytes < 8 or length > MAX_HEADER_BYTES or begin > self.num_bytes:
            raise self._corrupt_file_error(
                f"its header is said to have {length} bytes; the file has {self.num_bytes}"
            )
        try:
            header = json.loads(self._file.read(8, length))
        except (ValueError, RecursionError) as error:
            raise self._corrupt_file_error(f"its header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise self._corrupt_file_error("its header is not a JSON object")
        return {
            name: self._parse_entry(name, value, begin)
            for name, value in header.items()
            if name != METADATA_KEY
        }

    def _parse_entry(self, name: str, value: Any, begin: int) -> TensorEntry:
        try:
            first, last = (_to_natural(offset) for offset in value["data_offsets"])
            entry = TensorEntry(
                str(value["dtype"]),
                tuple(_to_natural(size) for size in value["shape"]),
                begin + first,
                last - first,
            )
        except (KeyError, TypeError, ValueError):
            raise self._corrupt_file_error(f"tensor `{name}` is described as {value!r:.80}") from None
        if entry.num_bytes < 0 or begin + last > self.num_bytes:
            raise self._corrupt_file_error(
                f"tensor `{name}` is said to end at byte {begin + last} of {self.num_bytes}"
            )
        return entry

    def _corrupt_file_error(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or incomplete: {reason}")


def _to_natural(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError
    return value
