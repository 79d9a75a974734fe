"""The pool of processes that decode pictures: what a file does to a decoder happens there, and costs only its own request.

Nothing that a worker says is trusted further than it must be: no pickles, a size within the limits, as many pixels as belong
to it; what else the engine is told follows from these, the digest included.
"""

from __future__ import annotations

import json
import math
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, Final, TypeVar

from foreword.core.images import PromptImage
from foreword.errors import InvalidRequest, Overloaded, RequestFailed, ShuttingDown
from foreword.multimodal import limits
from foreword.multimodal.base import ImageProcessor
from foreword.multimodal.decode_worker import PIXELS, READY, SIZE
from foreword.multimodal.limits import MediaLimits

__all__ = ["ImageDecodePool"]

T = TypeVar("T")

WORKER: Final = ("-m", "foreword.multimodal.decode_worker")
MAX_REPLY_BYTES: Final = 1 << 16
BROKEN: Final = "it is broken in a way that ends the process which decodes it"


class ImageDecodePool:
    """Prepares pictures for one model, as many at a time as there are workers. May be used from any thread."""

    def __init__(
        self, processor: ImageProcessor, media_limits: MediaLimits, num_workers: int = limits.NUM_WORKERS
    ) -> None:
        self._workers = [_Worker(processor, media_limits) for _ in range(num_workers)]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def preprocess(self, data: bytes, where: str) -> PromptImage:
        """From the bytes of a file.

        Raises InvalidRequest, which names the field `where` and says why; Overloaded if too many wait, or the worker's end says
        nothing about the picture; RequestFailed if no worker can be had; ShuttingDown after `close`.
        """
        with self._acquire_worker(where) as worker:
            return worker.preprocess(data, where)

    def pixel_bytes(self, data: bytes, where: str) -> int:
        """Bytes that the pixels take, as the file's head says, before it is known how it is to be turned. Raises as prepare()."""
        with self._acquire_worker(where) as worker:
            return worker.pixel_bytes(data, where)

    def close(self) -> None:
        """End the workers; pictures that they have are given up."""
        for worker in self._workers:
            worker.close()

    @contextmanager
    def _acquire_worker(self, where: str) -> Iterator[_Worker]:
        try:
            worker = self._idle.get(timeout=limits.QUEUE_TIMEOUT_S)
        except queue.Empty:
            raise Overloaded(f"{where}: too many pictures wait to be decoded", where) from None
        try:
            yield worker
        finally:
            self._idle.put(worker)


class _Worker:
    """One worker process, started when it is needed. One thread at a time uses it; `close` may come from another."""

    def __init__(self, processor: ImageProcessor, media_limits: MediaLimits) -> None:
        self._processor = processor
        self._limits = media_limits
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._lock = threading.Lock()
        self._closed = False

    def preprocess(self, data: bytes, where: str) -> PromptImage:
        return self._request(PIXELS, data, where, self._receive_image)

    def pixel_bytes(self, data: bytes, where: str) -> int:
        return self._request(SIZE, data, where, self._pixel_bytes)

    def _request(
        self,
        command: bytes,
        data: bytes,
        where: str,
        read_reply: Callable[[Mapping[str, Any], Connection], T],
    ) -> T:
        """What `read` makes of the answer. Raises as Workers.prepare()."""
        with self._lock:
            connection = self._connect()
            try:
                connection.send_bytes(command)
                connection.send_bytes(data)
                head = json.loads(self._receive(connection, MAX_REPLY_BYTES))
                if "reason" not in head:
                    return read_reply(head, connection)
            except TimeoutError:
                raise self._exit_error(where, self._reap(kill=True)) from None
            except (EOFError, OSError):
                raise self._exit_error(where, self._reap()) from None
            except (
                BaseException
            ):  # an interrupt, too: what the worker still says must not answer the next picture
                self._reap(kill=True)
                raise
            raise InvalidRequest(f"{where}: {head['reason']}", where)

    def close(self) -> None:
        self._closed = True
        if self._process is not None:
            self._process.kill()  # whoever waits for it goes on
        with self._lock:
            if self._connection is not None:
                self._reap(kill=True)

    def _receive_image(self, reply: Mapping[str, Any], connection: Connection) -> PromptImage:
        height, width = self._check_size(reply)
        num_bytes = math.prod(self._processor.layout(height, width).shape)
        return self._processor.make_image((height, width), self._receive(connection, num_bytes))

    def _pixel_bytes(self, reply: Mapping[str, Any], _: Connection) -> int:
        """Upright or turned, whichever is more."""
        height, width = self._check_size(reply)
        return max(
            math.prod(self._processor.layout(*size).shape) for size in ((height, width), (width, height))
        )

    def _check_size(self, reply: Mapping[str, Any]) -> tuple[int, int]:
        height, width = reply["size"]
        assert min(height, width) > 0 and height * width <= self._limits.max_pixels, (
            "a worker that says what it may not"
        )
        return height, width

    def _receive(self, connection: Connection, max_bytes: int) -> bytes:
        """One message. Raises EOFError or OSError where the worker falls, TimeoutError where it hangs."""
        if not connection.poll(limits.DECODE_WALL_S):
            raise TimeoutError
        return connection.recv_bytes(max_bytes)

    def _connect(self) -> Connection:
        """To a process that is alive: one that ended while nobody needed it is replaced."""
        if self._closed:
            raise ShuttingDown("the server is about to end")
        if self._connection is not None and self._process is not None and self._process.poll() is not None:
            self._reap()
        return self._connection or self._start()

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        command = [sys.executable, *WORKER, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,
            )
        self._connection = Connection(ours.detach())
        try:
            self._connection.send((self._processor, self._limits))
            if (
                self._connection.poll(limits.START_WALL_S)
                and self._connection.recv_bytes(MAX_REPLY_BYTES) == READY
            ):
                return self._connection
        except (EOFError, OSError):
            pass
        self._reap(kill=True)
        raise RequestFailed("the process that decodes pictures does not start; its last words are above")

    def _exit_error(self, where: str, exit_code: int) -> InvalidRequest | Overloaded | ShuttingDown:
        """Only the limits of a worker, and what it makes of a file, speak against the picture."""
        if self._closed:
            return ShuttingDown("the server is about to end")
        if exit_code == -signal.SIGPROF:
            return InvalidRequest(f"{where}: it takes more than {limits.DECODE_CPU_S:g} s to decode", where)
        if exit_code == -signal.SIGKILL:  # by us, who waited long enough, or by a machine without memory
            return Overloaded(f"{where}: the machine is too busy to decode it; try again later", where)
        return InvalidRequest(f"{where}: {BROKEN}", where)

    def _reap(self, kill: bool = False) -> int:
        """Clear away a process that is of no use any more; returns its exit code."""
        assert self._process is not None and self._connection is not None
        self._connection.close()
        self._connection = None
        if kill:
            self._process.kill()
        return self._process.wait()
