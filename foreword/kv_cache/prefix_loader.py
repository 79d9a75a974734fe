"""Reads prefixes of waiting requests from the disk tier into free blocks, where the prefix cache has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from math import inf

from foreword.core.outputs import KVDiskStats
from foreword.core.request import RequestState
from foreword.kv_cache.disk_tier import DiskTier, ImageKey, PooledFiles, ReadJob
from foreword.kv_cache.prefix_cache import PrefixCache
from foreword.kv_cache.state_cache import StateCache

IDLE_WAIT_S = 0.01  # how long an idle step waits for an image
MAX_STEP_BYTES = 32 << 20  # images copied into blocks in a step, while other requests run
ROW_COST_DECAY = 0.9  # weight of the earlier cost of a row, at each step that is timed
MIN_TIMED_ROWS = 64  # rows of a step that is timed: most are of prompts


class PrefixLoader:
    """A request waits while blocks that it lacks are read, if that is faster than to compute them.

    It holds nothing meanwhile: a block that was read is a free one with content, as those of ended requests.
    """

    def __init__(
        self,
        tier: DiskTier,
        blocks: PooledFiles,
        prefix_cache: PrefixCache,
        anchors: PooledFiles | None = None,  # of a model with layers with state
        states: StateCache | None = None,
        row_seconds: float = 0.0,  # time of a prompt's row; 0: not measured yet
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tier = tier
        self.hit_tokens = 0
        self.avoided_seconds = 0.0  # expected time to compute these tokens
        self.blocks = blocks
        self._anchors = anchors
        self._prefix_cache = prefix_cache
        self._states = states
        self._row_seconds = row_seconds
        self._clock = clock
        self._jobs: dict[str, tuple[RequestState, ReadJob]] = {}  # requests that wait, by id
        self._in_flight: dict[ImageKey, ReadJob] = {}
        self._decided: dict[str, RequestState] = {}  # waiting requests that need not wait for this

    @property
    def is_busy(self) -> bool:
        return bool(self._jobs)

    def record_step(self, num_rows: int, seconds: float) -> None:
        """The forward pass of a step took that long."""
        if num_rows >= MIN_TIMED_ROWS:
            cost = seconds / num_rows
            before = self._row_seconds or cost
            self._row_seconds = before * ROW_COST_DECAY + cost * (1 - ROW_COST_DECAY)

    def step(self, candidates: Sequence[RequestState], live: Mapping[str, RequestState]) -> None:
        """Take what has been read, and begin to read for waiting requests that may start next."""
        decided = self._decided.values()
        self._decided = {s.id: s for s in decided if live.get(s.id) is s and not s.blocks}
        now_s = self._clock()
        for job in dict.fromkeys(job for _, job in self._jobs.values()):
            if not self._take(job) or now_s - job.submitted_s > job.max_seconds:
                self._end(job)
        for state in candidates:
            if state.id not in self._decided and state.id not in self._jobs:
                self._decide(state)

    def remove(self, state: RequestState) -> None:
        """The request has ended; the next step() may be long after."""
        if state.id in self._jobs:
            self._leave(*self._jobs[state.id])

    def wait(self) -> None:
        """Wait for a moment until something has been read: nothing else is to do."""
        if not any(job.images for _, job in self._jobs.values()):
            self.tier.progress.wait(IDLE_WAIT_S)
        self.tier.progress.clear()

    def stats(self) -> KVDiskStats:
        return self.tier.stats(self.hit_tokens, self.avoided_seconds)

    def close(self) -> None:
        self.tier.close()

    def _decide(self, state: RequestState) -> None:
        """Have the missing blocks of a request read, unless computing them is faster."""
        cache = self._prefix_cache
        cache.hash_blocks(state)
        if not cache.is_enabled_for(state):
            self._decided[state.id] = state
            return
        if cache.computing_request(state) is not None:
            return  # it waits for these blocks anyway
        missing = self._missing(state)
        if missing is None:
            return  # it cannot start either
        keys, num_tokens = missing
        shared = next((self._in_flight[key] for key in keys if key in self._in_flight), None)
        if shared is not None:
            self._wait_for(state, shared)  # and decide again when it ends
            return
        job = ReadJob(keys, num_tokens * self._row_seconds or inf, self._clock())
        self._decided[state.id] = state
        if keys and self.tier.read_seconds(job.num_bytes) < job.max_seconds:
            self._in_flight.update(dict.fromkeys(keys, job))
            self._wait_for(state, job)
            self.tier.read(job)

    def _missing(self, state: RequestState) -> tuple[list[ImageKey], int] | None:
        """Images that make the longest prefix usable, in order, and the tokens gained; None: no room now."""
        cache, blocks, anchors = self._prefix_cache, self.blocks, self._anchors
        hashes = cache.shareable_hashes(state)
        prefix = list(takewhile(lambda digest: digest in blocks.pool or digest in blocks.on_disk, hashes))
        num_usable, num_cached = len(prefix), len(cache.match(state))
        if self._states is not None and anchors is not None:
            num_usable = self._states.usable_blocks(prefix, anchors.on_disk)
        if num_usable <= num_cached:
            return [], 0
        prefix = prefix[:num_usable]
        keys: list[ImageKey] = [(blocks, digest) for digest in prefix if digest not in blocks.pool]
        cached = [digest for digest in prefix if digest in blocks.pool]
        if len(keys) + sum(map(blocks.pool.is_free, cached)) > blocks.pool.num_free:
            return None
        if anchors is not None and prefix[-1] not in anchors.pool:
            keys.append((anchors, prefix[-1]))
        return keys, (num_usable - num_cached) * cache.block_size

    def _wait_for(self, state: RequestState, job: ReadJob) -> None:
        state.is_loading = True
        self._jobs[state.id] = state, job

    def _take(self, job: ReadJob) -> bool:
        """Give what was read to free blocks; False if no more comes."""
        is_done, num_bytes = job.is_done or not self.tier.is_alive, 0
        while num_bytes < MAX_STEP_BYTES and (read := self.tier.take(job)) is not None:
            (pooled, digest, image), pool = read, read[0].pool
            num_bytes += len(image)
            if digest in pool:
                continue
            if not pool.num_free:
                return False
            block = pool.allocate()
            pooled.images.write(block, image)
            pool.publish(block, digest)
            pool.release([block])
            if pooled is self.blocks:
                self.hit_tokens += self._prefix_cache.block_size
                self.avoided_seconds += self._prefix_cache.block_size * self._row_seconds
        return not is_done or bool(job.images)

    def _end(self, job: ReadJob) -> None:
        for state, other in list(self._jobs.values()):
            if other is job:
                self.blocks.pool.touch(state.block_hashes)
                self._leave(state, job)

    def _leave(self, state: RequestState, job: ReadJob) -> None:
        """The request does not wait any longer. Without another one that does, the job is cancelled."""
        state.is_loading = False
        del self._jobs[state.id]
        if not any(other is job for _, other in self._jobs.values()):
            self.tier.cancel(job)
            for key in job.keys:
                del self._in_flight[key]
