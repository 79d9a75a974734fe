"""Every response is counted, each refused request is one line, and a client in a loop writes few."""

from __future__ import annotations

import gc
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from foreword.config.options import Config
from foreword.errors import Overloaded
from foreword.server.app import ROUTE_TABLE
from foreword.server.http.request_log import MAX_LINES, OTHER_ROUTE, WINDOW_S, RequestLog
from foreword.utils.logging import JSONFormatter, RedactingFormatter
from tests.server.conftest import RunningServer, run_server
from tests.support.waiting import wait_until

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "sentinel prompt"}]
KEY = "sentinel-key"


class LogLines:
    """The lines of `foreword serve --log-format json`, parsed."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.handler = logging.StreamHandler(self.stream)
        self.handler.setFormatter(JSONFormatter(RedactingFormatter()))

    def read(self, logger: str) -> list[dict[str, Any]]:
        lines = map(json.loads, self.stream.getvalue().splitlines())
        own = [line for line in lines if line["logger"] == logger]
        return [line for line in own if "the event loop stood still" not in line["message"]]  # a busy machine

    def take(self, logger: str = "foreword.serve") -> list[dict[str, Any]]:
        """The lines since the last call."""
        lines = self.read(logger)
        self.stream.seek(0)
        self.stream.truncate()
        return lines


@pytest.fixture
def lines() -> Iterator[LogLines]:
    for each in gc.get_objects():  # servers of other tests, whose sums would be written meanwhile
        if type(each) is RequestLog:
            each.flush(force=True)
    root, log = logging.getLogger(), LogLines()
    level = root.level
    root.addHandler(log.handler)
    root.setLevel(logging.INFO)
    yield log
    root.removeHandler(log.handler)
    root.setLevel(level)


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    config = Config(api_key=KEY, access_log=True, max_body_mb=1, client_timeout=1)
    with run_server(config, key=KEY) as server:
        server.http.headers["Authorization"] = f"Bearer {KEY}"
        yield server


def counts(server: RunningServer) -> dict[tuple[str, str], float]:
    """Responses by (route, status)."""
    return {
        (labels[0], labels[1]): value
        for (name, *labels), value in server.metrics().items()
        if name == "foreword_http_requests_total"
    }


REFUSALS: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
    (
        "POST",
        CHAT,
        {"json": {"messages": USER, "temperature": -1}},
        {"status": 400, "code": "invalid_request_error", "field": "temperature"},
    ),
    ("POST", CHAT, {"json": {"messages": USER, "sentinel text": 1}}, {"status": 400, "field": None}),
    ("POST", CHAT, {"json": {"messages": USER, "bogus": 1}}, {"status": 400, "field": "bogus"}),
    (
        "POST",
        CHAT,
        {"json": {"messages": USER, "model": "sentinel"}},
        {"status": 404, "code": "model_not_found", "field": "model"},
    ),
    (
        "POST",
        CHAT,
        {"json": {"messages": USER}, "headers": {"Authorization": "Bearer sentinel-wrong"}},
        {"status": 401, "code": "invalid_api_key", "key": None},
    ),
    ("POST", CHAT, {"content": b"x" * 1_100_000}, {"status": 413, "code": "payload_too_large"}),
    ("GET", CHAT, {}, {"status": 405, "code": "method_not_allowed"}),
    ("GET", "/v1/models/sentinel", {}, {"status": 404, "code": "model_not_found"}),
    ("GET", "/sentinel/path", {}, {"status": 404, "code": "not_found"}),
]


@pytest.mark.parametrize(("method", "path", "options", "expected"), REFUSALS)
def test_refused_request_is_counted_and_logged_once(
    locked: RunningServer,
    lines: LogLines,
    method: str,
    path: str,
    options: dict[str, Any],
    expected: dict[str, Any],
) -> None:
    route, before = ROUTE_TABLE.template(path), counts(locked)
    locked.app.state.request_log.flush(force=True)  # a new window: earlier cases are of the same kind
    lines.take()
    headers = {"X-Request-Id": "the-request", **options.pop("headers", {})}
    reply = locked.http.request(method, path, headers=headers, **options)
    wait_until(lambda: lines.read("foreword.serve"))
    (line,) = lines.take()
    wanted = {
        "key": "#1",
        "status": reply.status_code,
        "route": route,
        "request_id": "the-request",
        **expected,
    }
    assert {name: line.get(name) for name in wanted} == wanted
    assert f"refused {reply.status_code} on {route}" in line["message"] and "sentinel" not in json.dumps(line)
    assert (
        counts(locked).get((route, str(reply.status_code)), 0)
        == before.get((route, str(reply.status_code)), 0) + 1
    )


def test_routes_are_templates() -> None:
    """A path that a client makes up is no label of its own."""
    assert ROUTE_TABLE.template("/v1/models/a/b") == "/v1/models/{name}"
    assert ROUTE_TABLE.template("/admin/requests/x/abort") == "/admin/requests/{name}/abort"
    assert ROUTE_TABLE.template("/openapi.json") == "/openapi.json"
    assert {ROUTE_TABLE.template(path) for path in ("", "/v1", "/v1/chat/completions/x")} == {OTHER_ROUTE}


def test_unreadable_requests_and_timeouts_are_counted(lines: LogLines) -> None:
    log = RequestLog()
    with run_server(Config(client_timeout=1), request_log=log) as server:
        for text in (b"no http\r\n\r\n", b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n{"):
            with server.connect() as raw:
                raw.sendall(text)
                while raw.recv(4096):
                    pass
        wait_until(lambda: len(lines.read("foreword.serve")) == 2)
        found = counts(server)
    assert found[OTHER_ROUTE, "400"] == found["/tokenize", "408"] == 1
    assert [(line["status"], line["route"]) for line in lines.take()] == [
        (400, OTHER_ROUTE),
        (408, "/tokenize"),
    ]


def test_client_that_leaves_is_no_refusal(lines: LogLines, locked: RunningServer) -> None:
    lines.take()
    with locked.connect() as raw:
        head = (
            f"POST /tokenize HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 9\r\n\r\n"
        )
        raw.sendall(head.encode())
    wait_until(lambda: ("/tokenize", "499") in counts(locked))
    assert not lines.take("foreword.serve")


def test_access_log_has_one_line_per_request(locked: RunningServer, lines: LogLines) -> None:
    reply = locked.http.post(f"{CHAT}?sentinel", json={"messages": USER, "max_tokens": 2})
    wait_until(lambda: lines.read("foreword.access"))
    (line,) = lines.take("foreword.access")
    milliseconds = line.pop("milliseconds")
    assert milliseconds > 0 and {
        name: line[name] for name in ("method", "route", "status", "bytes", "key")
    } == {
        "method": "POST",
        "route": CHAT,
        "status": 200,
        "bytes": len(reply.content),
        "key": "#1",
    }
    assert line["request_id"] == reply.headers["X-Request-Id"] and "sentinel" not in json.dumps(line)


def test_without_the_flag_there_is_no_access_log(served: RunningServer, lines: LogLines) -> None:
    assert served.http.get("/v1/models").status_code == 200
    assert not lines.take("foreword.access")


def test_probes_are_not_refused_requests(lines: LogLines) -> None:
    with run_server() as server:
        server.client.kill()
        assert server.http.get("/health").status_code == server.http.get("/ready").status_code == 503
        assert counts(server)["/health", "503"] == 1
    assert not [line for line in lines.take() if line.get("route") in ("/health", "/ready")]


# A client in a loop


class Flood:
    """A request log with a clock, and its lines."""

    def __init__(self, lines: LogLines) -> None:
        self.now = 0.0
        self.log = RequestLog(clock=lambda: self.now)
        self.lines = lines

    def refuse(self, times: int, route: str = CHAT, status: int = 429, **body: Any) -> None:
        error = {"code": "overloaded", "type": "rate_limit_error", "param": None, **body}
        text = json.dumps({"error": error}).encode()
        for _ in range(times):
            self.log.on_response_sent(
                {"method": "POST", "state": {}}, route, status, text, len(text), self.now
            )

    def messages(self) -> list[str]:
        return [line["message"] for line in self.lines.take()]


def test_repeated_refusals_are_summed(lines: LogLines) -> None:
    flood = Flood(lines)
    flood.refuse(317)
    line = f"refused 429 on {CHAT}: overloaded"
    assert flood.messages() == [line] * MAX_LINES
    flood.now = WINDOW_S
    flood.log.flush()
    assert flood.messages() == [f"{line}, and 312 more in 10 s"]
    flood.refuse(1)
    assert flood.messages() == [line]  # a new window
    flood.now += WINDOW_S
    flood.log.flush()
    assert flood.messages() == []


def test_fields_of_a_client_do_not_evade_the_limit(lines: LogLines) -> None:
    flood = Flood(lines)
    for number in range(1000):
        flood.refuse(1, status=400, code=None, param=f"field_{number}")
    messages = flood.messages()
    assert len(messages) == MAX_LINES
    assert messages[0] == f"refused 400 on {CHAT}: rate_limit_error, field field_0"
    flood.refuse(1, route="/tokenize", status=400)
    assert len(flood.messages()) == 1  # another kind is not hidden


def test_next_refusal_writes_an_overdue_sum(lines: LogLines) -> None:
    flood = Flood(lines)
    flood.refuse(MAX_LINES + 2)
    flood.messages()
    flood.now = 2 * WINDOW_S
    flood.refuse(1)
    assert [message.rpartition(", ")[2] for message in flood.messages()] == [
        "and 2 more in 20 s",
        f"refused 429 on {CHAT}: overloaded",
    ]


def test_refused_connections_are_logged(lines: LogLines) -> None:
    flood = Flood(lines)
    flood.log.on_connection_refused(Overloaded("4 connections are open, which is the limit"))
    assert flood.messages() == [f"refused 429 on {OTHER_ROUTE}: overloaded"]


# Behind a proxy


def test_prefix_of_a_proxy_may_be_passed_on_or_stripped() -> None:
    with run_server(Config(root_path="/llm", api_key=KEY), key=KEY) as server:
        for prefix in ("", "/llm"):
            assert server.http.get(f"{prefix}/health").status_code == 200
            assert server.http.get(f"{prefix}/v1/models").status_code == 401
            key = {"Authorization": f"Bearer {KEY}"}
            reply = server.http.post(f"{prefix}{CHAT}", json={"messages": USER, "max_tokens": 1}, headers=key)
            assert reply.status_code == 200
            assert server.http.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": "/llm"}]
        assert counts(server)[CHAT, "200"] == 2
        assert server.http.get("/other/health").status_code == 401


def test_prefix_that_begins_a_route_does_not_hide_it() -> None:
    with run_server(Config(root_path="/v1")) as server:
        assert (
            server.http.get("/v1/models").status_code == server.http.get("/v1/v1/models").status_code == 200
        )
