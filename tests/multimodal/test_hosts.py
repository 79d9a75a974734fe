"""Which hosts, and which of their addresses."""

from __future__ import annotations

import pytest

from foreword.multimodal.url_policy import is_allowed, is_public, may_be_private

PRIVATE = [
    *(
        "127.0.0.1",
        "127.8.8.8",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
        "0.0.0.0",
        "224.0.0.1",
    ),
    *(
        "255.255.255.255",
        "198.18.0.1",
        "192.0.2.1",
        "240.0.0.1",
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd00:ec2::254",
    ),
    *(
        "ff02::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "64:ff9b::7f00:1",
        "64:ff9b::a9fe:a9fe",
        "2002:7f00:1::",
    ),
    *("2002:a9fe:a9fe::1", "2001:0:7f00:1::", "2001:db8::1", "64:ff9b:1::1", "fec0::1"),
]
PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_that_are_not_in_the_open(address: str) -> None:
    assert not is_public([address])
    assert not is_public(["8.8.8.8", address])


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_in_the_open(address: str) -> None:
    assert is_public([address])


def test_hosts_are_listed_one_by_one_or_by_their_parent() -> None:
    hosts = ("images.example.com", ".example.org")
    assert is_allowed(hosts, "images.example.com")
    assert is_allowed(hosts, "a.example.org")
    assert is_allowed(hosts, "b.a.example.org")
    for other in (
        "example.com",
        "x.images.example.com",
        "example.org",
        "badexample.org",
        "images.example.com.evil.net",
        "",
    ):
        assert not is_allowed(hosts, other)
    assert not is_allowed((), "images.example.com")


def test_only_addresses_and_localhost_may_be_private() -> None:
    assert all(map(may_be_private, ("127.0.0.1", "10.1.2.3", "::1", "localhost")))
    assert not any(map(may_be_private, ("example.com", "127.1", "2130706433", "localhost.example.com")))
