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

from foreword.checkpoint import CheckpointInfo, prepare_checkpoint
from foreword.cli.banner import banner_lines, local_url
from foreword.cli.options import add_config_options, read_config
from foreword.cli.server_stack import ServerStack
from foreword.cli.terminal import loading_bar, set_up_logging, stderr_console
from foreword.cli.uvicorn_server import ShutdownSignals, UvicornServer, wait_first
from foreword.config.options import Config
from foreword.config.resolve import EngineInfo
from foreword.errors import ConfigError
from foreword.metrics.recorder import MetricsRecorder
from foreword.server.auth.key_file import read_key_file
from foreword.server.http_protocol import uvicorn_config
from foreword.server.lifecycle import DrainState
from foreword.server.loading_app import SwappableApp
from foreword.server.malloc_trim import freeze_gc

__all__ = ["add_arguments", "run"]

logger = logging.getLogger("foreword.serve")

ENGINE_DEAD_GRACE_S = 2.0  # a dead engine's errors reach the clients, and /health is seen to be 503
CANCEL_GRACE_S = 1.0  # for what could not be finished: its clients are told
EXTRA_FILES = 256  # beside those of the connections


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", nargs="?", metavar="MODEL", default=argparse.SUPPRESS, help="same as --model"
    )
    add_config_options(parser)


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    set_up_logging(config.log_level)
    if config.api_key_file is not None:
        read_key_file(Path(config.api_key_file))  # a broken one is told of before a model is loaded
    raise_file_limit(config.max_connections + EXTRA_FILES)
    with bind(config.host, config.port) as listener:
        return asyncio.run(_run(prepare_checkpoint(config), listener))


def bind(host: str, port: int) -> socket.socket:
    """A bound socket, before anything slow is done. Raises ConfigError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _bind_error(error, host, port) from None
    return listener


def _bind_error(error: OSError, host: str, port: int) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(
            f"port {port} on {host} is in use; choose another with --port (0 takes a free one)", "port"
        )
    return ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}", "host")


def raise_file_limit(count: int) -> None:
    """Let this process have so many files open, or as many as it may: each connection is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < count:
        logger.warning(
            "only %d files may be open (ulimit -n): fewer connections than max_connections can be taken", hard
        )


async def _run(prepared: CheckpointInfo, listener: socket.socket) -> int:
    """Listen, load, serve; returns the exit code."""
    config, ending, drain = prepared.config, ShutdownSignals(), DrainState()
    ending.install()
    started = time.perf_counter()
    async with AsyncExitStack() as stack:
        with loading_bar(f"loading {prepared.path.name}") as progress:
            backends = ServerStack(prepared, progress)
            await stack.enter_async_context(_skip_drain_on_second_signal(backends, ending))
            await stack.enter_async_context(backends)
            entrance = SwappableApp(backends.loading_app(drain))
            web = UvicornServer(uvicorn_config(entrance, config), listener)
            await _listen(stack, web, config, listener)
            info = await _start_engine(backends, ending)
        if info is None:
            return 0
        recorder = MetricsRecorder(
            info.resolved.drafters, config.log_interval, multimodal=info.image_token_id is not None
        )
        app = backends.serving_app(recorder, drain)
        async with app.router.lifespan_context(app):
            entrance.app = app
            freeze_gc()
            _print_banner(backends, info, config, listener, time.perf_counter() - started)
            return await _serve_until_shutdown(backends, web, drain, ending, config.drain_timeout)


@asynccontextmanager
async def _skip_drain_on_second_signal(
    server_stack: ServerStack, signals: ShutdownSignals
) -> AsyncIterator[None]:
    """Told to end now, nobody waits for an engine in the midst of a step, not even where that is closed already."""

    async def hurry() -> None:
        await signals.immediate.wait()
        server_stack.engine.skip_drain()

    task = asyncio.create_task(hurry(), name="hurry")
    try:
        yield
    finally:
        task.cancel()


async def _listen(
    stack: AsyncExitStack, server: UvicornServer, config: Config, listener: socket.socket
) -> None:
    try:
        await stack.enter_async_context(server)
    except OSError as error:  # another process listens on what we have bound
        raise _bind_error(error, config.host, config.port) from None


async def _start_engine(server_stack: ServerStack, signals: ShutdownSignals) -> EngineInfo | None:
    """Facts of the engine; None if the server was told to end before it was ready."""
    if await wait_first(signals.graceful.wait(), server_stack.start()) == 0:
        return None
    return server_stack.engine.info


def _print_banner(
    server_stack: ServerStack, info: EngineInfo, config: Config, listener: socket.socket, load_s: float
) -> None:
    url = local_url(config.host, listener.getsockname()[1])
    encoder = server_stack.encoder.info if server_stack.encoder is not None else None
    for line in banner_lines(config, info, server_stack.name, url, load_s, encoder):
        stderr_console().print(line, markup=False)


async def _serve_until_shutdown(
    server_stack: ServerStack,
    server: UvicornServer,
    drain: DrainState,
    signals: ShutdownSignals,
    drain_s: float,
) -> int:
    """Serve until told to end or until the engine is gone for good; returns the exit code."""
    if await wait_first(signals.graceful.wait(), server_stack.engine.dead.wait(), server.wait_stopped()) == 1:
        logger.error("the engine is gone; open requests got an error; shutting down")
        await wait_first(signals.graceful.wait(), timeout_s=ENGINE_DEAD_GRACE_S)
        return 1
    drain.begin()
    logger.info("ending: %d requests are open and may finish within %g s", drain.num_open, drain_s)
    await wait_first(drain.wait_empty(), signals.immediate.wait(), timeout_s=drain_s)
    drain.cancel_open()
    await wait_first(drain.wait_empty(), timeout_s=CANCEL_GRACE_S)
    return 0
