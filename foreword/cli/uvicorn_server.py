"""uvicorn as an async context, and the signals that stop a server."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Coroutine, Iterator
from types import TracebackType
from typing import Any

import uvicorn

POLL_S = 0.005  # while uvicorn starts


class ShutdownSignals:
    """SIGTERM and SIGINT: the first starts a graceful shutdown, the second an immediate one.

    `exit_code` follows the first: 130 after SIGINT, as shells expect, and 0 after SIGTERM.
    """

    def __init__(self) -> None:
        self.graceful = asyncio.Event()
        self.immediate = asyncio.Event()
        self.exit_code = 0

    def install(self) -> None:
        """Install the handlers, in the running loop."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.graceful.is_set():
            self.immediate.set()
            return
        self.exit_code = 128 + number if number == signal.SIGINT else 0
        self.graceful.set()


class UvicornServer:
    """uvicorn on a bound socket; it listens while the context is open."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket) -> None:
        self._server = _NoSignalServer(config)
        self._listener = listener
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> UvicornServer:
        """Raises OSError if it cannot listen on the address."""
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
    """uvicorn without its signal handlers, which raise the signal again and change the exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def wait_first(*coroutines: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> int | None:
    """Index of the first coroutine that finishes, or None after the timeout; the others are cancelled.

    Raises that coroutine's exception.
    """
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    for index, task in enumerate(tasks):
        if task in done:
            task.result()
            return index
    return None
