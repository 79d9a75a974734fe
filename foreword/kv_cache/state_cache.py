"""States of layers with state: the ring of each running request, and anchors, kept for later requests too."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence

from foreword.core.request import RequestState
from foreword.core.states import NO_ANCHOR, SEGMENT, StateSizes
from foreword.kv_cache.block_pool import BlockPool


class StateCache:
    """Gives running requests a ring and the anchors of their steps; indexes anchors by content.

    A running request holds the anchor of its segment, and during a step the one that the step ends at. When
    it has passed an anchor, that stays in the index if it is the last of the prompt or at a multiple of
    `interval` tokens; the last one stays when the request ends. Anchors without a holder are reused: first
    those whose blocks are gone, then the least recently used.
    """

    def __init__(self, sizes: StateSizes, interval: int, block_size: int) -> None:
        num_requests = sizes.num_slots - 1
        assert 0 < 2 * num_requests < sizes.num_anchors, "every running request needs two anchors"
        self.pool = BlockPool(sizes.num_anchors - 1)
        self.sizes = sizes
        self.interval = interval
        self._block_size = block_size
        # Tokens between anchors that have a hash; both are powers of two
        self._unit = max(block_size, SEGMENT)
        self._num_slots = num_requests
        self._free_slots = list(range(num_requests, 0, -1))
        self._passing: set[int] = set()  # anchors that leave the index when their request has passed them
        # Called with the content of an anchor that stays in the index, and the anchor
        self.on_kept: list[Callable[[bytes, int], None]] = []

    def on_block_lost(self, digest: bytes, block: int) -> None:
        """A block is no longer cached: without it, the anchor at its end is of no use."""
        self.pool.drop(digest)

    def usable_blocks(self, digests: Sequence[bytes], elsewhere: Sequence[Container[bytes]] = ()) -> int:
        """How many of the leading cached blocks end at an anchor, one that is cached or `elsewhere`."""
        step = self._unit // self._block_size
        for count in range(len(digests) // step * step, 0, -step):
            if digests[count - 1] in self.pool or any(digests[count - 1] in each for each in elsewhere):
                return count
        return 0

    def last_prompt_block(self, state: RequestState) -> int:
        """The block that ends at the last anchor within the prompt; -1 if there is none."""
        return (state.num_prompt - 1) // self._unit * self._unit // self._block_size - 1

    def attach(self, state: RequestState, num_blocks: int) -> None:
        """Give a starting request its ring, and the anchor at the end of its cached blocks."""
        state.state_slot = self._free_slots.pop()
        if num_blocks:
            anchor = self.pool.acquire(state.block_hashes[num_blocks - 1])
            assert anchor is not None
            state.anchors[num_blocks * self._block_size // SEGMENT] = anchor

    def limit_rows(self, state: RequestState, num_tokens: int) -> int:
        """Rows of a request that can be computed again: those of its ring that they read stay in place.

        Chunks of a prompt end at anchors, so that the next chunk needs no ring.
        """
        start = state.num_computed
        end, anchor = start + num_tokens, start - start % SEGMENT
        if start > anchor and end > anchor + SEGMENT + self.sizes.max_rows:
            end = anchor + SEGMENT
        elif end < len(state.tokens) and end // SEGMENT * SEGMENT > start:
            end = end // SEGMENT * SEGMENT
        return end - start

    def limit_draft(self, state: RequestState, num_draft: int) -> int:
        """Draft tokens whose rows cross one anchor: wherever they are rejected, the next row has one."""
        return min(num_draft, (state.num_computed // SEGMENT + 2) * SEGMENT - 1 - len(state.tokens))

    def allocate(self, state: RequestState, end: int) -> None:
        """Give a request the anchors of a step up to token `end`: always the last one, others to be kept."""
        first, last = state.num_computed // SEGMENT, end // SEGMENT
        for segment in range(first + 1, last + 1):
            is_optional = segment != last
            if is_optional and not (self._is_kept(state, segment) and self.pool.num_free > self._num_slots):
                continue
            if segment not in state.anchors:
                state.anchors[segment] = self.pool.allocate()

    def commit(self, state: RequestState, is_cached: bool) -> None:
        """Index the anchors that are complete, and release those of other segments than the next row's.

        is_cached  later requests may use them
        """
        current = state.num_computed // SEGMENT
        for segment, anchor in list(state.anchors.items()):
            if segment <= current and is_cached:
                self._publish(state, segment, anchor)
            if segment != current:
                if anchor in self._passing:
                    self._passing.discard(anchor)
                    self.pool.invalidate([anchor])
                self.pool.release([anchor])
                del state.anchors[segment]

    def release(self, state: RequestState) -> None:
        """Free the ring and the anchors; indexed ones stay until their memory is needed."""
        for anchor in self._passing.intersection(state.anchors.values()):
            self._passing.discard(anchor)
            if (digest := self.pool.digest_of(anchor)) is not None:
                self._keep(digest, anchor)
        self.pool.release(state.anchors.values())
        state.anchors.clear()
        self._free_slots.append(state.state_slot)
        state.state_slot = 0

    def invalidate(self, state: RequestState) -> None:
        """Drop the anchors of a failed request from the index, those that it has passed too."""
        for digest in state.block_hashes:
            self.pool.drop(digest)

    def check(self, running: Iterable[RequestState]) -> None:
        """Assert that running requests hold their ring and at most the anchor of their segment.

        Pooling requests may hold later ones: a step checks after a failure, before their pass.
        """
        states = list(running)
        self.pool.check(state.anchors.values() for state in states)
        slots = [state.state_slot for state in states]
        assert sorted([*slots, *self._free_slots]) == list(range(1, self._num_slots + 1))
        for state in states:
            segment = state.num_computed // SEGMENT
            held = {each for each in state.anchors if not state.is_pooling or each <= segment}
            assert held == ({segment} if segment else set()), "anchors of other segments"
        assert self._passing <= {anchor for state in states for anchor in state.anchors.values()}

    def _is_kept(self, state: RequestState, segment: int) -> bool:
        tokens = segment * SEGMENT
        return tokens % self.interval == 0 or tokens == (self.last_prompt_block(state) + 1) * self._block_size

    def _keep(self, digest: bytes, anchor: int) -> None:
        for on_kept in self.on_kept:
            on_kept(digest, anchor)

    def _publish(self, state: RequestState, segment: int, anchor: int) -> None:
        block, rest = divmod(segment * SEGMENT, self._block_size)
        if rest or not 0 < block <= len(state.block_hashes) or self.pool.digest_of(anchor) is not None:
            return
        self.pool.publish(anchor, state.block_hashes[block - 1])
        if self.pool.digest_of(anchor) is not None:
            if self._is_kept(state, segment):
                self._keep(state.block_hashes[block - 1], anchor)
            else:
                self._passing.add(anchor)


def anchors_between(state: RequestState, start: int, end: int) -> list[int]:
    """The anchors of the segments from that of row `start` to that of row `end`."""
    return [state.anchors.get(segment, NO_ANCHOR) for segment in range(start // SEGMENT, end // SEGMENT + 1)]
