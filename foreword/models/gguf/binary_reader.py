"""Reading values one after the other from bytes that may lie: nothing is read, or made room for, beyond the end."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foreword.errors import CheckpointError

__all__ = ["BinaryReader"]

STRING, ARRAY, BOOL = 8, 9, 7
SCALAR_CODES: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
)
LENGTH_STRUCT = struct.Struct("<Q")
MAX_HEADER_BYTES = (
    256 << 20
)  # bytes; vocabularies take ten or so. What lies beyond can only be a lie, and is never read
MAX_ITEMS = 1 << 24  # of a list
MAX_QUOTED_BYTES = 40  # bytes shown of a text that is none


class BinaryReader:
    """A place in a mapped GGUF file; every step names what it reads, for the error message.

    Raises CheckpointError where the file ends before the value does, or the value is none.
    """

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._end = min(len(data), MAX_HEADER_BYTES)
        self._limit_text = (
            f"the file ends at byte {self._end}"
            if len(data) <= MAX_HEADER_BYTES
            else f"a header takes {MAX_HEADER_BYTES} at most"
        )
        self.position = 0

    def read_scalar(self, code: str, field: str) -> Any:
        """One number in the notation of `struct`, little-endian."""
        start = self._advance(struct.calcsize(code), field)
        return struct.unpack_from("<" + code, self._data, start)[0]

    def read_count(self, field: str, min_item_bytes: int, code: str = "Q") -> int:
        """A number of things that take at least so many bytes each and are still to come."""
        number: int = self.read_scalar(code, field)
        room = min((self._end - self.position) // min_item_bytes, MAX_ITEMS)
        if number > room:
            raise self.error(f"{field} is {number}, but there is room for {room} at most")
        return number

    def read_str(self, field: str) -> str:
        length = self.read_scalar("Q", f"the length of {field}")
        start = self._advance(length, field)
        return self._decode(self._data[start : start + length], field)

    def read_value(self, field: str) -> Any:
        """A type and what is of it: number, bool, text, or list of these."""
        kind = self.read_scalar("I", f"the type of {field}")
        if kind == ARRAY:
            return self._read_array(field)
        return self.read_str(field) if kind == STRING else self._read_numbers(kind, 1, field)[0]

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {message}", "model")

    def _read_array(self, field: str) -> list[Any]:
        kind = self.read_scalar("I", f"the element type of {field}")
        if kind == STRING:
            return self._read_strs(self.read_count(f"the length of {field}", LENGTH_STRUCT.size), field)
        if kind not in SCALAR_CODES:
            raise self.error(f"the element type of {field} is {kind}; known: {_format_known_types(STRING)}")
        return self._read_numbers(
            kind, self.read_count(f"the length of {field}", struct.calcsize(SCALAR_CODES[kind])), field
        )

    def _read_numbers(self, type_id: int, count: int, field: str) -> list[Any]:
        if type_id not in SCALAR_CODES:
            raise self.error(f"the type of {field} is {type_id}; known: {_format_known_types(STRING, ARRAY)}")
        layout = f"<{count}{SCALAR_CODES[type_id]}"
        start = self._advance(struct.calcsize(layout), field)
        numbers = list(struct.unpack_from(layout, self._data, start))
        if type_id != BOOL:
            return numbers
        if any(number > 1 for number in numbers):
            raise self.error(f"{field} must be 0 or 1 (false or true), got {max(numbers)}")
        return [number == 1 for number in numbers]

    def _read_strs(self, count: int, field: str) -> list[str]:
        """A loop without calls: a vocabulary has a quarter of a million of these."""
        data, end, at, unpack = self._data, self._end, self.position, LENGTH_STRUCT.unpack_from
        found = []
        for index in range(count):
            stop = at + 8
            if stop <= end:
                stop += unpack(data, at)[0]
            if stop > end:
                raise self.error(
                    f"{field}[{index}] begins at byte {at} and takes {stop - at} bytes, but {self._limit_text}"
                )
            found.append(data[at + 8 : stop])
            at = stop
        self.position = at
        return [self._decode(raw, field) for raw in found]

    def _advance(self, num_bytes: int, field: str) -> int:
        """Where the next `size` bytes begin."""
        start = self.position
        if num_bytes > self._end - start:
            raise self.error(
                f"{field} begins at byte {start} and takes {num_bytes} bytes, but {self._limit_text}"
            )
        self.position = start + num_bytes
        return start

    def _decode(self, raw: bytes, field: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"{field} holds bytes that are no UTF-8: {raw[:MAX_QUOTED_BYTES]!r}") from None


def _format_known_types(*more: int) -> str:
    return ", ".join(str(kind) for kind in sorted((*SCALAR_CODES, *more)))
