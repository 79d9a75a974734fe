"""A tier of the KV cache below the pools: blocks are written behind and read ahead by one thread.

    pool  -- on_gained --> queue of writes --> |        | --> images in host memory, or files
    waiting request --> ReadJob -------------> | thread | <-- images in host memory, or files
    free blocks <-- PrefixLoader <-- images <- |        |

A block enters the index of its pool when the host has seen the end of the step that computed it. Nothing
that writes to it is launched until the index has lost it. So the thread copies it without a lock, and
without a wait for a GPU's steps, and drops the copy if the index has lost the block by its end. All that a
tier does, being full, slow or broken, costs hits and no step's time.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from math import inf
from typing import ClassVar, Final, NamedTuple

from torch import Tensor

from foreword.core.outputs import KVTierStats
from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.storage import CacheImages

logger = logging.getLogger(__name__)

MAX_QUEUED_WRITES: Final = 1 << 15  # blocks; more are not written
MAX_STAGED_BYTES: Final = 64 << 20  # images that are read and not yet in a block
WRITE_PAUSE_S: Final = 10.0  # after a write that failed
IDLE_WAIT_S: Final = 60.0  # an idle thread's wait; new work wakes it
MIN_JUDGED_S: Final = 0.02  # reading time from which a job's speed is judged


class QueuedWrite(NamedTuple):
    pool: PooledImages
    digest: bytes
    block: int


class PooledImages(ABC):
    """The content of one pool, and its images in a tier. Methods are for the tier's thread."""

    stored: Container[bytes]  # hashes of the images that the tier has

    def __init__(self, pool: BlockPool, images: CacheImages, entry_bytes: int) -> None:
        """entry_bytes  of an image in the tier"""
        self.pool = pool
        self.images = images
        self.entry_bytes = entry_bytes
        self.queued: dict[bytes, QueuedWrite] = {}  # to be written, as long as the pool has them

    def on_lost(self, digest: bytes, block: int) -> None:
        self.queued.pop(digest, None)

    @abstractmethod
    def buffer(self) -> Tensor:
        """Memory for the next image to be saved; no image that the tier has is in it."""

    @abstractmethod
    def save(self, digest: bytes, image: Tensor) -> None:
        """Store what is in buffer(). Raises OSError."""

    @abstractmethod
    def load(self, digest: bytes) -> Tensor | None:
        """An image; None if the tier does not have it, which `stored` then says too."""

    @abstractmethod
    def remove(self, digest: bytes) -> None:
        """Forget an image, if there is one."""

    def has(self, digest: bytes, image: Tensor) -> bool:
        """Whether the memory of a loaded image still has it. For the engine's thread."""
        return True

    @abstractmethod
    def touch(self, digests: Sequence[bytes]) -> None:
        """A request asks for these. For the engine's thread."""


ImageKey = tuple[PooledImages, bytes]  # and the hash


class ReadJob:
    """Images that a waiting request needs, in order."""

    def __init__(self, keys: Sequence[ImageKey], max_seconds: float, submitted_s: float) -> None:
        """max_seconds  computing takes as long"""
        self.keys = keys
        self.max_seconds = max_seconds
        self.submitted_s = submitted_s
        self.num_bytes = sum(pool.entry_bytes for pool, _ in keys)
        self.seconds = 0.0  # spent reading
        self.num_bytes_read = 0
        # Read and not yet taken, each with its pool and hash
        self.images: deque[tuple[PooledImages, bytes, Tensor]] = deque()
        self.is_cancelled = False
        self.is_done = False  # no further image comes

    @property
    def is_too_slow(self) -> bool:
        """At its speed so far, reading takes longer than computing."""
        expected = self.seconds * self.num_bytes / max(self.num_bytes_read, 1)
        return self.seconds > MIN_JUDGED_S and expected > self.max_seconds


