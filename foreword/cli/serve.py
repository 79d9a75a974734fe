"""`foreword serve [MODEL]`: the API server in this process, the engine in one of its own.

Exit codes: 0 after Ctrl-C or SIGTERM, 1 when the engine died, 2 when it could not start as configured.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from foreword.cli.backends import Backends
from foreword.cli.banner import address, banner
from foreword.cli.options import add_config_options, read_config
from foreword.cli.terminal import errors, loading_bar, set_up_logging
from foreword.cli.web import Ending, WebServer, first_of
from foreword.config import Config
from foreword.errors import ConfigError
from foreword.metrics.recorder import Recorder
from foreword.prepare import Prepared, prepare
from foreword.resolve import EngineInfo
from foreword.serve.connections import web_config
from foreword.serve.draining import Drain
from foreword.serve.entrance import Entrance
from foreword.serve.heap import settle
from foreword.serve.key_file import read_key_file

__all__ = ["add_arguments", "run"]

logger = logging.getLogger("foreword.serve")

LAST_WORDS_S = 2.0  # a dead engine's errors reach the clients, and /health is seen to be 503
HANDING_BACK_S = 1.0  # for what could not be finished: its clients are told
SPARE_FILES = 256  # beside those of the connections


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="same as --model")
    add_config_options(parser)


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    set_up_logging(config.log_level)
    if config.api_key_file is not None:
        read_key_file(Path(config.api_key_file))  # a broken one is told of before a model is loaded
    allow_files(config.max_connections + SPARE_FILES)
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


def allow_files(count: int) -> None:
    """Let this process have so many files open, or as many as it may: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < count:
        logger.warning("only %d files may be open (ulimit -n): fewer connections than max_connections can be taken", hard)


async def _run(prepared: Prepared, listener: socket.socket) -> int:
    """Listen, load, serve; returns the exit code."""
    config, ending, drain = prepared.config, Ending(), Drain()
    ending.listen()
    started = time.perf_counter()
    async with AsyncExitStack() as stack:
        with loading_bar(f"loading {prepared.path.name}") as progress:
            backends = Backends(prepared, progress)
            await stack.enter_async_context(_hurrying(backends, ending))
            await stack.enter_async_context(backends)
            entrance = Entrance(backends.waiting_room(drain))
            web = WebServer(web_config(entrance, config), listener)
            await _listen(stack, web, config, listener)
            info = await _started(backends, ending)
        if info is None:
            return 0
        recorder = Recorder(info.resolved.drafters, config.log_interval, pictures=info.image_token_id is not None)
        app = backends.application(recorder, drain)
        async with app.router.lifespan_context(app):
            entrance.app = app
            settle()
            _say_ready(backends, info, config, listener, time.perf_counter() - started)
            return await _until_end(backends, web, drain, ending, config.drain_timeout)


@asynccontextmanager
async def _hurrying(backends: Backends, ending: Ending) -> AsyncIterator[None]:
    """Told to end now, nobody waits for an engine in the midst of a step, not even where that is closed already."""

    async def hurry() -> None:
        await ending.now.wait()
        backends.engine.hurry()

    task = asyncio.create_task(hurry(), name="hurry")
    try:
        yield
    finally:
        task.cancel()


async def _listen(stack: AsyncExitStack, web: WebServer, config: Config, listener: socket.socket) -> None:
    try:
        await stack.enter_async_context(web)
    except OSError as error:  # another process listens on what we have bound
        raise _unavailable(error, config.host, config.port) from None


async def _started(backends: Backends, ending: Ending) -> EngineInfo | None:
    """Facts of the engine; None if the server was told to end before it was ready."""
    if await first_of(ending.soon.wait(), backends.start()) == 0:
        return None
    return backends.engine.info


def _say_ready(backends: Backends, info: EngineInfo, config: Config, listener: socket.socket, load_s: float) -> None:
    url = address(config.host, listener.getsockname()[1])
    encoder = backends.encoder.info if backends.encoder is not None else None
    for line in banner(config, info, backends.name, url, load_s, encoder):
        errors().print(line, markup=False)


async def _until_end(backends: Backends, web: WebServer, drain: Drain, ending: Ending, drain_s: float) -> int:
    """Serve until told to end or until the engine is gone for good; returns the exit code."""
    if await first_of(ending.soon.wait(), backends.engine.dead.wait(), web.ended()) == 1:
        logger.error("the engine is gone; open requests got an error; shutting down")
        await first_of(ending.soon.wait(), timeout_s=LAST_WORDS_S)
        return 1
    drain.begin()
    logger.info("ending: %d requests are open and may finish within %g s", drain.num_open, drain_s)
    await first_of(drain.emptied(), ending.now.wait(), timeout_s=drain_s)
    drain.hand_back()
    await first_of(drain.emptied(), timeout_s=HANDING_BACK_S)
    return 0
