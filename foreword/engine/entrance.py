"""Who of those that wait could start: whoever would only wait for others is passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from foreword.core.request import RequestState
from foreword.engine.prefixes import PrefixCache
from foreword.engine.waiting import PendingImages, WaitingQueue

__all__ = ["AdmissionFilter"]


class AdmissionFilter:
    """Between `waiting` and `running`, which it looks at; whoever takes a request through tells it.

    reach  see Scheduler
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        running: Sequence[RequestState],
        prefix_cache: PrefixCache,
        block_size: int,
        computable_until: Callable[[RequestState, int], int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._prefix_cache = prefix_cache
        self._block_size = block_size
        self._computable_until = computable_until
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._pending_images: PendingImages | None = None  # None: it has changed
        self._last_pending_images: PendingImages | None = None  # for which nobody is apart without need

    def refresh(self) -> None:
        """Who waits for pictures of others may go on when these have changed."""
        crowd = PendingImages(self._running, self._computable_until)
        if crowd != self._last_pending_images:
            self._waiting.unblock_all()
        self._pending_images = self._last_pending_images = crowd

    def invalidate(self, state: RequestState) -> None:
        """A request that joined or left those who run may have been one of those with pictures to see."""
        if state.request.images:
            self._pending_images = self._last_pending_images = None

    def next_candidate(self, include_pooling: bool = True) -> RequestState | None:
        """The first that waits for rows, blocks or a place, and not for others; `vectors`: also one that wants no tokens."""
        return next(self.candidates(lambda state: state.is_pooling and not include_pooling), None)

    def candidates(self, is_skipped: Callable[[RequestState], bool]) -> Iterator[RequestState]:
        """Those that wait for rows, blocks or a place and not for others, by rank. Whoever takes one may start it."""
        ready, index, deferred = self._waiting.ready, 0, 0
        while index < len(ready) and deferred < self._max_num_seqs:
            state = ready[index]
            if not is_skipped(state):
                if self._is_blocked_on_images(state):
                    self._waiting.block(index)
                    continue
                if self._prefix_cache.computing_request(state) is None:
                    yield state
                elif not state.request.images:  # of these there may be thousands, and it is a matter of a few steps
                    deferred += 1
            index += index < len(ready) and ready[index] is state

    def _is_blocked_on_images(self, state: RequestState) -> bool:
        """It lets others see their pictures first, or one whose block it could share."""
        self._prefix_cache.hash_blocks(state)
        if not state.request.images:
            return False
        owner = self._prefix_cache.computing_request(state)
        if owner is not None:
            return self._computable_until(owner, owner.num_computed) == owner.num_computed
        if self._pending_images is None:
            self._pending_images = PendingImages(self._running, self._computable_until)
        if not self._pending_images.blocks(state, self._max_num_batched_tokens, max(self._max_num_seqs // 2, 1)):
            return False
        start = len(self._prefix_cache.match(state)) * self._block_size
        return self._computable_until(state, start) < len(state.tokens)
