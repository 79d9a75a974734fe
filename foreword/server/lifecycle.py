"""How a server ends: nobody new comes in, who is in may finish, and what is left then is handed back.

A server that listens before its model is loaded.

Whether an idle engine still computes: it is asked for one token.

What /health says.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Literal

from fastapi import Response
from pydantic import BaseModel, Field
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.core.health import Readiness
from foreword.core.outputs import ErrorEvent
from foreword.core.request import Request
from foreword.embedding.client import EncoderClient
from foreword.engine_client.client import EngineClient
from foreword.errors import EngineDead, ForewordError, ShuttingDown
from foreword.server.auth.keys import PUBLIC_PATHS
from foreword.server.errors import error_body, error_headers, error_response
from foreword.server.json_response import JSONResponse
from foreword.server.streaming import final_error_event

__all__ = [
    "DrainMiddleware",
    "DrainState",
    "EngineProbe",
    "Health",
    "HealthBody",
]

RETRY_AFTER_S = 1.0

logger = logging.getLogger(__name__)

FINAL_ERROR_TIMEOUT_S = 1.0  # a client may take to read why its answer ends


class DrainState:
    """Which requests are open, and whether the server is about to end.

    began  no new requests are taken
    """

    __slots__ = ("_empty", "_open", "draining")

    def __init__(self) -> None:
        self.draining = False
        self._open: set[asyncio.Timeout] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    def begin(self) -> None:
        """Refuse new requests from now on."""
        self.draining = True

    async def wait_empty(self) -> None:
        """Wait until no request is open."""
        await self._empty.wait()

    def cancel_open(self) -> None:
        """End what is still open: it gets an error that says so."""
        for limit in self._open:
            limit.reschedule(asyncio.get_running_loop().time())

    @contextlib.contextmanager
    def track_request(self, limit: asyncio.Timeout) -> Iterator[None]:
        """A request is open, and ends when its limit expires."""
        self._open.add(limit)
        self._empty.clear()
        try:
            yield
        finally:
            self._open.discard(limit)
            if not self._open:
                self._empty.set()


class DrainMiddleware:
    """Counts the requests, and refuses or ends them when the time has come; health and metrics stay readable."""

    def __init__(self, app: ASGIApp, drain: DrainState, on_refusal: Callable[[str], None]) -> None:
        self._app = app
        self._drain = drain
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in PUBLIC_PATHS:
            return await self._app(scope, receive, send)
        if self._drain.draining:
            self._on_refusal("draining")
            return await _reject(scope, receive, send)
        response, limit = _TrackedResponse(send), asyncio.timeout(None)
        with self._drain.track_request(limit):
            try:
                async with limit:
                    await self._app(scope, receive, response.send)
            except TimeoutError:
                if not limit.expired():
                    raise
                await response.send_final_error(scope, receive)


class _TrackedResponse:
    """What was sent of a response, in case it has to be ended early."""

    __slots__ = ("_ended", "_is_stream", "_send", "_started")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._started = self._is_stream = self._ended = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = True
            self._is_stream = (
                Headers(raw=message["headers"]).get("content-type", "").startswith("text/event-stream")
            )
        else:
            self._ended = not message.get("more_body", False)
        await self._send(message)

    async def send_final_error(self, scope: Scope, receive: Receive) -> None:
        """Say why there is no more: as a response, or as the last event of a stream. A client that reads nothing is left."""
        error = ShuttingDown("the server is ending, and the answer was not finished in time; ask again")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINAL_ERROR_TIMEOUT_S):
                if not self._started:
                    await error_response(error)(scope, receive, self._send)
                elif self._is_stream and not self._ended:
                    await self._send(
                        {"type": "http.response.body", "body": final_error_event(error), "more_body": False}
                    )


async def _reject(scope: Scope, receive: Receive, send: Send) -> None:
    response = error_response(ShuttingDown("the server is ending and takes no new requests"))
    response.headers["Connection"] = "close"
    await response(scope, receive, send)


PROBE_TIMEOUT_S = 5.0


class EngineProbe:
    """Asks the engine for a token where nothing else has shown for a while that it computes.

    request_of  the question, of a given id
    idle_s      no step for so long makes it necessary; 0: it is never asked
    limit_s     an answer may take; later ones are waited for in the background
    """

    __slots__ = (
        "_client",
        "_counter",
        "_failed",
        "_idle_s",
        "_last_step_s",
        "_make_request",
        "_pending",
        "_timeout_s",
    )

    def __init__(
        self,
        client: EngineClient,
        make_request: Callable[[str], Request],
        idle_s: float,
        timeout_s: float = PROBE_TIMEOUT_S,
    ) -> None:
        self._client = client
        self._make_request = make_request
        self._idle_s = idle_s
        self._timeout_s = timeout_s
        self._counter = itertools.count()
        self._last_step_s = time.monotonic()
        self._failed = False
        self._pending: asyncio.Task[bool] | None = None

    def on_step(self) -> None:
        """The engine has done a step."""
        self._last_step_s = time.monotonic()

    async def is_responsive(self) -> bool:
        """Whether the engine computes: it did lately, or does so now. Once it did not, only an answer counts."""
        if not self._idle_s or (not self._failed and time.monotonic() - self._last_step_s < self._idle_s):
            return True
        if self._pending is None or self._pending.done():
            self._pending = asyncio.create_task(self._send_probe(), name="health-probe")
        elif self._failed:
            return False  # it is late already
        done, _ = await asyncio.wait((self._pending,), timeout=self._timeout_s)
        self._failed = not (done and self._pending.result())
        return not self._failed

    async def _send_probe(self) -> bool:
        """True for a token; a refusal of the engine counts as an answer, its failure does not."""
        request = self._make_request(f"health-probe-{next(self._counter)}")
        try:
            events: Any = self._client.submit(request)
            async with aclosing(events):
                event = await anext(events)
        except Exception as error:
            logger.warning("the engine failed on a request for one token (%s)", type(error).__name__)
            return False
        answered = not isinstance(event, ErrorEvent) or event.error.status < 500
        self._failed = self._failed and not answered
        return answered


UNRESPONSIVE = Readiness(
    "unresponsive", "the engine was idle, and gives no answer to a request for one token"
)
DRAINING_MESSAGE = "the server is ending: open answers may finish, new requests are refused"


class HealthError(BaseModel):
    """As in OpenAI's envelope."""

    message: str
    type: str
    param: str | None
    code: str | None


