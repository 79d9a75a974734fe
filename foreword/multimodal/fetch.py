"""Fetches image files: http(s) only from allowed hosts at public addresses, checked on each redirect.

Against DNS rebinding, a host is resolved once per hop, and the connection uses an address that was checked.
data: and file: URLs are read below a limit of size, files only below one directory.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import os
import socket
import stat
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Final
from urllib.parse import unquote, unquote_to_bytes, urlsplit

import httpx

from foreword.errors import ForewordError, InvalidRequest, ShuttingDown
from foreword.multimodal.image_source import MB, ImageSource, MediaLimits

REDIRECT_STATUSES: Final = (301, 302, 303, 307, 308)
HEADERS: Final = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "foreword"}
MAX_PORT: Final = 65535
MAX_REDIRECTS: Final = 3
DEFAULT_PORTS: Final = {"http": 80, "https": 443}
NO_KEEPALIVE: Final = httpx.Limits(max_keepalive_connections=0)  # hosts at one address share no connection
LOCALHOST = "localhost"
NAT64 = ipaddress.ip_network("64:ff9b::/96")


async def download(client: httpx.AsyncClient, url: str, where: str, media_limits: MediaLimits) -> bytes:
    """Download a file. Raises InvalidRequest with the field, the limit and the host, but no more of the URL.

    `client` must not follow redirects, keep connections or read proxy variables.
    """
    try:
        async with asyncio.timeout(media_limits.timeout_s):
            for _ in range(MAX_REDIRECTS + 1):
                target = _parse_url(url, where, media_limits)
                result = await _get(client, target, where, media_limits)
                if isinstance(result, bytes):
                    return result
                url = str(target.join(result))
    except (TimeoutError, httpx.TimeoutException):
        message = f"the image did not arrive within {media_limits.timeout_s:g} s (--media-timeout)"
    except ForewordError:
        raise
    except Exception as error:  # a foreign server can cause anything
        message = f"the image cannot be fetched: {type(error).__name__}"
    else:
        message = f"more than {MAX_REDIRECTS} redirects"
    raise InvalidRequest(f"{where}: {message}", where)


def _parse_url(url: str, where: str, media_limits: MediaLimits) -> httpx.URL:
    """Parses the URL of one hop and checks its host name."""
    try:
        target = httpx.URL(url)
    except (httpx.InvalidURL, ValueError):
        raise InvalidRequest(f"{where}: not a URL", where) from None
    has_host = target.host and not target.userinfo and 0 < (target.port or 80) <= MAX_PORT
    if target.scheme not in DEFAULT_PORTS or not has_host:
        message = "must be http://HOST/... or https://HOST/..., without a password, also after redirects"
        raise InvalidRequest(f"{where}: {message}", where)
    if not is_allowed(media_limits.allowed_hosts, _host_name(target)):
        message = f"images from {target.host:.253} are not allowed (--allowed-media-domains)"
        raise InvalidRequest(f"{where}: {message}", where)
    return target


def _host_name(target: httpx.URL) -> str:
    """The host in lower case and IDNA encoding, without a trailing dot."""
    return target.raw_host.decode("ascii").lower().removesuffix(".")


async def _get(
    client: httpx.AsyncClient, target: httpx.URL, where: str, media_limits: MediaLimits
) -> bytes | str:
    """The file, or the target of a redirect. Tries the host's addresses until one connects."""
    addresses = await _resolve_addresses(target, where)
    for address in addresses[:-1]:
        try:
            return await _request(client, target, address, where, media_limits.max_bytes)
        except httpx.ConnectError:
            continue
    return await _request(client, target, addresses[-1], where, media_limits.max_bytes)


async def _resolve_addresses(target: httpx.URL, where: str) -> list[str]:
    """All addresses of the host. Raises InvalidRequest if one is not public."""
    name = _host_name(target)
    try:
        loop, port = asyncio.get_running_loop(), target.port or DEFAULT_PORTS[target.scheme]
        entries = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
    except (OSError, UnicodeError):
        raise InvalidRequest(f"{where}: unknown host {name:.253}", where) from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
    if not is_public(addresses) and not may_be_private(name):
        raise InvalidRequest(
            f"{where}: the host {name:.253} has an address that is not public; to allow a private address, "
            "list the address itself in --allowed-media-domains",
            where,
        )
    return addresses


async def _request(
    client: httpx.AsyncClient, target: httpx.URL, address: str, where: str, max_bytes: int
) -> bytes | str:
    """One request to one address, with the host's name in Host header and TLS."""
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
            raise InvalidRequest(f"{where}: the image's server answered {response.status_code}", where)
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


