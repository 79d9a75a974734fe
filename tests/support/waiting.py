"""Waiting for a condition with a time limit, and a clock that tests set."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

__all__ = ["FakeClock", "wait_until", "wait_until_async"]


def wait_until(condition: Callable[[], object], limit_s: float = 20) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition was not met within {limit_s:g} s"
        time.sleep(0.005)


async def wait_until_async(condition: Callable[[], object], limit_s: float = 20) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.002)


class FakeClock:
    """A monotonic clock; tests set `now`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
