"""Requests that wait for their turn, and the pictures that some of them wait for.

Pictures take long to encode, and only those of running requests are. So few requests run that still have some to see, and
those behind them are kept apart: they take no place of anybody who could start, and nobody looks at them in vain.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence

from foreword.core.request import RequestState

__all__ = ["Crowd", "Waiting", "rank_of"]


def rank_of(state: RequestState) -> tuple[int, int, int]:
    return state.rank


class Waiting:
    """By rank.

    ready  those that could be looked at
    apart  those that wait for pictures of running requests, until these have changed
    """

    def __init__(self) -> None:
        self.ready: list[RequestState] = []
        self.apart: list[RequestState] = []

    def __len__(self) -> int:
        return len(self.ready) + len(self.apart)

    def __contains__(self, state: object) -> bool:
        return state in self.ready or state in self.apart

    def __iter__(self) -> Iterator[RequestState]:
        return heapq.merge(self.ready, self.apart, key=rank_of)

    def add(self, state: RequestState) -> None:
        insort(self.ready, state, key=rank_of)

    def remove(self, state: RequestState) -> None:
        (self.apart if state in self.apart else self.ready).remove(state)

    def put_apart(self, index: int) -> None:
        """One of those that are ready is not."""
        insort(self.apart, self.ready.pop(index), key=rank_of)

    def call_back(self) -> None:
        """What they wait for has changed."""
        self.ready = list(self)
        self.apart = []

    def sort(self) -> None:
        """Ranks have changed."""
        self.ready = sorted((*self.ready, *self.apart), key=rank_of)
        self.apart = []


class Crowd:
    """Running requests that have pictures to see before all of their tokens can be computed.

    running  by rank
    reach    see Scheduler
    """

    def __init__(self, running: Sequence[RequestState], reach: Callable[[RequestState, int], int]) -> None:
        seeing = (state for state in running if state.request.pictures)
        unseen = ((state, len(state.tokens) - reach(state, state.num_computed)) for state in seeing)
        self._unseen = [(state.rank, state.id, num_tokens) for state, num_tokens in unseen if num_tokens]

    def __eq__(self, other: object) -> bool:
        """They have as much to see, each of them."""
        return isinstance(other, Crowd) and self._unseen == other._unseen

    __hash__ = None  # type: ignore[assignment]

    def keeps_out(self, state: RequestState, max_tokens: int, max_places: int) -> bool:
        """Those before it have enough to see for a step, or those that need not give way to it hold so many places."""
        before = bisect_left(self._unseen, state.rank, key=_rank_in)
        if sum(num_tokens for _, _, num_tokens in self._unseen[:before]) >= max_tokens:
            return True
        return sum(rank[0] <= state.rank[0] for rank, _, _ in self._unseen) >= max_places


def _rank_in(one: tuple[tuple[int, int, int], str, int]) -> tuple[int, int, int]:
    return one[0]
