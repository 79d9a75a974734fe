"""The server's own work beside a default executor that requests fill."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from foreword.utils.threads import run_in_own_thread


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
