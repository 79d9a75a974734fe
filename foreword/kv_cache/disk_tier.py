"""The disk tier of the KV cache: blocks are written behind and read ahead by one thread.

    pool  -- on_gained --> queue of writes --> |        | --> files
    waiting request --> ReadJob -------------> | thread | <-- files
    free blocks <-- PrefixLoader <-- images <- |        |

A block in the index of its pool is never written to again until the index has lost it. So the thread copies
it without a lock, and drops the copy if the index has lost the block meanwhile. All that the disk does, being
full, slow or broken, costs hits and no step's time.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from foreword.core.outputs import KVDiskStats
from foreword.kv_cache.block_files import BlockFiles, RefusedFile, stored_bytes, sweep
from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.storage import CacheImages

logger = logging.getLogger(__name__)

WRITE_BYTES_PER_S: Final = 200 << 20  # bound of the write-behind, far above what a CPU computes
MAX_QUEUED_WRITES: Final = 1 << 15  # blocks; more are not written
MAX_STAGED_BYTES: Final = 64 << 20  # images that are read and not yet in a block
WRITE_PAUSE_S: Final = 10.0  # after a write that failed
SWEEP_SHARE: Final = 16  # a sweep follows after 1/16 of the limit was written: other engines write too
MIN_SWEEP_SHARE: Final = 128  # and not before 1/128: what it could not remove may leave no room
CLOSE_TIMEOUT_S: Final = 5.0  # limits the writes at the end of an engine
REFRESH_S: Final = 1.0  # interval at which an idle thread looks for files that have come or gone
REFRESH_SHARE: Final = 0.05  # largest share of the thread's time
REWRITE_SHARE: Final = 0.75  # share of the limit; a sweep leaves more: swept blocks are not written again
MIN_JUDGED_S: Final = 0.02  # reading time from which a job's speed is judged


class QueuedWrite(NamedTuple):
    pool: PooledFiles
    digest: bytes
    block: int


class PooledFiles:
    """The content of one pool, in memory and in files."""

    def __init__(self, pool: BlockPool, images: CacheImages, files: BlockFiles) -> None:
        self.pool = pool
        self.images = images
        self.files = files
        self.on_disk = files.digests()
        self.queued: dict[bytes, QueuedWrite] = {}  # to be written, as long as the pool has them
        pool.on_lost.append(self._on_lost)

    def _on_lost(self, digest: bytes, block: int) -> None:
        self.queued.pop(digest, None)

    def refresh(self) -> set[bytes]:
        """Find files that have come and gone; returns the hashes of those that are gone. Raises OSError."""
        shards = self.files.changed_shards()
        present = set[bytes]().union(*shards.values())
        gone = {digest for digest in self.on_disk if digest[0] in shards and digest not in present}
        self.on_disk |= present
        self.on_disk -= gone
        return gone


ImageKey = tuple[PooledFiles, bytes]  # and the hash


class ReadJob:
    """Images that a waiting request needs, in order."""

    def __init__(self, keys: Sequence[ImageKey], max_seconds: float, submitted_s: float) -> None:
        """max_seconds  computing takes as long"""
        self.keys = keys
        self.max_seconds = max_seconds
        self.submitted_s = submitted_s
        self.num_bytes = sum(pool.files.file_bytes for pool, _ in keys)
        self.seconds = 0.0  # spent reading
        self.num_bytes_read = 0
        # Read and not yet taken, each with its pool and hash
        self.images: deque[tuple[PooledFiles, bytes, bytes]] = deque()
        self.is_cancelled = False
        self.is_done = False  # no further image comes

    @property
    def is_too_slow(self) -> bool:
        """At its speed so far, reading takes longer than computing."""
        expected = self.seconds * self.num_bytes / max(self.num_bytes_read, 1)
        return self.seconds > MIN_JUDGED_S and expected > self.max_seconds


@dataclass(slots=True)
class _Counts:
    """Totals; only the thread changes them."""

    read_bytes: int = 0
    read_seconds: float = 0.0
    written_bytes: int = 0
    write_seconds: float = 0.0
    write_errors: int = 0


class DiskTier:
    """Writes what pools gain, reads what jobs ask for. Methods are for the engine's thread."""

    def __init__(
        self,
        root: Path,
        max_bytes: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """max_bytes  of all engines that use the directory"""
        self.is_alive = True  # False once it has ended after an error, or was closed
        self.progress = threading.Event()  # a job has a further image, or is done
        self.refused: Counter[str] = Counter()  # files, by reason
        self.num_dropped = 0  # blocks that were not written: the queue was full
        self._root = root
        self._max_bytes = max_bytes
        self._pools: list[PooledFiles] = []
        self._next_refresh_s = 0.0
        self._clock = clock
        self._counts = _Counts()
        self._problems: set[str] = set()  # that were logged
        self._writes: deque[QueuedWrite] = deque()
        self._reads: deque[ReadJob] = deque()
        self._forgotten: deque[bytes] = deque()  # hashes whose files are to be removed
        self._lock = threading.Lock()  # guards staged images
        self._staged_bytes = 0
        self._next_write_s = 0.0
        self._stored_bytes = 0  # of all engines at the last sweep
        self._unswept_bytes = max_bytes  # written since; the first write is followed by a sweep
        self._wake, self._taken = threading.Event(), threading.Event()
        self._closes_at_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)

    def start(self, pools: Sequence[PooledFiles]) -> None:
        self._pools = list(pools)
        self._thread.start()

    def close(self) -> None:
        """Write what is queued, for a while."""
        self._closes_at_s = self._clock() + CLOSE_TIMEOUT_S
        self._wake.set()
        self._taken.set()
        self._thread.join(CLOSE_TIMEOUT_S + 1.0)

    def on_gained(self, pool: PooledFiles, digest: bytes, block: int) -> None:
        """The index has a block that is complete."""
        if digest in pool.on_disk or not self.is_alive:
            return
        if len(self._writes) >= MAX_QUEUED_WRITES:
            self.num_dropped += 1
            return
        pool.queued[digest] = write = QueuedWrite(pool, digest, block)
        self._writes.append(write)
        self._wake.set()

    def forget(self, digests: Sequence[bytes]) -> None:
        """Remove files of blocks whose content may be wrong, and of the states at their ends."""
        if self.is_alive:
            self._forgotten.extend(digests)
            self._wake.set()

    def read(self, job: ReadJob) -> None:
        """Begin to read in the background, after earlier jobs."""
        self._reads.append(job)
        self._wake.set()

    def take(self, job: ReadJob) -> tuple[PooledFiles, bytes, bytes] | None:
        """The next image of a job: its pool, hash and bytes."""
        with self._lock:
            if not job.images:
                return None
            image = job.images.popleft()
            self._staged_bytes -= len(image[2])
        self._taken.set()
        return image

    def cancel(self, job: ReadJob) -> None:
        """Read no more of it, and drop what was not taken."""
        with self._lock:
            job.is_cancelled = True
            self._staged_bytes -= sum(len(image) for _, _, image in job.images)
            job.images.clear()
        self._taken.set()

    @property
    def is_idle(self) -> bool:
        """Nothing is queued, read or written."""
        return not (self._writes or self._reads or self._forgotten)

    def read_seconds(self, num_bytes: int) -> float:
        """Expected time to read; 0 before the first read, which measures it."""
        counts = self._counts
        return counts.read_seconds / counts.read_bytes * num_bytes if counts.read_bytes else 0.0

    def stats(self, hit_tokens: int, avoided_seconds: float) -> KVDiskStats:
        counts = self._counts
        return KVDiskStats(
            hit_tokens,
            avoided_seconds,
            counts.read_bytes,
            counts.read_seconds,
            counts.written_bytes,
            counts.write_seconds,
            counts.write_errors,
            self.num_dropped,
            dict(self.refused),
        )

    # The thread

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._wake.clear()
                self._remove_forgotten()
                if self._reads:
                    self._read(self._reads[0])
                    self._reads.popleft()
                elif (delay_s := self._write_delay_s()) <= 0:
                    self._write(self._writes[0])
                    self._writes.popleft()
                elif self._closes_at_s is None:
                    self._refresh()
                    self._wake.wait(min(delay_s, REFRESH_S))
            self._remove_forgotten()
        except Exception:
            logger.exception("engine: the disk tier of the KV cache ends after an error")
        finally:
            self.is_alive = False
            self.progress.set()

    def _remove_forgotten(self) -> None:
        while self._forgotten:
            for pool in self._pools:
                pool.on_disk.discard(self._forgotten[0])
                with contextlib.suppress(OSError):
                    pool.files.path(self._forgotten[0]).unlink()
            self._forgotten.popleft()

    def _is_over(self) -> bool:
        """Closed, with nothing left to write, or no time for it."""
        closes_at_s = self._closes_at_s
        return closes_at_s is not None and (not self._writes or self._clock() >= closes_at_s)

    def _write_delay_s(self) -> float:
        """Time until the next write; positive if there is none."""
        if not self._writes:
            return 60.0
        return 0.0 if self._closes_at_s is not None else self._next_write_s - self._clock()

    def _write(self, write: QueuedWrite) -> None:
        pool, digest, block = write
        if pool.queued.get(digest) is not write:
            return
        started_s = self._clock()
        image = pool.images.read(block)
        if pool.queued.pop(digest, None) is not write:
            return  # the block may have been reused while it was copied
        try:
            pool.files.write(digest, image)
        except OSError as error:
            self._warn("a KV block cannot be written to disk", error)
            self._counts.write_errors += 1
            self._next_write_s = self._clock() + WRITE_PAUSE_S
            return
        pool.on_disk.add(digest)
        self._counts.written_bytes += pool.files.file_bytes
        self._counts.write_seconds += self._clock() - started_s
        self._unswept_bytes += pool.files.file_bytes
        self._next_write_s = started_s + pool.files.file_bytes / WRITE_BYTES_PER_S
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
                for pool in self._pools:
                    pool.on_disk = pool.files.digests()
        except OSError as error:
            self._warn("the KV cache's directory cannot be swept", error)

    def _refresh(self) -> None:
        """Find files that other engines have written, and write those again that were deleted."""
        started_s = self._clock()
        if started_s < self._next_refresh_s:
            return
        try:
            gone = {pool: pool.refresh() for pool in self._pools}
            cached = {pool: [digest for digest in gone[pool] if digest in pool.pool] for pool in gone}
            if any(cached.values()):
                self._write_again(cached)
        except OSError as error:
            self._warn("the KV cache's directory cannot be read", error)
        seconds = self._clock() - started_s
        self._next_refresh_s = started_s + max(REFRESH_S, seconds / REFRESH_SHARE)

    def _warn(self, problem: str, reason: OSError | str) -> None:
        """Warn once: a problem may come back each second."""
        level = logging.DEBUG if problem in self._problems else logging.WARNING
        self._problems.add(problem)
        reason = reason.strerror or str(reason) if isinstance(reason, OSError) else reason
        logger.log(level, "engine: %s: %s", problem, reason)

    def _write_again(self, gone: Mapping[PooledFiles, Sequence[bytes]]) -> None:
        """Queue blocks whose files are gone. In a full directory a sweep has removed them: they stay away."""
        room = int(self._max_bytes * REWRITE_SHARE) - stored_bytes(self._root)
        for pool, digests in gone.items():
            for digest in digests:
                room -= pool.files.file_bytes
                block = pool.pool.block_of(digest)
                if room < 0 or len(self._writes) >= MAX_QUEUED_WRITES:
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

    def _read(self, job: ReadJob) -> None:
        for pool, digest in job.keys:
            while self._staged_bytes >= MAX_STAGED_BYTES and not self._is_stopped(job):
                self._taken.wait()
                self._taken.clear()
            if job.is_too_slow or self._is_stopped(job):
                break
            image = self._read_image(job, pool, digest)
            if image is None:
                break  # without this block the later ones are of no use
            with self._lock:
                if not job.is_cancelled:
                    self._staged_bytes += len(image)
                    job.images.append((pool, digest, image))
            self.progress.set()
        job.is_done = True
        self.progress.set()

    def _is_stopped(self, job: ReadJob) -> bool:
        return job.is_cancelled or self._closes_at_s is not None

    def _read_image(self, job: ReadJob, pool: PooledFiles, digest: bytes) -> bytes | None:
        started_s = self._clock()
        try:
            image = pool.files.read(digest)
        except RefusedFile as error:
            self.refused[str(error)] += 1
            logger.warning("engine: removed a KV block on disk: its %s is wrong", error)
        except FileNotFoundError:
            self.refused["missing"] += 1
            self._next_refresh_s = 0.0  # others may be gone too
        except OSError as error:
            self.refused["unreadable"] += 1
            logger.warning("engine: a KV block cannot be read from disk: %s", error.strerror or error)
        else:
            seconds = self._clock() - started_s
            job.seconds += seconds
            job.num_bytes_read += pool.files.file_bytes
            self._counts.read_seconds += seconds
            self._counts.read_bytes += pool.files.file_bytes
            return image
        pool.on_disk.discard(digest)
        return None