class Tier:
    """Writes what pools gain, reads what jobs ask for. Methods are for the engine's thread."""

    name: ClassVar[str]
    write_bytes_per_s: ClassVar[float] = inf  # bound of the write-behind
    close_timeout_s: ClassVar[float] = 0.0  # limits the writes at the end of an engine

    def __init__(
        self,
        blocks: PooledImages,
        anchors: PooledImages | None = None,  # None: the model has no layers with state
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.blocks = blocks
        self.anchors = anchors
        self.pools: Sequence[PooledImages] = [blocks] if anchors is None else [blocks, anchors]
        for images in self.pools:
            images.pool.on_lost.append(images.on_lost)
        self.is_alive = True  # False once it has ended after an error, or was closed
        self.progress = threading.Event()  # a job has a further image, or is done
        self.counts = KVTierStats()  # each one is changed by one thread alone
        self.copy_seconds = 0.0  # copying read images into blocks
        self._clock = clock
        self._problems: set[str] = set()  # that were logged
        self._writes: deque[QueuedWrite] = deque()
        self._reads: deque[ReadJob] = deque()
        self._forgotten: deque[bytes] = deque()  # hashes whose images are to be removed
        self._lock = threading.Lock()  # guards staged images
        self._staged_bytes = 0
        self._next_write_s = 0.0
        self._wake, self._taken = threading.Event(), threading.Event()
        self._closes_at_s: float | None = None
        self._thread = threading.Thread(target=self._run, name=f"kv-{self.name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Write what is queued, for a while."""
        self._closes_at_s = self._clock() + self.close_timeout_s
        self._wake.set()
        self._taken.set()
        self._thread.join(self.close_timeout_s + 1.0)

    def on_gained(self, pool: PooledImages, digest: bytes, block: int) -> None:
        """The index has a block that is complete."""
        if digest in pool.stored or not self.is_alive:
            return
        if self._is_full:
            self.counts.dropped_blocks += 1
            return
        pool.queued[digest] = write = QueuedWrite(pool, digest, block)
        self._writes.append(write)
        self._wake.set()

    def forget(self, digests: Sequence[bytes]) -> None:
        """Remove images of blocks whose content may be wrong, and of the states at their ends."""
        if self.is_alive:
            self._forgotten.extend(digests)
            self._wake.set()

    def read(self, job: ReadJob) -> None:
        """Begin to read in the background, after earlier jobs."""
        self._reads.append(job)
        self._wake.set()

    def take(self, job: ReadJob) -> tuple[PooledImages, bytes, Tensor] | None:
        """The next image of a job: its pool, hash and bytes."""
        with self._lock:
            if not job.images:
                return None
            image = job.images.popleft()
            self._staged_bytes -= image[2].nbytes
        self._taken.set()
        return image

    def cancel(self, job: ReadJob) -> None:
        """Read no more of it, and drop what was not taken."""
        with self._lock:
            job.is_cancelled = True
            self._staged_bytes -= sum(image.nbytes for _, _, image in job.images)
            job.images.clear()
        self._taken.set()

    @property
    def is_idle(self) -> bool:
        """Nothing is queued, read or written."""
        return not (self._writes or self._reads or self._forgotten)

    def read_seconds(self, num_bytes: int) -> float:
        """Expected time to read into blocks; 0 before the first read, which measures it."""
        counts = self.counts
        seconds = counts.read_seconds + self.copy_seconds
        return seconds / counts.read_bytes * num_bytes if counts.read_bytes else 0.0

    def stats(self) -> KVTierStats:
        """A copy of the counts; copies of images are a part of reading."""
        seconds = self.counts.read_seconds + self.copy_seconds
        return replace(self.counts, read_seconds=seconds, refused=Counter(self.counts.refused))

    # The thread

    def _run(self) -> None:
        try:
            while not self._is_over():
                self._wake.clear()
                if not self._work() and self._closes_at_s is None:
                    max_wait_s = self._on_idle()
                    self._wake.wait(min(self._write_delay_s(), max_wait_s))
            self._remove_forgotten()
        except Exception:
            logger.exception("engine: the %s tier of the KV cache ends after an error", self.name)
        finally:
            self.is_alive = False
            self.progress.set()

    def _work(self) -> bool:
        """Read or write what is next; False if there is nothing."""
        self._remove_forgotten()
        if self._reads:
            self._read(self._reads[0])
            self._reads.popleft()
        elif self._write_delay_s() <= 0:
            self._write(self._writes[0])
            self._writes.popleft()
        else:
            return False
        return True

    def _on_idle(self) -> float:
        """Nothing is queued; returns the longest time to wait until the next call."""
        return IDLE_WAIT_S

    @property
    def _is_full(self) -> bool:
        return len(self._writes) >= MAX_QUEUED_WRITES

    def _remove_forgotten(self) -> None:
        while self._forgotten:
            for pool in self.pools:
                pool.remove(self._forgotten[0])
            self._forgotten.popleft()

    def _is_over(self) -> bool:
        """Closed, with nothing left to write, or no time for it."""
        closes_at_s = self._closes_at_s
        return closes_at_s is not None and (not self._writes or self._clock() >= closes_at_s)

    def _write_delay_s(self) -> float:
        """Time until the next write; positive if there is none."""
        if not self._writes:
            return IDLE_WAIT_S
        return 0.0 if self._closes_at_s is not None else self._next_write_s - self._clock()

    def _write(self, write: QueuedWrite) -> None:
        pool, digest, block = write
        if pool.queued.get(digest) is not write:
            return
        started_s, image = self._clock(), pool.buffer()
        pool.images.read(block, image)
        if pool.queued.pop(digest, None) is not write:
            return  # the block may have been reused while it was copied
        try:
            pool.save(digest, image)
        except OSError as error:
            self._warn(f"a KV block cannot be written to {self.name}", error)
            self.counts.write_errors += 1
            self._next_write_s = self._clock() + WRITE_PAUSE_S
            return
        self.counts.written_bytes += pool.entry_bytes
        self.counts.write_seconds += self._clock() - started_s
        self._next_write_s = started_s + pool.entry_bytes / self.write_bytes_per_s
        self._on_written(pool.entry_bytes)

    def _on_written(self, num_bytes: int) -> None:
        """An image was written."""

    def _warn(self, problem: str, reason: OSError | str) -> None:
        """Warn once: a problem may come back each second."""
        level = logging.DEBUG if problem in self._problems else logging.WARNING
        self._problems.add(problem)
        reason = reason.strerror or str(reason) if isinstance(reason, OSError) else reason
        logger.log(level, "engine: %s: %s", problem, reason)

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
                    self._staged_bytes += image.nbytes
                    job.images.append((pool, digest, image))
            self.progress.set()
        job.is_done = True
        self.progress.set()

    def _is_stopped(self, job: ReadJob) -> bool:
        return job.is_cancelled or self._closes_at_s is not None

    def _read_image(self, job: ReadJob, pool: PooledImages, digest: bytes) -> Tensor | None:
        started_s = self._clock()
        image = self._load(pool, digest)
        if image is not None:
            seconds = self._clock() - started_s
            job.seconds += seconds
            job.num_bytes_read += pool.entry_bytes
            self.counts.read_seconds += seconds
            self.counts.read_bytes += pool.entry_bytes
        return image

    def _load(self, pool: PooledImages, digest: bytes) -> Tensor | None:
        return pool.load(digest)
