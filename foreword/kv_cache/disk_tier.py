"""The disk tier of the KV cache: images in files (kv_cache/block_files.py), which engines share."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from torch import Tensor

from foreword.kv_cache.block_files import BlockFiles, RefusedFile, stored_bytes, sweep
from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.storage import CacheImages
from foreword.kv_cache.tier import PooledImages, QueuedWrite, Tier

logger = logging.getLogger(__name__)

WRITE_BYTES_PER_S: Final = 200 << 20  # bound of the write-behind, far above what a CPU computes
SWEEP_SHARE: Final = 16  # a sweep follows after 1/16 of the limit was written: other engines write too
MIN_SWEEP_SHARE: Final = 128  # and not before 1/128: what it could not remove may leave no room
CLOSE_TIMEOUT_S: Final = 5.0
REFRESH_S: Final = 1.0  # interval at which an idle thread looks for files that have come or gone
REFRESH_SHARE: Final = 0.05  # largest share of the thread's time
REWRITE_SHARE: Final = 0.75  # share of the limit; a sweep leaves more: swept blocks are not written again


class PooledFiles(PooledImages):
    """The content of one pool, and its files."""

    stored: set[bytes]

    def __init__(self, pool: BlockPool, images: CacheImages, files: BlockFiles) -> None:
        super().__init__(pool, images, files.file_bytes)
        self.files = files
        self.stored = files.digests()
        self._buffer = images.new_image()

    def buffer(self) -> Tensor:
        return self._buffer

    def save(self, digest: bytes, image: Tensor) -> None:
        self.files.write(digest, image.numpy().data)
        self.stored.add(digest)

    def load(self, digest: bytes) -> Tensor | None:
        """Raises OSError, and RefusedFile."""
        image = self.images.new_image()
        image.numpy().data[:] = self.files.read(digest)
        return image

    def remove(self, digest: bytes) -> None:
        self.stored.discard(digest)
        with contextlib.suppress(OSError):
            self.files.path(digest).unlink()

    def touch(self, digests: Sequence[bytes]) -> None:
        """A file is used when it is read."""

    def refresh(self) -> set[bytes]:
        """Find files that have come and gone; returns the hashes of those that are gone. Raises OSError."""
        shards = self.files.changed_shards()
        present = set[bytes]().union(*shards.values())
        gone = {digest for digest in self.stored if digest[0] in shards and digest not in present}
        self.stored |= present
        self.stored -= gone
        return gone


class DiskTier(Tier):
    """Also sweeps the directory, and follows what other engines and users do there."""

    name = "disk"
    write_bytes_per_s = WRITE_BYTES_PER_S
    close_timeout_s = CLOSE_TIMEOUT_S
    pools: Sequence[PooledFiles]

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        blocks: PooledFiles,
        anchors: PooledFiles | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_bytes  of all engines that use the directory"""
        super().__init__(blocks, anchors, clock)
        self._root = root
        self._max_bytes = max_bytes
        self._next_refresh_s = clock() + REFRESH_S  # `blocks` and `anchors` have just read it
        self._stored_bytes = 0  # total of all engines at the last sweep
        self._unswept_bytes = max_bytes  # written since; the first write is followed by a sweep

    # The thread

    def _on_written(self, num_bytes: int) -> None:
        self._unswept_bytes += num_bytes
        room = self._max_bytes - self._stored_bytes
        interval = max(min(room, self._max_bytes // SWEEP_SHARE), self._max_bytes // MIN_SWEEP_SHARE)
        if self._unswept_bytes > interval:
            self._sweep()

    def _sweep(self) -> None:
        stored_bytes, self._unswept_bytes = self._stored_bytes + self._unswept_bytes, 0
        try:
            self._stored_bytes = sweep(self._root, self._max_bytes)
            if self._stored_bytes > self._max_bytes:
                reason = "they cannot be removed, or another engine removes them now"
                self._warn("the KV cache's directory has files beyond --kv-cache-disk", reason)
            if self._stored_bytes < stored_bytes:  # blocks that were removed may be written again
                for pool in self.pools:
                    pool.stored = pool.files.digests()
        except OSError as error:
            self._warn("the KV cache's directory cannot be swept", error)

    def _on_idle(self) -> float:
        """Find files that other engines have written, and write those again that were deleted."""
        started_s = self._clock()
        if started_s < self._next_refresh_s:
            return REFRESH_S
        try:
            gone = {pool: pool.refresh() for pool in self.pools}
            cached = {pool: [digest for digest in gone[pool] if digest in pool.pool] for pool in gone}
            if any(cached.values()):
                self._write_again(cached)
        except OSError as error:
            self._warn("the KV cache's directory cannot be read", error)
        seconds = self._clock() - started_s
        self._next_refresh_s = started_s + max(REFRESH_S, seconds / REFRESH_SHARE)
        return REFRESH_S

    def _write_again(self, gone: Mapping[PooledFiles, Sequence[bytes]]) -> None:
        """Queue blocks whose files are gone. In a full directory a sweep has removed them: they stay away."""
        room = int(self._max_bytes * REWRITE_SHARE) - stored_bytes(self._root)
        for pool, digests in gone.items():
            for digest in digests:
                room -= pool.files.file_bytes
                block = pool.pool.block_of(digest)
                if room < 0 or self._is_full:
                    return
                if block is None or digest in pool.queued:
                    continue
                pool.queued[digest] = write = QueuedWrite(pool, digest, block)
                # The engine may have lost the block before it was queued
                if pool.pool.block_of(digest) != block:
                    pool.queued.pop(digest, None)
                else:
                    self._writes.append(write)
                    self._wake.set()

    def _load(self, pool: PooledImages, digest: bytes) -> Tensor | None:
        assert isinstance(pool, PooledFiles)
        try:
            return pool.load(digest)
        except RefusedFile as error:
            self.counts.refused[str(error)] += 1
            logger.warning("engine: removed a KV block on disk: its %s is wrong", error)
        except FileNotFoundError:
            self.counts.refused["missing"] += 1
            self._next_refresh_s = 0.0  # others may be gone too
        except OSError as error:
            self.counts.refused["unreadable"] += 1
            logger.warning("engine: a KV block cannot be read from disk: %s", error.strerror or error)
        pool.stored.discard(digest)
        return None
