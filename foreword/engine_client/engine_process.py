"""The client's end of one engine process, and the open requests, which end with it. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import pickle
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

from foreword.core.outputs import ErrorEvent, Event, StepReport, StepStats
from foreword.core.request import Request
from foreword.core.structured_output import Vocabulary
from foreword.engine_client.base import PendingCalls, is_last
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.heartbeat import HeartbeatPage, read_proc_stat
from foreword.engine_client.messages import SHARED_FDS, RemoveRequest, SentImages
from foreword.errors import ConfigError, EngineDead, RequestFailed
from foreword.utils.threads import run_in_own_thread

logger = logging.getLogger(__name__)

EXIT_TIMEOUT_S: Final = 10.0
EXIT_CODE_TIMEOUT_S: Final = 1.0  # limits the fork server's report of an exit code
POLL_S: Final = 0.05
NO_HEARTBEAT_S: Final = 1.0  # age of a heartbeat at which an engine would not notice a hang-up
READ_BYTES: Final = 1 << 18  # read at once
# A message follows its length, as multiprocessing's Connection has it at the other end.
LENGTH: Final = struct.Struct("!i")
LONG_LENGTH: Final = struct.Struct("!Q")  # follows LENGTH = LONG_MESSAGE
LONG_MESSAGE: Final = -1
MAX_SHORT_BYTES: Final = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class SendFailed:
    """Delivered to on_message: a message could not be pickled. Nothing after it is sent."""

    message: Any
    error: Exception


class KVMemory:
    """A file in memory for the KV cache of successive engines, empty until the first has sized it."""

    def __init__(self) -> None:
        """Raises ConfigError."""
        try:
            self.fd = os.memfd_create("foreword-kv-cache", os.MFD_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"there is no memory file for the KV cache: {error.strerror or error}"
            ) from error

    def clear(self) -> None:
        """Begin with an empty file: an engine that cannot be killed may still write to the old one.

        Raises ConfigError, and keeps the old file for another attempt.
        """
        fd = KVMemory().fd
        self.close()
        self.fd = fd

    def close(self) -> None:
        os.close(self.fd)


class EngineProcess:
    """One engine over a socket pair. A thread writes, so the event loop never waits; it reads itself.

    A thread that read would be woken for each step, and then wake the loop.
    """

    def __init__(
        self,
        pid: int,
        sock: socket.socket,
        heartbeat: HeartbeatPage,
        on_message: Callable[[EngineProcess, Any], None],
    ) -> None:
        self.pid = pid
        self.heartbeat = heartbeat
        self.exited = asyncio.Event()  # the engine hung up, and all its messages are delivered
        self.ready_s = float("inf")  # time.monotonic() when it became ready
        self.has_vocabulary = False
        self.exit_reason: str | None = None
        self.exit_code: int | None = None  # negative for a signal; None: unknown, or it has not ended
        self._is_reaping = self._is_reaped = False
        self._on_message = on_message  # called in the event loop
        self._socket = sock
        self._received = bytearray()  # the beginning of a message
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._loop = asyncio.get_running_loop()
        self._writer = threading.Thread(target=self._write, name="engine-write", daemon=True)
        self._writer.start()
        self._loop.add_reader(sock, self._on_readable)

    @classmethod
    async def launch(
        cls,
        fork_server: ForkServer,
        on_message: Callable[[EngineProcess, Any], None],
        kv_memory: KVMemory | None = None,
    ) -> EngineProcess:
        """Start a process. Raises ConfigError."""
        with contextlib.ExitStack() as stack:
            try:
                ours, theirs = map(stack.enter_context, socket.socketpair())
                page = stack.enter_context(HeartbeatPage.create())
                socket.send_fds(ours, [SHARED_FDS], [page.fd, *([] if kv_memory is None else [kv_memory.fd])])
                pid = await fork_server.spawn(theirs.fileno())
            except OSError as error:
                raise ConfigError(f"the engine process could not be started: {error}") from error
            theirs.close()
            stack.pop_all()
        return cls(pid, ours, page, on_message)

    def send(self, message: Any | None, make_first: Callable[[], Any] | None = None) -> None:
        """Queue a message. `make_first` runs in the write thread; its result is sent before the message.

        None: that result alone is sent.
        """
        self._outbox.put((message, make_first))

    def kill(self, reason: str) -> None:
        """Kill the process group and hang up."""
        if self.exited.is_set():
            return
        self.exit_reason = self.exit_reason or reason
        self._kill()
        self._disconnect()  # abandons a process that cannot die because its device hangs

    def skip_wait(self) -> None:
        """Kill a process that close() waits for."""
        if not self._is_reaped:
            self._kill()

    async def reap(self, fork_server: ForkServer, timeout_s: float = EXIT_CODE_TIMEOUT_S) -> str:
        """Wait for the exit of a process that hung up, and free all but its page; returns the exit reason."""
        if self.exit_reason is not None and self._is_reaping:
            return self.exit_reason
        self._is_reaping = True
        self._outbox.put(None)
        code = await fork_server.exit_code(self.pid, timeout_s)
        if code is None:
            self._kill()
            code = await self._wait_killed(fork_server)
        self._is_reaped, self.exit_code = True, code
        await run_in_own_thread(self._writer.join)
        self._loop.remove_reader(self._socket)
        self._socket.close()
        self.heartbeat.close()
        self.exit_reason = self.exit_reason or _describe_exit(code)
        return self.exit_reason

    async def _wait_killed(self, fork_server: ForkServer) -> int | None:
        """Wait for the exit: freeing much memory takes a while. A fork server that hangs is replaced."""
        for _ in range(int(EXIT_TIMEOUT_S / POLL_S)):
            if _has_exited(self.pid):
                code = await fork_server.exit_code(self.pid, EXIT_CODE_TIMEOUT_S)
                if code is None:
                    fork_server.reset()
                return code
            await asyncio.sleep(POLL_S)
        return None

    async def close(self, fork_server: ForkServer, force: bool = False) -> None:
        """Hang up and wait for the exit; kill the process if it is unresponsive."""
        if force or self.is_unresponsive():
            self.kill("it did not answer at shutdown")
        self._disconnect()
        await self.exited.wait()
        await self.reap(fork_server, EXIT_TIMEOUT_S)

    def is_unresponsive(self) -> bool:
        """Whether the heartbeat stopped."""
        heartbeat_s = self.heartbeat.read().heartbeat_s
        return bool(heartbeat_s) and time.monotonic() - heartbeat_s >= NO_HEARTBEAT_S

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def _disconnect(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        """The write thread."""
        while (item := self._outbox.get()) is not None:
            message, make_first = item
            try:
                messages = [None if make_first is None else make_first(), message]
                pickles = [ForkingPickler.dumps(each) for each in messages if each is not None]
            except Exception as error:
                logger.exception("client: a %s for the engine cannot be pickled", type(message).__name__)
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    self._loop.call_soon_threadsafe(self._on_message, self, SendFailed(message, error))
                return
            try:
                for data in pickles:
                    is_long = len(data) > MAX_SHORT_BYTES
                    long_length = LONG_LENGTH.pack(len(data)) if is_long else b""
                    self._socket.sendall(LENGTH.pack(LONG_MESSAGE if is_long else len(data)) + long_length)
                    self._socket.sendall(data)
            except OSError:
                return  # _on_readable notices the end of the engine

    def _on_readable(self) -> None:
        """Deliver the messages that are complete; at the end of the engine, perhaps in one's middle, stop."""
        try:
            data = self._socket.recv(READ_BYTES, socket.MSG_DONTWAIT)  # the write thread may wait, this not
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self._received += data
        try:
            messages = [pickle.loads(each) for each in self._pop_complete()]
        except Exception:
            logger.exception("client: a message of the engine cannot be unpickled")
            messages, data = [], b""
        for message in messages:
            self._loop.call_soon(self._on_message, self, message)
        if not data:
            self._loop.remove_reader(self._socket)
            self._loop.call_soon(self.exited.set)

    def _pop_complete(self) -> Iterator[bytes]:
        """The received messages, each after its length, without it."""
        received, start = self._received, 0
        while len(received) >= start + LENGTH.size:
            (length,), head = LENGTH.unpack_from(received, start), LENGTH.size
            if length == LONG_MESSAGE:
                if len(received) < start + head + LONG_LENGTH.size:
                    break
                (length,), head = LONG_LENGTH.unpack_from(received, start + head), head + LONG_LENGTH.size
            end = start + head + length
            if len(received) < end:
                break
            yield bytes(received[start + head : end])
            start = end
        del received[:start]


