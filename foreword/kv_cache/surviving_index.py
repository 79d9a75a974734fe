"""The index of a pool in memory that outlives its engine: which blocks are whole.

    entry of block 0 | entry of block 1 ...      entry: hash | check

An entry is written after its block is complete, the check last, and the check is erased before the block is
reused. So whenever the engine is killed, a block with a valid entry is whole: none had begun to write to it.

An engine of another layout overwrites blocks and does not see their entries. So only the last owner's count.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.prefix_cache import DIGEST_BYTES
from foreword.utils.mapped_memory import MemoryFile

CHECK_BYTES: Final = 8
ENTRY_BYTES: Final = DIGEST_BYTES + CHECK_BYTES
NO_CHECK: Final = bytes(CHECK_BYTES)


class SurvivingIndex:
    """Mirrors the index of a pool from adopt() on."""

    def __init__(self, memory: MemoryFile, pool: BlockPool, namespace: bytes) -> None:
        """namespace  a hash of all that the bytes of a block depend on, and of the layout of the memory;
        its engine claims the memory after adopt()
        """
        assert len(namespace) == DIGEST_BYTES
        size = (pool.num_blocks + 1) * ENTRY_BYTES
        self._pool = pool
        self._namespace = namespace
        self._is_ours = memory.last_owner == namespace
        self._bytes = memoryview(memory.allocate(size).numpy().data)

    def adopt(self) -> int:
        """Index the whole blocks that an engine of this namespace has left; returns their number.

        Blocks of another engine are forgotten.
        """
        if not self._is_ours:
            self._bytes[:] = bytes(len(self._bytes))
        num_adopted = 0
        for block in range(1, self._pool.num_blocks + 1):
            start = self._start(block)
            digest = bytes(self._bytes[start : start + DIGEST_BYTES])
            is_whole = self._bytes[start + DIGEST_BYTES : start + ENTRY_BYTES] == self._check(digest, block)
            if is_whole and digest not in self._pool:
                self._pool.adopt(block, digest)
                num_adopted += 1
            else:
                self._on_lost(digest, block)
        self._pool.on_gained.append(self._on_gained)
        self._pool.on_lost.append(self._on_lost)
        return num_adopted

    def _on_gained(self, digest: bytes, block: int) -> None:
        start = self._start(block)
        self._bytes[start : start + DIGEST_BYTES] = digest
        self._bytes[start + DIGEST_BYTES : start + ENTRY_BYTES] = self._check(digest, block)

    def _on_lost(self, digest: bytes, block: int) -> None:
        start = self._start(block) + DIGEST_BYTES
        self._bytes[start : start + CHECK_BYTES] = NO_CHECK

    def _check(self, digest: bytes, block: int) -> bytes:
        return blake2b(
            digest + self._namespace, digest_size=CHECK_BYTES, salt=block.to_bytes(8, "little")
        ).digest()

    def _start(self, block: int) -> int:
        return block * ENTRY_BYTES
