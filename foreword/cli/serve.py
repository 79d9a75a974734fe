"""`foreword serve [MODEL]`: the API server in this process, each engine in its own.

Exit codes: 0 after SIGTERM, 130 after Ctrl-C, 1 if the engine of the only model died or the event loop hangs
after a signal, 2 if the server could not start as configured.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import gc
import logging
import resource
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from foreword.cli.banner import UNIX, banner_lines, local_url, models_lines
from foreword.cli.configuration import read_config
from foreword.cli.fleet import run_up
from foreword.cli.listener import bind, bind_error, bind_unix
from foreword.cli.startup import startup_line
from foreword.cli.terminal import loading_bar, set_up_logging, stderr_console
from foreword.cli.uvicorn_server import ShutdownSignals, run_uvicorn, wait_first
from foreword.config.options import Config
from foreword.engine_client.forkserver import ForkServer
from foreword.fleet.memory import FleetPlan, plan_server
from foreword.fleet.model_manager import ModelManager
from foreword.server.app import SwappableApp, create_app, loading_app
from foreword.server.health import DrainState, Health
from foreword.server.http.bounded_connections import uvicorn_config
from foreword.server.http.request_log import open_request_log

T = TypeVar("T")
logger = logging.getLogger("foreword.serve")

ENGINE_DEAD_GRACE_S = 2.0  # clients get their errors, monitoring a 503 from /health
CANCEL_GRACE_S = 1.0  # clients get the errors of cancelled requests
LATE_GRACE_S = 1.0  # how much later than planned a drain may end
# A full garbage collection after 700,000 new objects instead of 70,000. One takes 0.3 s beside the objects of
# a large body, and seven ran while it was read.
GC_THRESHOLDS = (700, 10, 100)
CLOSE_LIMIT_S = 30.0  # longest time in which engines, encoders and workers end
EXTRA_FILES = 256  # open files besides the connections


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    if config.ray is not None:
        return run_up(config)
    set_up_logging(config.log_level, config.log_format)
    raise_file_limit(config.max_connections + EXTRA_FILES)
    with bind(config.host, config.port) if config.uds is None else bind_unix(Path(config.uds)) as listener:
        try:
            return asyncio.run(_serve(config, listener, args.fork_server))
        finally:
            faulthandler.cancel_dump_traceback_later()  # armed by ShutdownSignals


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


async def _serve(config: Config, listener: socket.socket, fork_server: ForkServer) -> int:
    """Listen, load what the server cannot be without, serve; returns the exit code."""
    signals = ShutdownSignals(config.drain_delay + config.drain_timeout + CANCEL_GRACE_S + LATE_GRACE_S)
    drain = DrainState()
    loading_health = Health(drain, answers_requests=False)
    signals.install()
    started_s = time.perf_counter()
    async with AsyncExitStack() as stack:
        request_log = await stack.enter_async_context(open_request_log(config))
        app = SwappableApp(loading_app(loading_health, config, request_log))
        web_server = run_uvicorn(uvicorn_config(app, config, request_log), listener)
        try:
            web_task = await stack.enter_async_context(web_server)
        except OSError as error:  # another process listens on the bound port
            raise bind_error(error, config.host, config.port) from None
        with loading_bar("loading the model") as progress:
            plan = await _until_signal(plan_server(config, fork_server), signals)
            if plan is None:
                return _interrupted(config, signals)
            manager = ModelManager(config, plan, fork_server, progress)
            loading_health.models = manager
            await stack.enter_async_context(_call_on_second_signal(manager.skip_drain, signals))
            await stack.enter_async_context(manager)
            gc.collect()  # 50 ms, beside the engine's start
            if await wait_first(signals.graceful.wait(), manager.wait_ready()) == 0:
                return _interrupted(config, signals)
        serving_app = create_app(manager.models, Health(drain, manager), drain, request_log)
        async with serving_app.router.lifespan_context(serving_app):
            app.app = serving_app
            gc.freeze()  # or a full collection would pause every stream
            gc.set_threshold(*GC_THRESHOLDS)
            for line in _ready_lines(config, manager, plan, listener, time.perf_counter() - started_s):
                _print_line(config, line)
            try:
                return await _serve_until_shutdown(manager.dead, web_task, drain, signals, config)
            finally:
                signals.extend_limit(CLOSE_LIMIT_S)


async def _until_signal(work: Coroutine[Any, Any, T], signals: ShutdownSignals) -> T | None:
    """The result of `work`; None, with `work` cancelled, at a signal."""
    task = asyncio.ensure_future(work)

    async def wait() -> None:
        await task

    return None if await wait_first(signals.graceful.wait(), wait()) == 0 else task.result()


def _interrupted(config: Config, signals: ShutdownSignals) -> int:
    """End the start-up line; returns the exit code."""
    signals.extend_limit(CLOSE_LIMIT_S)
    startup_line.end()
    if signals.exit_code:
        _print_line(config, "foreword serve: interrupted")
    return signals.exit_code


@asynccontextmanager
async def _call_on_second_signal(kill: Callable[[], None], signals: ShutdownSignals) -> AsyncIterator[None]:
    """On the second SIGTERM, kill engines instead of waiting for their steps, even while they close."""

    async def wait_and_kill() -> None:
        await signals.immediate.wait()
        kill()

    task = asyncio.create_task(wait_and_kill(), name="kill on second signal")
    try:
        yield
    finally:
        task.cancel()


def _ready_lines(
    config: Config, manager: ModelManager, plan: FleetPlan, listener: socket.socket, load_s: float
) -> Iterable[str]:
    model, url = manager.alone, _url(config, listener)
    if model is None:
        return models_lines(config, plan, url)
    return banner_lines(
        config,
        model.info(),
        model.model_name,
        url,
        load_s,
        None if model.encoder is None else model.encoder.info,
        str(model.tokenizer.generation_config),
        bool(model.tokenizer.chat_template),
    )


def _url(config: Config, listener: socket.socket) -> str:
    if config.uds is not None:
        return UNIX + config.uds
    return local_url(config.host, listener.getsockname()[1])


def _print_line(config: Config, line: str) -> None:
    if config.log_format == "json":
        logger.info("%s", line)
    else:
        stderr_console().print(line, markup=False)


async def _serve_until_shutdown(
    dead: asyncio.Event,
    server: asyncio.Task[None],
    drain: DrainState,
    signals: ShutdownSignals,
    config: Config,
) -> int:
    """Serve until a signal, or until the engine is `dead`; returns the exit code."""
    if await wait_first(signals.graceful.wait(), dead.wait(), asyncio.wait((server,))) == 1:
        logger.error("the engine is dead, its open requests failed; shutting down")
        await wait_first(signals.graceful.wait(), timeout_s=ENGINE_DEAD_GRACE_S)
        return 1
    drain.stopping = True
    if config.drain_delay:
        logger.info("shutting down in %g s: /ready says so, requests are still taken", config.drain_delay)
        await wait_first(signals.immediate.wait(), dead.wait(), timeout_s=config.drain_delay)
    drain.draining = True
    drain_s = config.drain_timeout
    logger.info("shutting down: %d open requests may finish within %g s", drain.num_open, drain_s)
    await wait_first(drain.wait_empty(), signals.immediate.wait(), timeout_s=drain_s)
    drain.cancel_open()
    await wait_first(drain.wait_empty(), timeout_s=CANCEL_GRACE_S)
    return signals.exit_code
