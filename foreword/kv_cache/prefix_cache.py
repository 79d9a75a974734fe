"""Names for the content of full blocks: a chain of hashes over tokens, from the first block on.

The prefix cache as the scheduler sees it: whose beginning can be shared, and who is just computing it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

from foreword.core.images import PromptImage
from foreword.core.request import RequestState
from foreword.kv_cache.block_pool import BlockPool

__all__ = ["PrefixCache", "extend_hashes"]

DIGEST_BYTES = 16
IMAGE_PERSON = b"pictures"  # a block with pictures has no name in common with any without


def extend_hashes(
    hashes: list[bytes],
    tokens: Sequence[int],
    block_size: int,
    namespace: str,
    images: Sequence[PromptImage] = (),
) -> None:
    """Append the hash of each full block of `tokens` that `hashes` does not cover yet.

    A hash names a block's tokens and pictures, all before them, and the namespace (the tenant): equal
    hashes mean equal KV. blake2b with 16 bytes: no two prompts can be made to collide.
    """
    for index in range(len(hashes), len(tokens) // block_size):
        start, end = index * block_size, (index + 1) * block_size
        content = (hashes[-1] if hashes else namespace.encode()) + array("q", tokens[start:end]).tobytes()
        seen = _image_content(images, start, end)
        hashes.append(
            blake2b(content + seen, digest_size=DIGEST_BYTES, person=IMAGE_PERSON if seen else b"").digest()
        )


def _image_content(images: Sequence[PromptImage], start: int, end: int) -> bytes:
    """What is seen in a block: every picture that reaches into it, and where that begins, which tells the part."""
    inside = [picture for picture in images if picture.start < end and picture.end > start]
    return b"".join(picture.digest + array("q", [picture.start]).tobytes() for picture in inside)


class PrefixCache:
    """Blocks that are found by their content. Switched off, nobody finds any, and nothing is remembered."""

    def __init__(self, pool: BlockPool, block_size: int, enabled: bool) -> None:
        self.enabled = enabled
        self._pool = pool
        self._block_size = block_size
        self._computing: dict[bytes, RequestState] = {}

    @property
    def idle(self) -> bool:
        """Nobody computes anything that others could share."""
        return not self._computing

    def is_enabled_for(self, state: RequestState) -> bool:
        """Logprobs of a prompt, and their mean, want every row of it."""
        return self.enabled and state.params.prompt_logprobs is None and state.request.pooling != "mean"

    def hash_blocks(self, state: RequestState) -> None:
        """Name the blocks that its tokens fill."""
        if self.enabled:
            request = state.request
            extend_hashes(
                state.block_hashes, state.tokens, self._block_size, request.cache_salt, request.images
            )

    def match(self, state: RequestState) -> list[bytes]:
        """Hashes of the leading blocks that the cache holds; never that of the last token."""
        found: list[bytes] = []
        if self.is_enabled_for(state):
            for digest in self._shareable_hashes(state):
                if not self._pool.contains(digest):
                    break
                found.append(digest)
        return found

    def computing_request(self, state: RequestState) -> RequestState | None:
        """The running request that is just computing the next block of this one's beginning.

        Then it waits a step or two and shares the block: n choices compute their prompt once. Who wants tokens does not wait
        for a vector, which may take its time.
        """
        if not self.is_enabled_for(state):
            return None
        index = len(self.match(state))
        beginning = self._shareable_hashes(state)
        owner = self._computing.get(beginning[index]) if index < len(beginning) else None
        return owner if owner is not None and (state.is_pooling or not owner.is_pooling) else None

    def attach(self, state: RequestState) -> int:
        """Let a request that starts take what is there of its beginning; the rest is its to compute. Returns the blocks taken."""
        shareable = self.match(state)
        for digest in shareable:
            block = self._pool.acquire(digest)
            assert block is not None
            state.blocks.append(block)
        for digest in state.block_hashes[len(shareable) :]:
            self._computing.setdefault(digest, state)
        return len(shareable)

    def publish(self, state: RequestState, num_computed_before: int) -> None:
        """Make findable what the step completed; `before` it so many tokens were computed."""
        size = self._block_size
        if not self.enabled or state.num_computed // size == num_computed_before // size:
            return
        self.hash_blocks(state)
        done = min(state.num_computed // size, len(state.block_hashes))
        for index in range(num_computed_before // size, done):
            self._pool.publish(state.blocks[index], state.block_hashes[index])
            self._end_computing(state, state.block_hashes[index])

    def forget(self, state: RequestState) -> None:
        """The request computes nothing any more."""
        for digest in state.block_hashes:
            self._end_computing(state, digest)

    def invalidate(self, state: RequestState) -> None:
        """An error of ours ended the request: what its blocks hold may be the reason, so nobody else finds it."""
        self._pool.invalidate(state.blocks)

    def _shareable_hashes(self, state: RequestState) -> list[bytes]:
        return state.block_hashes[: (len(state.tokens) - 1) // self._block_size]

    def _end_computing(self, state: RequestState, digest: bytes) -> None:
        """The request computes this block no longer: it is done, or given up."""
        if self._computing.get(digest) is state:
            del self._computing[digest]
