"""The operator's options for images."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreword.errors import ConfigError
from foreword.multimodal.image_source import MediaLimits


def test_options_are_parsed(tmp_path: Path) -> None:
    actual = MediaLimits.from_options(
        3, 1000, " Images.Example.com, *.example.org,,[::1],127.0.0.1 ", str(tmp_path), 2.5
    )
    hosts = ("images.example.com", ".example.org", "::1", "127.0.0.1")
    assert actual == MediaLimits(3_000_000, 1000, hosts, tmp_path.resolve(), 2.5)


def test_default_allows_no_host_and_no_directory() -> None:
    assert MediaLimits() == MediaLimits.from_options(20, 50_000_000, "", None, 5.0)
    assert not MediaLimits().allowed_hosts
    assert MediaLimits().local_path is None


@pytest.mark.parametrize(
    "name", ["https://example.com", "example.com/images", "example.com:443", "*", ".", "a..b", "ex ample.com"]
)
def test_bad_host_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-media-domains") as caught:
        MediaLimits.from_options(1, 1, f"example.com,{name}", None, 1.0)
    assert caught.value.param == "allowed_media_domains"


def test_bad_directory_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing", tmp_path / "file", Path("zero\0byte")):
        with pytest.raises(ConfigError, match="--allowed-local-media-path must be a directory"):
            MediaLimits.from_options(1, 1, "", str(path), 1.0)
