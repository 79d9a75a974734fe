"""An engine that another server runs, over HTTP. Nothing here imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import ssl
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, NoReturn

import httpx
from pydantic import ValidationError

from foreword.config.lora import AdapterInfo, LoraModule
from foreword.core.outputs import EmbeddingEvent, ErrorEvent, Event, StepStats, TokenEvent
from foreword.core.readiness import Readiness
from foreword.core.request import Request
from foreword.engine_client.base import EngineCallbacks, PendingCalls, ReplicaClient, is_last
from foreword.engine_client.messages import (
    AddImage,
    LoadAdapter,
    RemoveRequest,
    SendBlocks,
    SentImages,
    UnloadAdapter,
)
from foreword.engine_client.remote_messages import (
    CLIENT_INTERVAL_S,
    GREETING,
    MESSAGES,
    REPORT,
    SESSIONS_PATH,
    Greeting,
    ReloadEngine,
    RemoteError,
    SessionMessage,
    SessionReport,
    SessionStatus,
    build_digest,
)
from foreword.errors import AdapterConflict, ConfigError, EngineDead, ForewordError, RequestFailed
from foreword.planning.resolve import EngineInfo

logger = logging.getLogger(__name__)

SILENCE_S: Final = 2.0  # silence after which a connection is dead
MAX_LINE_BYTES: Final = 64 << 20
MAX_BATCH_BYTES: Final = 4 << 20  # limit of the messages in one POST; a single one may be larger
MIN_BACKOFF_S, MAX_BACKOFF_S = 0.1, 2.0  # pause between attempts to connect
MAX_CLOCK_ERROR_S: Final = 0.25  # limit of the error of the clocks' difference
REFUSALS: Final = (
    httpx.codes.BAD_REQUEST,
    httpx.codes.REQUEST_ENTITY_TOO_LARGE,
)  # statuses that refuse a message
MAX_DRAFTED: Final = 1 << 12  # far above the longest draft of an event
MAX_ERROR_CHARS: Final = 300  # length of a server's answer in our errors

OnEvent = Callable[[Event], None]
# (number of the request that it submits or "", JSON; an image is written as such when it is sent)
_Message = tuple[str, bytes | AddImage]


class _Disconnected(Exception):
    """The session is over, and why."""


class _Refused(_Disconnected):
    """This server does not take this client: another key, another version, another model."""


class RemoteClient:
    """See ReplicaClient. The server replaces an engine that crashes, under open requests.

    If the connection is closed, or silent for `silence_s`, all open requests get EngineDead at once, and so
    do new ones until there is a connection again, to an engine with the same fingerprint.
    """

    pid: None = None  # a process of another machine

    def __init__(
        self, url: str, key: str, adapters: tuple[LoraModule, ...] = (), silence_s: float = SILENCE_S
    ) -> None:
        """url       of the server: http://10.0.0.7:8000
        key       its --engine-key
        adapters  to load there, from paths of that machine
        """
        self.address = url.rstrip("/")
        self.info: EngineInfo | None = None
        self.alive = False
        self._callbacks: EngineCallbacks  # set by start()
        self._session: _Session | None = None
        self._accepts = False  # the session is that of the right engine, with its adapters
        self._started: asyncio.Future[EngineInfo] | None = None
        self._task: asyncio.Task[None] | None = None
        self._detail = f"there is no connection to {self.address} yet"
        self._num_lost = 0  # connections
        # By path: None is not loaded yet. A server that was started again has to load them again.
        self._adapters: dict[str, AdapterInfo | None] = {module.path: None for module in adapters}
        self._http = httpx.AsyncClient(
            base_url=self.address,
            headers={"Authorization": f"Bearer {key.strip()}", "Content-Type": "application/json"},
            timeout=httpx.Timeout(silence_s, pool=None),
            verify=ssl.create_default_context(),  # the system's certificates, or those of SSL_CERT_FILE
            trust_env=False,  # no proxy
        )

    @property
    def stats(self) -> StepStats:
        return StepStats() if self._session is None else self._session.stats

    @property
    def readiness(self) -> Readiness:
        if self._session is not None and self._accepts:
            readiness = self._session.readiness
            return replace(readiness, restarts=readiness.restarts + self._num_lost)
        status = "loading" if self.info is None else "unresponsive"
        return Readiness(status, self._detail, restarts=self._num_lost)

    async def start(self, callbacks: EngineCallbacks, reuse: ReplicaClient | None = None) -> EngineInfo:
        """Connect; wait while the server cannot be reached, or loads. Raises ConfigError if it refuses."""
        self._callbacks = callbacks
        self._started = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(), name=f"engine at {self.address}")
        return await self._started

    def listen(self, request: Request, on_event: OnEvent) -> None:
        if not self._accepts:
            raise EngineDead(self._detail)
        self._open_session.submit(request, on_event)

    def remove(self, request_id: str, num_tokens: int | None = None) -> None:
        if self._session is not None:
            self._session.remove(request_id, num_tokens)

    def running_ids(self) -> Collection[str]:
        return () if self._session is None else self._session.open_ids()

    def set_threads(self, num_threads: int) -> None:
        """The other machine has cores of its own."""

    def request_blocks(self) -> None:
        if self._session is not None:
            self._session.send(SessionMessage(send_blocks=SendBlocks()))

    async def reload(self) -> AsyncIterator[str]:
        started_s = time.monotonic()
        yield f"{self.address} replaces its engine"
        await self._call(lambda call: SessionMessage(reload=ReloadEngine(call)))
        yield f"ready after {time.monotonic() - started_s:.1f} s"

    async def load_adapter(self, path: str) -> AdapterInfo:
        info = self._adapters[path] = await self._load(path)
        return info

    async def unload_adapter(self, digest: str) -> None:
        """It is not loaded again after a lost connection either, even if there is none now."""
        before = self._adapters.copy()
        for path, info in before.items():
            if info is not None and info.digest == digest:
                del self._adapters[path]
        try:
            await self._call(lambda call: SessionMessage(unload_adapter=UnloadAdapter(call, digest)))
        except AdapterConflict:
            self._adapters = before | self._adapters
            raise

    async def _load(self, path: str) -> AdapterInfo:
        info = await self._call(lambda call: SessionMessage(load_adapter=LoadAdapter(call, path)))
        assert info is not None, "a loaded adapter has info"
        return info

    async def _call(self, make_message: Callable[[int], SessionMessage]) -> AdapterInfo | None:
        """The reply to a message that has one. Raises its error, or EngineDead."""
        session = self._open_session
        return await session.calls.call(lambda call: session.send(make_message(call)))

    @property
    def _open_session(self) -> _Session:
        """Raises EngineDead without a connection."""
        if self._session is None:
            raise EngineDead(self._detail)
        return self._session

    def skip_drain(self) -> None:
        """close() does not wait for the server's steps."""

    async def close(self) -> None:
        self.alive = False
        self._detail = "the engine was shut down"
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._started is not None and not self._started.done():
            self._started.set_exception(EngineDead(self._detail))
        await self._http.aclose()

    # Connections

    async def _run(self) -> None:
        """Connect again and again. A server that refuses the first connection ends start()."""
        backoff_s = MIN_BACKOFF_S
        while True:
            started_s = time.monotonic()
            try:
                await self._connect()
            except Exception as error:
                if not isinstance(error, _Disconnected | httpx.HTTPError):
                    logger.exception("client: the connection to %s failed", self.address)
                self._set_detail(error)
                if isinstance(error, _Refused) and self._started is not None and not self._started.done():
                    self._started.set_exception(ConfigError(str(error), "replica_urls"))
            if time.monotonic() - started_s > MAX_BACKOFF_S:
                backoff_s = MIN_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _connect(self) -> None:
        """One connection, until it ends with _Disconnected or httpx.HTTPError."""
        async with self._http.stream("POST", SESSIONS_PATH) as response:
            await self._check(response)
            lines = _read_lines(response)
            session = self._session = _Session(self._http, self._read_greeting(await anext(lines)))
            on_refused = partial(self._deliver, session)
            work = (self._read(session, lines), session.write(on_refused), self._begin(session))
            tasks = [asyncio.create_task(each) for each in work]
            try:
                for ended in asyncio.as_completed(tasks):
                    await ended
            except BaseException as error:
                self._on_lost(session, error)
                raise
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _check(self, response: httpx.Response) -> None:
        """Raises _Disconnected; _Refused where another attempt gets the same answer."""
        if response.status_code == httpx.codes.OK:
            return
        text = _error_text(await response.aread())
        if response.status_code == httpx.codes.NOT_FOUND:
            raise _Refused(f"the server {self.address} has no --engine-key")
        if response.status_code == httpx.codes.UNAUTHORIZED:
            raise _Refused(f"the server {self.address} has another --engine-key")
        raise _Disconnected(f"the server {self.address} answers {response.status_code}: {text}")

    def _read_greeting(self, line: bytes) -> Greeting:
        """Raises _Refused for a server of another build, whose messages may be others."""
        refusal = _Refused(f"the server {self.address} runs another build of Foreword: install the same")
        try:
            greeting = GREETING.loads(line)
        except ValidationError:
            raise refusal from None
        if greeting.build != build_digest():
            raise refusal
        return greeting

    async def _begin(self, session: _Session) -> None:
        """Accept requests, if the engine is that of the first connection. Raises _Refused."""
        info = session.info
        if self.info is not None and info.fingerprint != self.info.fingerprint:
            problem = f"its fingerprint is {info.fingerprint}, that of before was {self.info.fingerprint}"
            raise _Refused(f"the engine of {self.address} would give other tokens: {problem}")
        if self._adapters:
            info = replace(info, adapters=await self._load_again())
        self.info = info  # its limits may be others than before
        logger.info("client: connected to %s", self.address)
        self.alive = self._accepts = True
        if self._started is not None and not self._started.done():
            self._started.set_result(self.info)
        else:
            self._callbacks.on_ready()

    async def _load_again(self) -> tuple[AdapterInfo, ...]:
        """Load the adapters of before, without those whose files changed or are gone.

        Raises _Refused for one that this client never had: the configuration is wrong.
        """
        loaded = []
        for path, before in list(self._adapters.items()):
            try:
                adapter = await self._load(path)
            except ForewordError as error:
                problem = f"the engine of {self.address} cannot load {path}: {error.message}"
                if before is None or isinstance(error, EngineDead):
                    raise _Refused(problem) from None
                logger.error("client: %s; its requests go elsewhere", problem)
                continue
            if before is not None and before.digest != adapter.digest:
                text = "client: adapter %s on %s changed since the last connection; its requests go elsewhere"
                logger.error(text, path, self.address)
            elif path in self._adapters:  # not unloaded meanwhile
                self._adapters[path] = adapter
                loaded.append(adapter)
        return tuple(loaded)

    async def _read(self, session: _Session, lines: AsyncIterator[bytes]) -> None:
        """Pass the reports on. Raises _Disconnected, httpx.HTTPError."""
        async for line in lines:
            try:
                report = REPORT.loads(line)
            except ValidationError as error:
                raise _Disconnected(f"{self.address} sent no report: {_first_problem(error)}") from None
            self._on_report(session, report)
        raise _Disconnected(f"the server {self.address} closed the connection")

    def _on_report(self, session: _Session, report: SessionReport) -> None:
        if report.status is not None:
            session.on_status(report.status)
        for stats in report.steps:
            if not stats.replica:  # the server's status has the sum of several engines
                session.stats = stats
            self._callbacks.on_step(stats)
        for update in report.blocks:
            self._callbacks.on_blocks(update)
        for result in report.calls:
            session.calls.resolve(
                result.call, result.info if result.error is None else result.error.to_error()
            )
        for event in report.events:
            if isinstance(event, TokenEvent) and not _is_within_bounds(event, session.info.vocab_size):
                raise _Disconnected(f"{self.address} sent tokens outside of their limits")
            self._deliver(session, event)

    def _deliver(self, session: _Session, event: TokenEvent | EmbeddingEvent | RemoteError) -> None:
        if (delivery := session.take_event(event)) is not None:
            on_event, own = delivery
            on_event(own)

    def _on_lost(self, session: _Session, error: BaseException) -> None:
        """End all open requests."""
        was_accepting, self._accepts = self._accepts, False
        self._set_detail(error)
        if was_accepting and not isinstance(error, asyncio.CancelledError):
            self._num_lost += 1
            logger.warning("client: %s; %d open requests end here", self._detail, len(session.open_ids()))
            self._callbacks.on_restart(None if session.readiness.status == "draining" else self._detail)
        session.close(EngineDead(self._detail))
        self._session = None

    def _set_detail(self, error: BaseException) -> None:
        """Say why there is no connection."""
        if isinstance(error, _Disconnected):
            self._detail = str(error)
        elif isinstance(error, httpx.TimeoutException):
            self._detail = f"the server {self.address} is silent"
        elif not isinstance(error, asyncio.CancelledError):
            self._detail = f"no connection to the server {self.address}: {str(error) or type(error).__name__}"


