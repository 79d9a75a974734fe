"""The blocks that requests hold: for what is computed, for one token more, and for what is computed ahead of its commit."""

from __future__ import annotations

from collections.abc import Sequence

from foreword.core.request import RequestState
from foreword.kv_cache.block_pool import BlockPool

__all__ = ["BlockManager"]


class BlockManager:
    """Gives blocks of `pool` to requests, and takes back what they need no more."""

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self._reserved: dict[RequestState, int] = {}  # tokens that each shall have room for until let_go()

    def num_blocks(self, num_tokens: int) -> int:
        """How many blocks so many tokens take."""
        return -(-num_tokens // self.block_size)

    def blocks_needed(self, state: RequestState, num_tokens: int) -> int:
        """Blocks that a request lacks for so many tokens; below 0 if it has more."""
        return self.num_blocks(num_tokens) - len(state.blocks)

    def allocate(self, state: RequestState, num_tokens: int) -> None:
        """Room for so many tokens; the pool has the blocks that this takes."""
        state.blocks += [self.pool.allocate() for _ in range(self.blocks_needed(state, num_tokens))]

    def trim(self, state: RequestState) -> None:
        """Take back what lies behind its tokens and behind what is computed ahead."""
        keep = self.num_blocks(max(len(state.tokens), state.num_computed, self._reserved.get(state, 0)))
        if keep < len(state.blocks):
            spare = state.blocks[keep:]
            del state.blocks[keep:]
            self.pool.release(spare)

    def release(self, state: RequestState) -> None:
        """Take all back."""
        self._reserved.pop(state, None)
        self.pool.release(state.blocks)
        state.blocks.clear()

    def reserve(self, lengths: Sequence[tuple[RequestState, int]]) -> bool:
        """Room for so many tokens of each, until let_go(); False, and nothing has changed, if there are too few blocks."""
        if sum(max(self.blocks_needed(state, length), 0) for state, length in lengths) > self.pool.num_free:
            return False
        for state, length in lengths:
            self.allocate(state, length)
            self._reserved[state] = max(length, self._reserved.get(state, 0))
        return True

    def release_reserved(self) -> None:
        """Nothing is computed ahead any more."""
        held, self._reserved = self._reserved, {}
        for state in held:
            self.trim(state)

    def check(self, running: Sequence[RequestState]) -> None:
        """Assert that only those that run hold blocks, and no more than they need."""
        assert set(self._reserved) <= set(running)
        for state in running:
            assert len(state.blocks) <= self.num_blocks(max(len(state.tokens), self._reserved.get(state, 0)))
