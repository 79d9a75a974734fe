"""The health of the server as /health and /ready report it, and its drain at shutdown.

Drain: open requests may finish, new ones are refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Literal, Protocol

from fastapi import Response
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Receive, Scope, Send

from foreword.core.outputs import ErrorEvent
from foreword.core.readiness import Readiness
from foreword.core.request import Request
from foreword.embedding.client import EncoderClient
from foreword.engine_client.base import EngineClient
from foreword.engine_client.remote_messages import SESSIONS_PATH
from foreword.errors import EngineDead, ForewordError, ModelLoading, ShuttingDown
from foreword.server.auth.keys import is_public
from foreword.server.http.errors import error_body, error_headers, error_response
from foreword.server.http.request_log import SentResponse
from foreword.server.http.responses import JSONResponse

FINAL_ERROR_TIMEOUT_S = 1.0  # time to send the reason to a client
STOPPING_MESSAGE = "the server will shut down soon: requests are still taken, send new ones elsewhere"
logger = logging.getLogger(__name__)
RETRY_AFTER_S = 1.0  # Retry-After while the engine does not answer
PROBE_TIMEOUT_S = 5.0
UNRESPONSIVE = Readiness("unresponsive", "the engine was idle and does not answer a one-token request")
REFUSAL_MESSAGE = "the server is shutting down and takes no new requests"
DRAINING_MESSAGE = "the server is shutting down: open requests may finish, new requests are refused"


class DrainState:
    """The open requests, and whether the server is shutting down."""

    def __init__(self) -> None:
        self.stopping = False  # a signal came: /ready says so, requests are still taken
        self.draining = False  # new requests are refused
        self._open: set[asyncio.Timeout] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def num_open(self) -> int:
        return len(self._open)

    async def wait_empty(self) -> None:
        """Wait until no request is open."""
        await self._empty.wait()

    def cancel_open(self) -> None:
        """End all open requests with an error."""
        for timeout in self._open:
            timeout.reschedule(asyncio.get_running_loop().time())

    @contextlib.contextmanager
    def track_request(self, timeout: asyncio.Timeout) -> Iterator[None]:
        """Count a request as open; cancel_open() expires its timeout."""
        self._open.add(timeout)
        self._empty.clear()
        try:
            yield
        finally:
            self._open.discard(timeout)
            if not self._open:
                self._empty.set()


class DrainMiddleware:
    """Tracks open requests; while draining, refuses new ones. Health and metrics stay readable."""

    def __init__(self, app: ASGIApp, drain: DrainState, on_refusal: Callable[[str], None]) -> None:
        self._app = app
        self._drain = drain
        self._on_refusal = on_refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or is_public(scope["path"]):
            return await self._app(scope, receive, send)
        # Messages of a session belong to its open requests; the session itself refuses new ones.
        if self._drain.draining and not scope["path"].startswith(f"{SESSIONS_PATH}/"):
            self._on_refusal("draining")
            error = ShuttingDown(REFUSAL_MESSAGE)
            response = error_response(error, scope)
            response.headers["Connection"] = "close"
            return await response(scope, receive, send)
        timeout = asyncio.timeout(None)
        with self._drain.track_request(timeout):
            try:
                async with timeout:
                    await self._app(scope, receive, send)
            except TimeoutError:
                if not timeout.expired():
                    raise
                await _send_final_error(scope, receive, send)


async def _send_final_error(scope: Scope, receive: Receive, send: Send) -> None:
    """Send the reason as a response, or as the last event of a stream, if the client still reads."""
    error = ShuttingDown("the server is shutting down, and the answer was not finished in time; retry")
    sent: SentResponse = scope["state"]["sent"]
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FINAL_ERROR_TIMEOUT_S):
            if not sent.status:
                await error_response(error, scope)(scope, receive, send)
            elif sent.is_stream and not sent.has_ended:
                body = scope["state"]["error_event"](error)
                await send({"type": "http.response.body", "body": body, "more_body": False})


class EngineProbe:
    """Asks an idle engine for one token, because a hung idle engine shows no other sign."""

    def __init__(
        self,
        client: EngineClient,
        make_request: Callable[[str], Request],  # takes the request id
        idle_s: float,  # seconds without a step before a probe; 0: never probe
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
        """Record that the engine has finished a step."""
        self._last_step_s = time.monotonic()

    async def is_responsive(self) -> bool:
        """Whether the engine steps: recently, or for a probe. After a failed probe only an answer counts."""
        if not self._idle_s or (not self._failed and time.monotonic() - self._last_step_s < self._idle_s):
            return True
        if self._pending is None or self._pending.done():
            self._pending = asyncio.create_task(self._send_probe(), name="health-probe")
        elif self._failed:
            return False  # the pending probe has timed out before
        done, _ = await asyncio.wait((self._pending,), timeout=self._timeout_s)
        self._failed = not (done and self._pending.result())
        return not self._failed

    async def _send_probe(self) -> bool:
        """True for a token, or for a refusal; False for a failure of the engine."""
        request = self._make_request(f"health-probe-{next(self._counter)}")
        try:
            events: Any = self._client.submit(request)
            async with aclosing(events):
                event = await anext(events)
        except Exception as error:
            logger.warning("health probe: the engine failed (%s)", type(error).__name__)
            return False
        answered = not isinstance(event, ErrorEvent) or event.error.status < 500
        self._failed = self._failed and not answered
        return answered


class HealthError(BaseModel):
    """The error of OpenAI's envelope."""

    message: str
    type: str
    param: str | None
    code: str | None


