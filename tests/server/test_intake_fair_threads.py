"""Work of several keys in few threads: fair, bounded in time, and independent of what else hangs."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.errors import InvalidRequest, Overloaded
from foreword.server.intake import FairSemaphore, FairThreads
from foreword.utils.logging import log_model
from tests.support.waiting import WAIT_S, wait_until_async


async def hold_permit(semaphore: FairSemaphore, key: str, served: list[str], end: asyncio.Event) -> None:
    async with semaphore.hold(key, 60):
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
    async with semaphore.hold("a", 60):
        with pytest.raises(TimeoutError):
            async with semaphore.hold("b", 0.01):
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


async def test_one_permit_is_kept_for_other_keys() -> None:
    semaphore, served, end = FairSemaphore(3), list[str](), asyncio.Event()
    tasks = [asyncio.create_task(hold_permit(semaphore, key, served, end)) for key in "aaaa"]
    await settle()
    assert served == ["a", "a"] and semaphore.num_free == 1
    tasks.append(asyncio.create_task(hold_permit(semaphore, "b", served, end)))
    await settle()
    assert served == ["a", "a", "b"]
    end.set()
    await asyncio.gather(*tasks)
    assert served == ["a", "a", "b", "a", "a"] and semaphore.num_free == 3


def make_threads(num_threads: int, timeout_s: float = WAIT_S) -> tuple[FairThreads, list[str]]:
    refused: list[str] = []
    return FairThreads("prompts", num_threads, timeout_s, refused.append), refused


async def test_work_has_results_errors_and_context() -> None:
    threads, refused = make_threads(2)
    log_model.set("m")
    assert await threads.run("a", log_model.get) == "m"

    def fail() -> None:
        raise InvalidRequest("no", "field")

    with pytest.raises(InvalidRequest, match="no"):
        await threads.run("a", fail)
    assert not refused and threads._permits.num_free == 2


async def test_hanging_work_of_one_key_delays_no_other() -> None:
    threads, refused = make_threads(3)
    go, running = threading.Event(), list[int]()

    def hang() -> None:
        running.append(1)
        assert go.wait(WAIT_S)

    hanging = [asyncio.create_task(threads.run("a", hang)) for _ in range(9)]
    await wait_until_async(lambda: len(running) == 2)
    assert [await threads.run("b", lambda i=i: i) for i in range(5)] == list(range(5))
    assert len(running) == 2
    go.set()
    await asyncio.gather(*hanging)
    assert not refused


async def test_cancelled_work_holds_its_thread_until_it_ends() -> None:
    threads, _ = make_threads(1)
    go, running = threading.Event(), threading.Event()
    task = asyncio.create_task(threads.run("a", lambda: running.set() or go.wait(WAIT_S)))
    await wait_until_async(running.is_set)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert threads._permits.num_free == 0
    go.set()
    await wait_until_async(lambda: threads._permits.num_free == 1)


async def test_wait_is_bounded_and_counted() -> None:
    threads, refused = make_threads(1, timeout_s=0.01)
    go = threading.Event()
    task = asyncio.create_task(threads.run("a", lambda: go.wait(WAIT_S)))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded, match=r"waited 0\.01 s for the prompts of other requests"):
        await threads.run("b", lambda: None)
    assert refused == ["intake_queue"]
    go.set()
    await task
