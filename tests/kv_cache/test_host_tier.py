"""The LRU cache of images in host memory, and its slots that are reused while the engine copies them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.kv_cache import prefix_loader
from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.host_tier import HostImages, HostTier
from foreword.kv_cache.prefix_cache import PrefixCache
from foreword.kv_cache.prefix_loader import PrefixLoader
from foreword.kv_cache.storage import CacheImages
from foreword.kv_cache.tier import ReadJob
from tests.support.waiting import wait_until

BLOCK_SIZE, NUM_BLOCKS, IMAGE_BYTES = 4, 8, 64
PROMPT = tuple(range(40))


class Cache:
    """The cache of an engine with a host tier of `num_slots` images."""

    def __init__(self, num_slots: int = 16) -> None:
        self.memory = torch.zeros((NUM_BLOCKS + 1) * BLOCK_SIZE, 16, dtype=torch.uint8)
        self.pool = BlockPool(NUM_BLOCKS)
        self.prefix_cache = PrefixCache(self.pool, BLOCK_SIZE, True)
        self.host = HostImages(self.pool, CacheImages([self.memory], BLOCK_SIZE), num_slots)
        self.tier = HostTier(self.host)
        self.pool.on_gained.append(lambda digest, block: self.tier.on_gained(self.host, digest, block))
        self.loader = PrefixLoader([self.tier], self.prefix_cache)
        self.state = RequestState(Request("a", PROMPT[:21], SamplingParams(max_tokens=1), 1, ()), 0, 64)
        self.prefix_cache.hash_blocks(self.state)
        self.digests = self.state.block_hashes

    def compute(self) -> None:
        """Compute the blocks of the request, and lose them."""
        for number, digest in enumerate(self.digests):
            block = self.pool.allocate()
            self.memory[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = number + 1
            self.pool.publish(block, digest)
            self.pool.release([block])
        wait_until(lambda: self.tier.is_idle)
        for digest in self.digests:
            self.pool.drop(digest)
        self.memory.zero_()

    def load(self) -> int:
        """Have the request's blocks read; returns how many memory has then."""
        live = {self.state.id: self.state}
        wait_until(lambda: self.loader.step([self.state], live) or not self.loader.is_busy)
        self.pool.check([])
        return len(self.prefix_cache.match(self.state))


@pytest.fixture
def cache() -> Iterator[Cache]:
    cache = Cache()
    cache.tier.start()
    yield cache
    cache.tier.close()


def test_blocks_that_memory_lost_are_read(cache: Cache) -> None:
    cache.compute()
    assert cache.load() == 5 and cache.tier.counts.hit_tokens == 20
    for number, digest in enumerate(cache.digests):
        block = cache.pool.block_of(digest)
        assert block is not None
        assert cache.memory[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE].eq(number + 1).all()
    stats = cache.tier.stats()
    assert stats.written_bytes == stats.read_bytes == 5 * IMAGE_BYTES
    assert stats.read_seconds >= cache.tier.copy_seconds > 0 and stats.avoided_seconds == 0
    assert cache.tier.is_idle, "what was read is not written again"


