"""Client of the encoder process: fair batching, restarts after crashes. No torch."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import logging
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

from foreword.config.options import Config
from foreword.core.readiness import Readiness
from foreword.embedding.encoder_messages import (
    MAX_BATCH_TOKENS,
    EncodeBatch,
    EncodeBatchFailed,
    EncodeBatchResult,
    EncoderInfo,
    EncoderInput,
    TokenizedPair,
    pack_message,
    read_message_async,
    scalar,
    validate_pairs,
    validate_texts,
)
from foreword.embedding.encoder_tokenizer import EncoderTokenizer
from foreword.errors import ConfigError, EngineDead, ForewordError, InvalidRequest, Overloaded, RequestFailed
from foreword.utils.threads import run_in_own_thread
from foreword.weights.hub import resolve_path
from foreword.workers.pool import spawn

LOG = logging.getLogger(__name__)
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}  # threads that spin would take cores from the engine
CLOSE_TIMEOUT_S = 10.0
MAX_BATCHES_IN_FLIGHT = 2  # one computed, one queued in the process
MAX_INLINE_CHECKS = 64  # inputs; more are checked in a thread
MAX_RESTARTS, RESTART_WINDOW_S = 3, 60.0
START_RETRY_S = 5.0  # pause after a failed start: memory or files may become free


@dataclass(eq=False, slots=True)
class EncodeCall:
    """The inputs of one caller."""

    inputs: Sequence[EncoderInput]
    arrival: int
    served_tag: float  # virtual time at arrival + dispatched tokens
    result: asyncio.Future[list[bytes]]
    num_dispatched: int = 0  # inputs
    is_cancelled: bool = False
    vectors: list[bytes] = field(init=False)  # b"" until computed
    num_missing: int = field(init=False)  # vectors

    def __post_init__(self) -> None:
        self.vectors = [b""] * len(self.inputs)
        self.num_missing = len(self.inputs)

    def __lt__(self, other: EncodeCall) -> bool:
        """Whether this call is served first."""
        return (self.served_tag, self.arrival) < (other.served_tag, other.arrival)


class FairBatcher:
    """A start-time fair queue: the call with the fewest served tokens is next, the oldest among equals.

    A new call starts at the virtual time, the tokens that each call would have under ideal sharing. So it
    does not wait for a long call to finish, and a stream of new calls starves no other.
    """

    def __init__(self) -> None:
        self._heap: list[EncodeCall] = []  # calls with undispatched inputs, and cancelled calls
        self._virtual_time = 0.0
        self._num_calls = 0
        self.num_waiting = 0  # undispatched inputs

    def add(self, inputs: Sequence[EncoderInput], result: asyncio.Future[list[bytes]]) -> EncodeCall:
        """Add a call of at least one input."""
        call = EncodeCall(inputs, self._num_calls, self._virtual_time, result)
        self._num_calls += 1
        self.num_waiting += len(inputs)
        heapq.heappush(self._heap, call)
        return call

    def cancel(self, call: EncodeCall) -> None:
        """Drop the undispatched inputs of a call."""
        if not call.is_cancelled:
            call.is_cancelled = True
            self.num_waiting -= len(call.inputs) - call.num_dispatched

    def next_batch(self, max_tokens: int) -> list[tuple[EncodeCall, int]]:
        """Pairs (call, input index) of up to max_tokens tokens; a longer input forms a batch of its own."""
        batch: list[tuple[EncodeCall, int]] = []
        room = max_tokens
        while self._heap:
            call = heapq.heappop(self._heap)
            if call.is_cancelled:
                continue
            size = len(call.inputs[call.num_dispatched].token_ids)
            if batch and size > room:
                heapq.heappush(self._heap, call)
                break
            room -= size
            batch.append((call, call.num_dispatched))
            self._virtual_time += size / (len(self._heap) + 1)
            call.served_tag += size
            call.num_dispatched += 1
            self.num_waiting -= 1
            if call.num_dispatched < len(call.inputs):
                heapq.heappush(self._heap, call)
        return batch


class EncoderProcess:
    """One encoder process."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def launch(cls, config: Config) -> EncoderProcess:
        """Start a process that loads `config.embedding_model`."""
        process, connection = spawn("foreword.embedding.worker", environment=ENVIRONMENT)
        reader, writer = await asyncio.open_connection(sock=connection)
        writer.write(pack_message(config))
        return cls(process, reader, writer)

    async def wait_ready(self) -> EncoderInfo:
        """Wait until the encoder is loaded. Raises ConfigError or CheckpointError."""
        try:
            message: EncoderInfo | ForewordError = await read_message_async(self._reader)
        except (EOFError, OSError):
            raise ConfigError("the encoder process ended while it was loading; see its log above") from None
        if isinstance(message, ForewordError):
            raise message
        return message

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, batch: EncodeBatch) -> None:
        """Never blocks."""
        self._writer.write(pack_message(batch))

    async def receive(self) -> EncodeBatchResult | EncodeBatchFailed:
        """Raises EOFError or OSError once the process is gone."""
        message: EncodeBatchResult | EncodeBatchFailed = await read_message_async(self._reader)
        return message

    async def stop(self) -> None:
        """Terminate the process and wait for its exit."""
        self._writer.transport.abort()
        self._process.terminate()
        try:
            await run_in_own_thread(self._process.wait, CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await run_in_own_thread(self._process.wait)
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class EncoderClient:
    """Runs an encoder in a process, and restarts it after a crash unless it crashes too often.

    After a crash, inputs in flight are retried one by one; an input that crashes the process again is
    rejected.
    """

    def __init__(self, config: Config) -> None:
        self.info: EncoderInfo | None = None  # set by start()
        self.tokenizer: EncoderTokenizer | None = None  # set by start()
        self.alive = False  # accepts calls; False before start() and after too many crashes
        self._is_up = False  # the process is ready
        self._config = config
        self._batcher = FairBatcher()
        self._open_calls: set[EncodeCall] = set()
        self._in_flight: dict[int, list[tuple[EncodeCall, int]]] = {}
        self._retries: deque[tuple[EncodeCall, int]] = deque()  # inputs in flight at a crash
        self._is_retrying = False  # the batch in flight is a retry
        self._last_batch_id = 0
        self._process: EncoderProcess | None = None
        self._serve_task: asyncio.Task[None] | None = None
        self._crash_times: deque[float] = deque(maxlen=MAX_RESTARTS)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @property
    def readiness(self) -> Readiness:
        """State for health checks."""
        if not self.alive:
            return Readiness("loading" if self.info is None else "dead")
        return Readiness("ok") if self._is_up else Readiness("restarting")

    async def start(self) -> EncoderInfo:
        """Start the process and wait until it is ready. Raises ConfigError or CheckpointError."""
        assert self._config.embedding_model is not None and self._process is None
        path = await run_in_own_thread(resolve_path, self._config.embedding_model)
        self._config = replace(self._config, embedding_model=str(path))
        self._process = await EncoderProcess.launch(self._config)
        try:
            self.info = await self._process.wait_ready()
            self.tokenizer = await run_in_own_thread(EncoderTokenizer.from_directory, Path(path), self.info)
        except BaseException:
            await self._stop_process()
            raise
        self.alive = self._is_up = True
        self._serve_task = asyncio.create_task(self._serve(), name="encoder")
        return self.info

    async def encode(self, token_ids: Sequence[Sequence[int]], pooling: str | None = None) -> list[bytes]:
        """Vectors of texts: float32 [H] as bytes, not normalized; `pooling` None is the checkpoint's.

        Raises InvalidRequest, Overloaded, EngineDead. Cancelling the call drops its waiting inputs.
        """
        info = self._require_running()
        return await self._compute(
            await _check_in_thread(len(token_ids), lambda: validate_texts(info, token_ids, pooling))
        )

    async def score(self, pairs: Sequence[TokenizedPair]) -> list[float]:
        """Scores of pairs (token ids, type ids) from `EncoderTokenizer.encode_pair`. Raises as `encode`."""
        info = self._require_running()
        vectors = await self._compute(await _check_in_thread(len(pairs), lambda: validate_pairs(info, pairs)))
        return [scalar(vector) for vector in vectors]

    async def close(self) -> None:
        """End the process and wait for its exit."""
        self.alive = self._is_up = False
        self._fail_all("the server shuts down")
        if self._serve_task is not None:
            self._serve_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serve_task
        await self._stop_process()

    def _require_running(self) -> EncoderInfo:
        if self.info is None or not self.alive:
            raise EngineDead("the encoder is not running")
        return self.info

    async def _compute(self, inputs: Sequence[EncoderInput]) -> list[bytes]:
        self._admit(len(inputs))
        if not inputs:
            return []
        call = self._batcher.add(inputs, asyncio.get_running_loop().create_future())
        self._open_calls.add(call)
        self._dispatch()
        try:
            return await call.result
        finally:
            self._open_calls.discard(call)
            self._batcher.cancel(call)

    def _admit(self, num_inputs: int) -> None:
        self._require_running()
        limit, waiting = self._config.max_waiting, self._batcher.num_waiting
        if num_inputs > limit:
            raise InvalidRequest(f"{num_inputs} inputs; this server takes at most {limit} at once", "input")
        if waiting + num_inputs > limit:
            raise Overloaded(f"{waiting} inputs wait for the encoder, of at most {limit}; try again later")

    def _dispatch(self) -> None:
        """Send batches while the process has free slots."""
        if not self._is_up:
            return
        while self._retries and self._retries[0][0].result.done():
            self._retries.popleft()
        if self._retries:
            if not self._in_flight:
                self._is_retrying = True
                self._send_batch([self._retries.popleft()])
            return
        while len(self._in_flight) < MAX_BATCHES_IN_FLIGHT:
            batch = self._batcher.next_batch(MAX_BATCH_TOKENS)
            if not batch:
                return
            self._is_retrying = False
            self._send_batch(batch)

    def _send_batch(self, members: list[tuple[EncodeCall, int]]) -> None:
        assert self._process is not None
        self._last_batch_id += 1
        self._in_flight[self._last_batch_id] = members
        inputs = tuple(call.inputs[index] for call, index in members)
        self._process.send(EncodeBatch(self._last_batch_id, inputs))

    def _on_message(self, message: EncodeBatchResult | EncodeBatchFailed) -> None:
        self._crash_times.clear()
        members = self._in_flight.pop(message.batch_id)
        self._dispatch()
        if isinstance(message, EncodeBatchFailed):
            for call, _ in members:
                _fail(call, message.error)
            return
        for (call, index), vector in zip(members, message.vectors, strict=True):
            call.vectors[index] = vector
            call.num_missing -= 1
            if call.num_missing == 0 and not call.result.done():
                call.result.set_result(call.vectors)

    async def _serve(self) -> None:
        """Receive results, and restart the process after crashes, until it crashes too often."""
        try:
            while self._process is not None:
                with contextlib.suppress(EOFError, OSError):
                    while True:
                        self._on_message(await self._process.receive())
                self._is_up = False
                self._requeue_after_crash()
                await self._stop_process()
                await self._restart()
        except Exception:
            LOG.exception("encoder: internal error, giving up")
        finally:
            self.alive = self._is_up = False
            self._fail_all("the encoder crashed and cannot be restarted")

    def _requeue_after_crash(self) -> None:
        """Queue the inputs in flight for a retry, one by one; a retried input fails."""
        for call, index in chain(*self._in_flight.values()):
            if self._is_retrying:
                _fail(call, RequestFailed("the encoder crashed twice on this input"))
            elif not call.is_cancelled:
                self._retries.append((call, index))
        self._in_flight.clear()

    async def _restart(self) -> None:
        """Start the process again; a failed start counts as a crash. Leaves no process after too many."""
        while self._may_restart():
            LOG.error("encoder: process crashed, restarting it")
            try:
                self._process = await EncoderProcess.launch(self._config)
                self.info = await self._process.wait_ready()
            except Exception:
                LOG.exception("encoder: restart failed")
                await self._stop_process()
                await asyncio.sleep(START_RETRY_S)
            else:
                self._is_up = True
                self._dispatch()
                return
        message = "encoder: crashed more than %d times within %g s without a result, giving up"
        LOG.error(message, MAX_RESTARTS, RESTART_WINDOW_S)

    def _may_restart(self) -> bool:
        """Record a crash; returns False after too many recent ones."""
        now = time.monotonic()
        is_full = len(self._crash_times) == MAX_RESTARTS
        may_restart = not is_full or now - self._crash_times[0] >= RESTART_WINDOW_S
        self._crash_times.append(now)
        return may_restart

    def _fail_all(self, reason: str) -> None:
        self._in_flight.clear()
        self._retries.clear()
        for call in self._open_calls:
            self._batcher.cancel(call)
            _fail(call, EngineDead(reason))

    async def _stop_process(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            await process.stop()


async def _check_in_thread(num_inputs: int, check: Callable[[], list[EncoderInput]]) -> list[EncoderInput]:
    """Check many inputs in a thread, to keep the event loop responsive."""
    return await run_in_own_thread(check) if num_inputs > MAX_INLINE_CHECKS else check()


def _fail(call: EncodeCall, error: Exception) -> None:
    if not call.result.done():
        call.result.set_exception(error)
