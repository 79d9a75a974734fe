"""The encoder as an asyncio program sees it. Nothing here imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path

from foreword.config import Config
from foreword.core.readiness import Readiness
from foreword.core.vectors import only_value
from foreword.encoders.child import Child
from foreword.encoders.inputs import BATCH_TOKENS, Pair, pairs_of, texts_of
from foreword.encoders.messages import Done, EncoderInfo, Failure, Input, Work
from foreword.encoders.texts import EncoderTexts
from foreword.encoders.turns import Call, Turns
from foreword.errors import EngineDead, InvalidRequest, Overloaded, RequestFailed
from foreword.models.hub import resolve_path

__all__ = ["EncoderClient", "EncoderInfo", "EncoderTexts"]

LOG = logging.getLogger(__name__)
AHEAD = 2  # batches that are with the process: while one is computed, the next one waits there
MANY = 64  # inputs whose check others would notice
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
        self.texts: EncoderTexts | None = None
        self.alive = False
        self._up = False
        self._config = config
        self._turns = Turns()
        self._open: set[Call] = set()
        self._at_work: dict[int, list[tuple[Call, int]]] = {}
        self._again: deque[tuple[Call, int]] = deque()  # inputs that a process died with
        self._alone = False  # the process works on one of those
        self._number = 0
        self._child: Child | None = None
        self._serving: asyncio.Task[None] | None = None
        self._deaths: deque[float] = deque(maxlen=MAX_RESTARTS)

    @property
    def readiness(self) -> Readiness:
        """Whether it could work now."""
        if not self.alive:
            return Readiness("loading" if self.info is None else "dead")
        return Readiness("ok") if self._up else Readiness("restarting")

    async def start(self) -> EncoderInfo:
        """Start the process; return once it can take work. Raises ConfigError or CheckpointError."""
        assert self._config.embedding_model is not None and self._child is None
        path = await asyncio.to_thread(resolve_path, self._config.embedding_model)
        self._config = replace(self._config, embedding_model=str(path))
        self._child = await Child.launch(self._config)
        try:
            self.info = await self._child.ready()
            self.texts = await asyncio.to_thread(EncoderTexts.from_directory, Path(path), self.info)
        except BaseException:
            await self._end()
            raise
        self.alive = self._up = True
        self._serving = asyncio.create_task(self._serve(), name="encoder")
        return self.info

    async def encode(self, token_ids: Sequence[Sequence[int]], pooling: str | None = None) -> list[bytes]:
        """The vector of each text: float32 [H] as bytes, pooled as the checkpoint does it or as `pooling` says, not normalized.

        Raises InvalidRequest, Overloaded, EngineDead. A caller that is cancelled waits for nothing more.
        """
        info = self._known()
        return await self._computed(await _away_from_loop(len(token_ids), lambda: texts_of(info, token_ids, pooling)))

    async def rank(self, pairs: Sequence[Pair]) -> list[float]:
        """The score of each pair: (token ids, type ids) as `texts.encode_pair` makes them. Raises as `encode`."""
        info = self._known()
        vectors = await self._computed(await _away_from_loop(len(pairs), lambda: pairs_of(info, pairs)))
        return [only_value(vector) for vector in vectors]

    async def close(self) -> None:
        """End the process and wait until it is gone."""
        self.alive = self._up = False
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
        self._fail_all("the server shuts down")
        await self._end()

    def _known(self) -> EncoderInfo:
        if self.info is None or not self.alive:
            raise EngineDead("the encoder is not running")
        return self.info

    async def _computed(self, inputs: Sequence[Input]) -> list[bytes]:
        self._admit(len(inputs))
        if not inputs:
            return []
        call = self._turns.add(inputs, asyncio.get_running_loop().create_future())
        self._open.add(call)
        self._hand_over()
        try:
            return await call.result
        finally:
            self._open.discard(call)
            self._turns.drop(call)

    def _admit(self, count: int) -> None:
        self._known()
        limit, waiting = self._config.max_waiting, self._turns.waiting
        if count > limit:
            raise InvalidRequest(f"{count} inputs; this server takes at most {limit} at once", "input")
        if waiting + count > limit:
            raise Overloaded(f"{waiting} inputs wait for the encoder, of at most {limit}; try again later")

    def _hand_over(self) -> None:
        """Keep the process busy, if there is one."""
        if not self._up:
            return
        while self._again and self._again[0][0].result.done():
            self._again.popleft()
        if self._again:
            if not self._at_work:
                self._alone = True
                self._send([self._again.popleft()])
            return
        while len(self._at_work) < AHEAD and (taken := self._turns.take(BATCH_TOKENS)):
            self._alone = False
            self._send(taken)

    def _send(self, taken: list[tuple[Call, int]]) -> None:
        assert self._child is not None
        self._number += 1
        self._at_work[self._number] = taken
        self._child.send(Work(self._number, tuple(call.inputs[index] for call, index in taken)))

    def _received(self, message: Done | Failure) -> None:
        self._deaths.clear()
        taken = self._at_work.pop(message.number)
        self._hand_over()
        if isinstance(message, Failure):
            for call, _ in taken:
                _fail(call, message.error)
            return
        for (call, index), vector in zip(taken, message.vectors, strict=True):
            call.vectors[index] = vector
            call.missing -= 1
            if call.missing == 0 and not call.result.done():
                call.result.set_result(call.vectors)

    # The process

    async def _serve(self) -> None:
        """Listen to one process after the other, until they die too often."""
        while self._child is not None:
            with contextlib.suppress(EOFError, OSError):
                while True:
                    self._received(await self._child.receive())
            self._up = False
            self._blame()
            await self._end()
            await self._restart()
        self.alive = False
        self._fail_all("the encoder died, and cannot be started again")

    def _blame(self) -> None:
        """What a process died with is tried again, each input alone; what was alone with it is not."""
        for call, index in chain(*self._at_work.values()):
            if self._alone:
                _fail(call, RequestFailed("the encoder died twice while it worked on this input; it is not tried again"))
            elif not call.dropped:
                self._again.append((call, index))
        self._at_work.clear()

    async def _restart(self) -> None:
        if not self._may_restart():
            LOG.error(
                "the encoder died more than %d times within %g s and did nothing; it stays down", MAX_RESTARTS, RESTART_WINDOW_S
            )
            return
        LOG.error("the encoder died; it is started again")
        self._child = await Child.launch(self._config)
        try:
            self.info = await self._child.ready()
            self._up = True
            self._hand_over()
        except Exception:
            LOG.exception("the encoder cannot be started again")
            await self._end()

    def _may_restart(self) -> bool:
        """Note a death; False once there were too many of late."""
        now = time.monotonic()
        often = len(self._deaths) == MAX_RESTARTS and now - self._deaths[0] < RESTART_WINDOW_S
        self._deaths.append(now)
        return not often

    def _fail_all(self, why: str) -> None:
        self._at_work.clear()
        self._again.clear()
        for call in self._open:
            self._turns.drop(call)
            _fail(call, EngineDead(why))

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await child.end()


async def _away_from_loop(count: int, check: Callable[[], list[Input]]) -> list[Input]:
    """Check in a thread what takes long."""
    return await asyncio.to_thread(check) if count > MANY else check()


def _fail(call: Call, error: Exception) -> None:
    if not call.result.done():
        call.result.set_exception(error)
