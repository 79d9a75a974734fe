"""Whose texts are computed next. No torch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from foreword.encoders.messages import Input

__all__ = ["Call", "Turns"]


@dataclass(eq=False, slots=True)
class Call:
    """What one caller waits for.

    vectors  of its inputs, empty where they are not computed yet; `missing` of them
    taken    inputs that were handed out
    served   tokens handed out, counted from where the others were when it came
    """

    inputs: Sequence[Input]
    arrival: int
    result: asyncio.Future[list[bytes]]
    served: int
    taken: int = 0
    vectors: list[bytes] = field(init=False)
    missing: int = field(init=False)

    def __post_init__(self) -> None:
        self.vectors = [b""] * len(self.inputs)
        self.missing = len(self.inputs)


class Turns:
    """Open calls. The one that has got the fewest tokens is next, the oldest among equals.

    A newcomer counts as having got what the last one in turn had: it waits behind nobody's whole list, and never
    so that the others starve.
    """

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._clock = 0
        self._arrivals = 0
        self.waiting = 0  # inputs that were not handed out

    def add(self, inputs: Sequence[Input], result: asyncio.Future[list[bytes]]) -> Call:
        """A new call with at least one input."""
        call = Call(inputs, self._arrivals, result, self._clock)
        self._arrivals += 1
        self._calls.append(call)
        self.waiting += len(inputs)
        return call

    def drop(self, call: Call) -> None:
        """Nobody waits for it any more; what was handed out is not waited for either."""
        if call in self._calls:
            self._calls.remove(call)
            self.waiting -= len(call.inputs) - call.taken

    def take(self, max_tokens: int) -> list[tuple[Call, int]]:
        """(call, index of its input) to compute together: up to so many tokens, but at least one input if there is any."""
        taken: list[tuple[Call, int]] = []
        room = max_tokens
        while self._calls:
            call = min(self._calls, key=lambda call: (call.served, call.arrival))
            size = len(call.inputs[call.taken].token_ids)
            if taken and size > room:
                break
            room -= size
            taken.append((call, call.taken))
            self._hand_out(call, size)
        return taken

    def _hand_out(self, call: Call, size: int) -> None:
        self._clock = max(self._clock, call.served)
        call.served += size
        call.taken += 1
        self.waiting -= 1
        if call.taken == len(call.inputs):
            self._calls.remove(call)