class HealthBody(BaseModel):
    """The body of /health, whatever its status code."""

    status: Literal["ok", "loading", "restarting", "unresponsive", "draining", "dead"] = Field(
        description="ok: a step could run now (200). All else is a 503."
    )
    detail: str = Field(description="what an operator should know; empty where all is well")
    progress: float | None = Field(
        ge=0, le=1, description="how much of the weights is loaded, while they are"
    )
    restarts: int = Field(ge=0, description="how often the engine was replaced")
    encoder: Literal["ok", "down"] | None = Field(
        description="the encoder beside the model; null where there is none"
    )
    error: HealthError | None = Field(description="null with status ok")


@dataclass(frozen=True, slots=True)
class Health:
    """Who knows how the server is.

    probe  None while the engine is loading
    """

    client: EngineClient
    encoder: EncoderClient | None
    drain: DrainState
    probe: EngineProbe | None = None

    async def readiness(self) -> Readiness:
        """The engine's, or "draining" while the server ends."""
        found = self.client.readiness
        if self.drain.draining:
            return replace(found, status="draining", detail=DRAINING_MESSAGE)
        if found.is_ready and self.probe is not None and not await self.probe.is_responsive():
            return replace(UNRESPONSIVE, restarts=found.restarts)
        return found

    async def response(self) -> Response:
        """A body of the same shape with 200 and 503."""
        found = await self.readiness()
        error = None if found.is_ready else _readiness_error(found)
        body = HealthBody(
            status=found.status,  # type: ignore[arg-type]  # validated
            detail=found.detail,
            progress=found.progress,
            restarts=found.restarts,
            encoder=None if self.encoder is None else "ok" if self.encoder.alive else "down",
            error=None if error is None else HealthError(**error_body(error)["error"]),
        )
        if error is None:
            return JSONResponse(body.model_dump())
        return JSONResponse(body.model_dump(), status_code=error.status, headers=error_headers(error))


def _readiness_error(readiness: Readiness) -> ForewordError:
    if readiness.status == "draining":
        return ShuttingDown(readiness.detail)
    error = EngineDead(readiness.detail or f"the engine is {readiness.status}")
    error.retry_after_s = None if readiness.status == "dead" else RETRY_AFTER_S
    return error
