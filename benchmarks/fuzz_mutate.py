"""Mutations of parser inputs: bytes, JSON values, and files with a JSON header."""

from __future__ import annotations

import copy
import json
import re
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Mutate = Callable[[Random, bytes, bytes], bytes]  # (random source, input, another input) -> mutated input

NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    8,
    31,
    32,
    127,
    128,
    255,
    256,
    65535,
    65536,
    2**24 + 1,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**62,
)
LARGE = (2**63 - 1, 2**63, 2**64 - 1)
TOKENS = (
    b"[",
    b"{",
    b'"',
    b"\\",
    b"(",
    b"<",
    b"\x00",
    b"\xff",
    b"\xed\xa0\x80",
    b"\n",
    b"\r",
    b"\xe2\x80\xa8",
    b" ",
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 3, 64, 1000, 0.0, -0.0, 0.5, 1e-45, 1e308, -1e308),
    *(
        2**24 + 1,
        2**31,
        2**53 + 1,
        2**63,
        2**64,
        -(2**63),
        10**30,
        10**400,
        float("nan"),
        float("inf"),
        float("-inf"),
    ),
    *("", " ", "x", "\x00", "\ud800", "ü", "a" * 5000, "1", "true", "none", "../x", "/", "<s>", "$ref", "\n"),
    *([], {}, [[]], [{}], [None], [1, "x"], {"": None}, {"a": {"b": []}}, {"type": "x"}, {"content": 1}),
)
DIGITS = re.compile(rb"-?\d+")
MAX_NESTING = 200_000  # brackets at the end of an input
MAX_BYTES = 1 << 18  # of an input


def change_bytes(random: Random, data: bytes, other: bytes) -> bytes:
    """One to four changes of bytes."""
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        data = random.choice(BYTE_CHANGES)(random, data, other)
    return data[:MAX_BYTES]


def change_json(random: Random, data: bytes, other: bytes) -> bytes:
    """Mostly change a value within a JSON text, else its bytes."""
    if random.random() < 0.2:
        return change_bytes(random, data, other)
    try:
        root = [json.loads(data)]
        donor = json.loads(other)
    except (ValueError, RecursionError):
        return change_bytes(random, data, other)
    for _ in range(random.choice((1, 1, 2, 3))):
        _change_value(random, root, donor)
    try:
        return json.dumps(root[0], ensure_ascii=random.random() < 0.5).encode("utf-8", "surrogatepass")[
            :MAX_BYTES
        ]
    except (ValueError, RecursionError):  # a number too long to print, or nesting too deep
        return change_bytes(random, data, other)


def change_lines(random: Random, data: bytes, other: bytes) -> bytes:
    """Mostly change the text after the first line, which tells its kind."""
    head, _, body = data.partition(b"\n")
    other_head, _, other_body = other.partition(b"\n")
    if random.random() < 0.03:
        return change_bytes(random, data, other)
    change = change_json if body[:1] in (b"{", b"[") else change_bytes
    return (other_head if random.random() < 0.05 else head) + b"\n" + change(random, body, other_body)


def change_safetensors(random: Random, data: bytes, other: bytes) -> bytes:
    """Change the header's JSON or its length, else any bytes."""
    if random.random() < 0.3:
        return change_bytes(random, data, other)
    header, rest = _parts(data)
    header = change_json(random, header, _parts(other)[0])
    length = len(header) if random.random() < 0.9 else random.choice((*NUMBERS, *LARGE))
    return length.to_bytes(8, "little") + header + rest