class Fetcher:
    """Fetches files of all schemes. Thread-safe; each call blocks its thread."""

    def __init__(self, media_limits: MediaLimits) -> None:
        self._limits = media_limits
        self._lock = threading.Lock()
        self._download_loop: _DownloadLoop | None = None
        self._closed = False

    def fetch(self, source: ImageSource) -> bytes:
        """The file. Raises InvalidRequest, which names field and reason; ShuttingDown after `close`."""
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
        """Cancel all downloads."""
        with self._lock:
            self._closed = True
            if self._download_loop is not None:
                self._download_loop.close()

    def _get_download_loop(self) -> _DownloadLoop:
        with self._lock:
            if self._closed:
                raise ShuttingDown("the server shuts down")
            if self._download_loop is None:
                self._download_loop = _DownloadLoop(self._limits)
            return self._download_loop


class _DownloadLoop:
    """A thread with an event loop, so that a deadline covers all waits of a download."""

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
            raise ShuttingDown("the server shuts down") from None

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _download(self, url: str, where: str) -> bytes:
        """Uses a new client, so that requests share no cookies."""
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


def check_bytes(num_bytes: int, max_bytes: int, where: str) -> None:
    """Raises InvalidRequest if a file is too large."""
    if num_bytes > max_bytes:
        limit = f"{max_bytes / MB:g} MB (--max-image-mb)"
        raise InvalidRequest(f"{where}: the image file is larger than {limit}", where)


def read_data_url(url: str, max_bytes: int, where: str) -> bytes:
    """Bytes of a data: URL; its media type is ignored. Raises InvalidRequest."""
    head, comma, body = url.partition(",")
    if not comma:
        raise InvalidRequest(f"{where}: a data: URL must have a comma before the data", where)
    if not head.lower().endswith(";base64"):
        data = _decode_percent(body, where)
    else:
        text = "".join((unquote(body) if "%" in body else body).split())
        check_bytes(len(text) // 4 * 3 - 2, max_bytes, where)  # lower bound: two bytes may be padding
        data = _decode_base64(text, where)
    check_bytes(len(data), max_bytes, where)
    return data


def _decode_percent(body: str, where: str) -> bytes:
    try:
        return unquote_to_bytes(body)
    except UnicodeEncodeError:  # lone surrogate
        raise InvalidRequest(f"{where}: the data of the data: URL is not Unicode", where) from None


def _decode_base64(text: str, where: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):  # ValueError: non-ASCII
        raise InvalidRequest(f"{where}: the data of the data: URL is not base64", where) from None


def read_file_url(url: str, root: Path | None, max_bytes: int, where: str) -> bytes:
    """A file below the resolved `root`. Raises one InvalidRequest for missing files and files elsewhere."""
    if root is None:
        raise InvalidRequest(f"{where}: file: URLs are not allowed here (--allowed-local-media-path)", where)
    missing = InvalidRequest(f"{where}: no such file below the directory --allowed-local-media-path", where)
    try:
        parts = urlsplit(url)
        path = Path(unquote(parts.path)).resolve(strict=True)
        if parts.netloc not in ("", "localhost") or not path.is_relative_to(root):
            raise missing
        return _read_file(path, max_bytes, where)
    except (OSError, RuntimeError, ValueError):  # RuntimeError: symlink loop; ValueError: NUL
        raise missing from None


def _read_file(path: Path, max_bytes: int, where: str) -> bytes:
    """Raises OSError for a symlink (replaced after the check) or a special file."""
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError
        check_bytes(status.st_size, max_bytes, where)
        data = file.read(max_bytes + 1)
    check_bytes(len(data), max_bytes, where)
    return data


def is_allowed(allowed_hosts: Iterable[str], host: str) -> bool:
    """Whether a host is listed, itself or by a parent domain with a leading dot."""
    return any(host == entry or (entry.startswith(".") and host.endswith(entry)) for entry in allowed_hosts)


def may_be_private(host: str) -> bool:
    """Whether a listed host may be private: an IP address or localhost, but no other name."""
    if host == LOCALHOST:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_public(addresses: Sequence[str]) -> bool:
    """Whether all addresses are public, including IPv4 addresses embedded in IPv6 addresses."""
    return all(
        _is_public(embedded)
        for address in addresses
        for embedded in _embedded_addresses(ipaddress.ip_address(address.partition("%")[0]))
    )


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address) and address.is_site_local:
        return False  # deprecated, but still routed within sites
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _embedded_addresses(address: IPv4Address | IPv6Address) -> list[IPv4Address | IPv6Address]:
    """The address, or the IPv4 addresses embedded in an IPv6 address."""
    if isinstance(address, IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address in NAT64:
        return [IPv4Address(int(address) & 0xFFFFFFFF)]
    if address.sixtofour is not None:
        return [address.sixtofour]
    return list(address.teredo) if address.teredo is not None else [address]
