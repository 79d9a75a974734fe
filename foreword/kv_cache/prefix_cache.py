"""Prefix caching: full blocks are indexed by a hash chain over their tokens and images."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

from foreword.core.images import PromptImage
from foreword.core.request import RequestState
from foreword.kv_cache.block_pool import BlockPool
from foreword.kv_cache.state_cache import StateCache

DIGEST_BYTES = 16
IMAGE_PERSON = b"pictures"  # separates hashes of blocks with images from those without


def extend_hashes(
    hashes: list[bytes],
    tokens: Sequence[int],
    block_size: int,
    namespace: str,
    images: Sequence[PromptImage] = (),
) -> None:
    """Append the hash of each full block of `tokens` that `hashes` does not cover yet.

    A hash covers the block's tokens and images, all earlier ones, the adapter and the cache salt: equal
    hashes mean equal KV. blake2b, since callers choose the tokens and must not construct a collision.
    """
    first, last = len(hashes), len(tokens) // block_size
    if first >= last:
        return
    packed = array("q", tokens[first * block_size : last * block_size])
    content, num_bytes = packed.tobytes(), block_size * packed.itemsize
    previous = hashes[-1] if hashes else namespace.encode()
    for offset, start in enumerate(range(first * block_size, last * block_size, block_size)):
        block = previous + content[offset * num_bytes : (offset + 1) * num_bytes]
        if shown := _images_in_block(images, start, start + block_size) if images else b"":
            digest = blake2b(block + shown, person=IMAGE_PERSON).digest()
        else:
            digest = blake2b(block).digest()  # keyword arguments take as long as the hash
        previous = digest[:DIGEST_BYTES]
        hashes.append(previous)


def _images_in_block(images: Sequence[PromptImage], start: int, end: int) -> bytes:
    """The images with tokens in [start, end); their own start says which part of them lies there."""
    overlapping = (image for image in images if image.start < end and image.end > start)
    return b"".join(image.digest + array("q", [image.start]).tobytes() for image in overlapping)


class PrefixCache:
    """Finds cached prefix blocks, and tracks the running request that computes each shareable block."""

    def __init__(
        self, pool: BlockPool, block_size: int, enabled: bool, states: StateCache | None = None
    ) -> None:
        """states  of a model with layers with state: a prefix then ends at one of their anchors"""
        self.enabled = enabled
        self._states = states
        self._pool = pool
        self.block_size = block_size
        self._computing: dict[bytes, RequestState] = {}
        # Called with the hashes of blocks whose content may be wrong
        self.on_invalid: Callable[[Sequence[bytes]], None] = lambda digests: None

    @property
    def idle(self) -> bool:
        """No running request computes a shareable block."""
        return not self._computing

    def is_enabled_for(self, state: RequestState) -> bool:
        """Prompt logprobs and mean pooling need every row of the prompt, so they find no blocks."""
        return self.enabled and state.params.prompt_logprobs is None and state.request.pooling != "mean"

    def hash_blocks(self, state: RequestState) -> None:
        """Update the hashes of the request's full blocks."""
        if self.enabled:
            request = state.request
            hashes, tokens = state.block_hashes, state.tokens
            extend_hashes(hashes, tokens, self.block_size, request.namespace, request.images)

    def match(self, state: RequestState) -> list[bytes]:
        """Hashes of the leading cached blocks; never the last token's block, whose row must be computed."""
        shareable = self.shareable_hashes(state) if self.is_enabled_for(state) else ()
        cached = self._pool.cached_prefix(shareable)
        return cached if self._states is None else cached[: self._states.usable_blocks(cached)]

    def shareable_hashes(self, state: RequestState) -> list[bytes]:
        """Hashes of all full blocks but the last token's, whose row must be computed."""
        return state.block_hashes[: (len(state.tokens) - 1) // self.block_size]

    def num_cached(self, state: RequestState) -> int:
        """Tokens that a waiting request would find in the cache."""
        self.hash_blocks(state)
        return len(self.match(state)) * self.block_size

    def computing_request(self, state: RequestState) -> RequestState | None:
        """The running request that computes the first block this request misses.

        Waiting for it shares the block: n choices compute their prompt once. A generation does not wait
        for a pooling request, whose row budget is small.
        """
        if not self.is_enabled_for(state):
            return None
        index = len(self.match(state))
        shareable = self.shareable_hashes(state)
        if self._states is not None:  # only the anchor at the end of its prompt will be there for sure
            index = max(index, self._states.last_prompt_block(state))
        owner = self._computing.get(shareable[index]) if index < len(shareable) else None
        if self._states is not None and owner is not None and self._states.last_prompt_block(owner) != index:
            return None
        return owner if owner is not None and (state.is_pooling or not owner.is_pooling) else None

    def attach(self, state: RequestState) -> int:
        """Acquire the cached prefix blocks of a starting request; returns their number."""
        cached = self.match(state)
        for digest in cached:
            block = self._pool.acquire(digest)
            assert block is not None
            state.blocks.append(block)
        for digest in state.block_hashes[len(cached) :]:
            self._computing.setdefault(digest, state)
        return len(cached)

    def publish(self, state: RequestState, num_computed_before: int) -> None:
        """Index the blocks that were completed since `num_computed_before` tokens."""
        size = self.block_size
        if not self.enabled or state.num_computed // size == num_computed_before // size:
            return
        self.hash_blocks(state)
        done = min(state.num_computed // size, len(state.block_hashes))
        for index in range(num_computed_before // size, done):
            self._pool.publish(state.blocks[index], state.block_hashes[index])
            self._end_computing(state, state.block_hashes[index])

    def forget(self, state: RequestState) -> None:
        """The request stops computing: waiting requests may compute its blocks."""
        for digest in state.block_hashes:
            self._end_computing(state, digest)

    def invalidate(self, state: RequestState) -> None:
        """Drop the blocks of a failed request from the index: their content may be wrong."""
        self._pool.invalidate(state.blocks)
        self.on_invalid(state.block_hashes[: len(state.blocks)])

    def _end_computing(self, state: RequestState, digest: bytes) -> None:
        if self._computing.get(digest) is state:
            del self._computing[digest]
