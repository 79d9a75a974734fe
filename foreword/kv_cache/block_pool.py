"""KV blocks: reference counts, the free list, and the index from content hash to block."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import takewhile


class BlockPool:
    """Reference-counted blocks 1..num_blocks; block 0 is scratch and never allocated.

    A free block keeps its content and its hash until it is allocated again. Blocks without a hash are
    reused first, then the least recently freed.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self._ref_counts = [0] * (num_blocks + 1)
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        # Since the last pop_changes(): gained digests (True) and lost ones (False); None: not recorded
        self._changes: dict[bytes, bool] | None = None
        # Called with content that the index has gained or lost, and its block
        self.on_gained: list[Callable[[bytes, int], None]] = []
        self.on_lost: list[Callable[[bytes, int], None]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def allocate(self) -> int:
        """A block with one reference and undefined content; the caller has checked num_free."""
        block, _ = self._free.popitem(last=False)
        self.invalidate([block])
        self._ref_counts[block] = 1
        return block

    def adopt(self, block: int, digest: bytes) -> None:
        """Index a free block that has this content already."""
        del self._free[block]
        self._ref_counts[block] = 1
        self.publish(block, digest)
        self.release([block])

    def acquire(self, digest: bytes) -> int | None:
        """Add a reference to the block with this content; None if no block has it."""
        block = self._block_of.get(digest)
        if block is None:
            return None
        if self._ref_counts[block] == 0:
            del self._free[block]
        self._ref_counts[block] += 1
        return block

    def cached_prefix(self, digests: Iterable[bytes]) -> list[bytes]:
        """The leading digests whose content a block has."""
        return list(takewhile(self._block_of.__contains__, digests))

    def __contains__(self, digest: bytes) -> bool:
        """Whether a block has this content."""
        return digest in self._block_of

    def digest_of(self, block: int) -> bytes | None:
        """The content of an indexed block."""
        return self._hash_of.get(block)

    def block_of(self, digest: bytes) -> int | None:
        """The block with this content."""
        return self._block_of.get(digest)

    def is_free(self, digest: bytes) -> bool:
        """Whether acquiring this content takes a block off the free list."""
        return self._ref_counts[self._block_of[digest]] == 0

    @property
    def digests(self) -> tuple[bytes, ...]:
        """All content in the index."""
        return tuple(self._block_of)

    def record_changes(self) -> None:
        """Record changes of the index for pop_changes()."""
        self._changes = {}

    def pop_changes(self) -> tuple[tuple[bytes, ...], tuple[bytes, ...]]:
        """Digests that the index gained, and lost, since the last call."""
        changes = self._changes
        if not changes:
            return (), ()
        self._changes = {}
        return tuple(d for d, is_new in changes.items() if is_new), tuple(
            d for d, is_new in changes.items() if not is_new
        )

    def _record(self, digest: bytes, is_new: bool) -> None:
        """A change that undoes an earlier one cancels it."""
        if self._changes is not None and self._changes.pop(digest, is_new) == is_new:
            self._changes[digest] = is_new

    def publish(self, block: int, digest: bytes) -> None:
        """Index a block by its content, which is complete and committed."""
        assert self._ref_counts[block] > 0
        if digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest
            self._record(digest, True)
            for on_gained in self.on_gained:
                on_gained(digest, block)

    def invalidate(self, blocks: Iterable[int]) -> None:
        """Drop these blocks from the content index."""
        for block in blocks:
            digest = self._hash_of.pop(block, None)
            if digest is not None:
                del self._block_of[digest]
                self._record(digest, False)
                for on_lost in self.on_lost:
                    on_lost(digest, block)

    def touch(self, digests: Iterable[bytes]) -> None:
        """Make the blocks with this content the most recently used."""
        blocks = [self.acquire(digest) for digest in digests]
        self.release([block for block in blocks if block is not None])

    def drop(self, digest: bytes) -> None:
        """Drop this content from the index; a free block is then the first to be reused."""
        block = self._block_of.get(digest)
        if block is not None:
            self.invalidate([block])
            if self._ref_counts[block] == 0:
                self._free.move_to_end(block, last=False)

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block, the last first, so that prefixes stay cached longest."""
        for block in reversed(list(blocks)):
            assert self._ref_counts[block] > 0, f"block {block} was released twice"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert that the reference counts match the holders' block tables."""
        counts = [0] * (self.num_blocks + 1)
        for blocks in holders:
            for block in blocks:
                counts[block] += 1
        assert counts == self._ref_counts, "reference counts differ from the block tables"
        free = {block for block in range(1, self.num_blocks + 1) if counts[block] == 0}
        assert set(self._free) == free, "the free list differs from the unreferenced blocks"
        assert all(self._hash_of[block] == digest for digest, block in self._block_of.items())
        assert len(self._hash_of) == len(self._block_of)
