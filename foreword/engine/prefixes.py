"""The prefix cache as the scheduler sees it: whose beginning can be shared, and who is just computing it."""

from __future__ import annotations

from foreword.cache.blocks import BlockPool
from foreword.cache.prefix import extend_hashes
from foreword.core.request import RequestState

__all__ = ["PrefixCache"]


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
            extend_hashes(state.block_hashes, state.tokens, self._block_size, request.cache_salt, request.images)

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
