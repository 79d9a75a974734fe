"""data: and file: URLs; allowed hosts and public addresses."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from urllib.parse import quote

import pytest

from foreword.errors import InvalidRequest
from foreword.multimodal.fetch import is_allowed, is_public, may_be_private, read_data_url, read_file_url
from tests.support.image_files import encode_image, random_drawing

DATA = encode_image(random_drawing(9, 9))
BASE64 = base64.b64encode(DATA).decode()
LIMIT = 100_000
SOUND = {
    "usual": f"data:image/png;base64,{BASE64}",
    "wrong-type": f"data:text/html;base64,{BASE64}",
    "no-type": f"data:;base64,{BASE64}",
    "more-parameters": f"data:image/png;name=a.png;base64,{BASE64}",
    "letters": f"DATA:image/png;BASE64,{BASE64}",
    "escaped": f"data:image/png;base64,{quote(BASE64, safe='')}",
    "no-padding": f"data:image/png;base64,{BASE64.rstrip('=')}",
    "lines": f"data:image/png;base64,{BASE64[:40]}\r\n {BASE64[40:]}",
    "percent": f"data:image/png,{quote(DATA, safe='')}",
}


def test_data_url_is_decoded() -> None:
    for name in SOUND:
        assert read_data_url(SOUND[name], LIMIT, "x") == DATA


def test_bad_data_url_is_rejected() -> None:
    for url, message in [
        ("data:image/png;base64", "comma"),
        ("data:image/png,\ud800", "not Unicode"),
        ("data:image/png;base64,\ud800AAA", "not base64"),
        ("data:image/png;base64,!!!!", "not base64"),
        ("data:image/png;base64,AAAAA", "not base64"),
        ("data:image/png;base64,\u0416\u0416\u0416\u0416", "not base64"),
        ("data:image/png;base64," + "A" * 200_000, "larger than 0.1 MB"),
        ("data:image/png;base64," + "%41" * 200_000, "larger than 0.1 MB"),
        ("data:image/png," + "%41" * 100_001, "larger than 0.1 MB"),
        ("data:image/png," + "A" * 400_000, "larger than 0.1 MB"),
    ]:
        with pytest.raises(InvalidRequest, match=message) as caught:
            read_data_url(url, LIMIT, "x")
        assert caught.value.param == "x"
        assert len(caught.value.message) < 100
        assert "AAAA" not in caught.value.message


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An allowed directory, with files outside it."""
    (tmp_path / "open" / "below").mkdir(parents=True)
    for name in ("open/a b.png", "open/below/c.png", "secret.png", "open-sesame.png"):
        (tmp_path / name).write_bytes(DATA)
    (tmp_path / "open" / "out.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "open" / "in.png").symlink_to(tmp_path / "open" / "below" / "c.png")
    (tmp_path / "open" / "loop.png").symlink_to(tmp_path / "open" / "loop.png")
    os.mkfifo(tmp_path / "open" / "fifo.png")
    return tmp_path / "open"


def test_file_below_the_root_is_read(root: Path) -> None:
    for name in ["a%20b.png", "below/c.png", "in.png", "below/../a%20b.png"]:
        for head in ("file://", "file://localhost", "FILE://"):
            assert read_file_url(f"{head}{root}/{name}", root, LIMIT, "x") == DATA


def test_file_outside_the_root_looks_missing(root: Path) -> None:
    for name in [
        *(
            "../secret.png",
            "%2e%2e/secret.png",
            "..%2fsecret.png",
            "out.png",
            "loop.png",
            "fifo.png",
            "below",
            "",
            "missing.png",
        ),
        *("../open-sesame.png", "a%00.png", "a" * 5000, "/etc/passwd", "../../../../../../etc/passwd"),
    ]:
        with pytest.raises(
            InvalidRequest, match=r"^x: no such file below the directory --allowed-local-media-path$"
        ):
            read_file_url(f"file://{root}/{name}", root, LIMIT, "x")


def test_file_url_of_another_host_is_rejected(root: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such file"):
        read_file_url(f"file://example.com{root}/a%20b.png", root, LIMIT, "x")


def test_file_url_without_a_root_is_rejected(root: Path) -> None:
    with pytest.raises(InvalidRequest, match="--allowed-local-media-path"):
        read_file_url(f"file://{root}/a%20b.png", None, LIMIT, "x")


def test_large_file_is_rejected(root: Path) -> None:
    (root / "large.png").write_bytes(bytes(LIMIT + 1))
    with pytest.raises(InvalidRequest, match=r"larger than 0\.1 MB"):
        read_file_url(f"file://{root}/large.png", root, LIMIT, "x")


PRIVATE_V4 = """
127.0.0.1 127.8.8.8 10.0.0.1 172.16.0.1 192.168.1.1 169.254.169.254 100.64.0.1 0.0.0.0 224.0.0.1
255.255.255.255 198.18.0.1 192.0.2.1 240.0.0.1
"""
PRIVATE_V6 = """
::1 :: fe80::1 fe80::1%eth0 fc00::1 fd00:ec2::254 ff02::1 ::ffff:127.0.0.1 ::ffff:169.254.169.254
64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 2002:7f00:1:: 2002:a9fe:a9fe::1 2001:0:7f00:1:: 2001:db8::1 64:ff9b:1::1
fec0::1
"""
PUBLIC = ["8.8.8.8", "1.1.1.1", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"]


def test_private_address_is_not_public() -> None:
    for address in (PRIVATE_V4 + PRIVATE_V6).split():
        assert not is_public([address])
        assert not is_public(["8.8.8.8", address])


def test_public_address_is_public() -> None:
    for address in PUBLIC:
        assert is_public([address])


def test_hosts_are_allowed_by_name_or_parent_domain() -> None:
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
