"""Loads tensors from files to a device: threads read into one pinned buffer while the other is copied.

A mapped file would be read page by page in the copying thread, and copied twice.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final

import torch
from torch import Tensor

from foreword.errors import CheckpointError

logger = logging.getLogger(__name__)

NUM_BUFFERS: Final = 2
BUFFER_BYTES: Final = 32 << 20
NUM_READERS: Final = 8  # threads: enough concurrent reads for a fast disk
READAHEAD_BYTES: Final = 256 << 20  # after the last tensor, requested with posix_fadvise


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes [start, start + num_bytes) of a file."""

    path: Path
    start: int
    num_bytes: int


class DeviceLoader:
    """Tensors of files on a device. A context manager: its threads and buffers end with it.

    Copies are queued on the device's current stream. `pinned` defaults to True for GPUs.
    Raises CheckpointError for a file that cannot be read or is truncated.
    """

    def __init__(
        self,
        device: str,
        pinned: bool | None = None,
        buffer_bytes: int = BUFFER_BYTES,
        num_readers: int = NUM_READERS,
    ) -> None:
        assert buffer_bytes > 0 and num_readers > 0
        self._device = torch.device(device)
        self._buffers = [
            _Buffer(buffer_bytes, device != "cpu" if pinned is None else pinned) for _ in range(NUM_BUFFERS)
        ]
        self._next_buffer = 0
        self._readers = ThreadPoolExecutor(num_readers, "read")
        self._piece_bytes = -(-buffer_bytes // num_readers)
        self._files: dict[Path, int] = {}
        self._readahead_end: dict[int, int] = {}  # by file: end of the last requested readahead

    def __enter__(self) -> DeviceLoader:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for pending copies and release threads, files and buffers. Idempotent."""
        self._readers.shutdown()
        for buffer in self._buffers:
            buffer.wait()
        self._buffers = []
        for file in self._files.values():
            os.close(file)
        self._files = {}

    def tensor(self, span: FileSpan, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Load a span as a tensor; its bytes must match type and shape."""
        result = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        assert result.nbytes == span.num_bytes, "span and tensor differ in size"
        if span.num_bytes:
            self._fill(result.view(-1).view(torch.uint8), span)
        return result

    def _fill(self, target: Tensor, span: FileSpan) -> None:
        """target uint8 [span.num_bytes]"""
        file = self._open_file(span.path)
        self._readahead(file, span.start + span.num_bytes)
        done = 0
        while done < span.num_bytes:
            buffer = self._buffers[self._next_buffer]
            self._next_buffer = (self._next_buffer + 1) % NUM_BUFFERS
            size = min(buffer.num_bytes, span.num_bytes - done)
            buffer.wait()
            self._read(file, FileSpan(span.path, span.start + done, size), buffer.view)
            buffer.copy_to(target[done : done + size])
            done += size

    def _read(self, file: int, span: FileSpan, view: memoryview) -> None:
        """Fill the beginning of `view` with a span, all readers in parallel."""
        pieces = [
            (span.start + first, view[first : min(first + self._piece_bytes, span.num_bytes)])
            for first in range(0, span.num_bytes, self._piece_bytes)
        ]
        try:
            _read_all(self._readers, file, pieces)
        except EOFError:
            end = span.start + span.num_bytes
            raise CheckpointError(f"{span.path} is damaged: it ends before byte {end}") from None
        except OSError as error:
            raise CheckpointError(f"{span.path} cannot be read: {error.strerror or error}") from None

    def _readahead(self, file: int, end: int) -> None:
        """Prefetch the bytes after `end`: tensors are mostly loaded in file order.

        No range is requested twice: even a cached range costs time.
        """
        requested, stop = self._readahead_end.get(file, 0), end + READAHEAD_BYTES
        first = requested if end <= requested <= stop else end
        if stop - first >= READAHEAD_BYTES // 2 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, first, stop - first, os.POSIX_FADV_WILLNEED)
            self._readahead_end[file] = stop

    def _open_file(self, path: Path) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        return self._files[path]


class _Buffer:
    """Host memory, and the event of the last copy from it."""

    def __init__(self, num_bytes: int, pinned: bool) -> None:
        self.num_bytes = num_bytes
        self._bytes = _allocate_buffer(num_bytes, pinned)
        self._copy_done = torch.cuda.Event() if self._bytes.is_pinned() else None  # type: ignore[no-untyped-call]
        self.view: memoryview = self._bytes.numpy().data

    def wait(self) -> None:
        """Wait until the last copy is done."""
        if self._copy_done is not None:
            self._copy_done.synchronize()

    def copy_to(self, target: Tensor) -> None:
        """Copy the first bytes to `target` uint8; asynchronous from pinned memory."""
        target.copy_(self._bytes[: len(target)], non_blocking=self._copy_done is not None)
        if self._copy_done is not None:
            self._copy_done.record()


def _allocate_buffer(num_bytes: int, pinned: bool) -> Tensor:
    """uint8 [num_bytes]"""
    if pinned:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            logger.warning("pinned memory is not available (%s), loading weights is slower", reason)
    return torch.empty(num_bytes, dtype=torch.uint8)


def _read_all(readers: Executor, file: int, pieces: Sequence[tuple[int, memoryview]]) -> None:
    """Read the pieces (offset, target) in parallel; wait for all, then raise the first error."""
    if len(pieces) == 1:
        _read_piece(file, *pieces[0])
        return
    reads = [readers.submit(partial(_read_piece, file, *piece)) for piece in pieces]
    errors = [error for read in reads if (error := read.exception()) is not None]
    if errors:
        raise errors[0]


def _read_piece(file: int, offset: int, view: memoryview) -> None:
    """Fill `view`; one read may return less than requested. Raises EOFError, OSError."""
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if count == 0:
            raise EOFError
        done += count
