"""Whose texts are computed next. No torch."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.encoders.messages import Input

__all__ = ["Call", "Turns"]


@dataclass(eq=False, slots=True)
class Call:
    """What one caller waits for.

    served   tokens handed out, counted from where the others were when it came
    taken    inputs that were handed out
    dropped  nobody waits for it any more
    vectors  of its inputs, empty where they are not computed yet; `missing` of them
    """

    inputs: Sequence[Input]
    arrival: int
    served: float
    result: asyncio.Future[list[bytes]]
    taken: int = 0
    dropped: bool = False
    vectors: list[bytes] = field(init=False)
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.vectors = [b""] * len(self.inputs)
        self.missing = len(self.inputs)

    def __lt__(self, other: Call) -> bool:
        """Whether it is its turn before the other's."""
        return (self.served, self.arrival) < (other.served, other.arrival)


class Turns:
    """Open calls. The one that has got the fewest tokens is next, the oldest among equals.

    A newcomer counts as having got what each would have if all had been served at once, each at the same rate: it waits
    behind nobody's whole list, and those who came before it do not starve however many come.
    """

    def __init__(self) -> None:
        self._heap: list[Call] = []  # calls with inputs that were not handed out, and dropped ones
        self._clock = 0.0
        self._arrivals = 0
        self.waiting = 0  # inputs that were not handed out

    def add(self, inputs: Sequence[Input], result: asyncio.Future[list[bytes]]) -> Call:
        """A new call with at least one input."""
        call = Call(inputs, self._arrivals, self._clock, result)
        self._arrivals += 1
        self.waiting += len(inputs)
        heapq.heappush(self._heap, call)
        return call

    def drop(self, call: Call) -> None:
        """Nobody waits for it any more. What was handed out is computed all the same."""
        if not call.dropped:
            call.dropped = True
            self.waiting -= len(call.inputs) - call.taken

    def take(self, max_tokens: int) -> list[tuple[Call, int]]:
        """(call, index of its input) to compute together: up to so many tokens, but at least one input if there is any."""
        taken: list[tuple[Call, int]] = []
        room = max_tokens
        while self._heap:
            call = heapq.heappop(self._heap)
            if call.dropped:
                continue
            size = len(call.inputs[call.taken].token_ids)
            if taken and size > room:
                heapq.heappush(self._heap, call)
                break
            room -= size
            taken.append((call, call.taken))
            self._hand_out(call, size)
        return taken

    def _hand_out(self, call: Call, size: int) -> None:
        self._clock += size / (len(self._heap) + 1)
        call.served += size
        call.taken += 1
        self.waiting -= 1
        if call.taken < len(call.inputs):
            heapq.heappush(self._heap, call)
