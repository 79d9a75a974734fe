"""Pictures from other servers: real ones, on this machine's loopback, which behave well or badly."""

from __future__ import annotations

import asyncio
import base64
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from foreword.errors import InvalidRequest, ShuttingDown
from foreword.multimodal.fetch import Fetcher, ImageSource, download
from foreword.multimodal.limits import MediaLimits
from tests.support.image_files import encode_image, random_drawing

WHERE = "messages[0].content[1].image_url.url"
DATA = encode_image(random_drawing(20, 20))
SECRET = "token=5ecret"


class Server:
    """Answers by path. `seen` has the method, path and Host of each request."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.ways: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.go_on = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def port(self) -> int:
        return self._http.server_address[1]

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def encrypt(self, certificate: Path) -> None:
        """From here on it speaks TLS."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)

    def close(self) -> None:
        self.go_on.set()
        self._http.shutdown()
        self._http.server_close()

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.seen.append((self.path, self.headers["Host"]))
                server.ways[self.path.partition("?")[0]](self)

            def log_message(self, *_: Any) -> None:
                """Not to the terminal."""

        return Handler


def file(data: bytes = DATA, status: int = 200, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    def way(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)

    return way


def redirect(url: str) -> Callable[[BaseHTTPRequestHandler], None]:
    return file(b"", 302, Location=url)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """What a name server says, address by address; each answer is given once if there are several."""
    known: dict[str, list[str]] = {}
    real = socket.getaddrinfo

    def lookup(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in known:
            return real(host, port, *args, **kwargs)
        found = known[name]
        if not found:
            raise socket.gaierror("not known")
        return [entry for address in found for entry in real(address, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    return known


def fetched(url: str, *hosts: str, **options: Any) -> bytes:
    fetcher = Fetcher(MediaLimits(allowed_hosts=hosts or ("127.0.0.1",), **{"timeout_s": 10.0, **options}))
    try:
        return fetcher.fetch(ImageSource(WHERE, url))
    finally:
        fetcher.close()


def refusal(url: str, *hosts: str, **options: Any) -> str:
    """The message, which names the field and tells nothing of the URL but its host."""
    with pytest.raises(InvalidRequest) as caught:
        fetched(url, *hosts, **options)
    assert caught.value.param == WHERE
    assert caught.value.message.startswith(WHERE)
    assert SECRET not in caught.value.message
    assert "/picture" not in caught.value.message
    return caught.value.message


def test_a_picture_is_fetched(server: Server) -> None:
    server.ways["/picture"] = file()
    assert fetched(server.url(f"/picture?{SECRET}")) == DATA
    assert server.seen == [(f"/picture?{SECRET}", f"127.0.0.1:{server.port}")]


def test_redirects_are_followed(server: Server) -> None:
    server.ways |= {
        "/1": redirect("/2"),
        "/2": redirect(server.url("/3")),
        "/3": redirect("../picture"),
        "/picture": file(),
    }
    assert fetched(server.url("/1")) == DATA


def test_cookies_are_not_kept(server: Server) -> None:
    """What a server is told of one request must not depend on another."""

    def way(handler: BaseHTTPRequestHandler) -> None:
        file((handler.headers["Cookie"] or "none").encode(), **{"Set-Cookie": "who=alice"})(handler)

    server.ways["/picture"] = way
    fetcher = Fetcher(MediaLimits(allowed_hosts=("127.0.0.1",)))
    assert [fetcher.fetch(ImageSource(WHERE, server.url("/picture"))) for _ in range(2)] == [b"none", b"none"]
    fetcher.close()


def test_three_redirects_are_enough(server: Server) -> None:
    server.ways |= {"/picture": redirect("/picture")}
    assert "more than 3 redirects" in refusal(server.url("/picture"))
    assert len(server.seen) == 4


@pytest.mark.parametrize("hosts", [(), ("example.com",), (".127.0.0.1",), ("localhost",)])
def test_hosts_that_are_not_listed_are_refused(server: Server, hosts: tuple[str, ...]) -> None:
    fetcher = Fetcher(MediaLimits(allowed_hosts=hosts))
    with pytest.raises(
        InvalidRequest, match=r"pictures from 127\.0\.0\.1 are not allowed \(--allowed-media-domains\)"
    ):
        fetcher.fetch(ImageSource(WHERE, server.url("/picture")))
    fetcher.close()
    assert not server.seen


def test_redirects_to_hosts_that_are_not_listed_are_refused(server: Server) -> None:
    server.ways["/picture"] = redirect(server.url("/secret", "localhost"))
    assert "localhost are not allowed" in refusal(server.url("/picture"))
    assert len(server.seen) == 1


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_names_of_private_addresses_are_refused(
    server: Server, names: dict[str, list[str]], address: str
) -> None:
    """Also where only one of several is private."""
    server.ways["/picture"] = file()
    for addresses in ([address], ["93.184.216.34", address]):
        names["images.example.com"] = addresses
        message = refusal(server.url(f"/picture?{SECRET}", "images.example.com"), ".example.com")
        assert "images.example.com has an address that is not public" in message
    assert not server.seen


def test_redirects_into_private_networks_are_refused(server: Server, names: dict[str, list[str]]) -> None:
    """To a host that is listed, by a name that leads inside."""
    names["inside.example.com"] = ["127.0.0.1"]
    server.ways["/picture"] = redirect(server.url("/secret", "inside.example.com"))
    assert "not public" in refusal(server.url("/picture"), "127.0.0.1", ".example.com")
    assert server.seen == [("/picture", f"127.0.0.1:{server.port}")]


def test_the_address_that_was_checked_is_the_one(
    server: Server, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that says something else the second time is not asked a second time."""
    server.ways["/picture"] = file()
    names["images.example.com"] = ["127.0.0.1"]

    def checked(addresses: list[str]) -> bool:
        assert addresses == ["127.0.0.1"]
        names["images.example.com"] = []
        return True

    monkeypatch.setattr("foreword.multimodal.fetch.is_public", checked)
    assert fetched(server.url("/picture", "images.example.com"), "images.example.com") == DATA
    assert server.seen == [("/picture", f"images.example.com:{server.port}")]


def test_other_addresses_of_a_host_are_tried(
    server: Server, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreword.multimodal.fetch.is_public", lambda _: True)
    names["images.example.com"] = ["127.0.0.2", "127.0.0.1"]
    server.ways["/picture"] = file()
    assert fetched(server.url("/picture", "images.example.com"), "images.example.com") == DATA


def test_proxies_of_the_environment_are_not_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.ways["/picture"] = file()
    assert fetched(server.url("/picture")) == DATA


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://",
            "http:///picture",
            "http://user:pass@127.0.0.1/picture",
            "http://127.0.0.1:x/picture",
            "http://[::1/picture",
        ),
        *("http://127.0.0.1:99999/picture", "https:127.0.0.1"),
    ],
)
def test_urls_that_make_no_sense_are_refused(url: str) -> None:
    refusal(url)


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1/picture", "gopher://x", "javascript:1", "", "/etc/passwd", "iVBORw0KGgo="]
)
def test_other_schemes_are_refused(url: str) -> None:
    assert "must be a data:, http:, https: or file: URL" in refusal(url)


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "data:image/png;base64,AAAA", "ftp://127.0.0.1/", "http://a:b@127.0.0.1/"],
)
def test_redirects_to_other_schemes_are_refused(server: Server, location: str) -> None:
    server.ways["/picture"] = redirect(location)
    assert re.search("also after redirects|cannot be fetched: InvalidURL", refusal(server.url("/picture")))
    assert len(server.seen) == 1


@pytest.mark.parametrize("status", [204, 301, 403, 404, 500])
def test_other_answers_are_refused(server: Server, status: int) -> None:
    server.ways["/picture"] = file(b"", status)
    assert f"answered {status}" in refusal(server.url("/picture"))


def test_nobody_there(names: dict[str, list[str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert "cannot be fetched: ConnectError" in refusal(f"http://127.0.0.1:{port}/picture")
    names["images.example.com"] = []
    assert "the host images.example.com is not known" in refusal(
        "http://images.example.com/picture", "images.example.com"
    )


def test_no_http(server: Server) -> None:
    server.ways["/picture"] = lambda handler: handler.wfile.write(b"220 smtp ready\r\n\r\n") and None
    assert "cannot be fetched" in refusal(server.url("/picture"))


@pytest.mark.parametrize("length", [{}, {"Content-Length": "200001"}])
def test_large_files_are_refused(server: Server, length: dict[str, str]) -> None:
    """Whether their length is said or found out."""
    server.ways["/picture"] = file(bytes(200_001), **length)
    assert "larger than 0.2 MB (--max-image-mb)" in refusal(server.url("/picture"), max_bytes=200_000)


def test_endless_files_are_refused_when_the_limit_is_reached(server: Server) -> None:
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(bytes(100_000))
        except OSError:
            server.go_on.set()

    server.ways["/picture"] = endless
    assert "larger than 0.2 MB" in refusal(server.url("/picture"), max_bytes=200_000)
    assert server.go_on.wait(20)


def _drips(server: Server, head: bool) -> Callable[[BaseHTTPRequestHandler], None]:
    """A byte now and then, each soon enough for a timeout between two of them."""

    def way(handler: BaseHTTPRequestHandler) -> None:
        if not head:
            handler.send_response(200)
            handler.end_headers()
        try:
            while not server.go_on.wait(0.05):
                handler.wfile.write(b"H")
        except OSError:
            return

    return way


@pytest.mark.parametrize("head", [True, False])
def test_slow_servers_are_left(server: Server, head: bool) -> None:
    server.ways["/picture"] = _drips(server, head)
    assert "within 0.3 s (--media-timeout)" in refusal(server.url("/picture"), timeout_s=0.3)


def test_redirects_do_not_begin_the_time_again(server: Server) -> None:
    def way(handler: BaseHTTPRequestHandler) -> None:
        server.go_on.wait(0.15)
        redirect("/picture")(handler)

    server.ways["/picture"] = way
    assert "within 0.3 s" in refusal(server.url("/picture"), timeout_s=0.3)


def test_slow_name_servers_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def slow(*_: Any, **__: Any) -> Any:
        go_on.wait(20)
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    assert "within 0.3 s" in refusal("http://images.example.com/picture", "images.example.com", timeout_s=0.3)
    go_on.set()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Of images.example.com, signed by itself, and its key."""
    path = tmp_path / "certificate.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    names = ["-subj", "/CN=images.example.com", "-addext", "subjectAltName=DNS:images.example.com"]
    subprocess.run(
        [*command, *names, "-keyout", path, "-out", tmp_path / "public.pem"], check=True, capture_output=True
    )
    path.write_bytes(path.read_bytes() + (tmp_path / "public.pem").read_bytes())
    return path


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_certificates_are_those_of_the_host_and_not_of_the_address(
    server: Server, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, certificate: Path
) -> None:
    monkeypatch.setattr("foreword.multimodal.fetch.is_public", lambda _: True)
    names |= {"images.example.com": ["127.0.0.1"], "other.example.com": ["127.0.0.1"]}
    server.ways["/picture"] = file()
    server.encrypt(certificate)
    trust = ssl.create_default_context(cafile=str(certificate))

    async def get(host: str) -> bytes:
        async with httpx.AsyncClient(trust_env=False, verify=trust) as client:
            url = server.url("/picture", host).replace("http:", "https:")
            return await download(
                client, url, WHERE, MediaLimits(allowed_hosts=(".example.com",), timeout_s=10.0)
            )

    assert asyncio.run(get("images.example.com")) == DATA
    with pytest.raises(InvalidRequest, match="cannot be fetched: ConnectError"):
        asyncio.run(get("other.example.com"))


def test_many_at_once(server: Server) -> None:
    for number in range(20):
        server.ways[f"/{number}"] = file(b"%d" % number)
    fetcher = Fetcher(MediaLimits(allowed_hosts=("127.0.0.1",)))
    with ThreadPoolExecutor(20) as pool:
        found = list(
            pool.map(lambda number: fetcher.fetch(ImageSource(WHERE, server.url(f"/{number}"))), range(20))
        )
    fetcher.close()
    assert found == [b"%d" % number for number in range(20)]


def test_closing_ends_what_waits(server: Server) -> None:
    server.ways["/picture"] = _drips(server, head=True)
    fetcher = Fetcher(MediaLimits(allowed_hosts=("127.0.0.1",), timeout_s=60.0))
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(fetcher.fetch, ImageSource(WHERE, server.url("/picture")))
        while not server.seen:
            time.sleep(0.01)
        fetcher.close()
        with pytest.raises(ShuttingDown):
            pending.result(20)
    with pytest.raises(ShuttingDown):
        fetcher.fetch(ImageSource(WHERE, server.url("/picture")))


def test_what_is_at_hand_is_not_fetched() -> None:
    fetcher = Fetcher(MediaLimits(max_bytes=5000))
    assert fetcher.fetch(ImageSource(WHERE, data=DATA)) == DATA
    assert (
        fetcher.fetch(ImageSource(WHERE, f"data:image/png;base64,{base64.b64encode(DATA).decode()}")) == DATA
    )
    with pytest.raises(InvalidRequest, match=r"larger than 0\.005 MB"):
        fetcher.fetch(ImageSource(WHERE, data=bytes(5001)))
    assert not [thread for thread in threading.enumerate() if thread.name == "downloads"]
    fetcher.close()
