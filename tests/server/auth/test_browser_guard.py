"""A server without keys answers its own names and its own page, and no page of another site."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from foreword.config.options import Config
from foreword.errors import ConfigError, Forbidden
from foreword.server.auth.browser_guard import BrowserGuard
from tests.server.conftest import RunningServer, run_server
from tests.support.fakes import FakeEngineClient, FakeOutput

CHAT = "/v1/chat/completions"
BODY = b'{"messages": [{"role": "user", "content": "Hi"}]}'


def is_allowed(config: Config, method: str, **headers: str) -> bool:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    try:
        BrowserGuard(config).check({"type": "http", "method": method, "headers": raw})
    except Forbidden:
        return False
    return True


@pytest.mark.parametrize(
    ("host", "listed", "allowed"),
    [
        # Addresses: a name that resolves to this server is what an attack needs.
        ("127.0.0.1:8000", "", True),
        ("[::1]:8000", "", True),
        ("192.168.1.5", "", True),  # --host 0.0.0.0; Kubernetes' probes of a pod
        ("[fe80::1%25eth0]:8000", "", True),
        ("", "", True),  # HTTP/1.0
        # Names that nobody can register.
        ("localhost:8000", "", True),
        ("LOCALHOST.:8000", "", True),
        ("app.localhost", "", True),
        ("foreword:8000", "", True),  # a service of Compose, the machine itself
        ("foreword.default.svc.cluster.local", "", True),
        ("host.docker.internal:8000", "", True),
        # Names that somebody can.
        ("evil.example", "", False),
        ("evil.example.:8000", "", False),
        ("localhost.evil.example", "", False),
        ("127.0.0.1.evil.example", "", False),
        ("evillocal.example", "", False),
        # --host and --allowed-hosts.
        ("llm.corp.example:8000", "", True),
        ("a.llm.corp.example", "", False),
        ("AI.example.com", "other.example, ai.Example.com", True),
        ("b.ai.example.com", "ai.example.com", False),
        ("ai.example.com", ".example.com", True),
        ("a.b.example.com", "*.example.com", True),
        ("evilexample.com", "*.example.com", False),
        ("evil.example", "*", True),
    ],
)
def test_hosts(host: str, listed: str, allowed: bool) -> None:
    config = Config(host="LLM.corp.example", allowed_hosts=listed)
    assert is_allowed(config, "GET", host=host) is allowed
    assert is_allowed(config, "POST", host=host) is allowed  # no browser: it sends no Origin


def test_unix_socket_has_every_name() -> None:
    assert is_allowed(Config(uds="/run/foreword.sock"), "GET", host="ai.example.com")


@pytest.mark.parametrize("name", ["https://ai.example.com", "ai.example.com:8000", "a/b", "*.", "a b"])
def test_what_is_no_name_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts must be names"):
        Config(allowed_hosts=f"ai.example.com,{name}")


@pytest.mark.parametrize("origin", ["localhost", "ai.example.com:8000", "https://ai.example.com/", "a b"])
def test_what_no_browser_sends_as_origin_is_a_config_error(origin: str) -> None:
    """`localhost` was taken, and allowed no page."""
    Config(cors_origins="http://localhost:8080, https://ai.example.com,tauri://localhost,file://,null,*")
    with pytest.raises(ConfigError, match="cors_origins must be"):
        Config(cors_origins=f"http://localhost:8080,{origin}")


OWN = "localhost:8000"


@pytest.mark.parametrize(
    ("headers", "cors_origins", "allowed"),
    [
        ({}, "", True),  # curl, and every SDK
        ({"origin": "http://localhost:8000"}, "", True),
        ({"origin": "https://LOCALHOST:8000"}, "", True),  # TLS ends at a proxy
        ({"origin": "http://localhost"}, "", False),  # another port is another page
        ({"origin": "http://localhost:3000"}, "", False),
        ({"origin": "http://127.0.0.1:8000"}, "", False),
        ({"origin": "https://evil.example"}, "", False),
        ({"origin": "https://localhost:8000.evil.example"}, "", False),
        ({"origin": "null"}, "", False),  # a file, or a sandboxed frame of anybody
        ({"origin": ""}, "", False),
        ({"origin": "app://localhost:8000"}, "", False),
        ({"origin": "https://a.example"}, "https://a.example, https://b.example", True),
        ({"origin": "https://b.example"}, "https://a.example, https://b.example", True),
        ({"origin": "https://evil.example"}, "https://a.example", False),
        ({"origin": "https://evil.example"}, "*", True),
        ({"sec_fetch_site": "same-origin"}, "", True),
        ({"sec_fetch_site": "none"}, "", True),
        ({"sec_fetch_site": "cross-site"}, "", False),
        ({"sec_fetch_site": "same-site"}, "", False),
        # What a page could not say of itself does not help it.
        ({"origin": "https://evil.example", "x_forwarded_host": "evil.example"}, "", False),
        ({"origin": "https://evil.example", "sec_fetch_site": "same-origin"}, "", False),
    ],
)
def test_origins(headers: dict[str, str], cors_origins: str, allowed: bool) -> None:
    config = Config(cors_origins=cors_origins)
    for method in ("POST", "DELETE", "PUT", "PATCH"):
        assert is_allowed(config, method, host=OWN, **headers) is allowed
    for method in ("GET", "HEAD", "OPTIONS"):
        assert is_allowed(config, method, host=OWN, **headers)


@pytest.mark.parametrize(("scheme", "port"), [("http", ":80"), ("https", ":443")])
def test_default_port_may_be_left_out(scheme: str, port: str) -> None:
    for origin, host in (("", port), (port, ""), ("", "")):
        assert is_allowed(Config(), "POST", host="localhost" + host, origin=f"{scheme}://localhost{origin}")


# The server


@pytest.fixture(scope="module")
def open_server() -> Iterator[RunningServer]:
    with run_server(Config(), FakeEngineClient(FakeOutput("ok"))) as server:
        yield server


def error_of(reply: Any) -> tuple[int, str, str]:
    error = reply.json()["error"]
    return reply.status_code, error["code"], error["message"]


def test_rebound_name_reaches_nothing_but_the_public_routes(open_server: RunningServer) -> None:
    """Probes, scrapes and the page itself have no data of anybody."""
    evil = {"Host": "evil.example"}
    for method, path in (("GET", "/v1/models"), ("POST", CHAT), ("POST", "/models/unload"), ("GET", "/x")):
        status, code, message = error_of(open_server.http.request(method, path, headers=evil))
        assert (status, code) == (403, "forbidden") and "--allowed-hosts" in message and "evil" in message
    for path in ("/", "/ui/app.js", "/health", "/live", "/metrics", "/version"):
        assert open_server.http.get(path, headers=evil).status_code == 200
    rejected = open_server.http.get("/metrics").text
    assert 'foreword_requests_rejected_total{model="fake-model",reason="forbidden"} 4.0' in rejected


def test_page_of_another_site_changes_nothing(open_server: RunningServer) -> None:
    evil = {"Origin": "https://evil.example", "Sec-Fetch-Site": "cross-site"}
    for path in ("/admin/reload", "/v1/responses/x/cancel", CHAT):
        status, code, message = error_of(open_server.http.post(path, headers=evil))
        assert (status, code) == (403, "forbidden") and "--cors-origins" in message
    assert open_server.http.get("/v1/models", headers=evil).headers.get("access-control-allow-origin") is None
    own = {"Origin": open_server.url, "Content-Type": "application/json"}
    assert open_server.http.post(CHAT, content=BODY, headers=own).status_code == 200


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", None])
def test_json_needs_its_content_type(open_server: RunningServer, content_type: str | None) -> None:
    """A browser sends these types without asking first."""
    headers = {} if content_type is None else {"Content-Type": content_type}
    reply = open_server.http.post(CHAT, content=BODY, headers=headers)
    assert reply.status_code == 400 and "application/json" in reply.json()["error"]["message"]


def test_key_stands_for_any_origin_and_host() -> None:
    """A page of another site knows no key."""
    foreign = {"Host": "ai.example.com", "Origin": "https://chat.example"}
    with run_server(Config(api_key="secret"), FakeEngineClient(FakeOutput("ok"))) as server:
        for key, status in ((None, 401), ("wrong", 401), ("secret", 200)):
            headers = {"Content-Type": "application/json", **foreign}
            if key is not None:
                headers["Authorization"] = f"Bearer {key}"
            assert server.http.post(CHAT, content=BODY, headers=headers).status_code == status


def test_engine_key_stands_for_any_host() -> None:
    """Routers reach this server by any name, also without keys of users."""
    key = "k" * 16
    with run_server(Config(engine_key=key), FakeEngineClient(FakeOutput("ok"))) as server:
        headers = {"Host": "gpu1.corp.example", "Authorization": f"Bearer {key}"}
        assert server.http.get("/engine/none", headers=headers).status_code == 404
        assert server.http.get("/v1/models", headers=headers).status_code == 403