def _has_exited(pid: int) -> bool:
    """Whether the process is gone, or a zombie."""
    try:
        os.kill(pid, 0)
        return read_proc_stat(pid)[0] == "Z"
    except OSError:
        return True


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "exit code unknown"
    if code >= 0:
        return f"exit code {code}; see its log above"
    name = signal.strsignal(-code) or "unknown signal"
    return f"signal {-code} ({name})" + ("; out of memory?" if -code == signal.SIGKILL else "")


class _OpenRequest(NamedTuple):
    request: Request
    arrival: int  # index among the requests sent to the process
    on_event: Callable[[Event], None]


class ProcessSession:
    """Sends requests and passes their events on."""

    def __init__(self, process: EngineProcess, vocabulary: Callable[[], Vocabulary]) -> None:
        """vocabulary  called in a thread, with the first grammar or by send_vocabulary()"""
        self.process = process
        self.calls = PendingCalls()
        self.stats = StepStats()
        self._vocabulary = vocabulary
        self._has_vocabulary = False
        self._images = SentImages()
        self._open: dict[str, _OpenRequest] = {}
        self._num_sent = 0

    def __len__(self) -> int:
        """Number of open requests."""
        return len(self._open)

    def send_vocabulary(self) -> None:
        """Before the first request, if the engine waits for it."""
        self._has_vocabulary = True
        self.process.send(None, self._vocabulary)

    def submit(self, request: Request, on_event: Callable[[Event], None]) -> None:
        self._open[request.id] = _OpenRequest(request, self._num_sent, on_event)
        self._num_sent += 1
        images, bare = self._images.add(request)
        for image in images:
            self.process.send(image)
        needs_vocabulary = request.params.structured is not None and not self._has_vocabulary
        self._has_vocabulary = self._has_vocabulary or needs_vocabulary
        self.process.send(bare, self._vocabulary if needs_vocabulary else None)

    def remove(self, request_id: str, num_tokens: int | None) -> None:
        """End a request, if it is open."""
        opened = self._open.get(request_id)
        if opened is not None:
            self.process.send(RemoveRequest(request_id, num_tokens))
            self._end(opened.request)

    def _end(self, request: Request) -> None:
        del self._open[request.id]
        for message in self._images.remove(request):
            self.process.send(message)

    def on_report(self, report: StepReport) -> None:
        for event in report.events:
            opened = self._open.get(event.request_id)
            if opened is None:  # removed meanwhile
                continue
            if is_last(event):
                self._end(opened.request)
            opened.on_event(event)

    def on_send_failed(self, failure: SendFailed) -> None:
        """Fail the request of the message; end the engine, whose arrival numbers differ now."""
        name = type(failure.error).__name__
        message = failure.message
        if isinstance(message, Request) and (opened := self._open.pop(message.id, None)) is not None:
            error = RequestFailed(f"the request could not be sent to the engine ({name})")
            opened.on_event(ErrorEvent(message.id, error))
        self.process.kill(f"a message to it could not be sent ({name})")

    def running_ids(self) -> frozenset[str]:
        """Open requests in the current or last batch; consistent once the process is gone."""
        arrivals = frozenset(self.process.heartbeat.busy_requests())
        return frozenset(name for name, opened in self._open.items() if opened.arrival in arrivals)

    def close(self, error: EngineDead) -> None:
        """End what is open."""
        self.calls.fail_all(RequestFailed("the engine ended meanwhile: try again"))
        while self._open:  # a listener may remove others
            request_id = next(iter(self._open))
            self._open.pop(request_id).on_event(ErrorEvent(request_id, error))
