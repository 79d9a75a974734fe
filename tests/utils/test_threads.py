"""The server's own work beside a default executor that requests fill."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from foreword.utils.threads import join_in_own_thread, run_in_own_thread


def test_own_thread_does_not_wait_for_the_default_executor() -> None:
    hung = threading.Event()

    def fail() -> None:
        raise ValueError("as raised")

    async def run() -> int:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        loop.run_in_executor(None, hung.wait)
        try:
            with pytest.raises(ValueError, match="as raised"):
                await run_in_own_thread(fail)
            return await run_in_own_thread(max, 1, 2)
        finally:
            hung.set()

    assert asyncio.run(run()) == 2


def test_cancelled_writing_ends_after_its_piece() -> None:
    begun, cancelled, ended = threading.Event(), threading.Event(), threading.Event()
    made: list[int] = []

    def pieces() -> Iterator[bytes]:
        try:
            for number in range(1000):
                made.append(number)
                begun.set()
                cancelled.wait()
                yield b"piece"
        finally:
            ended.set()

    async def run() -> None:
        writing = asyncio.ensure_future(join_in_own_thread(pieces))
        await asyncio.to_thread(begun.wait)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        cancelled.set()

    asyncio.run(run())
    ended.wait()
    assert made == [0]


def test_pieces_are_joined_in_a_thread() -> None:
    assert asyncio.run(join_in_own_thread(lambda: iter((b"a", b"", b"bc")))) == b"abc"
