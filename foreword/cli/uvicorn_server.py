"""uvicorn as an async context, and the signals that stop a server."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import signal
import socket
import sys
from collections.abc import AsyncIterator, Coroutine, Iterator
from types import FrameType
from typing import Any

import uvicorn

POLL_S = 0.005  # while uvicorn starts


class ShutdownSignals:
    """SIGTERM and SIGINT: the first starts a graceful shutdown, the second an immediate one.

    `exit_code` follows the first: 130 after SIGINT, as shells expect, and 0 after SIGTERM. A process whose
    event loop hangs does not call extend_limit() in time: it ends with code 1 and its stacks on stderr.
    """

    def __init__(self, limit_s: float | None = None) -> None:
        self.graceful = asyncio.Event()
        self.immediate = asyncio.Event()
        self.exit_code = 0
        self._limit_s = limit_s  # seconds after the first signal; None: no limit
        self._is_limited = False

    def install(self) -> None:
        """Install the handlers, in the running loop."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._on_signal, number)
            # Beside the loop's: it runs between two bytecodes, also while a callback blocks the loop.
            signal.signal(number, self._start_limit)
            signal.siginterrupt(number, False)

    def _start_limit(self, number: int, frame: FrameType | None) -> None:
        if self._limit_s is not None and not self._is_limited:
            self._is_limited = True
            _exit_later(self._limit_s)

    def extend_limit(self, limit_s: float) -> None:
        """Let a process that a signal ends take so much longer, from now on."""
        if self._is_limited:
            _exit_later(limit_s)

    def _on_signal(self, number: signal.Signals) -> None:
        if self.graceful.is_set():
            self.immediate.set()
            return
        self.exit_code = 128 + number if number == signal.SIGINT else 0
        self.graceful.set()


def _exit_later(seconds: float) -> None:
    """End the process with its stacks, by a thread of C that needs no interpreter."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=sys.__stderr__)


@contextlib.asynccontextmanager
async def run_uvicorn(config: uvicorn.Config, listener: socket.socket) -> AsyncIterator[asyncio.Task[None]]:
    """uvicorn on a bound socket, on which it listens while the context is open; yields its task.

    Raises OSError if it cannot listen on the address.
    """
    server = _NoSignalServer(config)
    task = asyncio.create_task(server.serve([listener]), name="web server")
    while not server.started:
        if task.done():
            task.result()
            raise OSError("the web server did not start")
        await asyncio.sleep(POLL_S)
    try:
        yield task
    finally:
        server.should_exit = True
        await task


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
