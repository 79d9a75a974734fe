"""Whose texts are computed next. No torch."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.embedding.messages import EncoderInput

__all__ = ["EncodeCall", "FairBatcher"]


@dataclass(eq=False, slots=True)
class EncodeCall:
    """What one caller waits for.

    served   tokens handed out, counted from where the others were when it came
    taken    inputs that were handed out
    dropped  nobody waits for it any more
    vectors  of its inputs, empty where they are not computed yet; `missing` of them
    """

    inputs: Sequence[EncoderInput]
    arrival: int
    served_tag: float
    result: asyncio.Future[list[bytes]]
    num_dispatched: int = 0
    is_cancelled: bool = False
    vectors: list[bytes] = field(init=False)
    num_missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.vectors = [b""] * len(self.inputs)
        self.num_missing = len(self.inputs)

    def __lt__(self, other: EncodeCall) -> bool:
        """Whether it is its turn before the other's."""
        return (self.served_tag, self.arrival) < (other.served_tag, other.arrival)


class FairBatcher:
    """Open calls. The one that has got the fewest tokens is next, the oldest among equals.

    A newcomer counts as having got what each would have if all had been served at once, each at the same rate: it waits
    behind nobody's whole list, and those who came before it do not starve however many come.
    """

    def __init__(self) -> None:
        self._heap: list[EncodeCall] = []  # calls with inputs that were not handed out, and dropped ones
        self._virtual_time = 0.0
        self._num_calls = 0
        self.num_waiting = 0  # inputs that were not handed out

    def add(self, inputs: Sequence[EncoderInput], result: asyncio.Future[list[bytes]]) -> EncodeCall:
        """A new call with at least one input."""
        call = EncodeCall(inputs, self._num_calls, self._virtual_time, result)
        self._num_calls += 1
        self.num_waiting += len(inputs)
        heapq.heappush(self._heap, call)
        return call

    def cancel(self, call: EncodeCall) -> None:
        """Nobody waits for it any more. What was handed out is computed all the same."""
        if not call.is_cancelled:
            call.is_cancelled = True
            self.num_waiting -= len(call.inputs) - call.num_dispatched

    def next_batch(self, max_tokens: int) -> list[tuple[EncodeCall, int]]:
        """(call, index of its input) to compute together: up to so many tokens, but at least one input if there is any."""
        taken: list[tuple[EncodeCall, int]] = []
        room = max_tokens
        while self._heap:
            call = heapq.heappop(self._heap)
            if call.is_cancelled:
                continue
            size = len(call.inputs[call.num_dispatched].token_ids)
            if taken and size > room:
                heapq.heappush(self._heap, call)
                break
            room -= size
            taken.append((call, call.num_dispatched))
            self._dispatch(call, size)
        return taken

    def _dispatch(self, call: EncodeCall, num_tokens: int) -> None:
        self._virtual_time += num_tokens / (len(self._heap) + 1)
        call.served_tag += num_tokens
        call.num_dispatched += 1
        self.num_waiting -= 1
        if call.num_dispatched < len(call.inputs):
            heapq.heappush(self._heap, call)
