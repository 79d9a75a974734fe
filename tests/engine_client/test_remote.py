"""An engine behind another server: the same events, and what a lost connection does."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from foreword.config.lora import AdapterInfo, LoraModule
from foreword.config.options import Config
from foreword.core.images import PromptImage
from foreword.core.outputs import DraftResult, ErrorEvent, Event, StepStats, TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.readiness import Readiness
from foreword.core.request import Request
from foreword.engine_client import remote
from foreword.engine_client.base import EngineCallbacks, is_last
from foreword.engine_client.remote import RemoteClient, _Disconnected, _read_lines, _Session
from foreword.engine_client.remote_messages import (
    GREETING,
    REPORT,
    Greeting,
    SessionReport,
    SessionStatus,
    build_digest,
)
from foreword.errors import (
    AdapterConflict,
    CheckpointError,
    ConfigError,
    EngineDead,
    Overloaded,
    RequestFailed,
)
from tests.server.conftest import RunningServer, run_server
from tests.support.fakes import EOS, FakeEngineClient, FakeOutput, engine_info
from tests.support.waiting import WAIT_S, wait_until_async

KEY = "a key of the engine"
CONFIG = Config(engine_key=KEY)


@pytest.fixture
def node() -> Iterator[RunningServer]:
    with run_server(CONFIG) as server:
        yield server


@contextlib.asynccontextmanager
async def connected(
    url: str, callbacks: EngineCallbacks | None = None, **options: Any
) -> AsyncIterator[RemoteClient]:
    client = RemoteClient(url, KEY, **({"silence_s": WAIT_S} | options))
    try:
        async with asyncio.timeout(WAIT_S):
            await client.start(callbacks or EngineCallbacks())
        yield client
    finally:
        await client.close()


def make_request(name: str = "r", **changes: Any) -> Request:
    params = SamplingParams(**changes.pop("params", {}))
    given = {"arrival_s": time.monotonic(), "eos_token_ids": (EOS,)} | changes
    return Request(name, (40, 41), params, 7, **given)


async def collect(client: RemoteClient, request: Request) -> list[Event]:
    events: list[Event] = []
    client.listen(request, events.append)
    await wait_until_async(lambda: events and is_last(events[-1]))
    return events


def without_times(events: list[Event]) -> list[Event]:
    return [event._replace(scheduled_s=0.0) if isinstance(event, TokenEvent) else event for event in events]


async def test_events_are_those_of_the_engine(node: RunningServer) -> None:
    node.set_output(FakeOutput("answer", bursts=(3, 1)))
    request = make_request(params={"logprobs": 2, "prompt_logprobs": 1})
    local = FakeEngineClient(FakeOutput("answer", bursts=(3, 1)))
    await local.start()
    expected = [event async for event in local.submit(request)]
    async with connected(node.url) as client:
        assert client.info == local.info
        assert client.readiness.status == "ok"
        assert without_times(await collect(client, request)) == without_times(expected)


async def test_request_arrives_as_it_was_sent(node: RunningServer) -> None:
    request = make_request(
        params={"temperature": 0, "logit_bias": {7: -1.5}},
        resume_output_ids=(65,),
        adapter_name="é",
        priority=-3,
    )
    async with connected(node.url) as client:
        await collect(client, request)
    sent = node.client.submitted[0]
    assert replace(sent, id=request.id, arrival_s=request.arrival_s) == request
    assert sent.arrival_s == pytest.approx(request.arrival_s, abs=1.0)  # one clock here, less the way


async def test_image_of_several_choices_is_sent_once(node: RunningServer) -> None:
    """128 choices sent its pixels 128 times, written as JSON on the event loop."""
    image = PromptImage(bytes(16), 2, (1, 1, 2), (8, 8), (1, 3, 8, 8), bytes(range(192)), start=0)
    node.set_output(FakeOutput("answer", hang_after=1))
    async with connected(node.url) as client:
        session = client._open_session
        bodies: list[bytes] = []
        post = session._http.post

        async def recorded(path: str, content: bytes) -> httpx.Response:
            bodies.append(content)
            return await post(path, content=content)

        session._http.post = recorded  # type: ignore[method-assign, assignment]
        requests = [make_request(f"r{n}", images=(image,)) for n in range(3)]
        for request in requests:
            client.listen(request, lambda event: None)
        await wait_until_async(lambda: len(node.client.submitted) == 3)
        assert [request.images for request in node.client.submitted] == [(image,)] * 3
        assert b"".join(bodies).count(base64.urlsafe_b64encode(image.pixels or b"")) == 1
        for request in requests:
            client.remove(request.id)
        await wait_until_async(lambda: b'"drop_image":{' in b"".join(bodies))
        client.listen(make_request("again", images=(image,)), lambda event: None)
        await wait_until_async(lambda: len(node.client.submitted) == 4)
        assert b"".join(bodies).count(base64.urlsafe_b64encode(image.pixels or b"")) == 2


async def test_clocks_of_two_machines_may_differ(
    node: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead_s = 1000.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + ahead_s)
    monkeypatch.setattr(remote, "time", clock)  # of the client
    now_s = clock.monotonic()
    request = make_request(arrival_s=now_s, deadline_s=now_s + WAIT_S, queue_deadline_s=now_s + 2 * WAIT_S)
    async with connected(node.url) as client:
        events = await collect(client, request)
        ended_s = clock.monotonic()
    sent = node.client.submitted[0]
    assert sent.arrival_s <= time.monotonic()
    assert sent.deadline_s - sent.arrival_s == pytest.approx(WAIT_S)
    assert sent.queue_deadline_s - sent.arrival_s == pytest.approx(2 * WAIT_S)
    for event in events:
        assert isinstance(event, TokenEvent)
        assert now_s <= event.scheduled_s <= ended_s + ahead_s / 2


async def test_messages_that_took_long_do_not_change_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A time that was sent 0.2 s ago looks like a clock that is 0.2 s behind."""
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: 100.0))
    async with httpx.AsyncClient() as http:
        session = _Session(http, Greeting(build_digest(), "s", engine_info(), 99.8))
        session.submit(make_request(), lambda event: None)
        for server_s in (100.0, 99.8):
            session.on_status(SessionStatus(Readiness("ok"), StepStats(), server_s))
    delivery = session.take_event(TokenEvent("s-0", 0, (65,), scheduled_s=50.0))
    assert delivery is not None and isinstance(delivery[1], TokenEvent)
    assert delivery[1].scheduled_s == 50.0


