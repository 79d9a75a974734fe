"""Block tables: allocate, reserve and release the KV blocks of requests."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Protocol

from foreword.core.request import RequestState
from foreword.kv_cache.block_pool import BlockPool


class BlockOwner(Protocol):
    @property
    def blocks(self) -> MutableSequence[int]:
        """Block ids in order of position."""


class BlockManager:
    """Block tables over one pool. A request holds blocks for its tokens and for steps in flight."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self._reserved: dict[RequestState, int] = {}  # tokens that must fit until release_reserved()

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, owner: BlockOwner, num_tokens: int) -> int:
        """Blocks missing for `num_tokens`; negative if there are more."""
        return self.num_blocks(num_tokens) - len(owner.blocks)

    def allocate(self, owner: BlockOwner, num_tokens: int) -> None:
        """Extend the table to `num_tokens`; the caller has checked pool.num_free."""
        owner.blocks.extend([self.pool.allocate() for _ in range(self.blocks_needed(owner, num_tokens))])

    def allocate_all(self, lengths: Sequence[tuple[BlockOwner, int]]) -> bool:
        """Extend each table to its number of tokens; False and no change if the pool has too few blocks."""
        if sum(max(self.blocks_needed(owner, length), 0) for owner, length in lengths) > self.pool.num_free:
            return False
        for owner, length in lengths:
            self.allocate(owner, length)
        return True

    def trim(self, state: RequestState) -> None:
        """Free blocks beyond the request's tokens and the reserved lookahead."""
        num_tokens = max(len(state.tokens), state.num_computed)
        if self._reserved:
            num_tokens = max(num_tokens, self._reserved.get(state, 0))
        keep = self.num_blocks(num_tokens)
        if keep < len(state.blocks):
            self.pool.release(state.blocks[keep:])
            del state.blocks[keep:]

    def release(self, owner: BlockOwner) -> None:
        """Free all blocks, reserved ones too."""
        if isinstance(owner, RequestState):
            self._reserved.pop(owner, None)
        self.pool.release(owner.blocks)
        del owner.blocks[:]

    def reserve(self, lengths: Sequence[tuple[RequestState, int]]) -> bool:
        """allocate_all(), and keep the blocks until release_reserved(): for steps in flight."""
        if not self.allocate_all(lengths):
            return False
        for state, length in lengths:
            self._reserved[state] = max(length, self._reserved.get(state, 0))
        return True

    def release_reserved(self) -> None:
        """Trim every request with a reservation: no step is in flight."""
        reserved, self._reserved = self._reserved, {}
        for state in reserved:
            self.trim(state)

    def check(self, running: Sequence[RequestState]) -> None:
        """Assert that only running requests hold blocks, and none beyond their tokens and reservation."""
        assert set(self._reserved) <= set(running)
        for state in running:
            assert len(state.blocks) <= self.num_blocks(max(len(state.tokens), self._reserved.get(state, 0)))
