"""Turns: shared among accounts, and none is lost, whoever leaves whenever."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.server.image_intake import FairSemaphore


async def hold(turns: FairSemaphore, account: str, served: list[str], end: asyncio.Event) -> None:
    async with turns.acquire(account, 60):
        served.append(account)
        await end.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_accounts_in_turn_and_each_in_its_order() -> None:
    turns, served, end = FairSemaphore(1), list[str](), asyncio.Event()
    tasks = [
        asyncio.create_task(hold(turns, account, served, end)) for account in ["a", "a", "a", "b", "c", "b"]
    ]
    await settle()
    assert turns.num_waiting == 5 and not turns.num_free
    end.set()
    await asyncio.gather(*tasks)
    assert served == ["a", "a", "b", "c", "a", "b"]
    assert turns.num_waiting == 0 and turns.num_free == 1


async def test_who_waits_too_long_has_no_place_any_more() -> None:
    turns = FairSemaphore(1)
    async with turns.acquire("a", 60):
        with pytest.raises(TimeoutError):
            async with turns.acquire("b", 0.01):
                raise AssertionError("there is none")
        assert turns.num_waiting == 0
    assert turns.num_free == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=12), st.integers(1, 3))
def test_none_is_lost(steps: list[tuple[str, int]], count: int) -> None:
    """Tasks come, are cancelled at once, later, or at the moment at which a turn comes."""

    async def run() -> None:
        turns, served = FairSemaphore(count), list[str]()
        ends = [asyncio.Event() for _ in steps]
        tasks = []
        for (account, what), end in zip(steps, ends, strict=True):
            tasks.append(asyncio.create_task(hold(turns, account, served, end)))
            if what != 1:
                await settle()
            if what == 2:
                ends[len(tasks) // 2].set()
            if what:
                tasks[len(tasks) // 2].cancel()
        for end in ends:
            end.set()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert turns.num_free == count and turns.num_waiting == 0

    asyncio.run(run())
