"""The encoder as an asyncio program sees it. Nothing here imports torch.

The encoder's process as its parent sees it. No torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from foreword.config.options import Config
from foreword.core.health import Readiness
from foreword.embedding.batcher import EncodeCall, FairBatcher
from foreword.embedding.messages import (
    MAX_BATCH_TOKENS,
    EncodeBatch,
    EncodeBatchFailed,
    EncodeBatchResult,
    EncoderInfo,
    EncoderInput,
    EncoderReady,
    EncoderStartFailed,
    TokenizedPair,
    pack_message,
    read_message_async,
    validate_pairs,
    validate_texts,
)
from foreword.embedding.tokenizer import EncoderTokenizer
from foreword.embedding.vectors import scalar
from foreword.errors import ConfigError, EngineDead, InvalidRequest, Overloaded, RequestFailed
from foreword.models.hub import resolve_path

__all__ = ["EncoderClient", "EncoderInfo", "EncoderProcess", "EncoderTokenizer"]

CLOSE_TIMEOUT_S = 10.0
ENVIRONMENT = {
    "OMP_WAIT_POLICY": "PASSIVE"
}  # torch's threads that spin take the cores from those they wait for


class EncoderProcess:
    """One process, from its start to its end."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer

    @classmethod
    async def launch(cls, config: Config) -> EncoderProcess:
        """Start a process that loads `config.embedding_model`."""
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "foreword.embedding.worker", str(theirs.fileno())]
        environment = {**ENVIRONMENT, **os.environ}
        with theirs:
            process = subprocess.Popen(
                command,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,
                env=environment,
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(pack_message(config))
        return cls(process, reader, writer)

    async def wait_ready(self) -> EncoderInfo:
        """Wait until it takes work. Raises ConfigError or CheckpointError if it never will."""
        try:
            message: EncoderReady | EncoderStartFailed = await read_message_async(self._reader)
        except (EOFError, OSError):
            raise ConfigError(
                "the encoder's process ended while it was loading; its last words are above"
            ) from None
        if isinstance(message, EncoderStartFailed):
            raise message.error
        return message.info

    def send(self, batch: EncodeBatch) -> None:
        """Never waits: what it does not take yet lies in a buffer."""
        self._writer.write(pack_message(batch))

    async def receive(self) -> EncodeBatchResult | EncodeBatchFailed:
        """Raises EOFError or OSError once it is gone."""
        message: EncodeBatchResult | EncodeBatchFailed = await read_message_async(self._reader)
        return message

    async def stop(self) -> None:
        """Make an end of it, whatever it does, and wait until it is gone."""
        self._writer.transport.abort()
        self._process.terminate()  # it has nothing to lose
        try:
            await asyncio.to_thread(self._process.wait, CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


LOG = logging.getLogger(__name__)
MAX_BATCHES_IN_FLIGHT = (
    2  # batches that are with the process: while one is computed, the next one waits there
)
MAX_INLINE_CHECKS = 64  # inputs whose check others would notice
MAX_RESTARTS, RESTART_WINDOW_S = 3, 60.0


class EncoderClient:
    """Runs an encoder in a process of its own. When it dies it is started again, unless it does so endlessly.

    Nobody who waits hears of a death: what the process was working on is given to its successor, each input alone, and only
    one that takes that one down as well is refused.

    info   None until start() returned
    texts  makes token ids of texts; None until start() returned
    alive  work is taken; false before the first start, and for good once the process cannot be kept up
    """

    def __init__(self, config: Config) -> None:
        self.info: EncoderInfo | None = None
        self.tokenizer: EncoderTokenizer | None = None
        self.alive = False
        self._is_up = False
        self._config = config
        self._batcher = FairBatcher()
        self._open_calls: set[EncodeCall] = set()
        self._in_flight: dict[int, list[tuple[EncodeCall, int]]] = {}
        self._retries: deque[tuple[EncodeCall, int]] = deque()  # inputs that a process died with
        self._is_retrying = False  # the process works on one of those
        self._last_batch_id = 0
        self._process: EncoderProcess | None = None
        self._serve_task: asyncio.Task[None] | None = None
        self._crash_times: deque[float] = deque(maxlen=MAX_RESTARTS)

    @property
    def readiness(self) -> Readiness:
        """Whether it could work now."""
        if not self.alive:
            return Readiness("loading" if self.info is None else "dead")
        return Readiness("ok") if self._is_up else Readiness("restarting")

    async def start(self) -> EncoderInfo:
        """Start the process; return once it can take work. Raises ConfigError or CheckpointError."""
        assert self._config.embedding_model is not None and self._process is None
        path = await asyncio.to_thread(resolve_path, self._config.embedding_model)
        self._config = replace(self._config, embedding_model=str(path))
        self._process = await EncoderProcess.launch(self._config)
        try:
            self.info = await self._process.wait_ready()
            self.tokenizer = await asyncio.to_thread(EncoderTokenizer.from_directory, Path(path), self.info)
        except BaseException:
            await self._stop_process()
            raise
        self.alive = self._is_up = True
        self._serve_task = asyncio.create_task(self._serve(), name="encoder")
        return self.info

    async def encode(self, token_ids: Sequence[Sequence[int]], pooling: str | None = None) -> list[bytes]:
        """The vector of each text: float32 [H] as bytes, pooled as the checkpoint does it or as `pooling` says, not normalized.

        Raises InvalidRequest, Overloaded, EngineDead. A caller that is cancelled waits for nothing more.
        """
        info = self._require_running()
        return await self._compute(
            await _check_in_thread(len(token_ids), lambda: validate_texts(info, token_ids, pooling))
        )

    async def score(self, pairs: Sequence[TokenizedPair]) -> list[float]:
        """The score of each pair: (token ids, type ids) as `texts.encode_pair` makes them. Raises as `encode`."""
        info = self._require_running()
        vectors = await self._compute(await _check_in_thread(len(pairs), lambda: validate_pairs(info, pairs)))
        return [scalar(vector) for vector in vectors]

    async def close(self) -> None:
        """End the process and wait until it is gone."""
        self.alive = self._is_up = False
        if self._serve_task is not None:
            self._serve_task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serve_task
        self._fail_all("the server shuts down")
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
        """Keep the process busy, if there is one."""
        if not self._is_up:
            return
        while self._retries and self._retries[0][0].result.done():
            self._retries.popleft()
        if self._retries:
            if not self._in_flight:
                self._is_retrying = True
                self._send_batch([self._retries.popleft()])
            return
        while len(self._in_flight) < MAX_BATCHES_IN_FLIGHT and (
            taken := self._batcher.next_batch(MAX_BATCH_TOKENS)
        ):
            self._is_retrying = False
            self._send_batch(taken)

    def _send_batch(self, members: list[tuple[EncodeCall, int]]) -> None:
        assert self._process is not None
        self._last_batch_id += 1
        self._in_flight[self._last_batch_id] = members
        self._process.send(
            EncodeBatch(self._last_batch_id, tuple(call.inputs[index] for call, index in members))
        )

    def _on_message(self, message: EncodeBatchResult | EncodeBatchFailed) -> None:
        self._crash_times.clear()
        taken = self._in_flight.pop(message.batch_id)
        self._dispatch()
        if isinstance(message, EncodeBatchFailed):
            for call, _ in taken:
                _fail(call, message.error)
            return
        for (call, index), vector in zip(taken, message.vectors, strict=True):
            call.vectors[index] = vector
            call.num_missing -= 1
            if call.num_missing == 0 and not call.result.done():
                call.result.set_result(call.vectors)

    # The process

    async def _serve(self) -> None:
        """Listen to one process after the other, until they die too often."""
        while self._process is not None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._on_message(await self._process.receive())
            self._is_up = False
            self._requeue_after_crash()
            await self._stop_process()
            await self._restart()
        self.alive = False
        self._fail_all("the encoder died, and cannot be started again")

    def _requeue_after_crash(self) -> None:
        """What a process died with is tried again, each input alone; what was alone with it is not."""
        for call, index in chain(*self._in_flight.values()):
            if self._is_retrying:
                _fail(
                    call,
                    RequestFailed(
                        "the encoder died twice while it worked on this input; it is not tried again"
                    ),
                )
            elif not call.is_cancelled:
                self._retries.append((call, index))
        self._in_flight.clear()

    async def _restart(self) -> None:
        if not self._may_restart():
            LOG.error(
                "the encoder died more than %d times within %g s and did nothing; it stays down",
                MAX_RESTARTS,
                RESTART_WINDOW_S,
            )
            return
        LOG.error("the encoder died; it is started again")
        self._process = await EncoderProcess.launch(self._config)
        try:
            self.info = await self._process.wait_ready()
            self._is_up = True
            self._dispatch()
        except Exception:
            LOG.exception("the encoder cannot be started again")
            await self._stop_process()

    def _may_restart(self) -> bool:
        """Note a death; False once there were too many of late."""
        now = time.monotonic()
        often = len(self._crash_times) == MAX_RESTARTS and now - self._crash_times[0] < RESTART_WINDOW_S
        self._crash_times.append(now)
        return not often

    def _fail_all(self, reason: str) -> None:
        self._in_flight.clear()
        self._retries.clear()
        for call in self._open_calls:
            self._batcher.cancel(call)
            _fail(call, EngineDead(reason))

    async def _stop_process(self) -> None:
        child, self._process = self._process, None
        if child is not None:
            await child.stop()


async def _check_in_thread(num_inputs: int, check: Callable[[], list[EncoderInput]]) -> list[EncoderInput]:
    """Check in a thread what takes long."""
    return await asyncio.to_thread(check) if num_inputs > MAX_INLINE_CHECKS else check()


def _fail(call: EncodeCall, error: Exception) -> None:
    if not call.result.done():
        call.result.set_exception(error)
