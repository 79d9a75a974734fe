"""Requests that wait for their turn, and the pictures that some of them wait for.

Pictures take long to encode, and only those of running requests are. So few requests run that still have some to see, and
those behind them are kept apart: they take no place of anybody who could start, and nobody looks at them in vain.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence

from foreword.core.request import RequestState

__all__ = ["PendingImages", "WaitingQueue", "sort_key_of"]


def sort_key_of(state: RequestState) -> tuple[int, int, int]:
    return state.sort_key


class WaitingQueue:
    """By rank.

    ready  those that could be looked at
    apart  those that wait for pictures of running requests, until these have changed
    """

    def __init__(self) -> None:
        self.ready: list[RequestState] = []
        self.blocked_on_images: list[RequestState] = []

    def __len__(self) -> int:
        return len(self.ready) + len(self.blocked_on_images)

    def __contains__(self, state: object) -> bool:
        return state in self.ready or state in self.blocked_on_images

    def __iter__(self) -> Iterator[RequestState]:
        return heapq.merge(self.ready, self.blocked_on_images, key=sort_key_of)

    def add(self, state: RequestState) -> None:
        insort(self.ready, state, key=sort_key_of)

    def remove(self, state: RequestState) -> None:
        (self.blocked_on_images if state in self.blocked_on_images else self.ready).remove(state)

    def block(self, index: int) -> None:
        """One of those that are ready is not."""
        insort(self.blocked_on_images, self.ready.pop(index), key=sort_key_of)

    def unblock_all(self) -> None:
        """What they wait for has changed."""
        self.ready = list(self)
        self.blocked_on_images = []

    def resort(self) -> None:
        """Ranks have changed."""
        self.ready = sorted((*self.ready, *self.blocked_on_images), key=sort_key_of)
        self.blocked_on_images = []


class PendingImages:
    """Running requests that have pictures to see before all of their tokens can be computed.

    running  by rank
    reach    see Scheduler
    """

    def __init__(self, running: Sequence[RequestState], computable_until: Callable[[RequestState, int], int]) -> None:
        seeing = (state for state in running if state.request.images)
        unseen = ((state, len(state.tokens) - computable_until(state, state.num_computed)) for state in seeing)
        self._pending = [(state.sort_key, state.id, num_tokens) for state, num_tokens in unseen if num_tokens]

    def __eq__(self, other: object) -> bool:
        """They have as much to see, each of them."""
        return isinstance(other, PendingImages) and self._pending == other._pending

    __hash__ = None  # type: ignore[assignment]

    def blocks(self, state: RequestState, max_tokens: int, max_slots: int) -> bool:
        """Those before it have enough to see for a step, or those that need not give way to it hold so many places."""
        before = bisect_left(self._pending, state.sort_key, key=_sort_key_in)
        if sum(num_tokens for _, _, num_tokens in self._pending[:before]) >= max_tokens:
            return True
        return sum(rank[0] <= state.sort_key[0] for rank, _, _ in self._pending) >= max_slots


def _sort_key_in(entry: tuple[tuple[int, int, int], str, int]) -> tuple[int, int, int]:
    return entry[0]
