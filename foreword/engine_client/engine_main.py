"""The engine process: requests come in over a socket, one report per step goes out.

The fork server starts it for `engine_client.engine_process.EngineProcess`; it exits when the client hangs up.
"""

from __future__ import annotations

import errno
import faulthandler
import logging
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import NoReturn

from foreword.config.lora import AdapterInfo
from foreword.config.options import Config
from foreword.core.request import Request
from foreword.core.structured_output import Vocabulary
from foreword.engine.engine import Engine
from foreword.engine.loader import describe_model, load
from foreword.engine_client.heartbeat import HeartbeatPage
from foreword.engine_client.messages import (
    SHARED_FDS,
    AdapterReply,
    AddImage,
    DescribeModels,
    DropImage,
    EngineReady,
    EngineStartFailed,
    Init,
    LoadAdapter,
    LoadProgress,
    ModelDescriptions,
    RemoveRequest,
    SendBlocks,
    SetThreads,
    UnloadAdapter,
)
from foreword.errors import ConfigError, ForewordError, RequestFailed
from foreword.planning.hardware import apply_placement
from foreword.planning.memory_plan import ModelDescription
from foreword.utils.logging import log_model, set_up_logging
from foreword.utils.mapped_memory import MemoryFile

logger = logging.getLogger(__name__)

IDLE_CHECK_S = 1.0  # idle time after which the engine checks its invariants


def main(fd: int, prepare: Callable[[Engine], None] = lambda engine: None) -> int:
    """Serve the client at the other end of `fd`; returns the exit code.

    prepare  called with the engine before its first step; tests inject faults
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client decides when to stop
    faulthandler.enable()  # a stack trace of crashes in native code
    try:
        page, kv_memory = _receive_shared(fd)
        with page, Connection(fd) as connection:
            return _run(connection, page, kv_memory, prepare)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return 0  # the client hung up
    except Exception:
        logger.exception("engine: exits after an error that may have broken its state")
        return 1


def _receive_shared(fd: int) -> tuple[HeartbeatPage, MemoryFile | None]:
    """Receive what the client shares before all messages."""
    with socket.socket(fileno=fd) as ours:
        try:
            message, fds, _, _ = socket.recv_fds(ours, len(SHARED_FDS), 2)
        finally:
            ours.detach()
    if not message:
        raise EOFError
    return HeartbeatPage(fds[0]), MemoryFile(fds[1]) if len(fds) > 1 else None


def _run(
    connection: Connection,
    page: HeartbeatPage,
    kv_memory: MemoryFile | None,
    prepare: Callable[[Engine], None],
) -> int:
    page.start()
    init: Init | DescribeModels = connection.recv()
    if isinstance(init, DescribeModels):
        connection.send(ModelDescriptions(tuple(map(_describe_model, init.configs))))
        return 0
    set_up_logging(init.config.log_level, "%(levelname)s %(name)s: %(message)s", init.config.log_format)
    log_model.set(init.log_model)

    def on_progress(stage: str, done: int, total: int) -> None:
        connection.send(LoadProgress(stage, done, total))

    try:
        apply_placement(init.config)
        restored = (init.resolved, on_progress, init.timings, init.adapters, kv_memory)
        engine = load(init.config, init.never_sampled_ids, *restored)
        if init.config.drafts_text:
            engine.set_vocabulary(connection.recv())
    except ConnectionError:  # the client hung up
        raise
    except (ForewordError, OSError, MemoryError) as error:
        logger.debug("engine: cannot start", exc_info=True)
        connection.send(EngineStartFailed(_describe_start_error(error)))
        return 1
    prepare(engine)
    engine.on_batch = page.set_requests
    numbers = {plugin.name: number for number, plugin in enumerate(init.config.drafter_plugins(), 1)}
    engine.proposer.on_timed_call = lambda name: page.set_plugin(numbers.get(name or "", 0))
    page.set_idle()
    connection.send(EngineReady(engine.info, engine.proposer.timings))
    try:
        _serve(engine, connection, page)
    finally:
        engine.close()


def _describe_model(config: Config) -> ModelDescription | ForewordError:
    try:
        apply_placement(replace(config, cpus=None))
        return describe_model(config)
    except (ForewordError, OSError, MemoryError) as error:
        return _describe_start_error(error)


def _describe_start_error(error: ForewordError | OSError | MemoryError) -> ForewordError:
    """An error of one line, for the client."""
    if isinstance(error, ForewordError):
        return error
    if isinstance(error, MemoryError) or error.errno == errno.ENOMEM:
        return ConfigError("the engine cannot start: out of memory; a smaller model would need less")
    place = f"{error.filename}: " if error.filename is not None else ""
    return ConfigError(f"the engine cannot start: {place}{error.strerror or error}")


def _serve(engine: Engine, connection: Connection, page: HeartbeatPage) -> NoReturn:
    """Step while there is work, else wait for messages; EOFError ends it."""
    messages = select.poll()  # Connection.poll() makes one for each call
    messages.register(connection, select.POLLIN)
    while True:
        if engine.idle:
            page.set_idle()
            if not messages.poll(IDLE_CHECK_S * 1000):
                engine.check()
                engine.proposer.prepare()
                messages.poll()
        while messages.poll(0):
            reply = _handle(engine, connection.recv(), page)
            if reply is not None:
                connection.send(reply)
        page.set_busy()
        connection.send(engine.step())


def _handle(
    engine: Engine,
    message: Request
    | RemoveRequest
    | Vocabulary
    | AddImage
    | DropImage
    | LoadAdapter
    | UnloadAdapter
    | SetThreads
    | SendBlocks,
    page: HeartbeatPage,
) -> AdapterReply | None:
    # A crash blames the next request: vocabulary and images precede the request that needs them.
    adds = isinstance(message, Request | Vocabulary | AddImage)
    page.set_busy((engine.num_submitted,) if adds else ())
    if isinstance(message, Request):
        engine.submit(message)
    elif isinstance(message, Vocabulary):
        engine.set_vocabulary(message)
    elif isinstance(message, AddImage):
        engine.encoder.add_pixels(message.digest, message.pixels)
    elif isinstance(message, DropImage):
        engine.encoder.drop_pixels(message.digest)
    elif isinstance(message, SetThreads):
        engine.set_threads(message.num_threads)
    elif isinstance(message, LoadAdapter | UnloadAdapter):
        return AdapterReply(message.call, _change_adapters(engine, message))
    elif isinstance(message, SendBlocks):
        engine.request_blocks()
    else:
        engine.remove(message.request_id, message.num_tokens)
    return None


def _change_adapters(
    engine: Engine, message: LoadAdapter | UnloadAdapter
) -> AdapterInfo | ForewordError | None:
    try:
        if isinstance(message, LoadAdapter):
            return engine.load_adapter(message.path)
        engine.unload_adapter(message.digest)
    except ForewordError as error:
        return error
    except Exception as error:  # whatever its files hold, the other requests go on
        logger.exception("engine: an adapter could not be changed")
        return RequestFailed(f"the adapter cannot be loaded: {error or type(error).__name__}")
    return None
