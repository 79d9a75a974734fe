"""DeltaQueue: deltas of a slow reader are merged without loss."""

from __future__ import annotations

import asyncio

from foreword.core.outputs import DraftResult, TokenEvent
from foreword.errors import RequestFailed
from foreword.server.answering.generation import MERGE_AFTER, DeltaQueue
from foreword.tokenizer.output_processor import OutputDelta, TokenPiece

COUNT = 10 * MERGE_AFTER + 3


def delta(index: int, end: str | None = None) -> OutputDelta:
    event = TokenEvent("r", index, (index,), draft=DraftResult("ngram", 2, 1), finish_reason=end)
    return OutputDelta(f"{index} ", event, end, pieces=(TokenPiece(f"{index} ", "ngram"),))


async def taken(backlog: DeltaQueue) -> list[tuple[int, OutputDelta]]:
    found = []
    while len(backlog):
        index, item = await backlog.get()
        assert isinstance(item, OutputDelta)
        found.append((index, item))
    return found


async def test_fast_reader_gets_each_delta() -> None:
    backlog = DeltaQueue()
    for index in range(COUNT):
        backlog.put(0, delta(index))
        assert await backlog.get() == (0, delta(index))


async def test_waiting_deltas_are_merged() -> None:
    backlog = DeltaQueue()
    for index in range(COUNT):
        for choice in (0, 1):
            backlog.put(choice, delta(index, "stop" if index == COUNT - 1 else None))
    assert len(backlog) < 2 * (COUNT / MERGE_AFTER + MERGE_AFTER)
    found = await taken(backlog)
    assert [choice for choice, _ in found[:4]] == [0, 1, 0, 1], "choices alternate"
    for choice in (0, 1):
        deltas = [one for index, one in found if index == choice]
        assert "".join(one.text for one in deltas) == "".join(
            piece.text for one in deltas for piece in one.pieces
        )
        assert "".join(one.text for one in deltas) == "".join(f"{index} " for index in range(COUNT))
        tokens = [token for one in deltas for token in one.event.token_ids]
        assert tokens == list(range(COUNT))
        assert all(one.event.index == one.event.token_ids[0] for one in deltas)
        assert sum(one.event.draft.num_accepted for one in deltas if one.event.draft) == COUNT
        assert [one.finish_reason for one in deltas if one.finish_reason] == ["stop"] and deltas[
            -1
        ].finish_reason


async def test_taken_deltas_are_not_merged() -> None:
    backlog = DeltaQueue()
    for index in range(MERGE_AFTER - 1):
        backlog.put(0, delta(index))
    assert await backlog.get() == (0, delta(0))
    for index in range(MERGE_AFTER - 1, COUNT):
        backlog.put(0, delta(index))
    assert [token for _, one in await taken(backlog) for token in one.event.token_ids] == list(
        range(1, COUNT)
    )


async def test_error_is_last_and_wakes_the_reader() -> None:
    backlog, error = DeltaQueue(), RequestFailed("broken")
    waiting = asyncio.create_task(backlog.get())
    await asyncio.sleep(0)
    for index in range(MERGE_AFTER - 1):
        backlog.put(3, delta(index))
    backlog.put(3, error)
    first = await waiting
    rest = [await backlog.get() for _ in range(len(backlog))]
    assert first == (3, delta(0)) and rest[-1] == (3, error) and len(rest) == MERGE_AFTER - 1
