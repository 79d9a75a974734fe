"""Options for pictures, as the operator writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from foreword.errors import ConfigError
from foreword.multimodal.limits import MediaLimits


def test_of_options(tmp_path: Path) -> None:
    found = MediaLimits.from_options(
        3, 1000, " Images.Example.com, *.example.org,,[::1],127.0.0.1 ", str(tmp_path), 2.5
    )
    assert found.allowed_hosts == ("images.example.com", ".example.org", "::1", "127.0.0.1")
    assert (found.max_bytes, found.max_pixels, found.local_path, found.timeout_s) == (
        3_000_000,
        1000,
        tmp_path.resolve(),
        2.5,
    )


def test_nothing_is_allowed_by_default() -> None:
    assert MediaLimits() == MediaLimits.from_options(20, 50_000_000, "", None, 5.0)
    assert not MediaLimits().allowed_hosts
    assert MediaLimits().local_path is None


@pytest.mark.parametrize(
    "name", ["https://example.com", "example.com/images", "example.com:443", "*", ".", "a..b", "ex ample.com"]
)
def test_what_is_no_host_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-media-domains") as caught:
        MediaLimits.from_options(1, 1, f"example.com,{name}", None, 1.0)
    assert caught.value.param == "allowed_media_domains"


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing", tmp_path / "file", Path("zero\0byte")):
        with pytest.raises(ConfigError, match="--allowed-local-media-path must be a directory"):
            MediaLimits.from_options(1, 1, "", str(path), 1.0)
