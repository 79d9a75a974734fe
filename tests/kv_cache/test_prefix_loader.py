"""Which waiting requests have their prefix read from disk, and for how long they wait."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.kv_cache.block_files import BlockFiles
from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.disk_tier import DiskTier, PooledFiles
from foreword.kv_cache.prefix_cache import PrefixCache
from foreword.kv_cache.prefix_loader import PrefixLoader
from foreword.kv_cache.storage import CacheImages
from tests.support.waiting import FakeClock, wait_until

BLOCK_SIZE, NUM_BLOCKS = 4, 8
PROMPT = tuple(range(40))


class Engine:
    """The cache of an engine whose rows take `row_seconds`."""

    def __init__(self, root: Path, row_seconds: float = 0.0) -> None:
        self.memory = torch.zeros((NUM_BLOCKS + 1) * BLOCK_SIZE, 16, dtype=torch.uint8)
        self.pool = BlockPool(NUM_BLOCKS)
        self.prefix_cache = PrefixCache(self.pool, BLOCK_SIZE, True)
        files = BlockFiles(root / f"model-{bytes(16).hex()}" / "blocks", bytes(16), BLOCK_SIZE * 16)
        self.pooled = PooledFiles(self.pool, CacheImages([self.memory], BLOCK_SIZE), files)
        self.tier = DiskTier(root, 1 << 20, self.pooled)
        self.clock = FakeClock()
        self.loader = PrefixLoader([self.tier], self.prefix_cache, row_seconds=row_seconds, clock=self.clock)
        self.live: dict[str, RequestState] = {}

    def add(self, name: str, num_tokens: int = 21) -> RequestState:
        request = Request(name, PROMPT[:num_tokens], SamplingParams(max_tokens=1), 1, ())
        self.live[name] = RequestState(request, len(self.live), 64)
        return self.live[name]

    def remove(self, name: str) -> None:
        self.loader.remove(self.live.pop(name))

    def step(self) -> None:
        self.loader.step(list(self.live.values()), self.live)

    def run(self) -> None:
        """Step until nothing is read."""
        self.step()
        wait_until(lambda: self.step() or not self.loader.is_busy)
        self.pool.check([])

    def num_cached(self, state: RequestState) -> int:
        return len(self.prefix_cache.match(state))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with the blocks of PROMPT."""
    engine = Engine(tmp_path)
    state = engine.add("a", 33)
    engine.prefix_cache.hash_blocks(state)
    for number, digest in enumerate(state.block_hashes):
        engine.pooled.files.write(digest, bytes([number + 1] * BLOCK_SIZE * 16))
    return tmp_path


@pytest.fixture
def engine(root: Path) -> Iterator[Engine]:
    engine = Engine(root)
    engine.tier.start()
    yield engine
    engine.tier.close()


def test_prefix_is_read_into_free_blocks(engine: Engine) -> None:
    state, other = engine.add("a"), engine.add("b", 13)
    engine.step()
    assert state.is_loading and other.is_loading
    engine.run()
    assert not state.is_loading and engine.num_cached(state) == 5 and engine.num_cached(other) == 3
    assert engine.tier.counts.hit_tokens == 20, "the common blocks are read once"
    for number, digest in enumerate(state.block_hashes[:5]):
        block = engine.pool.acquire(digest)
        assert block is not None
        assert engine.memory[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE].eq(number + 1).all()


def test_longer_prompt_reads_the_rest(engine: Engine) -> None:
    engine.add("a", 13)
    longer = engine.add("b", 25)
    engine.step()
    engine.run()
    assert engine.num_cached(longer) == 6 and engine.tier.counts.hit_tokens == 24


def test_nothing_is_read_without_room_for_all_of_it(engine: Engine) -> None:
    """Blocks that are read would displace each other, and the request cannot start."""
    held = [engine.pool.allocate() for _ in range(4)]
    state = engine.add("a")
    engine.step()
    assert not engine.loader.is_busy
    engine.pool.release(held[:1])
    engine.step()
    assert state.is_loading
    engine.pool.release(held[1:])


def test_own_blocks_in_memory_stay_while_the_rest_is_read(engine: Engine) -> None:
    first = engine.add("a", 13)
    engine.run()
    del engine.live["a"]
    held = [engine.pool.allocate() for _ in range(4)]
    assert engine.num_cached(first) == 3 and engine.pool.num_free == 4
    state = engine.add("b")
    engine.step()
    assert not state.is_loading and engine.num_cached(state) == 3
    engine.pool.release(held[:1])
    engine.step()
    wait_until(lambda: engine.step() or not engine.loader.is_busy)
    assert engine.num_cached(state) == 5
    engine.pool.release(held[1:])


@pytest.mark.parametrize(("row_seconds", "is_read"), [(0.0, True), (1.0, True), (0.01, False)])
def test_only_what_is_faster_to_read_is_read(
    root: Path, monkeypatch: pytest.MonkeyPatch, row_seconds: float, is_read: bool
) -> None:
    engine = Engine(root, row_seconds)
    monkeypatch.setattr(
        engine.tier, "read_seconds", lambda num_bytes: num_bytes / engine.pooled.files.file_bytes
    )
    engine.tier.start()
    state = engine.add("a")  # 5 blocks of a second each
    engine.step()
    assert state.is_loading == is_read
    engine.tier.close()


def test_steps_measure_the_time_of_a_row(engine: Engine) -> None:
    engine.loader.record_step(8, 8.0)
    assert not engine.loader._row_seconds, "decoding has another cost"
    engine.loader.record_step(100, 50.0)
    assert engine.loader._row_seconds == 0.5
    engine.loader.record_step(100, 10.0)
    assert 0.1 < engine.loader._row_seconds < 0.5


def test_request_waits_no_longer_than_computing_takes(root: Path) -> None:
    engine = Engine(root, row_seconds=1.0)  # its thread is not started
    state = engine.add("a")
    engine.step()
    engine.clock.now += 19.0
    engine.step()
    assert state.is_loading
    engine.clock.now += 2.0
    engine.step()
    assert not state.is_loading and not engine.loader.is_busy
    engine.step()
    assert not state.is_loading


def test_request_that_ended_is_not_waited_for(root: Path) -> None:
    engine = Engine(root)  # its thread is not started
    first, second = engine.add("a"), engine.add("b")
    engine.step()
    engine.remove("a")
    assert engine.loader.is_busy and second.is_loading
    engine.remove("b")
    assert not engine.loader.is_busy and not first.is_loading


def test_tier_that_has_ended_holds_up_no_request(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.pooled.files, "read", lambda digest: 1 // 0)
    state = engine.add("a")
    engine.run()
    assert not state.is_loading and not engine.tier.is_alive and engine.num_cached(state) == 0
