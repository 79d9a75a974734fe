"""The disk tier's thread: what is torn, full, slow or broken costs hits only."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch

from foreword.kv_cache import disk_tier, tier
from foreword.kv_cache.block_files import BlockFiles
from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.disk_tier import DiskTier, PooledFiles
from foreword.kv_cache.storage import CacheImages
from foreword.kv_cache.tier import ReadJob
from tests.support.waiting import wait_until

NUM_BLOCKS = 8


class Cache:
    """A pool of blocks of 64 bytes, and its tier."""

    def __init__(self, root: Path, max_bytes: int = 1 << 20) -> None:
        self.memory = torch.zeros((NUM_BLOCKS + 1) * 4, 16, dtype=torch.uint8)
        self.pool = BlockPool(NUM_BLOCKS)
        files = BlockFiles(root / f"model-{bytes(16).hex()}" / "blocks", bytes(16), 64)
        self.pooled = PooledFiles(self.pool, CacheImages([self.memory], 4), files)
        self.tier = DiskTier(root, max_bytes, self.pooled)
        self.pool.on_gained.append(lambda digest, block: self.tier.on_gained(self.pooled, digest, block))

    def fill(self, number: int) -> bytes:
        """Compute a block, index it, and release it; returns its hash."""
        digest, block = number.to_bytes(16, "big"), self.pool.allocate()
        self.memory[block * 4 : block * 4 + 4] = number
        self.pool.publish(block, digest)
        self.pool.release([block])
        return digest

    def wait(self) -> None:
        wait_until(lambda: self.tier.is_idle or not self.tier.is_alive)


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    cache = Cache(tmp_path)
    yield cache
    if cache.tier._thread.is_alive():
        cache.tier.close()


def read_all(cache: Cache, job: ReadJob) -> list[bytes]:
    cache.tier.read(job)
    wait_until(lambda: job.is_done)
    images = []
    while (read := cache.tier.take(job)) is not None:
        images.append(read[2].numpy().tobytes())
    return images


def test_written_behind_and_read_back(cache: Cache) -> None:
    cache.tier.start()
    digests = [cache.fill(number) for number in range(5)]
    cache.wait()
    job = ReadJob([(cache.pooled, digest) for digest in digests], 1e9, 0.0)
    assert read_all(cache, job) == [bytes([number] * 64) for number in range(5)]
    stats = cache.tier.stats()
    assert stats.written_bytes == stats.read_bytes == 5 * cache.pooled.files.file_bytes


def test_block_that_is_reused_while_it_is_copied_is_not_written(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine reuses each second block in the middle of the thread's copy."""
    read, reused = cache.pooled.images.read, []

    def copy(block: int, image: torch.Tensor) -> None:
        read(block, image)
        half = image[:32].clone()
        digest = cache.pool.digest_of(block)
        if block % 2:
            reused.append(digest)
            cache.pool.invalidate([block])  # as allocate() does
            cache.memory[block * 4 : block * 4 + 4] = 99
        read(block, image)
        image[:32] = half

    monkeypatch.setattr(cache.pooled.images, "read", copy)
    digests = [cache.fill(number) for number in range(NUM_BLOCKS)]
    cache.tier.start()
    cache.wait()
    assert reused and cache.pooled.stored == cache.pooled.files.digests() == set(digests) - set(reused)
    for number, digest in enumerate(digests):
        if digest not in reused:
            assert cache.pooled.files.read(digest) == bytes([number] * 64)


def test_block_that_is_lost_before_its_turn_is_not_written(cache: Cache) -> None:
    digests = [cache.fill(number) for number in range(NUM_BLOCKS + 3)]
    cache.tier.start()
    cache.wait()
    assert cache.pooled.files.digests() == set(digests[3:])


def test_full_queue_drops_blocks(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "MAX_QUEUED_WRITES", 2)
    digests = [cache.fill(number) for number in range(5)]
    assert cache.tier.counts.dropped_blocks == 3
    cache.tier.start()
    wait_until(lambda: cache.pooled.stored == set(digests[:2]))


def test_close_writes_what_is_queued(cache: Cache) -> None:
    cache.tier._next_write_s = 1e6
    cache.tier.start()
    digests = [cache.fill(number) for number in range(5)]
    cache.tier.close()
    assert cache.pooled.files.digests() == set(digests) and not cache.tier.is_alive


