"""Sizes, durations and lists of cores as options have them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from foreword.errors import ConfigError

MAX_CPUS = 1 << 16
# Units of parse_bytes().
UNIT_BYTES = {
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "b": 1,
    "": 1,
}
UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}  # units of parse_duration()


def parse_bytes(name: str, text: str) -> int:
    """Parse "2GiB", "512MiB", "1.5GB" or a number of bytes. Raises ConfigError."""
    match = re.fullmatch(r"([0-9.]+)\s*([a-z]*)", text.strip().lower())
    tokens = ' or "4000tokens"' if name == "kv_cache_memory" else ""
    try:
        return int(float(match[1]) * UNIT_BYTES[match[2]])  # type: ignore[index]
    except (TypeError, ValueError, KeyError, OverflowError):
        raise ConfigError(f'{name} must be like "2GiB" or "512MiB"{tokens}, got {text!r}', name) from None


def parse_tokens(name: str, text: str) -> int | None:
    """The number of "4000tokens"; None for another unit. Raises ConfigError."""
    number, unit, rest = text.strip().partition("tokens")
    if not unit or rest:
        return None
    try:
        return int(number)
    except ValueError:
        raise ConfigError(f"{name} must begin with a whole number, got {text!r}", name) from None


def parse_cpus(text: str) -> tuple[int, ...]:
    """CPU numbers of "0-3,8,16-31:2", where :2 takes every second one. Raises ConfigError."""
    cpus: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+)(?::(\d+))?)?\s*", part)
        first, last, stride = (int(each or 0) for each in match.groups()) if match else (0, -1, 0)
        if match and match[2] is None:
            last = first
        stride = 1 if match and match[3] is None else stride
        if not first <= last < MAX_CPUS or stride < 1:
            raise ConfigError(f'cpus must be like "0-7,16-23", got {text!r:.80}', "cpus")
        cpus.update(range(first, last + 1, stride))
    return tuple(sorted(cpus))


def format_cpus(cpus: Iterable[int]) -> str:
    """ "0-3,8", the inverse of parse_cpus()."""
    numbers = sorted(cpus)
    starts = [cpu for cpu in numbers if cpu - 1 not in numbers]
    ends = [cpu for cpu in numbers if cpu + 1 not in numbers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def parse_duration(name: str, text: str) -> float | None:
    """Seconds of "5m", "90s", "1h30m" or a number; None for a negative one: never. Raises ConfigError."""
    given = text.strip().lower()
    if re.fullmatch(r"-[0-9.]+(ms|[smhd])?", given):
        return None
    if re.fullmatch(r"[0-9]+(\.[0-9]+)?", given):
        return float(given)
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)(ms|[smhd])", given)
    if not parts or "".join(map("".join, parts)) != given:
        problem = f'must be like "5m", "90s" or "1h30m", 0 for at once, or -1 for never, got {text!r:.80}'
        raise ConfigError(f"{name} {problem}", name)
    return sum(float(number) * UNIT_SECONDS[unit] for number, unit in parts)
