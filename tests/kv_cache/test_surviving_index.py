"""The index in memory that outlives its engine: at any instant, a valid entry names a whole block."""

from __future__ import annotations

import mmap
import os
import random
import signal
import time
from collections.abc import Iterator

import pytest
import torch

from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.surviving_index import SurvivingIndex
from foreword.utils.mapped_memory import MemoryFile
from tests.support.budget import examples

NUM_BLOCKS, BLOCK_BYTES = 24, 1 << 14
NAMESPACE = bytes(range(16))


class Engine:
    """Blocks of one byte's value each, in a memory file."""

    def __init__(
        self, fd: int, namespace: bytes = NAMESPACE, num_head_bytes: int = 0, is_killed: bool = False
    ) -> None:
        """num_head_bytes  memory of a trained head, which moves what follows
        is_killed  before it has adopted anything
        """
        memory = MemoryFile(fd)
        memory.disown()
        self.head = memory.allocate(num_head_bytes)
        self.blocks = memory.allocate((NUM_BLOCKS + 1) * BLOCK_BYTES).view(NUM_BLOCKS + 1, BLOCK_BYTES)
        self.pool = BlockPool(NUM_BLOCKS)
        self.index = SurvivingIndex(memory, self.pool, namespace)
        if not is_killed:
            self.num_adopted = self.index.adopt()
            memory.claim(namespace)

    def fill(self, number: int) -> int:
        """Compute a block of this value, index it, and release it; returns the block."""
        block = self.pool.allocate()
        self.blocks[block] = number % 251
        self.pool.publish(block, digest_of(number))
        self.pool.release([block])
        return block

    def check(self) -> None:
        """What the index has is whole."""
        self.pool.check([])
        for digest in self.pool.digests:
            block = self.pool.acquire(digest)
            assert block is not None and self.blocks[block].eq(int.from_bytes(digest) % 251).all()
            self.pool.release([block])


def digest_of(number: int) -> bytes:
    return number.to_bytes(16, "big")


@pytest.fixture
def fd() -> Iterator[int]:
    fd = os.memfd_create("test")
    yield fd
    os.close(fd)


def test_next_engine_adopts_whole_blocks(fd: int) -> None:
    first = Engine(fd)
    assert first.num_adopted == 0
    for number in range(NUM_BLOCKS + 5):
        first.fill(number)
    held = first.pool.allocate()  # its content is gone, and the new one not complete
    first.blocks[held] = 99
    second = Engine(fd)
    assert second.num_adopted == len(second.pool.digests) == NUM_BLOCKS - 1
    assert set(second.pool.digests) == set(first.pool.digests)
    second.check()
    second.pool.invalidate([second.fill(1000)])
    third = Engine(fd)
    assert third.num_adopted > 0 and set(third.pool.digests) == set(second.pool.digests)


def test_another_namespace_adopts_nothing(fd: int) -> None:
    Engine(fd).fill(1)
    other = Engine(fd, bytes(range(2, 18)))
    assert other.num_adopted == 0
    assert Engine(fd).num_adopted == 0, "its engine may have written anything"


@pytest.mark.parametrize("is_killed", [False, True])
def test_blocks_under_another_layout_are_not_adopted(fd: int, is_killed: bool) -> None:
    """The engine between does not see the index of the first one, and overwrites its blocks."""
    first = Engine(fd)
    for number in range(NUM_BLOCKS):
        first.fill(number)
    other = Engine(fd, bytes(range(1, 17)), 3 * BLOCK_BYTES, is_killed)
    other.blocks[0] = 77  # the block of dummy rows, which a warm-up writes to
    assert Engine(fd).num_adopted == 0


@pytest.mark.parametrize("position", range(0, 24, 5))
def test_torn_entry_is_not_adopted(fd: int, position: int) -> None:
    first = Engine(fd)
    blocks = [first.fill(number) for number in range(3)]
    start = first.index._start(blocks[1])
    first.index._bytes[start + position] ^= 1
    second = Engine(fd)
    assert set(second.pool.digests) == {digest_of(0), digest_of(2)}


def test_entry_of_another_block_is_not_adopted(fd: int) -> None:
    first = Engine(fd)
    source, target = (first.index._start(block) for block in (first.fill(1), first.pool.allocate()))
    first.index._bytes[target : target + 24] = first.index._bytes[source : source + 24]
    first.index._bytes[source : source + 24] = bytes(24)
    assert Engine(fd).num_adopted == 0


def test_engine_killed_at_any_instant_leaves_whole_blocks(fd: int) -> None:
    """SIGKILL while blocks are computed, indexed and reused: each engine goes on with the blocks before."""
    rng = random.Random(0)
    total = 0
    with mmap.mmap(-1, 8) as shared:
        progress = memoryview(shared).cast("Q")
        for _ in range(examples(180)):
            before = progress[0]
            pid = os.fork()
            if pid == 0:
                engine = Engine(fd)
                while True:
                    progress[0] += 1
                    engine.fill(rng.randrange(1 << 20))
            while progress[0] < before + 5:
                time.sleep(0)
            time.sleep(rng.random() * 0.002)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            engine = Engine(fd)
            engine.check()
            total += engine.num_adopted
        progress.release()
    assert total > 60


def test_memory_file_keeps_content_and_zeroes_what_is_new(fd: int) -> None:
    first = MemoryFile(fd)
    tensors = [first.allocate(size) for size in (0, 1, 5000, 4096)]
    for tensor in tensors:
        assert not tensor.any() and tensor.data_ptr() % 4096 == 0
        tensor.fill_(7)
    second = MemoryFile(fd)
    for tensor in tensors:
        assert torch.equal(second.allocate(tensor.numel()), tensor)
    assert not second.allocate(9000).any()
