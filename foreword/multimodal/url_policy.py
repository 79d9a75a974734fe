"""Reads data: and file: URLs, and decides which hosts and addresses http(s) URLs may name."""

from __future__ import annotations

import base64
import binascii
import ipaddress
import os
import stat
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes, urlsplit

from foreword.errors import InvalidRequest

MB = 1_000_000


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


LOCALHOST = "localhost"
NAT64 = ipaddress.ip_network("64:ff9b::/96")


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
