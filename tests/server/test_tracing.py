"""Spans of requests: their tree, attributes and times, and a collector that is down."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from foreword.bench.server import ServerProcess
from foreword.config.options import Config
from foreword.metrics.tracing import RequestTracer, open_tracer
from foreword.server.http.request_log import RequestLog
from tests.server.conftest import MODEL, RunningServer, run_server
from tests.support.fakes import FakeOutput
from tests.support.waiting import WAIT_S, wait_until

memory_exporter: Any = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
trace_service: Any = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
CHAT = {"messages": [{"role": "user", "content": "sentinel"}]}


class Traces:
    """A server whose spans stay in memory."""

    def __init__(self, server: RunningServer, tracer: RequestTracer, exporter: Any) -> None:
        self.server = server
        self._tracer = tracer
        self._exporter = exporter

    def take(self, count: int) -> list[Any]:
        """The next `count` spans; they may end after their answer."""

        def is_complete() -> bool:
            self._tracer.flush()
            return len(self._exporter.get_finished_spans()) >= count

        wait_until(is_complete)
        spans = list(self._exporter.get_finished_spans())
        self._exporter.clear()
        assert len(spans) == count
        return spans


@contextmanager
def run_traced(config: Config, key: str = "none") -> Iterator[Traces]:
    exporter = memory_exporter.InMemorySpanExporter()
    tracer = RequestTracer(exporter, "1.2.3")
    with run_server(config, key=key, request_log=RequestLog(tracer=tracer)) as server:
        yield Traces(server, tracer, exporter)
    tracer.close()


@pytest.fixture(scope="module")
def traces() -> Iterator[Traces]:
    with run_traced(Config(api_key="sentinel-key"), "sentinel-key") as traces:
        traces.server.http.headers["Authorization"] = "Bearer sentinel-key"
        yield traces


def names(spans: list[Any]) -> list[str]:
    return sorted(span.name for span in spans)


def root_of(spans: list[Any]) -> Any:
    (root,) = (span for span in spans if span.kind.name == "SERVER")
    return root


def test_answer_is_a_tree_of_phases_in_order(traces: Traces) -> None:
    traces.server.set_output(FakeOutput(text="Hello world!", bursts=(1, 4), num_cached=2))
    traces.server.chat(max_tokens=8, temperature=0.5)
    spans = traces.take(5)
    root = root_of(spans)
    phases = {span.name: span for span in spans if span is not root}
    assert list(phases) == ["route", "queue", "prefill", "decode"]
    assert root.name == "POST /v1/chat/completions"
    assert {span.parent.span_id for span in phases.values()} == {root.context.span_id}
    times = [root.start_time]
    for span in phases.values():
        times += [span.start_time, span.end_time]
    assert times == sorted(times)
    assert phases["route"].start_time == root.start_time
    assert phases["route"].end_time == phases["queue"].start_time
    assert phases["queue"].end_time == phases["prefill"].start_time
    assert phases["prefill"].end_time == phases["decode"].start_time
    assert phases["decode"].end_time <= root.end_time
    assert (
        root.attributes.items()
        >= {
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": MODEL,
            "gen_ai.response.model": MODEL,
            "gen_ai.request.max_tokens": 8,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.response.finish_reasons": ("length",),
            "gen_ai.usage.output_tokens": 8,
            "gen_ai.usage.cache_read.input_tokens": 2,
            "foreword.key": "#1",
        }.items()
    )
    assert phases["prefill"].attributes["gen_ai.usage.cache_read.input_tokens"] == 2
    decode = dict(phases["decode"].attributes)
    assert decode.pop("foreword.choice_id").removesuffix("-0") == root.attributes["gen_ai.response.id"]
    assert decode == {  # 1 token, 4 with a draft of 4, of which 3 are accepted, 1, and 2 of the last draft
        "gen_ai.usage.output_tokens": 8,
        "foreword.draft_tokens": 8,
        "foreword.accepted_tokens": 5,
        "foreword.acceptance_rate": 5 / 8,
        "foreword.verify_steps": 2,
        "foreword.drafters": ("suffix",),
    }
    resource = root.resource.attributes
    assert (resource["service.name"], resource["service.version"]) == ("foreword", "1.2.3")


def test_callers_trace_is_continued_and_its_sampling_respected(traces: Traces) -> None:
    http = traces.server.http
    http.post("/v1/chat/completions", json=CHAT, headers={"traceparent": TRACEPARENT, "tracestate": "a=b"})
    spans = traces.take(5)
    root = root_of(spans)
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE_ID}
    assert f"{root.parent.span_id:016x}" == PARENT_ID
    assert root.context.trace_state["a"] == "b"
    unsampled = TRACEPARENT[:-2] + "00"
    http.post("/v1/chat/completions", json=CHAT, headers={"traceparent": unsampled})
    http.post("/v1/chat/completions", json=CHAT, headers={"traceparent": "no trace"})
    assert f"{root_of(traces.take(5)).context.trace_id:032x}" != TRACE_ID


def test_each_choice_has_its_phases_and_each_prompt_counts_once(traces: Traces) -> None:
    traces.server.set_output(FakeOutput())
    answer = traces.server.complete(["ab", "cd"], n=2)
    spans = traces.take(14)
    assert names(spans) == sorted(["POST /v1/completions", "route", *["queue", "prefill", "decode"] * 4])
    root = root_of(spans)
    assert len({span.attributes["foreword.choice_id"] for span in spans if span.name == "decode"}) == 4
    assert root.attributes["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens
    assert root.attributes["gen_ai.usage.output_tokens"] == answer.usage.completion_tokens
    assert root.attributes["gen_ai.response.finish_reasons"] == ("stop",) * 4


def test_failures_are_errors_and_probes_are_not_traced(traces: Traces) -> None:
    http = traces.server.http
    traces.server.set_output(FakeOutput(fail_after=3))
    http.post("/v1/chat/completions", json={**CHAT, "stream": True})
    root = root_of(traces.take(5))
    assert root.status.status_code.name == "ERROR"
    assert root.attributes["gen_ai.response.finish_reasons"] == ("error",)
    for path in ("/health", "/ready", "/live", "/metrics"):
        assert http.get(path).is_success
    http.post("/engine/session")
    assert http.post("/v1/chat/completions", json={"messages": 3}).status_code == 400
    (refused,) = traces.take(1)
    assert refused.attributes["error.type"] == "400"
    assert refused.status.status_code.name == "UNSET"  # the caller's mistake
    assert http.get("/secret-path").status_code == 404
    assert names(traces.take(1)) == ["GET other"]


def test_answer_that_its_client_leaves_ends_where_it_was() -> None:
    with run_traced(Config()) as traces:
        server = traces.server
        server.set_output(FakeOutput(hang_after=0))
        server.disconnect("/v1/completions", {"prompt": "Hi"}, lambda: server.client.live)
        spans = traces.take(3)
    assert names(spans) == ["POST /v1/completions", "queue", "route"]
    assert root_of(spans).attributes["http.response.status_code"] == 499


def test_restart_of_the_engine_is_an_event_of_open_requests(traces: Traces) -> None:
    server = traces.server
    server.set_output(FakeOutput(hang_after=2))
    with server.http.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True}) as response:
        lines = response.iter_lines()  # kept: without it the response would be closed
        next(lines)
        server.client.on_restart("killed")
    root = root_of(traces.take(5))
    assert [event.name for event in root.events] == ["engine restarted"]
    assert root.attributes["gen_ai.response.finish_reasons"] == ("abort",)


def test_spans_hold_no_text_and_no_key(traces: Traces) -> None:
    traces.server.set_output(FakeOutput(text="sentinel answer"))
    body = {**CHAT, "stop": ["sentinel stop"], "user": "sentinel user"}
    traces.server.http.post("/v1/chat/completions?sentinel=1", json=body)
    for span in traces.take(5):
        assert "sentinel" not in span.to_json()
    telemetry = getattr(traces.server.app, "_native_telemetry", None)  # of FastAPI, which has both
    assert telemetry is None or not any(telemetry.config[name] for name in ("tracing", "metrics", "logs"))


def test_embeddings_have_a_span_with_their_tokens(traces: Traces) -> None:
    answer = traces.server.openai.embeddings.create(model=MODEL, input=["ab", "cde"])
    (span,) = traces.take(1)
    assert span.attributes["gen_ai.operation.name"] == "embeddings"
    assert span.attributes["gen_ai.usage.input_tokens"] == answer.usage.prompt_tokens


class Collector(ThreadingHTTPServer):
    """A collector of OTLP/HTTP; `status` is its answer. It parses what it gets."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self.status = 200
        self.spans: list[tuple[str, Any]] = []  # service and span
        self.requested = threading.Event()
        self.release = threading.Event()
        self.release.set()  # cleared: requests are not answered
        super().__init__(address, CollectorHandler)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1/traces"


