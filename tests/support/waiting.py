"""Waiting for conditions and for stopped processes, and a clock that tests set."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

WAIT_S: Final = 300.0  # bound of every wait: a hang reaches it, a busy machine does not


def wait_until(condition: Callable[[], object], limit_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition was not met within {limit_s:g} s"
        time.sleep(0.005)


async def wait_until_async(condition: Callable[[], object], limit_s: float = WAIT_S) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():
            await asyncio.sleep(0.002)


def stop_process(pid: int) -> None:
    """Send SIGSTOP and wait until all threads have stopped: they run until one of them handles it."""

    def is_stopped() -> bool:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)

    os.kill(pid, signal.SIGSTOP)
    wait_until(is_stopped)


def wait_until_asleep(pid: int) -> None:
    """Wait until the main thread sleeps, and not for a moment only: in select(), for the next key."""
    seen: list[str] = []

    def is_asleep() -> bool:
        status = Path(f"/proc/{pid}/status").read_text()
        seen.append("".join(line for line in status.split("\n") if line.startswith(("State", "voluntary"))))
        return "S (sleeping)" in seen[-1] and seen[-5:].count(seen[-1]) == 5

    wait_until(is_asleep)


class FakeClock:
    """A monotonic clock; tests set `now`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now
