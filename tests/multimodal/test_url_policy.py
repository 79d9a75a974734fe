"""Pictures within their URL, and in files of this machine."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from urllib.parse import quote

import pytest

from foreword.errors import InvalidRequest
from foreword.multimodal.url_policy import read_data_url, read_file_url
from tests.support.image_files import encode_image, random_drawing

DATA = encode_image(random_drawing(9, 9))
BASE64 = base64.b64encode(DATA).decode()
LIMIT = 100_000
SOUND = {
    "usual": f"data:image/png;base64,{BASE64}",
    "type-that-lies": f"data:text/html;base64,{BASE64}",
    "no-type": f"data:;base64,{BASE64}",
    "more-parameters": f"data:image/png;name=a.png;base64,{BASE64}",
    "letters": f"DATA:image/png;BASE64,{BASE64}",
    "escaped": f"data:image/png;base64,{quote(BASE64, safe='')}",
    "no-padding": f"data:image/png;base64,{BASE64.rstrip('=')}",
    "lines": f"data:image/png;base64,{BASE64[:40]}\r\n {BASE64[40:]}",
    "percent": f"data:image/png,{quote(DATA, safe='')}",
}


@pytest.mark.parametrize("name", SOUND)
def test_data_urls(name: str) -> None:
    assert read_data_url(SOUND[name], LIMIT, "x") == DATA


@pytest.mark.parametrize(
    ("url", "message"),
    [
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
    ],
)
def test_data_urls_that_are_refused(url: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        read_data_url(url, LIMIT, "x")
    assert caught.value.param == "x"
    assert len(caught.value.message) < 100
    assert "AAAA" not in caught.value.message


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory that may be read, with something beside it that may not."""
    (tmp_path / "open" / "below").mkdir(parents=True)
    for name in ("open/a b.png", "open/below/c.png", "secret.png", "open-sesame.png"):
        (tmp_path / name).write_bytes(DATA)
    (tmp_path / "open" / "out.png").symlink_to(tmp_path / "secret.png")
    (tmp_path / "open" / "in.png").symlink_to(tmp_path / "open" / "below" / "c.png")
    (tmp_path / "open" / "loop.png").symlink_to(tmp_path / "open" / "loop.png")
    os.mkfifo(tmp_path / "open" / "fifo.png")
    return tmp_path / "open"


@pytest.mark.parametrize("name", ["a%20b.png", "below/c.png", "in.png", "below/../a%20b.png"])
def test_files(root: Path, name: str) -> None:
    for head in ("file://", "file://localhost", "FILE://"):
        assert read_file_url(f"{head}{root}/{name}", root, LIMIT, "x") == DATA


@pytest.mark.parametrize(
    "name",
    [
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
    ],
)
def test_files_elsewhere_look_as_if_they_did_not_exist(root: Path, name: str) -> None:
    with pytest.raises(
        InvalidRequest, match=r"^x: there is no such file below the directory of --allowed-local-media-path$"
    ):
        read_file_url(f"file://{root}/{name}", root, LIMIT, "x")


def test_files_of_other_machines_are_refused(root: Path) -> None:
    with pytest.raises(InvalidRequest, match="no such file"):
        read_file_url(f"file://example.com{root}/a%20b.png", root, LIMIT, "x")


def test_files_are_refused_where_no_directory_is_named(root: Path) -> None:
    with pytest.raises(InvalidRequest, match="--allowed-local-media-path"):
        read_file_url(f"file://{root}/a%20b.png", None, LIMIT, "x")


def test_large_files_are_refused(root: Path) -> None:
    (root / "large.png").write_bytes(bytes(LIMIT + 1))
    with pytest.raises(InvalidRequest, match=r"larger than 0\.1 MB"):
        read_file_url(f"file://{root}/large.png", root, LIMIT, "x")
