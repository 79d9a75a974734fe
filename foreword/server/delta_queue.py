"""What the choices of a request have said and nobody has taken yet."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from foreword.core.outputs import merge
from foreword.errors import ForewordError
from foreword.tokenizer.output_processor import OutputDelta

__all__ = ["DeltaQueue"]

MERGE_AFTER = 64  # deltas of one choice that wait one by one


class DeltaQueue:
    """A queue for each choice, in turn. Deltas that wait long are joined: a slow reader costs what the answer costs, no more.

    Told apart they take about a kilobyte a token.
    """

    __slots__ = ("_not_empty", "_queues")

    def __init__(self) -> None:
        self._queues: dict[
            int, _ChoiceQueue
        ] = {}  # by choice, none of them empty; the next to be asked stands first
        self._not_empty = asyncio.Event()

    def __len__(self) -> int:
        return sum(len(queue.items) for queue in self._queues.values())

    def put(self, index: int, item: OutputDelta | ForewordError) -> None:
        """Of a choice; nothing follows an error."""
        self._queues.setdefault(index, _ChoiceQueue()).put(item)
        self._not_empty.set()

    async def get(self) -> tuple[int, OutputDelta | ForewordError]:
        """Wait for the next of whichever choice has some."""
        while not self._queues:
            self._not_empty.clear()
            await self._not_empty.wait()
        index = next(iter(self._queues))
        queue = self._queues.pop(index)
        item = queue.get()
        if queue.items:
            self._queues[index] = queue
        return index, item


class _ChoiceQueue:
    """Of one choice. `apart` of its last items were not joined yet: each is joined once, so that it never takes long."""

    __slots__ = ("items", "num_unmerged")

    def __init__(self) -> None:
        self.items: deque[OutputDelta | ForewordError] = deque()
        self.num_unmerged = 0

    def put(self, item: OutputDelta | ForewordError) -> None:
        self.items.append(item)
        self.num_unmerged += 1
        if self.num_unmerged == MERGE_AFTER and isinstance(item, OutputDelta):
            tail = [
                delta
                for delta in (self.items.pop() for _ in range(MERGE_AFTER))
                if isinstance(delta, OutputDelta)
            ]
            self.items.append(_merge_deltas(tail[::-1]))
            self.num_unmerged = 0

    def get(self) -> OutputDelta | ForewordError:
        item = self.items.popleft()
        self.num_unmerged = min(self.num_unmerged, len(self.items))
        return item


def _merge_deltas(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Deltas that follow each other as one."""
    last = deltas[-1]
    return OutputDelta(
        "".join(delta.text for delta in deltas),
        merge([delta.event for delta in deltas]),
        last.finish_reason,
        last.stop_reason,
        last.hit_stop_string,
        tuple(token for delta in deltas for token in delta.logprobs),
        tuple(piece for delta in deltas for piece in delta.pieces),
    )
