"""Who of those that wait could start: whoever would only wait for others is passed over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from foreword.core.request import RequestState
from foreword.engine.prefixes import Prefixes
from foreword.engine.waiting import Crowd, Waiting

__all__ = ["Entrance"]


class Entrance:
    """Between `waiting` and `running`, which it looks at; whoever takes a request through tells it.

    reach  see Scheduler
    """

    def __init__(
        self,
        waiting: Waiting,
        running: Sequence[RequestState],
        prefixes: Prefixes,
        block_size: int,
        reach: Callable[[RequestState, int], int],
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._prefixes = prefixes
        self._block_size = block_size
        self._reach = reach
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._crowd: Crowd | None = None  # None: it has changed
        self._known_crowd: Crowd | None = None  # for which nobody is apart without need

    def look(self) -> None:
        """Who waits for pictures of others may go on when these have changed."""
        crowd = Crowd(self._running, self._reach)
        if crowd != self._known_crowd:
            self._waiting.call_back()
        self._crowd = self._known_crowd = crowd

    def changed(self, state: RequestState) -> None:
        """A request that joined or left those who run may have been one of those with pictures to see."""
        if state.request.pictures:
            self._crowd = self._known_crowd = None

    def first(self, vectors: bool = True) -> RequestState | None:
        """The first that waits for rows, blocks or a place, and not for others; `vectors`: also one that wants no tokens."""
        return next(self.open(lambda state: state.pools and not vectors), None)

    def open(self, skipped: Callable[[RequestState], bool]) -> Iterator[RequestState]:
        """Those that wait for rows, blocks or a place and not for others, by rank. Whoever takes one may start it."""
        ready, index, deferred = self._waiting.ready, 0, 0
        while index < len(ready) and deferred < self._max_num_seqs:
            state = ready[index]
            if not skipped(state):
                if self._waits_for_pictures(state):
                    self._waiting.put_apart(index)
                    continue
                if self._prefixes.owner(state) is None:
                    yield state
                elif not state.request.pictures:  # of these there may be thousands, and it is a matter of a few steps
                    deferred += 1
            index += index < len(ready) and ready[index] is state

    def _waits_for_pictures(self, state: RequestState) -> bool:
        """It lets others see their pictures first, or one whose block it could share."""
        self._prefixes.name(state)
        if not state.request.pictures:
            return False
        owner = self._prefixes.owner(state)
        if owner is not None:
            return self._reach(owner, owner.num_computed) == owner.num_computed
        if self._crowd is None:
            self._crowd = Crowd(self._running, self._reach)
        if not self._crowd.keeps_out(state, self._max_num_batched_tokens, max(self._max_num_seqs // 2, 1)):
            return False
        start = len(self._prefixes.shareable(state)) * self._block_size
        return self._reach(state, start) < len(state.tokens)
