"""Files of pictures from http(s) URLs: only from hosts that the operator lists, at addresses in the open, hop by hop.

A host's addresses are looked up once for each hop, all of them are checked, and the connection is made to one of those that were
checked: what a name server says later changes nothing.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Final

import httpx

from foreword.errors import ForewordError, InvalidRequest
from foreword.media import limits
from foreword.media.hosts import is_allowed, is_public, may_be_private
from foreword.media.limits import MediaLimits
from foreword.media.urls import check_bytes

__all__ = ["download"]

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
    if target.scheme not in DEFAULT_PORTS or not target.host or target.userinfo or not 0 < (target.port or 80) <= MAX_PORT:
        raise InvalidRequest(
            f"{where}: must be http://HOST/... or https://HOST/..., without a password, also after redirects", where
        )
    if not is_allowed(media_limits.allowed_hosts, _host_name(target)):
        raise InvalidRequest(f"{where}: pictures from {target.host:.253} are not allowed (--allowed-media-domains)", where)
    return target


def _host_name(target: httpx.URL) -> str:
    """Host in lower case, international names as they are looked up, without the dot that may end it."""
    return target.raw_host.decode("ascii").lower().removesuffix(".")


async def _get(client: httpx.AsyncClient, target: httpx.URL, where: str, media_limits: MediaLimits) -> bytes | str:
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
            name, target.port or DEFAULT_PORTS[target.scheme], type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
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


async def _request(client: httpx.AsyncClient, target: httpx.URL, address: str, where: str, max_bytes: int) -> bytes | str:
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
