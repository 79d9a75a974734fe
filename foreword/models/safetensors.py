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
from foreword.models.mapped import MappedFile
from foreword.models.staging import Span

__all__ = ["Entry", "SafetensorsFile"]

TYPES = MappingProxyType({"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16})
LONGEST_HEADER = 100 << 20  # as in the format's own reader
METADATA = "__metadata__"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's place: bytes [start, start + size) of the file."""

    type: str
    shape: tuple[int, ...]
    start: int
    size: int


class SafetensorsFile:
    """Raises CheckpointError for a file that is missing, damaged or incomplete."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = MappedFile(path)
        self.entries = self._read_entries()

    @property
    def size(self) -> int:
        """In bytes."""
        return self._file.size

    def tensor(self, name: str) -> Tensor:
        """The tensor in the mapped file, float32, bfloat16 or float16."""
        entry = self.entries[name]
        if entry.type not in TYPES:
            raise CheckpointError(f"{self.path}: tensor `{name}` is of type {entry.type}; weights must be {', '.join(TYPES)}")
        count = math.prod(entry.shape)
        if entry.size != count * TYPES[entry.type].itemsize:
            raise self._damaged(f"tensor `{name}` {list(entry.shape)} of type {entry.type} has {entry.size} bytes")
        return self._file.tensor(TYPES[entry.type], entry.start, count).view(entry.shape)

    def span(self, name: str) -> Span:
        """Where the tensor's bytes are."""
        return Span(self.path, self.entries[name].start, self.entries[name].size)

    def release(self, name: str) -> None:
        """Give back the memory that the tensor took by being read."""
        self._file.release(self.entries[name].start, self.entries[name].size)

    def _read_entries(self) -> dict[str, Entry]:
        length = int.from_bytes(self._file.read(0, 8), "little")
        begin = 8 + length
        if self.size < 8 or length > LONGEST_HEADER or begin > self.size:
            raise self._damaged(f"its header is said to have {length} bytes; the file has {self.size}")
        try:
            header = json.loads(self._file.read(8, length))
        except (ValueError, RecursionError) as error:
            raise self._damaged(f"its header is not JSON: {error}") from None
        if not isinstance(header, dict):
            raise self._damaged("its header is not a JSON object")
        return {name: self._entry(name, value, begin) for name, value in header.items() if name != METADATA}

    def _entry(self, name: str, value: Any, begin: int) -> Entry:
        try:
            first, last = (_natural(offset) for offset in value["data_offsets"])
            entry = Entry(str(value["dtype"]), tuple(_natural(size) for size in value["shape"]), begin + first, last - first)
        except (KeyError, TypeError, ValueError):
            raise self._damaged(f"tensor `{name}` is described as {value!r:.80}") from None
        if entry.size < 0 or begin + last > self.size:
            raise self._damaged(f"tensor `{name}` is said to end at byte {begin + last} of {self.size}")
        return entry

    def _damaged(self, why: str) -> CheckpointError:
        return CheckpointError(f"{self.path} is damaged or incomplete: {why}")


def _natural(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError
    return value