def test_image_that_changes_while_it_is_copied_is_not_used(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier's thread reuses the slot of the third image in the middle of the copy."""
    cache.compute()
    write, copies = cache.host.images.write, []

    def copy(block: int, image: torch.Tensor) -> None:
        copies.append(block)
        if len(copies) == 3:
            digest = next(each for each, other in cache.host.stored.items() if other is image)
            del cache.host.stored[digest]  # as buffer() does
            image[IMAGE_BYTES // 2 :] = 99
            cache.host.stored[digest] = image[:]  # of the same bytes again, in a tensor of its own
        write(block, image)

    monkeypatch.setattr(cache.host.images, "write", copy)
    assert cache.load() == 2 and cache.tier.counts.hit_tokens == 8


def test_a_step_copies_few_bytes_for_all_jobs_together(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is read at once: only this bound limits what other requests wait for."""
    monkeypatch.setattr(prefix_loader, "MAX_STEP_BYTES", 2 * IMAGE_BYTES)
    cache.compute()
    jobs = [ReadJob([(cache.host, digest)], inf, 0.0) for digest in cache.digests]
    params = SamplingParams(max_tokens=1)
    states = [RequestState(Request(str(number), PROMPT, params, 1, ()), 0, 64) for number in range(len(jobs))]
    cache.loader._jobs = {state.id: (state, [job]) for state, job in zip(states, jobs, strict=True)}
    cache.loader._in_flight = {job.keys[0]: job for job in jobs}
    for job in jobs:
        cache.tier.read(job)
    wait_until(lambda: all(job.is_done for job in jobs))
    counts = []
    while cache.loader.is_busy:
        cache.loader.step([], {})
        counts.append(cache.tier.counts.hit_tokens // BLOCK_SIZE)
    assert counts == [2, 4, 5]


def test_blocks_that_may_be_wrong_are_read_by_no_request(cache: Cache) -> None:
    """Not even where they were read before the request that computed them failed."""
    cache.compute()
    cache.loader.step([cache.state], {cache.state.id: cache.state})
    assert cache.state.is_loading
    wait_until(lambda: all(job.is_done for job in cache.loader._waited_for()))
    cache.loader.forget(cache.digests[1:])
    assert not cache.state.is_loading and not cache.loader.is_busy
    wait_until(lambda: cache.tier.is_idle)
    assert cache.load() == 0 and list(cache.host.stored) == cache.digests[:1]


def test_asked_for_images_stay_longest(cache: Cache) -> None:
    """Prefixes before what follows them, also while memory has them."""
    cache.compute()
    assert cache.load() == 5
    other = Cache(5)
    other.tier.start()
    other.compute()
    assert set(other.host.stored) == set(other.digests)
    other.load()
    for number in range(3):  # further blocks
        block = other.pool.allocate()
        other.pool.publish(block, bytes([number]) * 16)
        other.pool.release([block])
    wait_until(lambda: other.tier.is_idle)
    assert [digest for digest in other.digests if digest in other.host.stored] == other.digests[:2]
    other.tier.close()


def test_end_waits_for_no_write(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.host.images, "read", lambda *_: pytest.fail("nothing would read it"))
    cache.tier._closes_at_s = 0.0
    for number in range(NUM_BLOCKS):
        block = cache.pool.allocate()
        cache.pool.publish(block, bytes([number]) * 16)
    cache.tier.close()
    assert not cache.tier.is_alive and not cache.host.stored


def test_image_in_the_slot_of_an_earlier_one_is_another() -> None:
    """Also that of the same block: an image that was loaded before may have changed in between."""
    host = Cache(1).host
    digest = bytes(16)
    host.save(digest, host.buffer())
    image = host.load(digest)
    assert image is not None and host.has(digest, image)
    assert host.buffer().data_ptr() == image.data_ptr()
    host.save(digest, host.buffer())
    assert not host.has(digest, image)


KEYS = st.integers(0, 9)
ACTIONS = st.lists(
    st.tuples(st.sampled_from(("save", "copy", "remove", "load")), KEYS)
    | st.tuples(st.just("touch"), st.lists(KEYS, max_size=4)),
    max_size=60,
)


@given(st.integers(1, 6), ACTIONS)
def test_least_recently_used_gives_way(num_slots: int, actions: list[tuple[str, int | list[int]]]) -> None:
    """Compared with a dictionary of numbers. "copy" fills the buffer for a block that is lost meanwhile."""
    images = CacheImages([torch.zeros(3 * BLOCK_SIZE, 16, dtype=torch.uint8)], BLOCK_SIZE)
    host = HostImages(BlockPool(2), images, num_slots)
    expected: OrderedDict[bytes, int] = OrderedDict()
    for value, (action, which) in enumerate(actions):
        keys = [bytes([key]) * 16 for key in (which if isinstance(which, list) else [which])]
        if action == "touch":
            host.touch(keys)
            for key in reversed(keys):
                if key in expected:
                    expected.move_to_end(key)
        elif action == "remove":
            host.remove(keys[0])
            expected.pop(keys[0], None)
        elif action in ("save", "copy"):
            if host._next is None and len(expected) == num_slots:
                expected.popitem(last=False)
            host.buffer().fill_(value)
            if action == "save":
                host.save(keys[0], host.buffer())
                expected[keys[0]] = value
                expected.move_to_end(keys[0])
        assert list(host.stored) == list(expected)
        for key, number in expected.items():
            image = host.load(key)
            assert image is not None and image.eq(number).all() and host.has(key, image)
        assert len(host._free) + len(host.stored) + (host._next is not None) == num_slots
