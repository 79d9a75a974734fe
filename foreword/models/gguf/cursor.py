"""Reading values one after the other from bytes that may lie: nothing is read, or made room for, beyond the end."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foreword.errors import CheckpointError

__all__ = ["Cursor"]

STRING, ARRAY, BOOL = 8, 9, 7
SCALARS: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
)
LENGTH = struct.Struct("<Q")
MAX_HEADER = 256 << 20  # bytes; vocabularies take ten or so. What lies beyond can only be a lie, and is never read
MAX_ITEMS = 1 << 24  # of a list
QUOTED = 40  # bytes shown of a text that is none


class Cursor:
    """A place in a mapped GGUF file; every step names what it reads, for the error message.

    Raises CheckpointError where the file ends before the value does, or the value is none.
    """

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._end = min(len(data), MAX_HEADER)
        self._limit = f"the file ends at byte {self._end}" if len(data) <= MAX_HEADER else f"a header takes {MAX_HEADER} at most"
        self.position = 0

    def scalar(self, code: str, what: str) -> Any:
        """One number in the notation of `struct`, little-endian."""
        start = self._skip(struct.calcsize(code), what)
        return struct.unpack_from("<" + code, self._data, start)[0]

    def count(self, what: str, least_bytes: int, code: str = "Q") -> int:
        """A number of things that take at least so many bytes each and are still to come."""
        number: int = self.scalar(code, what)
        room = min((self._end - self.position) // least_bytes, MAX_ITEMS)
        if number > room:
            raise self.error(f"{what} is {number}, but there is room for {room} at most")
        return number

    def text(self, what: str) -> str:
        length = self.scalar("Q", f"the length of {what}")
        start = self._skip(length, what)
        return self._decoded(self._data[start : start + length], what)

    def value(self, what: str) -> Any:
        """A type and what is of it: number, bool, text, or list of these."""
        kind = self.scalar("I", f"the type of {what}")
        if kind == ARRAY:
            return self._array(what)
        return self.text(what) if kind == STRING else self._numbers(kind, 1, what)[0]

    def error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {what}", "model")

    def _array(self, what: str) -> list[Any]:
        kind = self.scalar("I", f"the element type of {what}")
        if kind == STRING:
            return self._texts(self.count(f"the length of {what}", LENGTH.size), what)
        if kind not in SCALARS:
            raise self.error(f"the element type of {what} is {kind}; known: {_known(STRING)}")
        return self._numbers(kind, self.count(f"the length of {what}", struct.calcsize(SCALARS[kind])), what)

    def _numbers(self, kind: int, count: int, what: str) -> list[Any]:
        if kind not in SCALARS:
            raise self.error(f"the type of {what} is {kind}; known: {_known(STRING, ARRAY)}")
        layout = f"<{count}{SCALARS[kind]}"
        start = self._skip(struct.calcsize(layout), what)
        numbers = list(struct.unpack_from(layout, self._data, start))
        if kind != BOOL:
            return numbers
        if any(number > 1 for number in numbers):
            raise self.error(f"{what} must be 0 or 1 (false or true), got {max(numbers)}")
        return [number == 1 for number in numbers]

    def _texts(self, count: int, what: str) -> list[str]:
        """A loop without calls: a vocabulary has a quarter of a million of these."""
        data, end, at, unpack = self._data, self._end, self.position, LENGTH.unpack_from
        found = []
        for index in range(count):
            stop = at + 8
            if stop <= end:
                stop += unpack(data, at)[0]
            if stop > end:
                raise self.error(f"{what}[{index}] begins at byte {at} and takes {stop - at} bytes, but {self._limit}")
            found.append(data[at + 8 : stop])
            at = stop
        self.position = at
        return [self._decoded(raw, what) for raw in found]

    def _skip(self, size: int, what: str) -> int:
        """Where the next `size` bytes begin."""
        start = self.position
        if size > self._end - start:
            raise self.error(f"{what} begins at byte {start} and takes {size} bytes, but {self._limit}")
        self.position = start + size
        return start

    def _decoded(self, raw: bytes, what: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"{what} holds bytes that are no UTF-8: {raw[:QUOTED]!r}") from None


def _known(*more: int) -> str:
    return ", ".join(str(kind) for kind in sorted((*SCALARS, *more)))
