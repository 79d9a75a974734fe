"""The web server as a context, and the two ways in which it is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Coroutine, Iterator
from types import TracebackType
from typing import Any

import uvicorn

__all__ = ["ShutdownSignals", "UvicornServer", "wait_first"]

POLL_S = 0.005


class ShutdownSignals:
    """What SIGTERM and SIGINT ask for: the first one to end soon, the second to end now."""

    def __init__(self) -> None:
        self.graceful = asyncio.Event()
        self.immediate = asyncio.Event()

    def install(self) -> None:
        """Take the signals, in the running loop."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.immediate if self.graceful.is_set() else self.graceful).set()


class UvicornServer:
    """uvicorn on a bound socket: it listens inside of the context, and is gone outside.

    ended  it stopped by itself
    """

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        self._server = _NoSignalServer(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> UvicornServer:
        """Raises OSError if the address cannot be listened on."""
        self._task = asyncio.create_task(self._server.serve([self._listener]), name="web server")
        while not self._server.started:
            if self._task.done():
                self._task.result()
                raise OSError("the web server did not start")
            await asyncio.sleep(POLL_S)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._task is not None
        self._server.should_exit = True
        await self._task

    async def wait_stopped(self) -> None:
        assert self._task is not None
        await asyncio.wait((self._task,))


class _NoSignalServer(uvicorn.Server):
    """uvicorn without its signal handlers: they would raise the signal again and spoil the exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def wait_first(*coroutines: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> int | None:
    """The place of one that is done first; None if the time is over before. The others are cancelled.

    Raises what that one raised.
    """
    tasks = [asyncio.ensure_future(work) for work in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    place = next((place for place, task in enumerate(tasks) if task in done), None)
    if place is not None:
        tasks[place].result()
    return place
