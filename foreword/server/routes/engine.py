"""Routes under /engine, for who has the engine key; they are not in /docs.

Sessions of other servers with this one's engine exist with --engine-key. With --replica-urls this server is
a router instead, and lists, adds and drains the servers that it uses.

A router sends token ids and gets token ids: prompts, stop strings and usage are its own affair. A session is
the response of one POST; once it ends, its open requests are aborted. engine_client/remote_messages.py has
the messages.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import asdict, fields, replace
from typing import Annotated, Any, Final
from weakref import WeakSet

from fastapi import APIRouter, Depends, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from foreword.config.options import Config
from foreword.core.outputs import BlockUpdate, EmbeddingEvent, ErrorEvent, Event, StepStats, TokenEvent
from foreword.core.readiness import Readiness
from foreword.core.request import Request as EngineRequest
from foreword.engine_client.base import EngineClient
from foreword.engine_client.make_client import remote_replica
from foreword.engine_client.messages import LoadAdapter, UnloadAdapter
from foreword.engine_client.remote_messages import (
    GREETING,
    HEARTBEAT_S,
    LEASE_S,
    MESSAGES,
    REPORT,
    SESSIONS_PATH,
    CallResult,
    Greeting,
    ReloadEngine,
    RemoteError,
    SessionMessage,
    SessionReport,
    SessionStatus,
    build_digest,
)
from foreword.engine_client.router import EngineRouter
from foreword.errors import ConfigError, ForewordError, InvalidRequest, ShuttingDown, shown
from foreword.server.apis.body import StrictModel
from foreword.server.auth.keys import KeyPermissions
from foreword.server.auth.rate_limit import UsageMeter
from foreword.server.health import REFUSAL_MESSAGE, STOPPING_MESSAGE, DrainState
from foreword.server.http.responses import JSONResponse
from foreword.server.loaded_model import LoadedModel
from foreword.server.registry import ModelsDep, ServedModels

logger = logging.getLogger("foreword.serve")

REPLICAS_PATH: Final = "/engine/replicas"
MAX_CALLS: Final = 64  # open calls of a session, each a task


class EngineSessions:
    """The open sessions of all models."""

    def __init__(self, drain: DrainState, image_bytes: int) -> None:
        """image_bytes  limits the pixels of each session"""
        self._image_bytes = image_bytes
        build_digest()  # cached now: an update may replace the files later
        self._drain = drain
        self._sessions: dict[str, _Session] = {}
        self._watched: WeakSet[EngineClient] = WeakSet()
        self._used_s = time.monotonic()  # when there was a session

    def open(self, client: EngineClient) -> _Session:
        self._watch(client)
        session = _Session(client, self._drain, self._image_bytes, self._sessions.pop)
        self._sessions[session.id] = session
        client.request_blocks()
        return session

    def get(self, session_id: str) -> _Session:
        """Raises HTTPException for a session that has ended."""
        if session_id not in self._sessions:
            raise HTTPException(404, "this session has ended")
        return self._sessions[session_id]

    def end_server_if_unused(self, timeout_s: float) -> None:
        """Without a session for `timeout_s`, end this process as SIGTERM does."""
        now = time.monotonic()
        if self._sessions:
            self._used_s = now
        elif now - self._used_s > timeout_s and not self._drain.stopping:
            logger.warning("no router has had a session for %g s: the server ends", timeout_s)
            os.kill(os.getpid(), signal.SIGTERM)

    def _watch(self, client: EngineClient) -> None:
        """Tell the sessions of an engine about its steps, besides who is told already."""
        if client in self._watched:
            return
        self._watched.add(client)
        before = client.on_step

        def on_step(stats: StepStats) -> None:
            if before is not None:
                before(stats)
            for session in self._sessions.values():
                if session.client is client:
                    session.on_step(stats)

        def on_blocks(update: BlockUpdate) -> None:
            for session in self._sessions.values():
                if session.client is client:
                    session.on_blocks(update)

        client.on_step, client.on_blocks = on_step, on_blocks


class _Session:
    """A router's open requests and unsent reports."""

    def __init__(
        self, client: EngineClient, drain: DrainState, image_bytes: int, on_close: Callable[[str], Any]
    ) -> None:
        self.id = secrets.token_hex(4)
        self.client = client
        self._drain = drain
        self._on_close = on_close
        self._open: set[str] = set()  # ids of requests
        self._pixels: dict[bytes, bytes] = {}  # by the digest of an image, until the router drops it
        self._image_bytes = image_bytes
        self._events: list[TokenEvent | EmbeddingEvent | RemoteError] = []
        self._steps: list[StepStats] = []
        self._blocks: list[BlockUpdate] = []
        self._results: list[CallResult] = []
        self._calls: set[asyncio.Task[None]] = set()  # at most MAX_CALLS
        self._has_news = asyncio.Event()
        self._heard_s = time.monotonic()  # when the last message came

    async def lines(self) -> AsyncIterator[bytes]:
        """The greeting and the reports, until the router is silent or the server has drained."""
        assert self.client.info is not None, "a served engine has info"
        greeting = Greeting(build_digest(), self.id, self.client.info, time.monotonic())
        yield GREETING.dumps(greeting) + b"\n"
        loop = asyncio.get_running_loop()
        status_s = loop.time()  # when the next status is due
        while not self._is_over():
            # A refusal comes with the status, so that the router chooses another engine.
            is_due = loop.time() >= status_s or self._drain.draining
            if is_due:
                status_s = loop.time() + HEARTBEAT_S
            yield REPORT.dumps(self._take_report(is_due)) + b"\n"
            timer = loop.call_at(status_s, self._has_news.set)
            await self._has_news.wait()
            timer.cancel()
            self._has_news.clear()

    def _is_over(self) -> bool:
        if time.monotonic() - self._heard_s > LEASE_S:
            logger.warning("a router sent nothing for %g s: its %d requests end", LEASE_S, len(self._open))
            return True
        return self._drain.draining and not (self._open or self._events)

    def _take_report(self, has_status: bool) -> SessionReport:
        status = None
        if has_status:
            status = SessionStatus(self._readiness(), self.client.stats, time.monotonic())
        report = SessionReport(
            tuple(self._events), tuple(self._steps), tuple(self._blocks), tuple(self._results), status
        )
        self._events, self._steps, self._blocks, self._results = [], [], [], []
        return report

    def _readiness(self) -> Readiness:
        if self._drain.stopping:
            return Readiness("draining", STOPPING_MESSAGE)
        return self.client.readiness

    def on_step(self, stats: StepStats) -> None:
        self._steps.append(stats)
        self._has_news.set()  # the writer runs after the events of this step

    def on_blocks(self, update: BlockUpdate) -> None:
        if update.is_snapshot:  # the whole cache: earlier updates are void
            self._blocks.clear()
        self._blocks.append(update)
        self._has_news.set()

    def _on_event(self, event: Event | None) -> None:
        if event is None:  # remove() ended the request
            return
        if not isinstance(event, TokenEvent) or event.finish_reason is not None:
            self._open.discard(event.request_id)
        if isinstance(event, ErrorEvent):
            self._events.append(RemoteError.from_error(event.error, event.request_id))
        else:
            self._events.append(event)
        self._has_news.set()

    def receive(self, messages: list[SessionMessage]) -> None:
        """Act on the router's messages. Raises InvalidRequest before the first of them is acted on."""
        self._heard_s = time.monotonic()
        new_ids: set[str] = set()
        images = {digest: len(pixels) for digest, pixels in self._pixels.items()}
        for index, message in enumerate(messages):
            self._check(f"[{index}]", message, new_ids, images)
        num_calls = sum(_call_of(message) is not None for message in messages)
        if num_calls + len(self._calls) > MAX_CALLS:
            raise InvalidRequest(f"a session may have {MAX_CALLS} open calls of adapters and reloads")
        for message in messages:
            if message.request is not None:
                self._submit(message.request)
            elif message.add_image is not None:
                self._pixels[message.add_image.digest] = message.add_image.pixels
            elif message.drop_image is not None:
                self._pixels.pop(message.drop_image.digest, None)
            elif message.remove is not None:
                self._remove(message.remove.request_id, message.remove.num_tokens)
            elif message.send_blocks is not None:
                self.client.request_blocks()
            elif (call := _call_of(message)) is not None:
                task = asyncio.create_task(self._answer(call))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)

    def _check(
        self, field: str, message: SessionMessage, new_ids: set[str], images: dict[bytes, int]
    ) -> None:
        """images  bytes of the pixels that the session has then, by digest; it is updated"""
        if sum(getattr(message, each.name) is not None for each in fields(SessionMessage)) != 1:
            raise InvalidRequest(
                f"{field} must have one of {', '.join(each.name for each in fields(SessionMessage))}", field
            )
        if message.remove is not None and (message.remove.num_tokens or 0) < 0:
            problem = f"must be at least 0, got {message.remove.num_tokens:.40g}"
            raise InvalidRequest(f"{field}.remove.num_tokens {problem}", f"{field}.remove.num_tokens")
        if message.add_image is not None:
            images[message.add_image.digest] = len(message.add_image.pixels)
            if sum(images.values()) > self._image_bytes:
                problem = f"the images of a session may have {self._image_bytes} bytes (--image-memory)"
                raise InvalidRequest(f"{field}.add_image: {problem}", f"{field}.add_image")
        if message.drop_image is not None:
            images.pop(message.drop_image.digest, None)
        if message.request is not None:
            self._check_request(f"{field}.request", message.request, new_ids, images)

    def _check_request(
        self, field: str, request: EngineRequest, new_ids: set[str], images: Mapping[bytes, int]
    ) -> None:
        assert self.client.info is not None, "a served engine has info"
        times = (request.arrival_s, request.queue_deadline_s, request.deadline_s)
        if not all(time_s is None or math.isfinite(time_s) for time_s in times):
            raise InvalidRequest(f"{field}: its times must be finite", field)
        request.check_bounds(self.client.info.vocab_size)
        for index, image in enumerate(request.images):
            if image.pixels is not None or images.get(image.digest) != image.num_bytes:
                problem = f"must come without pixels, after an add_image with {image.num_bytes} bytes"
                raise InvalidRequest(f"{field}.images[{index}] {problem}", f"{field}.images[{index}]")
        request_id = request.id
        is_known = request_id in self._open or request_id in new_ids
        new_ids.add(request_id)
        if is_known or not request_id.startswith(f"{self.id}-"):
            field = f"{field}.id"
            problem = f"must begin with {self.id}- and be new, got {shown(request_id)}"
            raise InvalidRequest(f"{field} {problem}", field)

    def _submit(self, request: EngineRequest) -> None:
        self._open.add(request.id)
        images = (replace(image, pixels=self._pixels[image.digest]) for image in request.images)
        request = replace(request, images=tuple(images))
        try:
            if self._drain.draining:
                raise ShuttingDown(REFUSAL_MESSAGE)
            self.client.listen(request, self._on_event)
        except ForewordError as error:
            self._on_event(ErrorEvent(request.id, error))

    def _remove(self, request_id: str, num_tokens: int | None) -> None:
        if request_id not in self._open:  # it ended meanwhile
            return
        self._open.remove(request_id)
        if num_tokens is None:
            self.client.abort(request_id)
        else:
            self.client.finish(request_id, num_tokens)

    async def _answer(self, message: LoadAdapter | UnloadAdapter | ReloadEngine) -> None:
        result = CallResult(message.call)
        try:
            if isinstance(message, LoadAdapter):
                result = result._replace(info=await self.client.load_adapter(message.path))
            elif isinstance(message, UnloadAdapter):
                await self.client.unload_adapter(message.digest)
            else:
                async for _ in self.client.reload():
                    pass
        except ForewordError as error:
            result = result._replace(error=RemoteError.from_error(error))
        self._results.append(result)
        self._has_news.set()

    def close(self) -> None:
        """Abort what is open."""
        self._on_close(self.id)
        for request_id in self._open:
            self.client.abort(request_id)
        for task in self._calls:
            task.cancel()


