"""Files of pictures, from wherever the operator allows.

Files of pictures from http(s) URLs: only from hosts that the operator lists, at addresses in the open, hop by hop.

A host's addresses are looked up once for each hop, all of them are checked, and the connection is made to one of those that were
checked: what a name server says later changes nothing.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Final

import httpx

from foreword.errors import ForewordError, InvalidRequest, ShuttingDown
from foreword.multimodal import limits
from foreword.multimodal.limits import MediaLimits
from foreword.multimodal.url_policy import (
    check_bytes,
    is_allowed,
    is_public,
    may_be_private,
    read_data_url,
    read_file_url,
)

__all__ = ["Fetcher", "ImageSource", "download"]

REDIRECT_STATUSES: Final = (301, 302, 303, 307, 308)
HEADERS: Final = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "foreword"}
MAX_PORT: Final = 65535
DEFAULT_PORTS: Final = {"http": 80, "https": 443}


async def download(client: httpx.AsyncClient, url: str, where: str, media_limits: MediaLimits) -> bytes:
    """Raises InvalidRequest, which names the field `where`, the limit, and of the URL the host alone.

    client  follows no redirects, keeps no connections, and asks no environment
    """
    try:
        async with asyncio.timeout(media_limits.timeout_s):
            for _ in range(limits.MAX_REDIRECTS + 1):
                target = _parse_url(url, where, media_limits)
                found = await _get(client, target, where, media_limits)
                if isinstance(found, bytes):
                    return found
                url = str(target.join(found))
    except (TimeoutError, httpx.TimeoutException):
        message = f"the picture did not arrive within {media_limits.timeout_s:g} s (--media-timeout)"
    except ForewordError:
        raise
    except Exception as error:  # whatever a foreign server makes of the client
        message = f"the picture cannot be fetched: {type(error).__name__}"
    else:
        message = f"more than {limits.MAX_REDIRECTS} redirects on the way to the picture"
    raise InvalidRequest(f"{where}: {message}", where)


def _parse_url(url: str, where: str, media_limits: MediaLimits) -> httpx.URL:
    """Of one hop, as far as its letters tell whether it is allowed."""
    try:
        target = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        raise InvalidRequest(f"{where}: not a URL", where) from None
    if (
        target.scheme not in DEFAULT_PORTS
        or not target.host
        or target.userinfo
        or not 0 < (target.port or 80) <= MAX_PORT
    ):
        raise InvalidRequest(
            f"{where}: must be http://HOST/... or https://HOST/..., without a password, also after redirects",
            where,
        )
    if not is_allowed(media_limits.allowed_hosts, _host_name(target)):
        raise InvalidRequest(
            f"{where}: pictures from {target.host:.253} are not allowed (--allowed-media-domains)", where
        )
    return target


def _host_name(target: httpx.URL) -> str:
    """Host in lower case, international names as they are looked up, without the dot that may end it."""
    return target.raw_host.decode("ascii").lower().removesuffix(".")


async def _get(
    client: httpx.AsyncClient, target: httpx.URL, where: str, media_limits: MediaLimits
) -> bytes | str:
    """The file, or where it is said to be. The first of its addresses that can be connected to is asked."""
    addresses = await _resolve_addresses(target, where)
    for address in addresses[:-1]:
        try:
            return await _request(client, target, address, where, media_limits.max_bytes)
        except httpx.ConnectError:
            continue
    return await _request(client, target, addresses[-1], where, media_limits.max_bytes)


async def _resolve_addresses(target: httpx.URL, where: str) -> list[str]:
    """All of the host's, checked."""
    name = _host_name(target)
    try:
        found = await asyncio.get_running_loop().getaddrinfo(
            name,
            target.port or DEFAULT_PORTS[target.scheme],
            type=socket.SOCK_STREAM,
            proto=socket.IPPROTO_TCP,
        )
    except (OSError, UnicodeError):
        raise InvalidRequest(f"{where}: the host {name:.253} is not known", where) from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if not is_public(addresses) and not may_be_private(name):
        raise InvalidRequest(
            f"{where}: the host {name:.253} has an address that is not public; such are allowed only where "
            "--allowed-media-domains lists the address itself",
            where,
        )
    return addresses


