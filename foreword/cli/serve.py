"""`foreword serve [MODEL]`: the API server in this process, the engine in one of its own.

Exit codes: 0 after Ctrl-C or SIGTERM, 1 when the engine died, 2 when it could not start as configured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI

from foreword.cli.backends import Backends
from foreword.cli.banner import address, banner
from foreword.cli.options import add_config_options, read_config
from foreword.cli.terminal import errors, loading_bar, set_up_logging
from foreword.config import Config
from foreword.engine.client import ProcessClient
from foreword.errors import ConfigError
from foreword.metrics.recorder import Recorder
from foreword.prepare import Prepared, prepare
from foreword.resolve import EngineInfo

__all__ = ["add_arguments", "run"]

logger = logging.getLogger("foreword.serve")

GRACE_S = 8  # for open answers after SIGTERM; `docker stop` kills after 10
LAST_WORDS_S = 2.0  # a dead engine's errors reach the clients, and /health is seen to be 503


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="same as --model")
    add_config_options(parser)


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    set_up_logging(config.log_level)
    with bind(config.host, config.port) as listener:
        return asyncio.run(_run(prepare(config), listener))


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, before anything slow is done. Raises ConfigError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _unavailable(error, host, port) from None
    return listener


def _unavailable(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"port {port} on {host} is in use; choose another with --port (0 takes a free one)", "port")
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}", "host")


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: they would raise the signal again and spoil the exit code."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@dataclass(frozen=True, slots=True)
class _Serving:
    """A server that runs: who ends it, and who tells whether the engine lives."""

    server: _Server
    client: ProcessClient
    stop: asyncio.Event

    async def until_end(self, listener: socket.socket, ready: Callable[[], None]) -> int:
        """Serve until told to stop or until the engine dies; returns the exit code."""
        task = asyncio.create_task(self.server.serve([listener]))
        while not self.server.started and not task.done():
            await asyncio.sleep(0.005)
        if self.server.started:
            ready()
        stopped, dead = (asyncio.create_task(event.wait()) for event in (self.stop, self.client.dead))
        await asyncio.wait((task, stopped, dead), return_when=asyncio.FIRST_COMPLETED)
        died = dead.done() and not stopped.done()
        if died:
            logger.error("the engine process died; open requests got an error; shutting down")
            await asyncio.sleep(LAST_WORDS_S)
        self.server.should_exit = True
        for waiting in (stopped, dead):
            waiting.cancel()
        await task
        return 1 if died else 0


async def _run(prepared: Prepared, listener: socket.socket) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    started = time.perf_counter()
    async with contextlib.AsyncExitStack() as stack:
        with loading_bar(f"loading {prepared.path.name}") as progress:
            backends = await stack.enter_async_context(Backends(prepared, progress))
            info = await _unless(stop, backends)
        if info is None:
            return 0
        return await _serve(prepared.config, listener, backends, info, stop, time.perf_counter() - started)


async def _unless(stop: asyncio.Event, backends: Backends) -> EngineInfo | None:
    """Start the engine; None if we were told to stop before it was ready."""
    starting = asyncio.create_task(backends.start())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait((starting, stopped), return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if starting.done():
        return starting.result()
    starting.cancel()
    return None


async def _serve(
    config: Config, listener: socket.socket, backends: Backends, info: EngineInfo, stop: asyncio.Event, load_s: float
) -> int:
    app = backends.application(Recorder(info.resolved.drafters, config.log_interval))
    url = address(config.host, listener.getsockname()[1])
    encoder = backends.encoder.info if backends.encoder is not None else None

    def ready() -> None:
        for line in banner(config, info, backends.name, url, load_s, encoder):
            errors().print(line, markup=False)

    try:
        return await _Serving(_server(app), backends.engine, stop).until_end(listener, ready)
    except OSError as error:
        raise _unavailable(error, config.host, listener.getsockname()[1]) from None


def _server(app: FastAPI) -> _Server:
    return _Server(
        uvicorn.Config(app, log_config=None, access_log=False, server_header=False, ws="none", timeout_graceful_shutdown=GRACE_S)
    )
