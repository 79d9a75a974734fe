"""Request ids, counts and traces of responses, and lines of refusals, or of all requests.

Never a text or a key.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from foreword.config.options import Config
from foreword.errors import ForewordError
from foreword.metrics.tracing import RequestTracer, current_span, open_tracer
from foreword.server.auth.keys import PUBLIC_PATHS
from foreword.server.http.responses import (
    CLIENT_CLOSED,
    EVENT_STREAM,
    REQUEST_ID_PATTERN,
    is_messages_path,
)
from foreword.utils.threads import run_in_own_thread
from foreword.utils.version import __version__

logger = logging.getLogger("foreword.serve")
access_logger = logging.getLogger("foreword.access")

OTHER_ROUTE = "other"  # no such route, or nothing that could be read as a request
PROBES = ("/health", "/ready", "/engine/replicas")  # a 503 is their answer, not a refusal
ENGINE_PATH = "/engine/"  # routes of other servers, which trace their requests themselves
WINDOW_S = 10.0
MAX_LINES = 5  # lines about refusals of one kind in a window
# A field that the client made up is logged if it looks like a name: an API key or a sentence does not.
FIELD_PATTERN = re.compile(r"[A-Za-z_]\w{0,39}(?:\[\d+\]|\.[A-Za-z_]\w{0,39}){0,9}", re.ASCII)


class RouteTable:
    """The template of a path: "/v1/models/{name}" for "/v1/models/demo"; OTHER_ROUTE without a route."""

    def __init__(self, routes: Iterable[Any], *more_paths: str) -> None:
        listed = [route for route in routes if isinstance(route, Route)]
        self._fixed = {*more_paths, *(route.path for route in listed if "{" not in route.path)}
        self._patterns = [
            (route.path_regex, re.sub(r":\w+}", "}", route.path)) for route in listed if "{" in route.path
        ]

    def template(self, path: str) -> str:
        if path in self._fixed:
            return path
        return next((name for pattern, name in self._patterns if pattern.match(path)), OTHER_ROUTE)


@asynccontextmanager
async def open_request_log(config: Config) -> AsyncIterator[RequestLog]:
    """The log of a server, and its traces. Raises ConfigError."""
    tracer = open_tracer(config.otlp_traces_endpoint, __version__)
    try:
        yield RequestLog(config.access_log, tracer=tracer)
    finally:
        if tracer is not None:
            await run_in_own_thread(tracer.close)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Key under which refusals are aggregated."""

    status: int
    code: str  # or the type of an error without one
    route: str
    key: str

    def describe(self) -> str:
        return f"refused {self.status} on {self.route}: {self.code}"


class RequestLog:
    """Counts and logs responses. A client in a loop does not fill the disk: of refusals of one kind MAX_LINES
    are written in WINDOW_S, and then a sum.
    """

    def __init__(
        self,
        access: bool = False,
        clock: Callable[[], float] = time.monotonic,
        tracer: RequestTracer | None = None,
    ) -> None:
        self.on_response: Callable[[str, int], None] | None = None  # called with route and status
        self.tracer = tracer  # None: requests are not traced
        self._access = access  # log every request
        self._clock = clock
        self._window_start_s = clock()
        self._counts: dict[_Refusal, int] = {}

    def on_response_sent(
        self,
        scope: Mapping[str, Any],
        route: str,
        status: int,
        refusal_body: bytes,  # error envelope of a refused request
        num_bytes: int,
        started_s: float,
    ) -> None:
        """A response was sent, or given up."""
        self._count(route, status)
        state = scope.get("state", {})
        key, request_id = _key_name(state), state.get("request_id", "")
        if self._access:
            milliseconds = (self._clock() - started_s) * 1000
            access_logger.info(
                "%s %s %d: %.1f ms, %d bytes%s, request %s",
                scope["method"],
                route,
                status,
                milliseconds,
                num_bytes,
                f", key {key}" if key else "",
                request_id,
                extra={
                    "fields": {
                        "method": scope["method"],
                        "route": route,
                        "status": status,
                        "milliseconds": round(milliseconds, 1),
                        "bytes": num_bytes,
                        "key": key,
                        "request_id": request_id,
                    }
                },
            )
        if _is_refused(status) and route not in PROBES:
            code, field = _error_fields(refusal_body)
            self._log_refusal(_Refusal(status, code, route, key), field, request_id)

    def on_connection_refused(self, error: ForewordError) -> None:
        """A connection was closed with an error before there was a request."""
        self._count(OTHER_ROUTE, error.status)
        self._log_refusal(_Refusal(error.status, error.code or error.error_type, OTHER_ROUTE, ""), None, "")

    def flush(self, force: bool = False) -> None:
        """Write the sums of a window that is over; call it about once a second."""
        seconds = self._clock() - self._window_start_s
        if seconds < WINDOW_S and not force:
            return
        for refusal, count in self._counts.items():
            if count > MAX_LINES:
                more = count - MAX_LINES
                self._write(refusal, f"and {more} more in {seconds:.0f} s", {"more": more})
        self._counts.clear()
        self._window_start_s = self._clock()

    def _count(self, route: str, status: int) -> None:
        if self.on_response is not None:
            self.on_response(route, status)

    def _log_refusal(self, refusal: _Refusal, field: str | None, request_id: str) -> None:
        self.flush()
        count = self._counts[refusal] = self._counts.get(refusal, 0) + 1
        if count <= MAX_LINES:
            parts = [f"field {field}" if field else "", f"request {request_id}" if request_id else ""]
            text = ", ".join(part for part in parts if part)
            self._write(refusal, text, {"field": field, "request_id": request_id})

    def _write(self, refusal: _Refusal, text: str, fields: Mapping[str, Any]) -> None:
        known = {"status": refusal.status, "code": refusal.code, "route": refusal.route, "key": refusal.key}
        level = logging.WARNING if refusal.status >= 500 else logging.INFO
        parts = [refusal.describe(), f"key {refusal.key}" if refusal.key else "", text]
        logger.log(level, "%s", ", ".join(filter(None, parts)), extra={"fields": {**known, **fields}})


