"""Selects the next batch of texts, fairly between callers. No torch."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.embedding.encoder_messages import EncoderInput


@dataclass(eq=False, slots=True)
class EncodeCall:
    """The inputs of one caller."""

    inputs: Sequence[EncoderInput]
    arrival: int
    served_tag: float  # virtual time at arrival + dispatched tokens
    result: asyncio.Future[list[bytes]]
    num_dispatched: int = 0  # inputs
    is_cancelled: bool = False
    vectors: list[bytes] = field(init=False)  # b"" until computed
    num_missing: int = field(init=False)  # vectors

    def __post_init__(self) -> None:
        self.vectors = [b""] * len(self.inputs)
        self.num_missing = len(self.inputs)

    def __lt__(self, other: EncodeCall) -> bool:
        """Whether this call is served first."""
        return (self.served_tag, self.arrival) < (other.served_tag, other.arrival)


class FairBatcher:
    """A start-time fair queue: the call with the fewest served tokens is next, the oldest among equals.

    A new call starts at the virtual time, the tokens that each call would have under ideal sharing. So it
    does not wait for a long call to finish, and a stream of new calls starves no other.
    """

    def __init__(self) -> None:
        self._heap: list[EncodeCall] = []  # calls with undispatched inputs, and cancelled calls
        self._virtual_time = 0.0
        self._num_calls = 0
        self.num_waiting = 0  # undispatched inputs

    def add(self, inputs: Sequence[EncoderInput], result: asyncio.Future[list[bytes]]) -> EncodeCall:
        """Add a call of at least one input."""
        call = EncodeCall(inputs, self._num_calls, self._virtual_time, result)
        self._num_calls += 1
        self.num_waiting += len(inputs)
        heapq.heappush(self._heap, call)
        return call

    def cancel(self, call: EncodeCall) -> None:
        """Drop the undispatched inputs of a call."""
        if not call.is_cancelled:
            call.is_cancelled = True
            self.num_waiting -= len(call.inputs) - call.num_dispatched

    def next_batch(self, max_tokens: int) -> list[tuple[EncodeCall, int]]:
        """Pairs (call, input index) of up to max_tokens tokens; a longer input forms a batch of its own."""
        batch: list[tuple[EncodeCall, int]] = []
        room = max_tokens
        while self._heap:
            call = heapq.heappop(self._heap)
            if call.is_cancelled:
                continue
            size = len(call.inputs[call.num_dispatched].token_ids)
            if batch and size > room:
                heapq.heappush(self._heap, call)
                break
            room -= size
            batch.append((call, call.num_dispatched))
            self._virtual_time += size / (len(self._heap) + 1)
            call.served_tag += size
            call.num_dispatched += 1
            self.num_waiting -= 1
            if call.num_dispatched < len(call.inputs):
                heapq.heappush(self._heap, call)
        return batch