async def _request(
    client: httpx.AsyncClient, target: httpx.URL, address: str, where: str, max_bytes: int
) -> bytes | str:
    """One request to one address, in the host's name."""
    request = client.build_request(
        "GET",
        target.copy_with(host=address),
        headers={**HEADERS, "Host": target.netloc.decode("ascii")},
        extensions={"sni_hostname": _host_name(target)},
    )
    response = await client.send(request, stream=True)
    try:
        location = response.headers.get("location")
        if response.status_code in REDIRECT_STATUSES and location is not None:
            return str(location)
        if response.status_code != httpx.codes.OK:
            raise InvalidRequest(f"{where}: the server of the picture answered {response.status_code}", where)
        return await _read_body(response, where, max_bytes)
    finally:
        await response.aclose()


async def _read_body(response: httpx.Response, where: str, max_bytes: int) -> bytes:
    length = response.headers.get("content-length", "")
    check_bytes(int(length) if length.isascii() and length.isdigit() else 0, max_bytes, where)
    body = bytearray()
    async for part in response.aiter_raw():
        body += part
        check_bytes(len(body), max_bytes, where)
    return bytes(body)


NO_KEEPALIVE: Final = httpx.Limits(
    max_keepalive_connections=0
)  # two hosts at one address must not share a connection


class Fetcher:
    """May be used from any thread; each call blocks its own. Downloads run in a loop, begun with the first of them."""

    def __init__(self, media_limits: MediaLimits) -> None:
        self._limits = media_limits
        self._lock = threading.Lock()
        self._download_loop: _DownloadLoop | None = None
        self._closed = False

    def fetch(self, source: ImageSource) -> bytes:
        """The file. Raises InvalidRequest, which names the field and says why; ShuttingDown after `close`."""
        where, max_bytes = source.where, self._limits.max_bytes
        if source.url is None:
            assert source.data is not None
            check_bytes(len(source.data), max_bytes, where)
            return source.data
        scheme = source.url.partition(":")[0].lower()
        if scheme == "data":
            return read_data_url(source.url, max_bytes, where)
        if scheme == "file":
            return read_file_url(source.url, self._limits.local_path, max_bytes, where)
        if scheme in ("http", "https"):
            return self._get_download_loop().fetch(source.url, where)
        raise InvalidRequest(f"{where}: must be a data:, http:, https: or file: URL", where)

    def close(self) -> None:
        """Downloads are given up."""
        with self._lock:
            self._closed = True
            if self._download_loop is not None:
                self._download_loop.close()

    def _get_download_loop(self) -> _DownloadLoop:
        with self._lock:
            if self._closed:
                raise ShuttingDown("the server is about to end")
            if self._download_loop is None:
                self._download_loop = _DownloadLoop(self._limits)
            return self._download_loop


class _DownloadLoop:
    """A thread with a loop, in which every download has its deadline, whatever it waits for."""

    def __init__(self, media_limits: MediaLimits) -> None:
        self._limits = media_limits
        self._ssl_context = httpx.create_ssl_context(trust_env=False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="downloads", daemon=True)
        self._thread.start()

    def fetch(self, url: str, where: str) -> bytes:
        future = asyncio.run_coroutine_threadsafe(self._download(url, where), self._loop)
        try:
            return future.result()
        except CancelledError:
            raise ShuttingDown("the server is about to end") from None

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _download(self, url: str, where: str) -> bytes:
        """With a client of its own: no cookie of one request reaches another."""
        async with httpx.AsyncClient(
            verify=self._ssl_context, trust_env=False, timeout=self._limits.timeout_s, limits=NO_KEEPALIVE
        ) as client:
            return await download(client, url, where, self._limits)

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.run_until_complete(self._cancel_downloads())
        self._loop.close()

    async def _cancel_downloads(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class ImageSource:
    """One picture: either its address or its file.

    where  the field of the request that names it, for errors, such as messages[0].content[1].image_url.url
    url    data:, http:, https: or file:
    data   bytes of a PNG, JPEG, WebP or GIF file
    """

    where: str
    url: str | None = field(default=None, repr=False)
    data: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        assert (self.url is None) != (self.data is None), "an address or a file"
