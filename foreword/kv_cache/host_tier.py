"""The host tier of the KV cache: images in host memory, pinned for a GPU. They end with the engine.

A slot is not written to until its image has left `stored`, and each image is a tensor of its own. So the
engine copies one without a lock, and drops the copy if `stored` has lost this tensor meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress

from torch import Tensor

from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.storage import CacheImages
from foreword.kv_cache.tier import PooledImages, Tier
from foreword.utils.mapped_memory import HugePages, pin_memory


class HostImages(PooledImages):
    """An LRU cache of the images of one pool, in host memory.

    There is no checksum: what may be wrong is removed as its request fails, and nothing outlives the engine.
    """

    stored: OrderedDict[bytes, Tensor]  # the least recently used first

    def __init__(self, pool: BlockPool, images: CacheImages, num_slots: int) -> None:
        """Raises RuntimeError if a GPU's driver pins no more memory."""
        assert num_slots > 0
        super().__init__(pool, images, images.nbytes)
        self.stored = OrderedDict()
        self._memory = HugePages().allocate(num_slots * images.nbytes)
        if images.is_on_gpu:
            pin_memory(self._memory)
        self._free = list(self._memory.view(num_slots, images.nbytes))
        self._next: Tensor | None = None  # buffer()

    def buffer(self) -> Tensor:
        if self._next is None:
            slot = self._free.pop() if self._free else self.stored.popitem(last=False)[1]
            self._next = slot[:]
        return self._next

    def save(self, digest: bytes, image: Tensor) -> None:
        assert image is self._next
        self.remove(digest)  # the pool may have lost it and gained it again while it was written
        self.stored[digest], self._next = image, None

    def load(self, digest: bytes) -> Tensor | None:
        return self.stored.get(digest)

    def remove(self, digest: bytes) -> None:
        if (image := self.stored.pop(digest, None)) is not None:
            self._free.append(image)

    def has(self, digest: bytes, image: Tensor) -> bool:
        return self.stored.get(digest) is image

    def touch(self, digests: Sequence[bytes]) -> None:
        for digest in reversed(digests):  # prefixes stay longest, as in a pool
            with suppress(KeyError):
                self.stored.move_to_end(digest)


class HostTier(Tier):
    """Writes nothing at its end: nothing would read it."""

    name = "host"
