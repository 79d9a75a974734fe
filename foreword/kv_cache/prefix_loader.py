"""Reads prefixes of waiting requests from the tiers into free blocks, where the prefix cache has them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from math import inf

from foreword.core.outputs import KVTierStats
from foreword.core.request import RequestState
from foreword.kv_cache.prefix_cache import PrefixCache
from foreword.kv_cache.state_cache import StateCache
from foreword.kv_cache.tier import ImageKey, PooledImages, ReadJob, Tier

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
        tiers: Sequence[Tier],  # the nearest first
        prefix_cache: PrefixCache,
        states: StateCache | None = None,  # None: the model has no layers with state
        row_seconds: float = 0.0,  # time of a prompt's row; 0: not measured yet
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tiers = tiers
        self._pool = tiers[0].blocks.pool
        self._tier_of = {pool: tier for tier in tiers for pool in tier.pools}
        self._prefix_cache = prefix_cache
        self._states = states
        self._row_seconds = row_seconds
        self._clock = clock
        self._jobs: dict[str, tuple[RequestState, list[ReadJob]]] = {}  # waiting requests by id
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
        now_s, room = self._clock(), MAX_STEP_BYTES
        for job in self._waited_for():
            is_open, num_bytes = self._take(job, room)
            room -= num_bytes
            if not is_open or now_s - job.submitted_s > job.max_seconds:
                self._end(job)
        for state in candidates:
            if state.id not in self._decided and state.id not in self._jobs:
                self._decide(state)

    def remove(self, state: RequestState) -> None:
        """The request has ended; the next step() may be long after."""
        if state.id in self._jobs:
            self._leave(state, self._jobs[state.id][1])

    def forget(self, digests: Sequence[bytes]) -> None:
        """Remove blocks whose content may be wrong, also those that are being read."""
        wrong = set(digests)
        for job in self._waited_for():
            if any(digest in wrong for _, digest in job.keys):
                self._end(job)
        for tier in self.tiers:
            tier.forget(digests)

    def wait(self) -> None:
        """Wait for a moment until something has been read: nothing else is to do."""
        jobs = self._waited_for()
        if not any(job.images for job in jobs):
            self._tier_of[jobs[0].keys[0][0]].progress.wait(IDLE_WAIT_S)
        for tier in self.tiers:
            tier.progress.clear()

    def stats(self) -> Mapping[str, KVTierStats]:
        return {tier.name: tier.stats() for tier in self.tiers}

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()

    def _waited_for(self) -> Sequence[ReadJob]:
        return list(dict.fromkeys(job for _, jobs in self._jobs.values() for job in jobs))

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
            self._wait_for(state, [shared])  # and decide again when it ends
            return
        for tier in self.tiers:
            for pool in tier.pools:
                pool.touch(cache.shareable_hashes(state))
        self._decided[state.id] = state
        max_seconds, now_s = num_tokens * self._row_seconds or inf, self._clock()
        jobs = {
            tier: ReadJob(own, max_seconds, now_s)
            for tier in self.tiers
            if (own := [key for key in keys if key[0] in tier.pools])
        }
        if jobs and sum(tier.read_seconds(job.num_bytes) for tier, job in jobs.items()) < max_seconds:
            self._wait_for(state, list(jobs.values()))
            for tier, job in jobs.items():
                self._in_flight.update(dict.fromkeys(job.keys, job))
                tier.read(job)

    def _missing(self, state: RequestState) -> tuple[list[ImageKey], int] | None:
        """Images that make the longest prefix usable, in order, and the tokens gained; None: no room now."""
        cache, pool = self._prefix_cache, self._pool
        blocks = [tier.blocks for tier in self.tiers]
        anchors = [tier.anchors for tier in self.tiers if tier.anchors is not None]
        hashes = cache.shareable_hashes(state)
        prefix = list(takewhile(lambda d: d in pool or any(d in each.stored for each in blocks), hashes))
        num_usable, num_cached = len(prefix), len(cache.match(state))
        if self._states is not None:
            num_usable = self._states.usable_blocks(prefix, [each.stored for each in anchors])
        if num_usable <= num_cached:
            return [], 0
        prefix = prefix[:num_usable]
        keys = [_nearest(blocks, digest) for digest in prefix if digest not in pool]
        cached = [digest for digest in prefix if digest in pool]
        if len(keys) + sum(map(pool.is_free, cached)) > pool.num_free:
            return None
        if self._states is not None and prefix[-1] not in self._states.pool:
            keys.append(_nearest(anchors, prefix[-1]))
        return keys, (num_usable - num_cached) * cache.block_size

    def _wait_for(self, state: RequestState, jobs: list[ReadJob]) -> None:
        state.is_loading = True
        self._jobs[state.id] = state, jobs

    def _take(self, job: ReadJob, max_bytes: int) -> tuple[bool, int]:
        """Give what was read to free blocks; whether more comes, and the bytes that were copied."""
        tier = self._tier_of[job.keys[0][0]]
        is_done, num_bytes = job.is_done or not tier.is_alive, 0
        while num_bytes < max_bytes and (read := tier.take(job)) is not None:
            (pooled, digest, image), pool, started_s = read, read[0].pool, self._clock()
            num_bytes += image.nbytes
            if digest in pool:
                continue
            if not pool.num_free:
                return False, num_bytes
            block = pool.allocate()
            pooled.images.write(block, image)
            if not pooled.has(digest, image):  # it may have changed while it was copied
                pool.release([block])
                return False, num_bytes
            pool.publish(block, digest)
            if pooled is tier.anchors:  # the other tiers learn of computed states alone
                self._offer(digest, block)
            pool.release([block])
            tier.copy_seconds += self._clock() - started_s
            if pooled is tier.blocks:
                tier.counts.hit_tokens += self._prefix_cache.block_size
                tier.counts.avoided_seconds += self._prefix_cache.block_size * self._row_seconds
        return not is_done or bool(job.images), num_bytes

    def _offer(self, digest: bytes, anchor: int) -> None:
        """Have the tiers write a state that was read from one of them."""
        for tier in self.tiers:
            if tier.anchors is not None:
                tier.on_gained(tier.anchors, digest, anchor)

    def _end(self, job: ReadJob) -> None:
        for state, jobs in list(self._jobs.values()):
            if job in jobs:
                self._pool.touch(state.block_hashes)
                self._leave(state, [job])

    def _leave(self, state: RequestState, ended: Sequence[ReadJob]) -> None:
        """The request does not wait for these any longer. A job that no other one waits for is cancelled."""
        left = [job for job in self._jobs.pop(state.id)[1] if job not in ended]
        state.is_loading = bool(left)
        if left:
            self._jobs[state.id] = state, left
        waited_for = self._waited_for()
        for job in ended:
            if job not in waited_for:
                self._tier_of[job.keys[0][0]].cancel(job)
                for key in job.keys:
                    del self._in_flight[key]


def _nearest(pools: Sequence[PooledImages], digest: bytes) -> ImageKey:
    """The first that has the image; the last if none has it any more, which a read then finds out."""
    return next((pool for pool in pools if digest in pool.stored), pools[-1]), digest
