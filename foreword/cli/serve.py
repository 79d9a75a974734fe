"""`foreword serve [MODEL]`: the API server in this process, the engine in its own.

Exit codes: 0 after SIGTERM, 130 after Ctrl-C, 1 if the engine died, 2 if it could not start as configured.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from foreword.checkpoint import CheckpointInfo, prepare_checkpoint
from foreword.cli.banner import banner_lines, local_url, unix_address
from foreword.cli.flags import read_config
from foreword.cli.listener import bind, bind_error, bind_unix
from foreword.cli.server_stack import ServerStack
from foreword.cli.startup import startup_line
from foreword.cli.terminal import loading_bar, set_up_logging, stderr_console
from foreword.cli.uvicorn_server import ShutdownSignals, UvicornServer, wait_first
from foreword.config.options import Config
from foreword.engine_client.forkserver import ForkServer
from foreword.server.app import SwappableApp
from foreword.server.http_protocol import uvicorn_config
from foreword.server.lifecycle import DrainState

__all__ = ["run"]

logger = logging.getLogger("foreword.serve")

ENGINE_DEAD_GRACE_S = 2.0  # for clients to get their errors, and monitoring a 503 from /health
CANCEL_GRACE_S = 1.0  # for clients to get the errors of cancelled requests
EXTRA_FILES = 256  # open files besides the connections


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    set_up_logging(config.log_level, config.log_format)
    raise_file_limit(config.max_connections + EXTRA_FILES)
    with bind(config.host, config.port) if config.uds is None else bind_unix(Path(config.uds)) as listener:
        return asyncio.run(_run(prepare_checkpoint(config), listener, args.fork_server))


def raise_file_limit(count: int) -> None:
    """Raise the limit on open files to `count`, or to the hard limit: each connection needs a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    if wanted < count:
        logger.warning(
            "only %d files may be open (ulimit -n), which allows fewer connections than --max-connections",
            hard,
        )


async def _run(prepared: CheckpointInfo, listener: socket.socket, fork_server: ForkServer) -> int:
    """Listen, load, serve; returns the exit code."""
    config, signals, drain = prepared.config, ShutdownSignals(), DrainState()
    signals.install()
    started_s = time.perf_counter()
    async with AsyncExitStack() as stack:
        with loading_bar(f"loading {prepared.path.name}") as progress:
            server_stack = ServerStack(prepared, progress, fork_server)
            await stack.enter_async_context(_kill_on_second_signal(server_stack, signals))
            await stack.enter_async_context(server_stack)
            app = SwappableApp(server_stack.loading_app(drain))
            web_server = UvicornServer(uvicorn_config(app, config, server_stack.request_log), listener)
            try:
                await stack.enter_async_context(web_server)
            except OSError as error:  # another process listens on the bound port
                raise bind_error(error, config.host, config.port) from None
            gc.collect()  # 50 ms, beside the engine's start
            if await wait_first(signals.graceful.wait(), server_stack.start()) == 0:
                if signals.exit_code:
                    startup_line.end()
                    _print_line(config, "foreword serve: interrupted")
                return signals.exit_code
        serving_app = server_stack.serving_app(drain)
        async with serving_app.router.lifespan_context(serving_app):
            app.app = serving_app
            gc.freeze()  # or a full collection would pause every stream
            _print_banner(server_stack, config, listener, time.perf_counter() - started_s)
            return await _serve_until_shutdown(server_stack, web_server, drain, signals, config)


@asynccontextmanager
async def _kill_on_second_signal(server_stack: ServerStack, signals: ShutdownSignals) -> AsyncIterator[None]:
    """On the second SIGTERM, kill the engine instead of waiting for its step, even while it closes."""

    async def kill() -> None:
        await signals.immediate.wait()
        server_stack.engine.skip_drain()

    task = asyncio.create_task(kill(), name="kill on second signal")
    try:
        yield
    finally:
        task.cancel()


def _print_banner(server_stack: ServerStack, config: Config, listener: socket.socket, load_s: float) -> None:
    address = listener.getsockname()
    url = unix_address(config.uds) if config.uds is not None else local_url(config.host, address[1])
    info = server_stack.engine.info
    assert info is not None, "a started engine has info"
    encoder = server_stack.encoder.info if server_stack.encoder is not None else None
    for line in banner_lines(
        config, info, server_stack.name, url, load_s, encoder, server_stack.sampling_defaults
    ):
        _print_line(config, line)


def _print_line(config: Config, line: str) -> None:
    if config.log_format == "json":
        logger.info("%s", line)
    else:
        stderr_console().print(line, markup=False)


async def _serve_until_shutdown(
    server_stack: ServerStack,
    server: UvicornServer,
    drain: DrainState,
    signals: ShutdownSignals,
    config: Config,
) -> int:
    """Serve until a signal, or until the engine is dead; returns the exit code."""
    if await wait_first(signals.graceful.wait(), server_stack.engine.dead.wait(), server.wait_stopped()) == 1:
        logger.error("the engine is dead, its open requests failed; shutting down")
        await wait_first(signals.graceful.wait(), timeout_s=ENGINE_DEAD_GRACE_S)
        return 1
    drain.stopping = True
    if config.drain_delay:
        logger.info("shutting down in %g s: /ready says so, requests are still taken", config.drain_delay)
        await wait_first(
            signals.immediate.wait(), server_stack.engine.dead.wait(), timeout_s=config.drain_delay
        )
    drain.draining = True
    drain_s = config.drain_timeout
    logger.info("shutting down: %d open requests may finish within %g s", drain.num_open, drain_s)
    await wait_first(drain.wait_empty(), signals.immediate.wait(), timeout_s=drain_s)
    drain.cancel_open()
    await wait_first(drain.wait_empty(), timeout_s=CANCEL_GRACE_S)
    return signals.exit_code
