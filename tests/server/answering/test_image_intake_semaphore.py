"""FairSemaphore: round-robin over keys, and no permit is lost."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.server.answering.image_intake import FairSemaphore


async def hold_permit(semaphore: FairSemaphore, key: str, served: list[str], end: asyncio.Event) -> None:
    async with semaphore.acquire(key, 60):
        served.append(key)
        await end.wait()


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_keys_alternate_in_order() -> None:
    semaphore, served, end = FairSemaphore(1), list[str](), asyncio.Event()
    tasks = [
        asyncio.create_task(hold_permit(semaphore, key, served, end))
        for key in ["a", "a", "a", "b", "c", "b"]
    ]
    await settle()
    assert semaphore.num_waiting == 5 and not semaphore.num_free
    end.set()
    await asyncio.gather(*tasks)
    assert served == ["a", "a", "b", "c", "a", "b"]
    assert semaphore.num_waiting == 0 and semaphore.num_free == 1


async def test_timed_out_waiter_is_removed() -> None:
    semaphore = FairSemaphore(1)
    async with semaphore.acquire("a", 60):
        with pytest.raises(TimeoutError):
            async with semaphore.acquire("b", 0.01):
                raise AssertionError("there is none")
        assert semaphore.num_waiting == 0
    assert semaphore.num_free == 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3)), max_size=12), st.integers(1, 3))
def test_no_permit_is_lost(steps: list[tuple[str, int]], count: int) -> None:
    """Tasks are cancelled at once, later, or just as their permit comes."""

    async def run() -> None:
        semaphore, served = FairSemaphore(count), list[str]()
        ends = [asyncio.Event() for _ in steps]
        tasks = []
        for (key, what), end in zip(steps, ends, strict=True):
            tasks.append(asyncio.create_task(hold_permit(semaphore, key, served, end)))
            if what != 1:
                await settle()
            if what == 2:
                ends[len(tasks) // 2].set()
            if what:
                tasks[len(tasks) // 2].cancel()
        for end in ends:
            end.set()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert semaphore.num_free == count and semaphore.num_waiting == 0

    asyncio.run(run())
