"""Which hosts pictures are fetched from, and at which addresses: never from within the operator's own network by accident."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv6Address

__all__ = ["is_allowed", "is_public", "may_be_private"]

LOCALHOST = "localhost"
NAT64 = ipaddress.ip_network("64:ff9b::/96")


def is_allowed(allowed_hosts: Iterable[str], host: str) -> bool:
    """Whether the list has a host, itself or by a parent that is written with a dot in front."""
    return any(host == entry or (entry.startswith(".") and host.endswith(entry)) for entry in allowed_hosts)


def may_be_private(host: str) -> bool:
    """An operator who lists an address itself, or localhost, means it; what a name resolves to is not the operator's word."""
    return host == LOCALHOST or _is_address(host)


def is_public(addresses: Sequence[str]) -> bool:
    """Whether all of them lie in the open internet: not private, local, shared, reserved, nor a way to such an IPv4 address."""
    return all(_is_public(one) for address in addresses for one in _embedded_addresses(ipaddress.ip_address(address.partition("%")[0])))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address) and address.is_site_local:
        return False  # deprecated, and routed within sites nevertheless
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _embedded_addresses(address: IPv4Address | IPv6Address) -> list[IPv4Address | IPv6Address]:
    """The address, or those within it: IPv6 has several ways to write an IPv4 address."""
    if isinstance(address, IPv4Address):
        return [address]
    if address.ipv4_mapped is not None:
        return [address.ipv4_mapped]
    if address in NAT64:
        return [IPv4Address(int(address) & 0xFFFFFFFF)]
    if address.sixtofour is not None:
        return [address.sixtofour]
    return list(address.teredo) if address.teredo is not None else [address]
