"""Sequential reader of untrusted GGUF bytes: lengths are checked before anything is read or allocated."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foreword.errors import CheckpointError

STRING, ARRAY, BOOL = 8, 9, 7
SCALAR_CODES: Mapping[int, str] = MappingProxyType(
    {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
)
LENGTH_STRUCT = struct.Struct("<Q")
MAX_HEADER_BYTES = 256 << 20  # a large vocabulary takes about 10 MiB
MAX_ITEMS = 1 << 24  # items of a list
MAX_QUOTED_BYTES = 40  # bytes of an invalid string quoted in an error


class BinaryReader:
    """A position in a mapped GGUF file. `field` names the value in errors.

    Raises CheckpointError where a value is invalid or ends after the file.
    """

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self._end = min(len(data), MAX_HEADER_BYTES)
        is_limited = len(data) > MAX_HEADER_BYTES
        self._limit_text = f"{'a header may end' if is_limited else 'the file ends'} at byte {self._end}"
        self.position = 0

    def read_scalar(self, code: str, field: str) -> Any:
        """One little-endian number; `code` as in `struct`."""
        start = self._advance(struct.calcsize(code), field)
        return struct.unpack_from("<" + code, self._data, start)[0]

    def read_count(self, field: str, min_item_bytes: int, code: str = "Q") -> int:
        """Number of items that follow, each of at least `min_item_bytes` bytes."""
        count: int = self.read_scalar(code, field)
        limit = min((self._end - self.position) // min_item_bytes, MAX_ITEMS)
        if count > limit:
            raise self.error(f"{field} is {count}, but there is room for {limit} at most")
        return count

    def read_str(self, field: str) -> str:
        length = self.read_scalar("Q", f"the length of {field}")
        start = self._advance(length, field)
        return self._decode(self._data[start : start + length], field)

    def read_value(self, field: str) -> Any:
        """A type id and its value: number, bool, string, or a list of these."""
        type_id = self.read_scalar("I", f"the type of {field}")
        if type_id == ARRAY:
            return self._read_array(field)
        return self.read_str(field) if type_id == STRING else self._read_numbers(type_id, 1, field)[0]

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {message}", "model")

    def _read_array(self, field: str) -> list[Any]:
        type_id = self.read_scalar("I", f"the element type of {field}")
        if type_id != STRING and type_id not in SCALAR_CODES:
            known = _format_known_types(STRING)
            raise self.error(f"the element type of {field} is {type_id}; known: {known}")
        item_bytes = LENGTH_STRUCT.size if type_id == STRING else struct.calcsize(SCALAR_CODES[type_id])
        count = self.read_count(f"the length of {field}", item_bytes)
        return (
            self._read_strs(count, field) if type_id == STRING else self._read_numbers(type_id, count, field)
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
        """Inlined for speed: a vocabulary has 250,000 strings."""
        data, end, start, unpack = self._data, self._end, self.position, LENGTH_STRUCT.unpack_from
        strings = []
        for index in range(count):
            stop = start + 8
            if stop <= end:
                stop += unpack(data, start)[0]
            if stop > end:
                raise self._end_error(f"{field}[{index}]", start, stop - start)
            strings.append(data[start + 8 : stop])
            start = stop
        self.position = start
        try:
            return list(map(bytes.decode, strings))
        except UnicodeDecodeError:
            return [self._decode(raw, field) for raw in strings]  # its error quotes the string

    def _advance(self, num_bytes: int, field: str) -> int:
        """Skip `num_bytes` and return where they start."""
        start = self.position
        if num_bytes > self._end - start:
            raise self._end_error(field, start, num_bytes)
        self.position = start + num_bytes
        return start

    def _end_error(self, field: str, start: int, num_bytes: int) -> CheckpointError:
        return self.error(
            f"{field} begins at byte {start} and takes {num_bytes} bytes, but {self._limit_text}"
        )

    def _decode(self, raw: bytes, field: str) -> str:
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise self.error(f"{field} is not UTF-8: {raw[:MAX_QUOTED_BYTES]!r}") from None


def _format_known_types(*more: int) -> str:
    return ", ".join(str(type_id) for type_id in sorted((*SCALAR_CODES, *more)))
