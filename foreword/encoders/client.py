"""The encoder as an asyncio program sees it. Nothing here imports torch."""

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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from foreword.config import Config
from foreword.encoders.inputs import BATCH_TOKENS, Pair, pairs_of, texts_of
from foreword.encoders.messages import Done, EncoderInfo, Failure, Input, Ready, Refused, Work, framed, read_stream
from foreword.encoders.texts import EncoderTexts
from foreword.encoders.turns import Call, Turns
from foreword.errors import ConfigError, EngineDead, InvalidRequest, Overloaded
from foreword.models.hub import resolve_path

__all__ = ["EncoderClient", "EncoderInfo", "EncoderTexts"]

LOG = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 10.0
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}  # torch's threads that spin take the cores from those they wait for
AHEAD = 2  # batches that are with the process: while one is computed, the next one waits there
MAX_RESTARTS, RESTART_WINDOW_S = 3, 60.0


class EncoderClient:
    """Runs an encoder in a process of its own; started again when it dies, but not endlessly.

    info   None until start() returned
    texts  makes token ids of texts; None until start() returned
    alive  work can be done now
    """

    def __init__(self, config: Config) -> None:
        self.info: EncoderInfo | None = None
        self.texts: EncoderTexts | None = None
        self.alive = False
        self._config = config
        self._turns = Turns()
        self._at_work: dict[int, list[tuple[Call, int]]] = {}
        self._open: set[Call] = set()
        self._number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._serving: asyncio.Task[None] | None = None
        self._deaths: deque[float] = deque(maxlen=MAX_RESTARTS)

    async def start(self) -> EncoderInfo:
        """Start the process; return once it can take work. Raises ConfigError or CheckpointError."""
        assert self._config.embedding_model is not None
        path = await asyncio.to_thread(resolve_path, self._config.embedding_model)
        self._config = replace(self._config, embedding_model=str(path))
        reader = await self._launch()
        try:
            self.info = await self._greeting(reader)
            self.texts = await asyncio.to_thread(EncoderTexts.from_directory, Path(path), self.info)
        except BaseException:
            await self._end()
            raise
        self.alive = True
        self._serving = asyncio.create_task(self._serve(reader), name="encoder")
        return self.info

    async def encode(self, token_ids: Sequence[Sequence[int]], pooling: str | None = None) -> list[bytes]:
        """The vector of each text: float32 [H] as bytes, pooled as the checkpoint does it or as `pooling` says, not normalized.

        Raises InvalidRequest, Overloaded, EngineDead. A caller that is cancelled waits for nothing more.
        """
        return await self._computed(texts_of(self._known(), token_ids, pooling))

    async def rank(self, pairs: Sequence[Pair]) -> list[float]:
        """The score of each pair: (token ids, type ids) as `texts.encode_pair` makes them. Raises as `encode`."""
        vectors = await self._computed(pairs_of(self._known(), pairs))
        return [memoryview(vector).cast("f")[0] for vector in vectors]

    async def close(self) -> None:
        """End the process and wait until it is gone."""
        self.alive = False
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
        self._fail_all(EngineDead("the encoder is shutting down"))
        await self._end()

    def _known(self) -> EncoderInfo:
        if self.info is None or not self.alive:
            raise EngineDead("the encoder is not running")
        return self.info

    async def _computed(self, inputs: Sequence[Input]) -> list[bytes]:
        if not inputs:
            return []
        limit = self._config.max_waiting
        if len(inputs) > limit:
            raise InvalidRequest(f"{len(inputs)} inputs; this server takes at most {limit} at once", "input")
        if self._turns.waiting + len(inputs) > limit:
            raise Overloaded(f"{self._turns.waiting} inputs wait for the encoder, of at most {limit}; try again later")
        call = self._turns.add(inputs, asyncio.get_running_loop().create_future())
        self._open.add(call)
        self._hand_over()
        try:
            return await call.result
        finally:
            self._open.discard(call)
            self._turns.drop(call)

    def _hand_over(self) -> None:
        """Keep the process busy."""
        while self._writer is not None and len(self._at_work) < AHEAD and (taken := self._turns.take(BATCH_TOKENS)):
            self._number += 1
            self._at_work[self._number] = taken
            work = Work(self._number, tuple(call.inputs[index] for call, index in taken))
            self._writer.write(framed(work))

    # The process

    async def _launch(self) -> asyncio.StreamReader:
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "foreword.encoders.process", str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, process_group=0, env={**ENVIRONMENT, **os.environ}
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        self._writer.write(framed(self._config))
        return reader

    async def _greeting(self, reader: asyncio.StreamReader) -> EncoderInfo:
        try:
            message: Ready | Refused = await read_stream(reader)
        except (EOFError, OSError):
            raise ConfigError("the encoder's process ended while it was loading; its last words are above") from None
        if isinstance(message, Refused):
            raise message.error
        return message.info

    async def _serve(self, reader: asyncio.StreamReader) -> None:
        """Listen to one process after the other, until they die too often."""
        while True:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._received(await read_stream(reader))
            self.alive = False
            self._fail_all(EngineDead("the encoder died while it was working; it is started again"))
            await self._end()
            if not self._may_restart():
                LOG.error("the encoder died %d times within %g s; it is not started again", MAX_RESTARTS + 1, RESTART_WINDOW_S)
                return
            LOG.error("the encoder died; it is started again")
            reader = await self._launch()
            try:
                self.info = await self._greeting(reader)
            except Exception:
                LOG.exception("the encoder could not be started again")
                return await self._end()
            self.alive = True

    def _may_restart(self) -> bool:
        """Note a death; False once there were too many of late."""
        now = time.monotonic()
        full = len(self._deaths) == MAX_RESTARTS
        often = full and now - self._deaths[0] < RESTART_WINDOW_S
        self._deaths.append(now)
        return not often

    async def _end(self) -> None:
        """Hang up, and wait until the process is gone."""
        writer, self._writer = self._writer, None
        if writer is not None:
            writer.transport.abort()
        process, self._process = self._process, None
        if process is not None:
            process.terminate()  # it has nothing to lose, and may be in the middle of a batch
            await asyncio.to_thread(_wait, process)

    def _received(self, message: Done | Failure) -> None:
        taken = self._at_work.pop(message.number)
        self._hand_over()
        if isinstance(message, Failure):
            for call in {call for call, _ in taken}:
                _fail(call, message.error)
            return
        for (call, index), vector in zip(taken, message.vectors, strict=True):
            call.vectors[index] = vector
            call.missing -= 1
            if call.missing == 0 and not call.result.done():
                call.result.set_result(call.vectors)

    def _fail_all(self, error: EngineDead) -> None:
        self._at_work.clear()
        self._turns = Turns()
        for call in self._open:
            _fail(call, error)


def _fail(call: Call, error: Exception) -> None:
    if not call.result.done():
        call.result.set_exception(error)


def _wait(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(CLOSE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
