"""Downloads from real servers on the loopback, which behave well or badly."""

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
from foreword.multimodal.fetch import Fetcher, download
from foreword.multimodal.image_source import ImageSource, MediaLimits
from tests.support.image_files import encode_image, random_drawing
from tests.support.waiting import WAIT_S

WHERE = "messages[0].content[1].image_url.url"
DATA = encode_image(random_drawing(20, 20))
SECRET = "token=5ecret"


class Server:
    """Responds by path; `seen` has the path and Host header of each request."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []
        self.routes: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {}
        self.released = threading.Event()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @property
    def port(self) -> int:
        return self._http.server_address[1]

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def encrypt(self, certificate: Path) -> None:
        """Switch to TLS."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        self._http.socket = context.wrap_socket(self._http.socket, server_side=True)

    def close(self) -> None:
        self.released.set()
        self._http.shutdown()
        self._http.server_close()

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.seen.append((self.path, self.headers["Host"]))
                server.routes[self.path.partition("?")[0]](self)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler


def respond(
    data: bytes = DATA, status: int = 200, **headers: str
) -> Callable[[BaseHTTPRequestHandler], None]:
    def respond(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)

    return respond


def redirect(url: str) -> Callable[[BaseHTTPRequestHandler], None]:
    return respond(b"", 302, Location=url)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """A fake DNS: addresses by host name; no addresses: unknown host."""
    known: dict[str, list[str]] = {}
    real = socket.getaddrinfo

    def lookup(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if name not in known:
            return real(host, port, *args, **kwargs)
        addresses = known[name]
        if not addresses:
            raise socket.gaierror("not known")
        return [entry for address in addresses for entry in real(address, port, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    return known


def fetch(url: str, *hosts: str, **options: Any) -> bytes:
    fetcher = Fetcher(MediaLimits(allowed_hosts=hosts or ("127.0.0.1",), **{"timeout_s": 10.0, **options}))
    try:
        return fetcher.fetch(ImageSource(WHERE, url))
    finally:
        fetcher.close()


def error_message(url: str, *hosts: str, **options: Any) -> str:
    """The error message: names the field, and of the URL only the host."""
    with pytest.raises(InvalidRequest) as caught:
        fetch(url, *hosts, **options)
    assert caught.value.param == WHERE
    assert caught.value.message.startswith(WHERE)
    assert SECRET not in caught.value.message
    assert "/image" not in caught.value.message
    return caught.value.message


def test_image_is_fetched(server: Server) -> None:
    server.routes["/image"] = respond()
    assert fetch(server.url(f"/image?{SECRET}")) == DATA
    assert server.seen == [(f"/image?{SECRET}", f"127.0.0.1:{server.port}")]


def test_redirects_are_followed(server: Server) -> None:
    server.routes |= {
        "/1": redirect("/2"),
        "/2": redirect(server.url("/3")),
        "/3": redirect("../image"),
        "/image": respond(),
    }
    assert fetch(server.url("/1")) == DATA


def test_cookies_are_not_kept(server: Server) -> None:
    """Requests must not leak information to each other."""

    def way(handler: BaseHTTPRequestHandler) -> None:
        respond((handler.headers["Cookie"] or "none").encode(), **{"Set-Cookie": "who=alice"})(handler)

    server.routes["/image"] = way
    fetcher = Fetcher(MediaLimits(allowed_hosts=("127.0.0.1",)))
    assert [fetcher.fetch(ImageSource(WHERE, server.url("/image"))) for _ in range(2)] == [b"none", b"none"]
    fetcher.close()


def test_fourth_redirect_is_rejected(server: Server) -> None:
    server.routes |= {"/image": redirect("/image")}
    assert "more than 3 redirects" in error_message(server.url("/image"))
    assert len(server.seen) == 4


@pytest.mark.parametrize("hosts", [(), ("example.com",), (".127.0.0.1",), ("localhost",)])
def test_unlisted_host_is_rejected(server: Server, hosts: tuple[str, ...]) -> None:
    fetcher = Fetcher(MediaLimits(allowed_hosts=hosts))
    with pytest.raises(
        InvalidRequest, match=r"images from 127\.0\.0\.1 are not allowed \(--allowed-media-domains\)"
    ):
        fetcher.fetch(ImageSource(WHERE, server.url("/image")))
    fetcher.close()
    assert not server.seen


def test_redirect_to_an_unlisted_host_is_rejected(server: Server) -> None:
    server.routes["/image"] = redirect(server.url("/secret", "localhost"))
    assert "localhost are not allowed" in error_message(server.url("/image"))
    assert len(server.seen) == 1


@pytest.mark.parametrize("address", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_host_with_a_private_address_is_rejected(
    server: Server, names: dict[str, list[str]], address: str
) -> None:
    """Also if only one of several addresses is private."""
    server.routes["/image"] = respond()
    for addresses in ([address], ["93.184.216.34", address]):
        names["images.example.com"] = addresses
        message = error_message(server.url(f"/image?{SECRET}", "images.example.com"), ".example.com")
        assert "images.example.com has an address that is not public" in message
    assert not server.seen


def test_redirects_into_private_networks_are_refused(server: Server, names: dict[str, list[str]]) -> None:
    """To an allowed host name that resolves to a private address."""
    names["inside.example.com"] = ["127.0.0.1"]
    server.routes["/image"] = redirect(server.url("/secret", "inside.example.com"))
    assert "not public" in error_message(server.url("/image"), "127.0.0.1", ".example.com")
    assert server.seen == [("/image", f"127.0.0.1:{server.port}")]


def test_the_address_that_was_checked_is_the_one(
    server: Server, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DNS rebinding: the host is resolved once."""
    server.routes["/image"] = respond()
    names["images.example.com"] = ["127.0.0.1"]

    def checked(addresses: list[str]) -> bool:
        assert addresses == ["127.0.0.1"]
        names["images.example.com"] = []
        return True

    monkeypatch.setattr("foreword.multimodal.fetch.is_public", checked)
    assert fetch(server.url("/image", "images.example.com"), "images.example.com") == DATA
    assert server.seen == [("/image", f"images.example.com:{server.port}")]


def test_next_address_is_tried_after_a_failed_connection(
    server: Server, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foreword.multimodal.fetch.is_public", lambda _: True)
    names["images.example.com"] = ["127.0.0.2", "127.0.0.1"]
    server.routes["/image"] = respond()
    assert fetch(server.url("/image", "images.example.com"), "images.example.com") == DATA


def test_proxy_variables_are_ignored(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server.routes["/image"] = respond()
    assert fetch(server.url("/image")) == DATA


@pytest.mark.parametrize(
    "url",
    [
        *(
            "http://",
            "http:///image",
            "http://user:pass@127.0.0.1/image",
            "http://127.0.0.1:x/image",
            "http://[::1/image",
        ),
        *("http://127.0.0.1:99999/image", "https:127.0.0.1"),
    ],
)
def test_malformed_url_is_rejected(url: str) -> None:
    error_message(url)


@pytest.mark.parametrize(
    "url", ["ftp://127.0.0.1/image", "gopher://x", "javascript:1", "", "/etc/passwd", "iVBORw0KGgo="]
)
def test_other_scheme_is_rejected(url: str) -> None:
    assert "must be a data:, http:, https: or file: URL" in error_message(url)


@pytest.mark.parametrize(
    "location",
    ["file:///etc/passwd", "data:image/png;base64,AAAA", "ftp://127.0.0.1/", "http://a:b@127.0.0.1/"],
)
def test_redirect_to_another_scheme_is_rejected(server: Server, location: str) -> None:
    server.routes["/image"] = redirect(location)
    assert re.search(
        "also after redirects|cannot be fetched: InvalidURL", error_message(server.url("/image"))
    )
    assert len(server.seen) == 1


@pytest.mark.parametrize("status", [204, 301, 403, 404, 500])
def test_error_status_is_reported(server: Server, status: int) -> None:
    server.routes["/image"] = respond(b"", status)
    assert f"answered {status}" in error_message(server.url("/image"))


def test_connection_and_dns_errors_are_reported(names: dict[str, list[str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert "cannot be fetched: ConnectError" in error_message(f"http://127.0.0.1:{port}/image")
    names["images.example.com"] = []
    assert "unknown host images.example.com" in error_message(
        "http://images.example.com/image", "images.example.com"
    )


def test_server_that_does_not_speak_http(server: Server) -> None:
    server.routes["/image"] = lambda handler: handler.wfile.write(b"220 smtp ready\r\n\r\n") and None
    assert "cannot be fetched" in error_message(server.url("/image"))


@pytest.mark.parametrize("length", [{}, {"Content-Length": "200001"}])
def test_large_file_is_rejected(server: Server, length: dict[str, str]) -> None:
    """With and without a Content-Length."""
    server.routes["/image"] = respond(bytes(200_001), **length)
    assert "larger than 0.2 MB (--max-image-mb)" in error_message(server.url("/image"), max_bytes=200_000)


def test_endless_file_is_rejected_at_the_limit(server: Server) -> None:
    def endless(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(bytes(100_000))
        except OSError:
            server.released.set()

    server.routes["/image"] = endless
    assert "larger than 0.2 MB" in error_message(server.url("/image"), max_bytes=200_000)
    assert server.released.wait(WAIT_S)


def _drips(server: Server, head: bool) -> Callable[[BaseHTTPRequestHandler], None]:
    """Single bytes, each within the timeout between reads."""

    def way(handler: BaseHTTPRequestHandler) -> None:
        if not head:
            handler.send_response(200)
            handler.end_headers()
        try:
            while not server.released.wait(0.05):
                handler.wfile.write(b"H")
        except OSError:
            return

    return way


@pytest.mark.parametrize("head", [True, False])
def test_slow_server_times_out(server: Server, head: bool) -> None:
    server.routes["/image"] = _drips(server, head)
    assert "within 0.3 s (--media-timeout)" in error_message(server.url("/image"), timeout_s=0.3)


def test_redirects_do_not_restart_the_timeout(server: Server) -> None:
    def way(handler: BaseHTTPRequestHandler) -> None:
        server.released.wait(0.15)
        redirect("/image")(handler)

    server.routes["/image"] = way
    assert "within 0.3 s" in error_message(server.url("/image"), timeout_s=0.3)


def test_slow_dns_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def slow(*_: Any, **__: Any) -> Any:
        released.wait(WAIT_S)
        raise socket.gaierror

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    assert "within 0.3 s" in error_message(
        "http://images.example.com/image", "images.example.com", timeout_s=0.3
    )
    released.set()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed certificate of images.example.com with its key."""
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
def test_certificate_must_match_the_host_name(
    server: Server, names: dict[str, list[str]], monkeypatch: pytest.MonkeyPatch, certificate: Path
) -> None:
    monkeypatch.setattr("foreword.multimodal.fetch.is_public", lambda _: True)
    names |= {"images.example.com": ["127.0.0.1"], "other.example.com": ["127.0.0.1"]}
    server.routes["/image"] = respond()
    server.encrypt(certificate)
    trust = ssl.create_default_context(cafile=str(certificate))

    async def get(host: str) -> bytes:
        async with httpx.AsyncClient(trust_env=False, verify=trust) as client:
            url = server.url("/image", host).replace("http:", "https:")
            return await download(
                client, url, WHERE, MediaLimits(allowed_hosts=(".example.com",), timeout_s=10.0)
            )

    assert asyncio.run(get("images.example.com")) == DATA
    with pytest.raises(InvalidRequest, match="cannot be fetched: ConnectError"):
        asyncio.run(get("other.example.com"))


def test_concurrent_downloads(server: Server) -> None:
    for number in range(20):
        server.routes[f"/{number}"] = respond(b"%d" % number)
    fetcher = Fetcher(MediaLimits(allowed_hosts=("127.0.0.1",)))
    with ThreadPoolExecutor(20) as pool:
        sources = [ImageSource(WHERE, server.url(f"/{number}")) for number in range(20)]
        files = list(pool.map(fetcher.fetch, sources))
    fetcher.close()
    assert files == [b"%d" % number for number in range(20)]


def test_close_ends_pending_downloads(server: Server) -> None:
    server.routes["/image"] = _drips(server, head=True)
    fetcher = Fetcher(MediaLimits(allowed_hosts=("127.0.0.1",), timeout_s=60.0))
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(fetcher.fetch, ImageSource(WHERE, server.url("/image")))
        while not server.seen:
            time.sleep(0.01)
        fetcher.close()
        with pytest.raises(ShuttingDown):
            pending.result(WAIT_S)
    with pytest.raises(ShuttingDown):
        fetcher.fetch(ImageSource(WHERE, server.url("/image")))


def test_local_data_starts_no_download_thread() -> None:
    fetcher = Fetcher(MediaLimits(max_bytes=5000))
    assert fetcher.fetch(ImageSource(WHERE, data=DATA)) == DATA
    url = f"data:image/png;base64,{base64.b64encode(DATA).decode()}"
    assert fetcher.fetch(ImageSource(WHERE, url)) == DATA
    with pytest.raises(InvalidRequest, match=r"larger than 0\.005 MB"):
        fetcher.fetch(ImageSource(WHERE, data=bytes(5001)))
    assert not [thread for thread in threading.enumerate() if thread.name == "downloads"]
    fetcher.close()