class _Session:
    """One connection: the requests that are open in it, and the messages to send."""

    def __init__(self, http: httpx.AsyncClient, greeting: Greeting) -> None:
        self.info = greeting.info
        self.stats = StepStats()
        self.readiness = Readiness("ok")
        self._http = http
        self._id = greeting.session
        self._clock_offset_s = greeting.now_s - time.monotonic()  # the server's time.monotonic() minus ours
        self._counter = itertools.count()
        # By number in this session: late events of a request never reach a later one with its id.
        self._open: dict[str, tuple[Request, OnEvent]] = {}
        self._numbers: dict[str, str] = {}  # numbers by request id
        self._images = SentImages()
        self.calls = PendingCalls()
        self._outbox: list[_Message] = []
        self._has_messages = asyncio.Event()

    # Requests

    def submit(self, request: Request, on_event: OnEvent) -> None:
        number = f"{self._id}-{next(self._counter)}"
        offset_s, queue_deadline_s, deadline_s = (
            self._clock_offset_s,
            request.queue_deadline_s,
            request.deadline_s,
        )
        remote = replace(
            request,
            id=number,
            arrival_s=request.arrival_s + offset_s,
            queue_deadline_s=None if queue_deadline_s is None else queue_deadline_s + offset_s,
            deadline_s=None if deadline_s is None else deadline_s + offset_s,
        )
        images, bare = self._images.add(remote)
        try:
            message = _dump(SessionMessage(request=bare))
        except Exception:  # the request is not open
            self._images.remove(remote)
            raise
        self._outbox += [("", image) for image in images]
        self._outbox.append((number, message))
        self._has_messages.set()
        self._open[number] = request, on_event
        self._numbers[request.id] = number

    def remove(self, request_id: str, num_tokens: int | None) -> None:
        """End a request, if it is open."""
        number = self._numbers.pop(request_id, None)
        if number is not None:
            request, _ = self._open.pop(number)
            self.send(SessionMessage(remove=RemoveRequest(number, num_tokens)))
            self._drop_images(request)

    def _drop_images(self, request: Request) -> None:
        for image in self._images.remove(request):
            self.send(SessionMessage(drop_image=image))

    def open_ids(self) -> Collection[str]:
        return self._numbers.keys()

    def take_event(self, event: TokenEvent | EmbeddingEvent | RemoteError) -> tuple[OnEvent, Event] | None:
        """The event with our id and our clock, for its listener; None if the request has ended."""
        if event.request_id not in self._open:
            return None
        request, on_event = self._open[event.request_id]
        own: Event
        if isinstance(event, RemoteError):
            own = ErrorEvent(request.id, event.to_error())
        else:
            scheduled_s = event.scheduled_s - self._clock_offset_s
            if isinstance(event, TokenEvent):
                own = event._replace(request_id=request.id, scheduled_s=scheduled_s)
            else:
                own = replace(event, request_id=request.id, scheduled_s=scheduled_s)
        if is_last(own):
            del self._open[event.request_id], self._numbers[request.id]
            self._drop_images(request)
        return on_event, own

    def close(self, error: ForewordError) -> None:
        """End what is open."""
        self.calls.fail_all(error)
        while self._open:  # a listener may remove others
            number = next(iter(self._open))
            request, on_event = self._open.pop(number)
            del self._numbers[request.id]
            on_event(ErrorEvent(request.id, error))

    def on_status(self, status: SessionStatus) -> None:
        self.readiness, self.stats = status.readiness, status.stats
        offset_s = (
            status.now_s - time.monotonic()
        )  # minus network latency, so the largest sample is the most accurate
        if offset_s > self._clock_offset_s or offset_s < self._clock_offset_s - MAX_CLOCK_ERROR_S:
            self._clock_offset_s = offset_s

    # Messages

    def send(self, message: SessionMessage) -> None:
        self._outbox.append(("", _dump(message)))
        self._has_messages.set()

    async def write(self, on_refused: Callable[[RemoteError], None]) -> NoReturn:
        """Send messages in order, none after a while. Raises _Disconnected, httpx.HTTPError."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CLIENT_INTERVAL_S):
                    await self._has_messages.wait()
            self._has_messages.clear()
            messages, self._outbox = self._outbox, []
            for batch in _batches(messages):
                await self._post(batch, on_refused)

    async def _post(self, batch: Sequence[_Message], on_refused: Callable[[RemoteError], None]) -> None:
        messages = (
            _dump(SessionMessage(add_image=message)) if isinstance(message, AddImage) else message
            for _, message in batch
        )
        body = b"[" + b",".join(messages) + b"]"
        response = await self._http.post(f"{SESSIONS_PATH}/{self._id}/messages", content=body)
        if response.status_code == httpx.codes.NO_CONTENT:
            return
        text = _error_text(response.content)
        if response.status_code not in REFUSALS:
            raise _Disconnected(f"{self._http.base_url} answers {response.status_code}: {text}")
        if len(batch) > 1:  # none of them took effect
            for message in batch:
                await self._post((message,), on_refused)
        elif batch and batch[0][0]:
            error = RequestFailed(f"the engine's server refused the request: {text}")
            on_refused(RemoteError.from_error(error, batch[0][0]))


def _is_within_bounds(event: TokenEvent, vocab_size: int) -> bool:
    """Whether its numbers may be those of an engine: statistics hold a counter for each drafted token."""
    draft = event.draft
    if draft is not None and not 0 <= draft.num_accepted <= draft.num_drafted <= MAX_DRAFTED:
        return False
    return event.index >= 0 and all(0 <= token_id < vocab_size for token_id in event.token_ids)


def _dump(message: SessionMessage) -> bytes:
    return MESSAGES.dumps([message])[1:-1]


def _batches(messages: Sequence[_Message]) -> Iterator[Sequence[_Message]]:
    """The messages in parts of at most MAX_BATCH_BYTES; without messages one empty part."""
    start = size = 0
    for index, (_, message) in enumerate(messages):
        num_bytes = len(message.pixels) if isinstance(message, AddImage) else len(message)
        if index > start and size + num_bytes > MAX_BATCH_BYTES:
            yield messages[start:index]
            start, size = index, 0
        size += num_bytes
    yield messages[start:]


async def _read_lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Lines without their ends. Raises _Disconnected, httpx.HTTPError."""
    line = bytearray()
    async for chunk in response.aiter_raw():
        for index, part in enumerate(chunk.split(b"\n")):
            if index:
                yield bytes(line)
                line.clear()
            if len(line) + len(part) > MAX_LINE_BYTES:
                limit = f"{MAX_LINE_BYTES >> 20} MiB"
                raise _Disconnected(f"{response.url.host} sent a line of more than {limit}")
            line += part


def _error_text(body: bytes) -> str:
    """The message of an error envelope, or the beginning of another body."""
    try:
        text = str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        text = body.decode(errors="replace")
    return text[:MAX_ERROR_CHARS]


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