def _call_of(message: SessionMessage) -> LoadAdapter | UnloadAdapter | ReloadEngine | None:
    return message.load_adapter or message.unload_adapter or message.reload


class _SessionResponse(StreamingResponse):
    """The lines of a session, which ends with the connection."""

    def __init__(self, session: _Session) -> None:
        super().__init__(session.lines(), media_type="application/x-ndjson")
        self._session = session

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(OSError):  # the router hung up
                await super().__call__(scope, receive, send)
        finally:
            self._session.close()


def _get_sessions(request: Request) -> EngineSessions:
    sessions: EngineSessions = request.app.state.engine_sessions
    return sessions


SessionsDep = Annotated[EngineSessions, Depends(_get_sessions)]
sessions_router = APIRouter(include_in_schema=False)
replicas_router = APIRouter(include_in_schema=False)


@sessions_router.post(SESSIONS_PATH)
async def open_session(request: Request, models: ModelsDep, sessions: SessionsDep) -> Response:
    """A stream of events of the default model's engine, for requests that come by the next route."""
    server = await models.acquire(None, KeyPermissions("", "", UsageMeter()), request)
    server.info()
    return _SessionResponse(sessions.open(server.client))


@sessions_router.post("/engine/shutdown", status_code=204)
async def shut_down() -> None:
    """End the server as SIGTERM does: open requests may finish, sessions hear of it."""
    os.kill(os.getpid(), signal.SIGTERM)