def shrink(data: bytes, fails: Callable[[bytes], bool], attempts: int = 400, seconds: float = 20.0) -> bytes:
    """Drop ever smaller pieces of an input while it still fails."""
    size, ends = max(len(data) // 2, 1), time.monotonic() + seconds
    while size and attempts > 0:
        place = 0
        while place < len(data) and attempts > 0:
            attempts = attempts - 1 if time.monotonic() < ends else 0
            shorter = data[:place] + data[place + size :]
            if fails(shorter):
                data = shorter
            else:
                place += size
        size //= 2
    return data


def _parts(data: bytes) -> tuple[bytes, bytes]:
    """The header of a safetensors file, and the rest."""
    end = 8 + int.from_bytes(data[:8], "little")
    return data[8:end], data[end:]


def _random_offset(random: Random, data: bytes) -> int:
    """Anywhere, more often near the beginning, where headers are."""
    return min(
        int(len(data) ** random.random()) if random.random() < 0.5 else random.randrange(len(data) + 1),
        len(data),
    )


def _set_byte(random: Random, data: bytes, other: bytes) -> bytes:
    place = _random_offset(random, data)
    return data[:place] + bytes([random.randrange(256)]) + data[place + 1 :]


def _flip(random: Random, data: bytes, other: bytes) -> bytes:
    place = _random_offset(random, data)
    return (
        data[:place]
        + bytes(byte ^ 1 << random.randrange(8) for byte in data[place : place + 1])
        + data[place + 1 :]
    )


def _set_number(random: Random, data: bytes, other: bytes) -> bytes:
    place, size = _random_offset(random, data), random.choice((1, 2, 4, 8))
    number = random.choice((*NUMBERS, *LARGE, len(data), place)) & (1 << 8 * size) - 1
    return data[:place] + number.to_bytes(size, "little") + data[place + size :]


def _add_number(random: Random, data: bytes, other: bytes) -> bytes:
    """Change a little-endian number by 1 or 2."""
    place, size = _random_offset(random, data), random.choice((1, 2, 4, 8))
    number = int.from_bytes(data[place : place + size], "little") + random.choice((-2, -1, 1, 2))
    return data[:place] + (number & (1 << 8 * size) - 1).to_bytes(size, "little") + data[place + size :]


def _set_digits(random: Random, data: bytes, other: bytes) -> bytes:
    """Replace a decimal number."""
    found = list(DIGITS.finditer(data))
    if not found:
        return _set_number(random, data, other)
    match = random.choice(found)
    number = random.choice((*NUMBERS, *LARGE, -1, 10**25)) if random.random() < 0.9 else 10**5000 // 7
    return (
        data[: match.start()] + (b"%d" % number if number < 10**4000 else b"9" * 5000) + data[match.end() :]
    )


def _cut_out(random: Random, data: bytes, other: bytes) -> bytes:
    place = _random_offset(random, data)
    return data[:place] + data[place + random.choice((1, 2, 4, 8, 64, random.randrange(1, 512))) :]


def _truncate(random: Random, data: bytes, other: bytes) -> bytes:
    return data[: _random_offset(random, data)]


def _repeat(random: Random, data: bytes, other: bytes) -> bytes:
    place = _random_offset(random, data)
    part = data[place : place + random.choice((1, 4, 8, 32, 200))]
    return data[:place] + part * random.choice((1, 1, 2, 50)) + data[place:]


def _insert(random: Random, data: bytes, other: bytes) -> bytes:
    place = _random_offset(random, data)
    sign = random.choice(TOKENS) * random.choice((1, 1, 1, 2, 120, 3000))
    return data[:place] + sign + data[place:]


def _splice(random: Random, data: bytes, other: bytes) -> bytes:
    return data[: _random_offset(random, data)] + other[_random_offset(random, other) :]


def _transplant(random: Random, data: bytes, other: bytes) -> bytes:
    place, origin = _random_offset(random, data), _random_offset(random, other)
    return data[:place] + other[origin : origin + random.randrange(1, 64)] + data[place:]


def _nest(random: Random, data: bytes, other: bytes) -> bytes:
    """Rarely, end in nothing but brackets."""
    if random.random() < 0.95:
        return _insert(random, data, other)
    place = _random_offset(random, data)
    return data[:place] + random.choice((b"[", b'{"a":', b"(")) * MAX_NESTING


BYTE_CHANGES: Sequence[Mutate] = (
    *(_set_byte, _flip, _set_number, _set_number, _add_number, _set_digits, _cut_out),
    *(_truncate, _repeat, _insert, _splice, _transplant, _nest),
)


def _change_value(random: Random, root: list[Any], donor: Any) -> None:
    """Change one value, name or element below `root`, in place."""
    spots = list(_value_positions(root))
    holder, key = random.choice(spots)
    match random.randrange(8):
        case 0:
            del holder[key]
            root[:] = root or [None]
        case 1 | 2 | 3:
            holder[key] = copy.deepcopy(random.choice(VALUES))
        case 4:
            owner, name = random.choice(spots)
            holder[key] = copy.deepcopy(owner[name])
        case 5:
            owner, name = random.choice(list(_value_positions([donor])))
            holder[key] = copy.deepcopy(owner[name])
        case 6 if isinstance(holder, dict):
            holder[random.choice((str(key) + "s", "", "x", *holder))] = holder.pop(key)
        case _:
            holder[key] = _change_slightly(random, holder[key])


def _change_slightly(random: Random, value: Any) -> Any:
    """Nearly the same value."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return random.choice(
            (value + 1, value - 1, -value, value * 2, float(value) if abs(value) < 1e300 else 0, str(value))
        )
    if isinstance(value, str):
        return random.choice(
            (value[:-1], value + value[-1:], value[1:], value.upper(), [value], value + "\ud800", value * 3)
        )
    if isinstance(value, list):
        return random.choice(
            (value * 2, value[:-1], value[::-1], [value], {str(i): item for i, item in enumerate(value)})
        )
    return random.choice((list(value), list(value.values()), [value], str(list(value))))


def _value_positions(root: Any) -> list[tuple[Any, Any]]:
    """(holder, key or index) of every value below `root`."""
    found: list[tuple[Any, Any]] = []
    open_ = [root]
    while open_:
        holder = open_.pop()
        for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder)):
            found.append((holder, key))
            if isinstance(value, dict | list):
                open_.append(value)
    return found