def test_job_slower_than_computing_stops(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.tier.start()
    keys = [(cache.pooled, cache.fill(number)) for number in range(8)]
    cache.wait()
    ticks = count()
    monkeypatch.setattr(cache.tier, "_clock", lambda: float(next(ticks)))  # each image takes a second
    assert len(read_all(cache, ReadJob(keys, 8.5, 0.0))) == 8
    assert len(read_all(cache, ReadJob(keys, 7.5, 0.0))) == 1
    assert cache.tier.read_seconds(cache.pooled.files.file_bytes) == 1.0


def test_staged_images_are_bounded(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier, "MAX_STAGED_BYTES", 100)
    cache.tier.start()
    keys = [(cache.pooled, cache.fill(number)) for number in range(8)]
    cache.wait()
    job, other = ReadJob(keys, 1e9, 0.0), ReadJob(keys[:1], 1e9, 0.0)
    cache.tier.read(job)
    cache.tier.read(other)
    wait_until(lambda: len(job.images) == 2)
    assert cache.tier.take(job) is not None
    wait_until(lambda: len(job.images) == 2)
    assert not job.is_done
    cache.tier.cancel(job)
    wait_until(lambda: job.is_done and other.is_done)
    assert not job.images and cache.tier._staged_bytes == 64


def test_blocks_that_may_be_wrong_are_removed(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose write has begun, and all of them when the tier is closed."""
    digests = [cache.fill(number) for number in range(4)]
    write = cache.pooled.files.write

    def write_and_forget(digest: bytes, image: memoryview) -> None:
        write(digest, image)
        if digest == digests[0]:
            cache.tier.forget(digests[:1])
        elif digest == digests[3]:
            cache.tier.forget(digests[2:])
            cache.tier._closes_at_s = 0.0

    monkeypatch.setattr(cache.pooled.files, "write", write_and_forget)
    cache.tier.start()
    wait_until(lambda: not cache.tier.is_alive)
    assert cache.pooled.files.digests() == cache.pooled.stored == {digests[1]}


def test_error_ends_the_tier_alone(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.tier.start()
    digest = cache.fill(1)
    cache.wait()
    broken = threading.Event()

    def fail(digest: bytes) -> bytes:
        broken.set()
        raise ValueError("a bug")

    monkeypatch.setattr(cache.pooled.files, "read", fail)
    cache.tier.read(ReadJob([(cache.pooled, digest)], 1e9, 0.0))
    wait_until(lambda: not cache.tier.is_alive)
    assert broken.is_set()
    cache.fill(2)
    assert cache.pooled.files.digests() == {digest}


@pytest.mark.full
def test_files_of_a_replica_are_found(cache: Cache, tmp_path: Path) -> None:
    other = Cache(tmp_path)
    other.tier.start()
    cache.tier.start()
    for number in range(3):
        digest = cache.fill(number)
        wait_until(lambda digest=digest: digest in other.pooled.stored)
    job = ReadJob([(other.pooled, digest)], 1e9, 0.0)
    assert read_all(other, job) == [bytes([2] * 64)]
    other.tier.close()


def test_blocks_that_a_sweep_removed_are_written_again(tmp_path: Path) -> None:
    cache = Cache(tmp_path, max_bytes=700)
    cache.tier.start()
    for number in range(40):
        cache.fill(number)
        cache.wait()
    assert cache.pooled.stored == cache.pooled.files.digests()
    assert 0 < len(cache.pooled.stored) * cache.pooled.files.file_bytes <= 700
    digest = cache.fill(0)
    cache.wait()
    assert digest in cache.pooled.files.digests()
    cache.tier.close()


def test_undeletable_files_cost_few_sweeps_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache, sweeps = Cache(tmp_path, max_bytes=1 << 16), count()
    other = BlockFiles(tmp_path / f"other-{bytes(16).hex()}" / "blocks", bytes(16), 1 << 16)
    other.write(bytes(16), bytes(1 << 16))
    unlink, sweep = os.unlink, disk_tier.sweep

    def fail(path: str) -> None:
        if "other" in path:
            raise PermissionError(errno.EACCES, "Permission denied")
        unlink(path)

    monkeypatch.setattr(os, "unlink", fail)
    monkeypatch.setattr(disk_tier, "sweep", lambda *args: (next(sweeps), sweep(*args))[1])
    cache.tier.start()
    for number in range(100):
        cache.fill(number)
        cache.wait()
    cache.tier.close()
    num_bytes = cache.tier.stats().written_bytes
    assert num_bytes == 100 * cache.pooled.files.file_bytes
    assert 1 < next(sweeps) <= num_bytes // ((1 << 16) // disk_tier.MIN_SWEEP_SHARE) + 1
    (warning,) = (record.message for record in caplog.records if record.levelname == "WARNING")
    assert "files beyond --kv-cache-disk: they cannot be removed" in warning


@pytest.fixture
def refreshing(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> Cache:
    """It looks for files all the time."""
    monkeypatch.setattr(disk_tier, "REFRESH_S", 0.01)
    cache.tier._next_refresh_s = 0.0
    return cache


def test_directory_that_cannot_be_read_is_told_once(
    refreshing: Cache, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (blocks,) = tmp_path.glob("model-*/blocks")
    blocks.rmdir()
    blocks.write_bytes(b"")
    caplog.set_level("DEBUG")
    refreshing.tier.start()
    wait_until(lambda: len(caplog.records) > 3)
    assert [record.levelname for record in caplog.records[:3]] == ["WARNING", "DEBUG", "DEBUG"]
    assert "the KV cache's directory cannot be read: Not a directory" in caplog.text


def test_files_deleted_by_hand_are_written_again(refreshing: Cache, tmp_path: Path) -> None:
    cache = refreshing
    cache.tier.start()
    digests = [cache.fill(number) for number in range(5)]
    cache.wait()
    cache.pool.drop(digests[4])
    for digest in digests[2:]:
        cache.pooled.files.path(digest).unlink()
    files = BlockFiles(tmp_path / f"model-{bytes(16).hex()}" / "blocks", bytes(16), 64)
    wait_until(lambda: cache.pooled.stored == files.digests() == set(digests[:4]))
    shutil.rmtree(tmp_path / f"model-{bytes(16).hex()}")
    wait_until(lambda: cache.pooled.stored == files.digests() == set(digests[:4]))
    keys = [(cache.pooled, digest) for digest in digests[:4]]
    assert read_all(cache, ReadJob(keys, 1e9, 0.0)) == [bytes([number] * 64) for number in range(4)]


def test_file_that_is_missing_ends_a_job_and_is_forgotten(cache: Cache) -> None:
    digests = [number.to_bytes(16, "big") for number in range(3)]
    for digest in digests:
        cache.pooled.files.write(digest, bytes(64))
    cache.pooled.stored.update(digests)
    cache.tier._next_refresh_s = 1e12
    cache.tier.start()
    for digest in digests[1:]:
        cache.pooled.files.path(digest).unlink()
    job = ReadJob([(cache.pooled, digest) for digest in digests], 1e9, 0.0)
    assert read_all(cache, job) == [bytes(64)] and cache.tier.counts.refused == {"missing": 1}
    wait_until(lambda: cache.pooled.stored == {digests[0]})


@pytest.mark.parametrize(("num_files", "is_lost"), [(4, False), (4, True), (20, False)])
def test_deleted_block_is_written_again_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_files: int, is_lost: bool
) -> None:
    """The tier's thread does not run: the test does what it would."""
    cache = Cache(tmp_path, max_bytes=24 * (64 + 64))
    for number in range(num_files):
        cache.pooled.files.write(bytes([99, *range(14), number]), bytes(64))
    digest = (7).to_bytes(16, "big")
    cache.pooled.stored = {digest, *cache.pooled.files.digests()}
    cache.pooled.files.path(digest).parent.mkdir()
    cache.fill(7)
    assert not cache.tier._writes, "it is said to be on disk"
    if is_lost:  # the engine reuses the block between the two looks at the index
        blocks = iter([cache.pool.block_of(digest), None])
        monkeypatch.setattr(cache.pool, "block_of", lambda digest: next(blocks))
    cache.tier._next_refresh_s = 0.0
    cache.tier._on_idle()
    assert cache.pooled.stored == cache.pooled.files.digests()
    is_written = num_files == 4 and not is_lost
    assert (digest in cache.pooled.queued) == bool(cache.tier._writes) == is_written
