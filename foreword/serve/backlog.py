"""What the choices of a request have said and nobody has taken yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from foreword.core.events import joined
from foreword.errors import ForewordError
from foreword.text.answer import Delta

__all__ = ["Backlog"]

MAX_APART = 64  # deltas of one choice that wait one by one


class Backlog:
    """A queue for each choice, in turn. Deltas that wait long are joined: a slow reader costs what the answer costs, no more.

    Told apart they take about a kilobyte a token.
    """

    __slots__ = ("_queues", "_some")

    def __init__(self) -> None:
        self._queues: dict[int, _Queue] = {}  # by choice, none of them empty; the next to be asked stands first
        self._some = asyncio.Event()

    def __len__(self) -> int:
        return sum(len(queue.items) for queue in self._queues.values())

    def put(self, index: int, item: Delta | ForewordError) -> None:
        """Of a choice; nothing follows an error."""
        self._queues.setdefault(index, _Queue()).put(item)
        self._some.set()

    async def take(self) -> tuple[int, Delta | ForewordError]:
        """Wait for the next of whichever choice has some."""
        while not self._queues:
            self._some.clear()
            await self._some.wait()
        index = next(iter(self._queues))
        queue = self._queues.pop(index)
        item = queue.take()
        if queue.items:
            self._queues[index] = queue
        return index, item


class _Queue:
    """Of one choice. `apart` of its last items were not joined yet: each is joined once, so that it never takes long."""

    __slots__ = ("apart", "items")

    def __init__(self) -> None:
        self.items: deque[Delta | ForewordError] = deque()
        self.apart = 0

    def put(self, item: Delta | ForewordError) -> None:
        self.items.append(item)
        self.apart += 1
        if self.apart == MAX_APART and isinstance(item, Delta):
            tail = [delta for delta in (self.items.pop() for _ in range(MAX_APART)) if isinstance(delta, Delta)]
            self.items.append(_joined(tail[::-1]))
            self.apart = 0

    def take(self) -> Delta | ForewordError:
        item = self.items.popleft()
        self.apart = min(self.apart, len(self.items))
        return item


def _joined(deltas: Sequence[Delta]) -> Delta:
    """Deltas that follow each other as one."""
    last = deltas[-1]
    return Delta(
        "".join(delta.text for delta in deltas),
        joined([delta.event for delta in deltas]),
        last.finish_reason,
        last.stop_reason,
        last.stopped,
        tuple(token for delta in deltas for token in delta.logprobs),
        tuple(piece for delta in deltas for piece in delta.pieces),
    )