@dataclass(slots=True, eq=False)
class SentResponse:
    """How much of a response was sent: `sent` in the state of a request, for the middleware within."""

    status: int = 0  # 0: nothing was sent
    num_bytes: int = 0  # of the body
    is_stream: bool = False
    has_ended: bool = False


class RequestLogMiddleware:
    """Adds X-Request-Id and the headers of the route to each response, and tells the request log about it.

    One layer for all of it, because every layer runs for every chunk of a stream.
    """

    def __init__(self, app: ASGIApp, log: RequestLog, routes: RouteTable) -> None:
        self._app = app
        self._log = log
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started_s, is_refused, refusal_body = time.monotonic(), False, b""
        given = Headers(scope=scope).get("x-request-id", "")
        state = scope.setdefault("state", {})
        sent = state["sent"] = SentResponse()
        state["request_id"] = given if REQUEST_ID_PATTERN.fullmatch(given) else uuid.uuid4().hex
        span, route = None, self._routes.template(scope["path"])
        if (task := asyncio.current_task()) is not None:
            task.set_name(f"{scope['method']:.8} {route}")  # for stall_monitor.py
        is_traced = scope["path"] not in PUBLIC_PATHS and not scope["path"].startswith(ENGINE_PATH)
        if self._log.tracer is not None and is_traced:
            span = self._log.tracer.start(scope["method"], route, Headers(scope=scope))
        token = current_span.set(span)

        async def send_counted(message: Message) -> None:
            nonlocal is_refused, refusal_body
            if message["type"] == "http.response.start":
                if sent.status:  # comments of an EarlyStream have started it
                    return
                headers = MutableHeaders(scope=message)
                sent.status = message["status"]
                sent.is_stream = headers.get("content-type", "").startswith(EVENT_STREAM)
                is_refused = _is_refused(sent.status)
                headers.update(state.get("response_headers", {}))
                if (meter := state.get("meter")) is not None:
                    headers.update(meter.headers())
                headers["X-Request-Id"] = state["request_id"]
                if is_messages_path(scope["path"]):
                    headers["request-id"] = state["request_id"]  # as Anthropic's SDKs read it
            elif message["type"] == "http.response.body":
                body = message.get("body", b"")
                sent.num_bytes += len(body)
                sent.has_ended = not message.get("more_body", False)
                if is_refused:
                    refusal_body += body
            await send(message)

        try:
            await self._app(scope, receive, send_counted)
        finally:
            closed_with: ForewordError | None = state.get("connection_error")
            # Without a response the client left, or the connection was closed for it.
            status = sent.status or (CLIENT_CLOSED if closed_with is None else closed_with.status)
            self._log.on_response_sent(scope, route, status, refusal_body, sent.num_bytes, started_s)
            current_span.reset(token)
            if span is not None:
                span.end(status, state["request_id"], _key_name(state))


def _is_refused(status: int) -> bool:
    return (400 <= status < 500 and status != CLIENT_CLOSED) or status == 503


def _key_name(state: Mapping[str, Any]) -> str:
    """The name of the request's key; "" without one."""
    access = state.get("access")
    return "" if access is None else str(access.fairness_key)


def _error_fields(body: bytes) -> tuple[str, str | None]:
    """(code or else type, field) of an error envelope; the field only if it looks like a name."""
    try:
        error = json.loads(body)["error"]
        code, param = error["code"] or error["type"], error["param"]
    except (ValueError, KeyError, TypeError):
        return "unknown", None
    is_name = isinstance(param, str) and FIELD_PATTERN.fullmatch(param) is not None
    return code, param if is_name else None