class CollectorHandler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        assert self.headers["Content-Type"] == "application/x-protobuf"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.requested.set()
        self.server.release.wait(WAIT_S)
        if self.server.status == 200:
            for resource in trace_service.ExportTraceServiceRequest.FromString(body).resource_spans:
                service = {each.key: each.value.string_value for each in resource.resource.attributes}
                spans = [span for scope in resource.scope_spans for span in scope.spans]
                self.server.spans += [(service["service.name"], span) for span in spans]
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def run_collector() -> Iterator[Collector]:
    with Collector() as collector:
        thread = threading.Thread(target=collector.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield collector
        finally:
            collector.release.set()
            collector.shutdown()
            thread.join()


@pytest.mark.full
def test_server_of_its_own_sends_spans_of_the_demo_to_a_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole path: flag, engine process, protobuf; the last spans are sent when the server ends."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "demo-server")
    with run_collector() as collector:
        config = Config(threads=1, otlp_traces_endpoint=collector.endpoint)
        with ServerProcess(config) as server:
            body = {**CHAT, "max_tokens": 40, "temperature": 0, "metrics": True}
            url, headers = f"{server.url}/v1/chat/completions", {"traceparent": TRACEPARENT}
            answer = httpx.post(url, json=body, headers=headers, timeout=WAIT_S).json()
        assert {service for service, _ in collector.spans} == {"demo-server"}
        spans = {span.name: span for _, span in collector.spans}
    assert set(spans) == {"POST /v1/chat/completions", "route", "queue", "prefill", "decode"}
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE_ID}
    decode = {each.key: each.value for each in spans["decode"].attributes}
    usage, metrics = answer["usage"], answer["metrics"]
    assert decode["gen_ai.usage.output_tokens"].int_value == usage["completion_tokens"]
    assert decode["foreword.draft_tokens"].int_value == metrics.get("draft_tokens", 0)


def test_collector_that_hangs_or_refuses_delays_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    with run_collector() as collector:
        tracer = open_tracer(collector.endpoint, "1")
        assert tracer is not None
        with run_server(request_log=RequestLog(tracer=tracer)) as server, caplog.at_level(logging.INFO):
            collector.release.clear()
            server.chat()
            flush = threading.Thread(target=tracer.flush)
            flush.start()
            assert collector.requested.wait(WAIT_S)
            for _ in range(3):  # while an export hangs
                server.chat()
            collector.status = 400
            collector.release.set()
            flush.join()
            tracer.flush()
            refused = [record for record in caplog.records if "takes no spans" in record.message]
            assert len(refused) == 1
            collector.status = 200
            server.chat()
            wait_until(lambda: tracer.flush() or collector.spans)
            assert "takes spans again" in caplog.text
        tracer.close()


def test_end_of_the_server_does_not_wait_for_a_collector_that_hangs() -> None:
    with run_collector() as collector:
        tracer = open_tracer(collector.endpoint, "1")
        assert tracer is not None
        collector.release.clear()
        tracer.start("POST", "/v1/completions", {}).end(200, "id", "")
        tracer.close()
        assert any(thread.name == "flush traces" for thread in threading.enumerate())