class HealthBody(BaseModel):
    """The body of /health and /ready, for 200 and 503."""

    status: Literal["ok", "loading", "restarting", "unresponsive", "draining", "dead"] = Field(
        description="ok: a step could run now (200). All else is a 503."
    )
    detail: str = Field(description="what an operator should know; empty with status ok")
    progress: float | None = Field(ge=0, le=1, description="share of a stage of loading, such as the weights")
    restarts: int = Field(ge=0, description="how often the engine was replaced")
    encoder: Literal["ok", "down"] | None = Field(description="the encoder process; null without one")
    error: HealthError | None = Field(description="null with status ok")


class HasHealth(Protocol):
    """The models of a server."""

    @property
    def readiness(self) -> Readiness:
        """The state of a pinned model that is alone; else "ok": models are loaded on demand."""

    @property
    def encoder(self) -> EncoderClient | None:
        """The encoder of that model."""

    @property
    def probe(self) -> EngineProbe | None:
        """The probe of that model once it is loaded."""


class Health:
    """The answers of /health and /ready."""

    def __init__(
        self, drain: DrainState, models: HasHealth | None = None, answers_requests: bool = True
    ) -> None:
        """models            None while the server plans them
        answers_requests  False: the application is a placeholder, and never healthy
        """
        self.drain = drain
        self.models = models
        self._answers_requests = answers_requests

    async def readiness(self, takes_traffic: bool = False) -> Readiness:
        """The engine's readiness; "draining" during shutdown.

        takes_traffic  /ready's question: also "draining" while requests are still taken before the drain
        """
        if self.models is None:
            return Readiness("loading", "the server reads its models")
        readiness, probe = self.models.readiness, self.models.probe
        if self.drain.draining:
            return replace(readiness, status="draining", detail=DRAINING_MESSAGE)
        if self.drain.stopping and takes_traffic:
            return replace(readiness, status="draining", detail=STOPPING_MESSAGE)
        if readiness.is_ready and not self._answers_requests:
            return Readiness("loading", "the server is about to answer")
        if readiness.is_ready and probe is not None and not await probe.is_responsive():
            return replace(UNRESPONSIVE, restarts=readiness.restarts)
        return readiness

    async def response(self, takes_traffic: bool = False) -> Response:
        """The response of /health, or of /ready: the same fields with 200 and 503."""
        readiness = await self.readiness(takes_traffic)
        encoder = None if self.models is None else self.models.encoder
        error = None if readiness.is_ready else _readiness_error(readiness)
        body = HealthBody(
            status=readiness.status,  # type: ignore[arg-type]  # pydantic validates it
            detail=readiness.detail,
            progress=readiness.progress,
            restarts=readiness.restarts,
            encoder=None if encoder is None else "ok" if encoder.alive else "down",
            error=None if error is None else HealthError(**error_body(error)["error"]),
        )
        if error is None:
            return JSONResponse(body.model_dump())
        return JSONResponse(body.model_dump(), status_code=error.status, headers=error_headers(error))


def _readiness_error(readiness: Readiness) -> ForewordError:
    if readiness.status == "draining":
        return ShuttingDown(readiness.detail)
    detail = readiness.detail or f"the engine is {readiness.status}"
    if readiness.status in ("loading", "restarting"):
        return ModelLoading(detail)
    error = EngineDead(detail)
    if readiness.status == "unresponsive":  # it may answer again, or is replaced
        error.code, error.retry_after_s = "engine_unresponsive", RETRY_AFTER_S
    return error
