"""Blocks of KV memory: who holds them, which are free, and which can be found by their content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

__all__ = ["BlockPool"]


class BlockPool:
    """Blocks 1..num_blocks with reference counts; block 0 is scratch and never handed out.

    A free block keeps its content, and can be found by its hash, until it is handed out again.
    Free blocks are reused oldest first, those that cannot be found before all others.

    num_free  blocks that allocate() can hand out
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._ref_counts = [0] * (num_blocks + 1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self) -> int:
        """A block of its own, content undefined. The caller has checked num_free."""
        block, _ = self._free.popitem(last=False)
        digest = self._hash_of.pop(block, None)
        if digest is not None:
            del self._block_of[digest]
        self._ref_counts[block] = 1
        return block

    def acquire(self, digest: bytes) -> int | None:
        """One more reference to the block that holds this content, or None."""
        block = self._block_of.get(digest)
        if block is None:
            return None
        if self._ref_counts[block] == 0:
            del self._free[block]
        self._ref_counts[block] += 1
        return block

    def contains(self, digest: bytes) -> bool:
        return digest in self._block_of

    def is_free(self, digest: bytes) -> bool:
        """Whether sharing this content would take a block from the free ones."""
        return self._ref_counts[self._block_of[digest]] == 0

    def publish(self, block: int, digest: bytes) -> None:
        """The block's content is complete and committed: it can be found from now on."""
        assert self._ref_counts[block] > 0
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def invalidate(self, blocks: Iterable[int]) -> None:
        """Whatever these blocks hold, it can be found no more."""
        for block in blocks:
            digest = self._hash_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]

    def release(self, blocks: Iterable[int]) -> None:
        """Give up one reference to each, the last block first: beginnings outlive their continuations."""
        for block in reversed(list(blocks)):
            assert self._ref_counts[block] > 0, f"block {block} released twice"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert that references are exactly those of the holders, and that nothing leaked."""
        counts = [0] * (self.num_blocks + 1)
        for blocks in holders:
            for block in blocks:
                counts[block] += 1
        assert counts == self._ref_counts, "block references differ from their holders"
        assert set(self._free) == {b for b in range(1, self.num_blocks + 1) if counts[b] == 0}, (
            "free list is wrong"
        )
        assert all(self._hash_of[block] == digest for digest, block in self._block_of.items())
        assert len(self._hash_of) == len(self._block_of)
