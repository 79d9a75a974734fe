"""From files to a device: threads read into one pinned buffer while the other is copied.

A mapped file would be read page by page by the thread that copies, and copied once more into memory that the device can
reach. Here the operating system reads straight into such memory, several pieces at a time, without Python in between, and
is told what will be read next. The host holds the buffers and nothing else.
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

__all__ = ["DeviceLoader", "FileSpan"]

logger = logging.getLogger(__name__)

NUM_BUFFERS: Final = 2
BUFFER_BYTES: Final = 32 << 20
NUM_READERS: Final = 8  # threads: enough requests under way for a fast disk
READAHEAD_BYTES: Final = 256 << 20  # bytes behind what was read last that the system is asked to fetch


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Bytes [start, start + size) of a file."""

    path: Path
    start: int
    num_bytes: int


class DeviceLoader:
    """Tensors of files on a device, in the types that they have there.

    pinned        None: pinned memory for devices other than the CPU, ordinary memory where that cannot be had
    buffer_bytes  of each of the buffers

    The copies are queued on the current stream of the device: what is computed there later sees them. Tensors come in the
    order that they are asked for; one that is larger than a buffer goes in pieces. Raises CheckpointError, which names the
    file, where it cannot be read or ends too early. It is a context manager: its threads and buffers end with it.
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
        self._readahead_end: dict[int, int] = {}  # of a file, up to where the system was asked to read last

    def __enter__(self) -> DeviceLoader:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Wait for the last copies, and let go of threads, files and buffers. It may be called again."""
        self._readers.shutdown()
        for buffer in self._buffers:
            buffer.wait()
        self._buffers = []
        for file in self._files.values():
            os.close(file)
        self._files = {}

    def tensor(self, span: FileSpan, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """The values of a span as a tensor of this type and shape, which take exactly its bytes."""
        result = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        assert result.nbytes == span.num_bytes, "a span of another size than the tensor's"
        if span.num_bytes:
            self._fill(result.view(-1).view(torch.uint8), span)
        return result

    def _fill(self, target: Tensor, span: FileSpan) -> None:
        """target uint8 [span.size]"""
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
        """Fill the beginning of `view` with a span, all readers at once."""
        pieces = [
            (span.start + first, view[first : min(first + self._piece_bytes, span.num_bytes)])
            for first in range(0, span.num_bytes, self._piece_bytes)
        ]
        try:
            _read_all(self._readers, file, pieces)
        except EOFError:
            raise CheckpointError(
                f"{span.path} is damaged or incomplete: it ends before byte {span.start + span.num_bytes}"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{span.path} cannot be read: {error.strerror or error}") from None

    def _readahead(self, file: int, end: int) -> None:
        """Tensors mostly stand in files in the order that they are wanted in. Nothing is asked for twice: to find that it is
        there takes time, too."""
        asked = self._readahead_end.get(file, 0)
        first = asked if end <= asked <= end + READAHEAD_BYTES else end
        if end + READAHEAD_BYTES - first >= READAHEAD_BYTES // 2 and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, first, end + READAHEAD_BYTES - first, os.POSIX_FADV_WILLNEED)
            self._readahead_end[file] = end + READAHEAD_BYTES

    def _open_file(self, path: Path) -> int:
        if path not in self._files:
            try:
                self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None
        return self._files[path]


class _Buffer:
    """Memory on the host, and when the last copy out of it is done."""

    def __init__(self, num_bytes: int, pinned: bool) -> None:
        self.num_bytes = num_bytes
        self._bytes = _allocate_buffer(num_bytes, pinned)
        self._copy_done = torch.cuda.Event() if self._bytes.is_pinned() else None  # type: ignore[no-untyped-call]
        self.view: memoryview = self._bytes.numpy().data

    def wait(self) -> None:
        """Until its contents are not needed any more."""
        if self._copy_done is not None:
            self._copy_done.synchronize()

    def copy_to(self, target: Tensor) -> None:
        """Queue the copy of as many bytes as `target`, uint8, has; out of ordinary memory it is done at once."""
        target.copy_(self._bytes[: len(target)], non_blocking=self._copy_done is not None)
        if self._copy_done is not None:
            self._copy_done.record()


def _allocate_buffer(num_bytes: int, pinned: bool) -> Tensor:
    """uint8 [size]"""
    if pinned:
        try:
            return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            logger.warning(
                "weights are loaded through ordinary memory, which is slower: none can be pinned (%s)", reason
            )
    return torch.empty(num_bytes, dtype=torch.uint8)


def _read_all(readers: Executor, file: int, pieces: Sequence[tuple[int, memoryview]]) -> None:
    """Each piece (offset, where to) by whoever is free; returns, or raises the first error, when nobody reads any more."""
    if len(pieces) == 1:
        _read_piece(file, *pieces[0])
        return
    under_way = [readers.submit(partial(_read_piece, file, *piece)) for piece in pieces]
    errors = [error for one in under_way if (error := one.exception()) is not None]
    if errors:
        raise errors[0]


def _read_piece(file: int, offset: int, view: memoryview) -> None:
    """Fill `view`; the system may hand over less than it is asked for. Raises EOFError, OSError."""
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if count == 0:
            raise EOFError
        done += count
