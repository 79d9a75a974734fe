"""Sizes, durations and lists of cores."""

import pytest

from foreword.config.units import parse_bytes, parse_cpus, parse_duration
from foreword.errors import ConfigError

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "size"), [("2GiB", 2 * GIB), ("512 MiB", 512 << 20), ("1.5GB", 1_500_000_000), ("1000", 1000)]
)
def test_parse_bytes(text: str, size: int) -> None:
    assert parse_bytes("x", text) == size


@pytest.mark.parametrize("text", ["", "many", "2 parsecs", "1.2.3GB", "-1GB"])
def test_invalid_bytes_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory"):
        parse_bytes("kv_cache_memory", text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300.0),
        ("90s", 90.0),
        ("1h30m", 5400.0),
        ("1.5h", 5400.0),
        ("250ms", 0.25),
        ("2d", 172_800.0),
        ("300", 300.0),
        ("0", 0.0),
        (" 5M ", 300.0),
        ("-1", None),
        ("-5m", None),
    ],
)
def test_durations(text: str, seconds: float | None) -> None:
    assert parse_duration("keep_alive", text) == seconds


@pytest.mark.parametrize(
    ("text", "cpus"),
    [("3", (3,)), ("0-3", (0, 1, 2, 3)), ("8,0-1", (0, 1, 8)), ("0-7:2, 4", (0, 2, 4, 6)), ("1,1", (1,))],
)
def test_cpus(text: str, cpus: tuple[int, ...]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1-", "0-3:0", "0,,1", "99999999999"])
def test_cpus_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match='cpus must be like "0-7,16-23"'):
        parse_cpus(text)


@pytest.mark.parametrize("text", ["", "m", "5 m", "5x", "5m3", "1e3", "inf", "--1", "5m-3s", "never"])
def test_durations_that_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="keep_alive must be like"):
        parse_duration("keep_alive", text)