@sessions_router.post(f"{SESSIONS_PATH}/{{session_id}}/messages", status_code=204)
async def receive_messages(session_id: str, request: Request, sessions: SessionsDep) -> None:
    """A JSON list of messages, which take effect in its order, all or none."""
    session = sessions.get(session_id)
    try:
        messages = MESSAGES.loads(await request.body())
    except ValidationError as error:
        problems = error.errors(include_url=False)
        if problems[0]["type"] == "json_invalid":
            raise InvalidRequest(f"the body is not valid JSON: {problems[0]['ctx']['error']}") from None
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in problems]) from None
    session.receive(messages)


class AddReplicaBody(StrictModel):
    url: str
    model: str | None = None  # None: the default model


@replicas_router.get(REPLICAS_PATH)
async def list_replicas(models: ModelsDep) -> Response:
    """The models with replicas, their load, and the state of each replica."""
    return JSONResponse(
        {"models": [_describe_replicas(server, client) for server, client in _replicated(models)]}
    )


@replicas_router.post(REPLICAS_PATH, status_code=204)
async def add_replica(body: AddReplicaBody, models: ModelsDep) -> None:
    """Use the engine of one more server, once it answers. One that is used already stays."""
    server, client = _find_replicated(models, body.model)
    try:
        (url,) = Config(replica_urls=body.url, engine_key=server.config.engine_key).remote_urls
    except (ConfigError, ValueError):
        raise InvalidRequest("url must be like http://10.0.0.7:8000", "url") from None
    added = remote_replica(server.config, url)
    if added.id not in {state.id for state in client.replica_states()}:
        client.add(added)