async def test_error_of_the_engine_arrives(node: RunningServer) -> None:
    node.set_output(FakeOutput(fail_after=2, error=Overloaded("full", retry_after_s=9)))
    async with connected(node.url) as client:
        *_, last = await collect(client, make_request())
    assert isinstance(last, ErrorEvent)
    assert last.request_id == "r"
    assert isinstance(last.error, Overloaded)
    assert last.error.retry_after_s == 9


async def test_removed_requests_end_in_the_engine(node: RunningServer) -> None:
    node.set_output(FakeOutput(hang_after=1))
    async with connected(node.url) as client:
        events: list[Event] = []
        for name in ("finished", "aborted"):
            client.listen(make_request(name), events.append)
        await wait_until_async(lambda: len(events) == 2)
        assert set(client.running_ids()) == {"finished", "aborted"}, "the server enforces their deadlines"
        client.remove("finished", 1)
        client.remove("aborted")
        await wait_until_async(lambda: not node.client.live)
        assert [num_tokens for _, num_tokens in node.client.finished] == [1]
        assert len(node.client.aborted) == 1 and len(events) == 2
        client.remove("aborted")  # twice does nothing


async def test_late_events_of_a_request_do_not_reach_the_next_with_its_id(node: RunningServer) -> None:
    node.set_output(FakeOutput("x" * 50))
    async with connected(node.url) as client:
        client.listen(make_request("same"), lambda event: None)
        client.remove("same")
        node.set_output(FakeOutput("yy"))
        events = await collect(client, make_request("same"))
        assert b"".join(bytes(event.token_ids[:1]) for event in events[:2]) == b"yy"  # type: ignore[union-attr]


async def test_stats_of_every_step_arrive(node: RunningServer) -> None:
    steps: list[StepStats] = []
    async with connected(node.url, EngineCallbacks(on_step=steps.append)) as client:
        await collect(client, make_request())
        assert [stats.step for stats in steps] == list(range(1, len(steps) + 1))
        assert len(steps) == len("Hello world") + 1
        assert client.stats == steps[-1]


