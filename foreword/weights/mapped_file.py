"""A memory-mapped file whose pages can be released after use."""

from __future__ import annotations

import mmap
from pathlib import Path

import torch
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.utils.mapped_memory import register_mapping


class MappedFile:
    """Raises CheckpointError if the file cannot be mapped. The file must not change while it is in use."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # Copy on write, because torch warns of read-only memory.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            raise CheckpointError(f"{path.parent}: the file {path.name} is missing") from None
        except ValueError:
            raise CheckpointError(f"{path} is damaged or incomplete: it is empty") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        register_mapping(self._map)

    @property
    def num_bytes(self) -> int:
        return len(self._map)

    def read(self, start: int, num_bytes: int) -> bytes:
        """A copy of these bytes, fewer at the end of the file."""
        return self._map[start : start + num_bytes]

    def tensor(self, dtype: torch.dtype, start: int, num_values: int) -> Tensor:
        """[num_values] from byte `start`, a view of the file."""
        assert start >= 0 and start + num_values * dtype.itemsize <= self.num_bytes
        if num_values == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=num_values, offset=start)

    def release(self, start: int, num_bytes: int) -> None:
        """Release the memory of these bytes; a later read loads them again."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if num_bytes and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, first, start + num_bytes - first)