@replicas_router.delete(f"{REPLICAS_PATH}/{{replica_id}}", status_code=204)
async def drain_replica(replica_id: str, models: ModelsDep, model: str | None = None) -> None:
    """Move the streams of a replica to others, and forget it."""
    _, client = _find_replicated(models, model)
    await client.drain(replica_id)


def _replicated(models: ServedModels) -> Iterator[tuple[LoadedModel, EngineRouter]]:
    for server in models.loaded:
        if isinstance(server.client, EngineRouter) and server.client.has_replicas:
            yield server, server.client


def _find_replicated(models: ServedModels, name: str | None) -> tuple[LoadedModel, EngineRouter]:
    """Raises HTTPException."""
    for server, client in _replicated(models):
        if name is None or name in server.names.all:
            return server, client
    raise HTTPException(404, "no model of this name has replicas")


def _describe_replicas(server: LoadedModel, client: EngineRouter) -> dict[str, Any]:
    now, live = time.monotonic(), list(server.recorder.live_requests())
    waits = (now - progress.arrival_s for progress in live if not progress.is_prompt_computed)
    return {
        "name": server.model_name,
        "num_requests": len(live),
        "longest_wait_s": round(max(waits, default=0.0), 3),
        "max_num_seqs": server.info().resolved.max_num_seqs,
        "replicas": [asdict(state) for state in client.replica_states()],
    }