async def test_stats_of_several_engines_are_the_sum_of_the_status() -> None:
    steps: list[StepStats] = []
    total = SessionStatus(Readiness("ok"), StepStats(requests_running=5), 0.0)
    lines = [SessionReport(status=total), SessionReport(steps=(StepStats(3, 2, replica="1"),))]
    callbacks = EngineCallbacks(on_step=steps.append)
    async with scripted_server(*map(REPORT.dumps, lines)) as url, connected(url, callbacks) as client:
        await wait_until_async(lambda: steps)
        assert steps == [StepStats(3, 2, replica="1")] and client.stats.requests_running == 5


async def test_two_clients_share_an_engine(node: RunningServer) -> None:
    async with connected(node.url) as one, connected(node.url) as other:
        answers = await asyncio.gather(*(collect(client, make_request("same")) for client in (one, other)))
    assert len(answers[0]) == len(answers[1]) == len("Hello world") + 1


async def test_adapters_are_loaded_there(node: RunningServer) -> None:
    modules = (LoraModule("a", "/adapters/a"), LoraModule("b", "/adapters/b"))
    async with connected(node.url, adapters=modules) as client:
        assert client.info is not None
        assert [adapter.path for adapter in client.info.adapters] == ["/adapters/a", "/adapters/b"]
        info = await client.load_adapter("/adapters/c")
        with pytest.raises(CheckpointError, match="rank 99"):
            await client.load_adapter("/broken")
        await client.unload_adapter(info.digest)
        assert set(node.client.adapters) == {"/adapters/a", "/adapters/b"}


async def test_adapter_that_the_server_cannot_load_refuses_the_start(node: RunningServer) -> None:
    with pytest.raises(ConfigError, match=r"cannot load /broken: .*rank 99"):
        async with connected(node.url, adapters=(LoraModule("a", "/broken"),)):
            pass


async def test_closed_client_ends_its_requests_there(node: RunningServer) -> None:
    node.set_output(FakeOutput(hang_after=1))
    events: list[Event] = []
    async with connected(node.url) as client:
        client.listen(make_request(), events.append)
        await wait_until_async(lambda: len(events) == 1)
    await wait_until_async(lambda: not node.client.live)
    assert isinstance(events[-1], ErrorEvent)
    assert isinstance(events[-1].error, EngineDead)
    assert not client.alive
    with pytest.raises(EngineDead):
        client.listen(make_request("later"), events.append)


def hang_up(node: RunningServer) -> None:
    """The server ends its sessions, as if their clients were silent."""
    for session in list(node.app.state.engine_sessions._sessions.values()):
        session._heard_s -= 3600


async def test_lost_connection_fails_the_requests_and_comes_back(node: RunningServer) -> None:
    node.set_output(FakeOutput(hang_after=1))
    reasons: list[str | None] = []
    async with connected(node.url, EngineCallbacks(on_restart=reasons.append)) as client:
        events: list[Event] = []
        client.listen(make_request(), events.append)
        await wait_until_async(lambda: len(events) == 1)
        hang_up(node)
        await wait_until_async(lambda: len(events) == 2)
        assert isinstance(events[1], ErrorEvent)
        assert isinstance(events[1].error, EngineDead)
        with pytest.raises(EngineDead):
            client.listen(make_request("meanwhile"), events.append)
        assert client.alive
        await wait_until_async(lambda: client.readiness.is_ready)
        assert len(reasons) == client.readiness.restarts == 1
        await wait_until_async(lambda: not node.client.live)
        node.set_output(FakeOutput("ok"))
        assert len(await collect(client, make_request())) == 3


@contextlib.asynccontextmanager
async def scripted_server(*lines: bytes) -> AsyncIterator[str]:
    """A server that greets, sends these lines, and is silent then; it takes all messages."""
    greeting = GREETING.dumps(Greeting(build_digest(), "s", engine_info(), time.monotonic()))

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError), contextlib.closing(writer):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                await reader.readexactly(int(length[0].split()[1]))
                if b"/messages" in head.split(b"\r\n")[0]:
                    writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
                    continue
                writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
                for line in (greeting, *lines):
                    writer.write(b"%x\r\n%b\n\r\n" % (len(line) + 1, line))

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_engine_of_another_fingerprint_gets_no_requests(
    node: RunningServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(node.url) as client:
        node.client.info = replace(engine_info(), fingerprint="fp_other")
        hang_up(node)
        await wait_until_async(lambda: "fp_other" in client.readiness.detail)
        assert client.readiness.status == "unresponsive"
        with pytest.raises(EngineDead, match="would give other tokens"):
            client.listen(make_request(), lambda event: None)
        node.client.info = engine_info()
        await wait_until_async(lambda: client.readiness.is_ready)


async def test_server_that_comes_back_with_another_context_says_so(node: RunningServer) -> None:
    async with connected(node.url) as client:
        assert client.info == engine_info()
        shorter = replace(engine_info().resolved, max_model_len=32)
        node.client.info = replace(engine_info(), resolved=shorter)
        hang_up(node)
        await wait_until_async(lambda: client.readiness.restarts == 1 and client.readiness.is_ready)
        assert client.info == node.client.info


async def test_adapters_are_loaded_again_after_a_restart_of_the_server(node: RunningServer) -> None:
    async with connected(node.url) as client:
        await client.load_adapter("/adapters/a")
        node.client.adapters.clear()
        hang_up(node)
        await wait_until_async(lambda: client.readiness.restarts == 1 and client.readiness.is_ready)
        assert set(node.client.adapters) == {"/adapters/a"}


async def test_adapter_that_is_unloaded_without_a_connection_is_not_loaded_again(node: RunningServer) -> None:
    async with connected(node.url) as client:
        info = await client.load_adapter("/adapters/a")
        node.client.adapters.clear()
        hang_up(node)
        await wait_until_async(lambda: client._session is None)
        with pytest.raises(EngineDead):
            await client.unload_adapter(info.digest)
        await wait_until_async(lambda: client.readiness.is_ready)
        assert client.info is not None and not client.info.adapters and not node.client.adapters


async def test_adapter_in_use_is_loaded_again(node: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def unload_adapter(digest: str) -> None:
        raise AdapterConflict("1 requests use the adapter", "lora_name")

    async with connected(node.url) as client:
        info = await client.load_adapter("/adapters/a")
        monkeypatch.setattr(node.client, "unload_adapter", unload_adapter)
        with pytest.raises(AdapterConflict):
            await client.unload_adapter(info.digest)
        hang_up(node)
        await wait_until_async(lambda: client.readiness.restarts == 1 and client.readiness.is_ready)
        assert client.info is not None and client.info.adapters == (info,)


@pytest.mark.parametrize("problem", ["changed", "gone"])
async def test_adapter_whose_files_changed_costs_only_its_own_requests(
    node: RunningServer, problem: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(node.url, adapters=(LoraModule("b", "/adapters/b"),)) as client:
        await client.load_adapter("/adapters/a")
        load = node.client.load_adapter

        async def load_adapter(path: str) -> AdapterInfo:
            if path != "/adapters/a":
                return await load(path)
            if problem == "gone":
                raise CheckpointError(f"{path} is gone", "lora_modules")
            return replace(await load(path), digest="another")

        monkeypatch.setattr(node.client, "load_adapter", load_adapter)
        hang_up(node)
        await wait_until_async(lambda: client.readiness.restarts == 1 and client.readiness.is_ready)
        assert client.info is not None and [each.path for each in client.info.adapters] == ["/adapters/b"]
        assert len(await collect(client, make_request())) == len("Hello world") + 1
        assert problem in caplog.text


async def test_silent_connection_is_dead() -> None:
    async with scripted_server() as url, connected(url, silence_s=0.5) as client:
        (event,) = await collect(client, make_request())
        assert isinstance(event, ErrorEvent)
        assert isinstance(event.error, EngineDead)
        assert event.error.message == f"the server {url} is silent"


@pytest.mark.parametrize("line", [b"{", b"null", b'[[],[],[],[],["ok"]]', b'[[{"error":"x"}]]'])
async def test_line_that_is_no_report_ends_the_connection(line: bytes) -> None:
    reasons: list[str | None] = []
    callbacks = EngineCallbacks(on_restart=reasons.append)
    async with scripted_server(b"[[],[],[],[],null]", line) as url, connected(url, callbacks):
        await wait_until_async(lambda: "sent no report" in str(reasons))


async def read_lines(*chunks: bytes) -> list[bytes]:
    response = httpx.Response(200, stream=Chunks(chunks), request=httpx.Request("GET", "http://host"))
    return [line async for line in _read_lines(response)]


class Chunks(httpx.AsyncByteStream):
    def __init__(self, chunks: Sequence[bytes]) -> None:
        self.chunks = chunks

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for chunk in self.chunks:
            yield chunk


async def test_lines_are_those_of_any_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is within its limit, also one that ends in the chunk that exceeds it."""
    monkeypatch.setattr(remote, "MAX_LINE_BYTES", 4)
    lines = [b"ab", b"", b"cdef", b"g"]
    body = b"\n".join(lines) + b"\nh"
    for size in range(1, len(body) + 1):
        chunks = [body[start : start + size] for start in range(0, len(body), size)]
        assert await read_lines(*chunks) == lines
    for chunks in ([b"abcde\n"], [b"abc", b"de\n"], [b"a\nabc", b"de"]):
        with pytest.raises(_Disconnected, match="a line of more than"):
            await read_lines(*chunks)


@pytest.mark.parametrize(
    "event",
    [
        TokenEvent("s-0", 0, (-1,)),
        TokenEvent("s-0", 0, (2**31,)),
        TokenEvent("s-0", -1, (65,)),
        TokenEvent("s-0", 0, (65,), draft=DraftResult("ngram", 2**40, 0)),  # a counter for each
        TokenEvent("s-0", 0, (65,), draft=DraftResult("ngram", 1, 2)),
    ],
)
async def test_numbers_that_no_engine_sends_end_the_connection(event: TokenEvent) -> None:
    reasons: list[str | None] = []
    callbacks = EngineCallbacks(on_restart=reasons.append)
    line = REPORT.dumps(SessionReport((event,)))
    async with scripted_server(b"[[],[],[],[],null]", line) as url, connected(url, callbacks):
        await wait_until_async(lambda: "sent tokens outside of their limits" in str(reasons))


async def test_refusals_of_the_start_say_why(node: RunningServer) -> None:
    client = RemoteClient(node.url, "another key that is wrong")
    with pytest.raises(ConfigError, match="has another --engine-key"):
        await client.start(EngineCallbacks())
    await client.close()
    with run_server() as keyless, pytest.raises(ConfigError, match="has no --engine-key"):
        async with connected(keyless.url):
            pass


async def test_close_ends_a_start_without_an_answer() -> None:
    client = RemoteClient("http://127.0.0.1:9", KEY)
    starting = asyncio.create_task(client.start(EngineCallbacks()))
    await wait_until_async(lambda: client.readiness.detail.startswith("no connection"))
    await client.close()
    with pytest.raises(EngineDead, match="was shut down"):
        async with asyncio.timeout(WAIT_S):
            await starting


async def test_server_of_another_build_is_refused(
    node: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "build_digest", lambda: "other")
    with pytest.raises(ConfigError, match="runs another build of Foreword: install the same"):
        async with connected(node.url):
            pass


async def test_request_that_is_no_json_is_not_open(node: RunningServer) -> None:
    async with connected(node.url) as client:
        with pytest.raises(ValueError, match="surrogate"):
            client.listen(make_request(adapter_name="\ud800"), lambda event: None)
        assert not client.running_ids()
        assert len(await collect(client, make_request())) == len("Hello world") + 1


async def test_message_that_is_too_large_fails_its_request_alone() -> None:
    with run_server(Config(engine_key=KEY, max_body_mb=1)) as node:
        async with connected(node.url) as client:
            large = make_request("large", prediction_ids=(1,) * 600_000)
            events, other = await asyncio.gather(
                collect(client, large), collect(client, make_request("other"))
            )
            assert isinstance(events[0], ErrorEvent)
            assert isinstance(events[0].error, RequestFailed)
            assert "1000000 bytes" in events[0].error.message
            assert len(other) == len("Hello world") + 1
