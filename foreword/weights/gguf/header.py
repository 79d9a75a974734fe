"""Reads and validates headers of GGUF files: metadata and tensor locations. Imports no torch."""

from __future__ import annotations

import functools
import math
import mmap
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from foreword.errors import CheckpointError
from foreword.weights.config_reader import ConfigReader

MAGIC = b"GGUF"
EMBEDDING_TENSOR = "token_embd.weight"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # bytes
MAX_ALIGNMENT = 1 << 20  # bytes
MAX_DIMS = 4
MAX_CACHED_HEADERS = 8
MIN_ENTRY_BYTES = 8 + 4 + 1  # metadata entry: length of the key, type, value
MIN_TENSOR_INFO_BYTES = 8 + 4 + 8 + 4 + 8  # length of the name, dimensions, one of them, type, offset
SPLIT_FILE_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")

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


@dataclass(frozen=True, slots=True)
class TensorType:
    """A data type of tensors, stored in blocks of values that are consecutive in a row."""

    name: str  # as GGUF's tools write it, lower case
    block_values: int
    block_bytes: int


TENSOR_TYPES: Mapping[int, TensorType] = MappingProxyType(
    {
        0: TensorType("f32", 1, 4),
        1: TensorType("f16", 1, 2),
        2: TensorType("q4_0", 32, 18),
        3: TensorType("q4_1", 32, 20),
        6: TensorType("q5_0", 32, 22),
        7: TensorType("q5_1", 32, 24),
        8: TensorType("q8_0", 32, 34),
        9: TensorType("q8_1", 32, 36),
        10: TensorType("q2_k", 256, 84),
        11: TensorType("q3_k", 256, 110),
        12: TensorType("q4_k", 256, 144),
        13: TensorType("q5_k", 256, 176),
        14: TensorType("q6_k", 256, 210),
        15: TensorType("q8_k", 256, 292),
        16: TensorType("iq2_xxs", 256, 66),
        17: TensorType("iq2_xs", 256, 74),
        18: TensorType("iq3_xxs", 256, 98),
        19: TensorType("iq1_s", 256, 50),
        20: TensorType("iq4_nl", 32, 18),
        21: TensorType("iq3_s", 256, 110),
        22: TensorType("iq2_s", 256, 82),
        23: TensorType("iq4_xs", 256, 136),
        24: TensorType("i8", 1, 1),
        25: TensorType("i16", 1, 2),
        26: TensorType("i32", 1, 4),
        27: TensorType("i64", 1, 8),
        28: TensorType("f64", 1, 8),
        29: TensorType("iq1_m", 256, 56),
        30: TensorType("bf16", 1, 2),
        34: TensorType("tq1_0", 256, 54),
        35: TensorType("tq2_0", 256, 66),
        39: TensorType("mxfp4", 32, 17),
        40: TensorType("nvfp4", 64, 36),
    }
)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a file."""

    name: str
    tensor_type: TensorType
    shape: tuple[int, ...]  # outermost dimension first, as in torch
    file: Path
    offset: int  # first byte in `file`

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.tensor_type.block_values * self.tensor_type.block_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes

    def part(self, index: int) -> TensorInfo:
        """Entry `index` of the first dimension."""
        start = self.offset + index * (self.num_bytes // self.shape[0])
        return replace(self, shape=self.shape[1:], offset=start)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """Header of a file. Metadata values are numbers, bools, strings and lists."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]  # by name
    files: tuple[Path, ...]  # all parts of a split file

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, which win over the key `vocab_size`; see read_vocab_size()."""
        if EMBEDDING_TENSOR not in self.tensors:
            raise CheckpointError(f"{self.path}: tensor `{EMBEDDING_TENSOR}` is missing", "model")
        rows = {EMBEDDING_TENSOR: self.tensors[EMBEDDING_TENSOR].shape[0]}
        return ConfigReader(rows, str(self.path)).get_int(EMBEDDING_TENSOR)


def is_gguf(path: Path) -> bool:
    """Whether `path` is a GGUF file, by its suffix or its first bytes."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_gguf(path: Path) -> GGUFFile:
    """Read the headers of all parts. Raises CheckpointError, which names the file and the field."""
    first = _read_header(path)
    num_parts = first.metadata.get("split.count", 1)
    if not isinstance(num_parts, int) or num_parts <= 1:
        return first
    return _merge_parts([first, *map(_read_header, _remaining_parts(path, num_parts))])


def split_files(path: Path) -> list[Path]:
    """All parts of a split file, by name, or the file itself."""
    match = SPLIT_FILE_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    numbers = range(1, int(match[3]) + 1)
    return [path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in numbers]


def _read_header(path: Path) -> GGUFFile:
    try:
        status = path.stat()
    except OSError as error:
        raise _read_error(path, error) from None
    if status.st_size == 0:
        raise CheckpointError(f"{path} is empty", "model")
    return _read_unchanged_header(path, status.st_ino, status.st_mtime_ns, status.st_size)


@functools.lru_cache(MAX_CACHED_HEADERS)
def _read_unchanged_header(path: Path, inode: int, mtime_ns: int, size: int) -> GGUFFile:
    """A start reads the header three times, which takes long with a vocabulary in it."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(BinaryReader(data, path), path, len(data)).read()
    except OSError as error:
        raise _read_error(path, error) from None


def _read_error(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path} cannot be read: {error.strerror or error}", "model")


class _HeaderReader:
    """Reads the header of one file."""

    def __init__(self, reader: BinaryReader, path: Path, size: int) -> None:
        self._reader = reader
        self._path = path
        self._size = size

    def read(self) -> GGUFFile:
        self._check_version()
        num_tensors = self._reader.read_count("the number of tensors", MIN_TENSOR_INFO_BYTES)
        num_pairs = self._reader.read_count("the number of metadata entries", MIN_ENTRY_BYTES)
        metadata = self._read_metadata(num_pairs)
        entries = [self._read_tensor_entry(index) for index in range(num_tensors)]
        alignment = self._get_alignment(metadata)
        start = -(-self._reader.position // alignment) * alignment
        tensors = [self._make_tensor_info(*entry, start, alignment) for entry in entries]
        self._check_overlap(tensors)
        return GGUFFile(self._path, metadata, self._index_by_name(tensors), (self._path,))

    def _check_version(self) -> None:
        reader = self._reader
        magic = reader.read_scalar("4s", "the magic number")
        if magic != MAGIC:
            raise reader.error(f"this is no GGUF file: it begins with {magic!r}, not {MAGIC!r}")
        version = reader.read_scalar("I", "the version")
        if version & 0xFFFF == 0:
            hint = "gguf-convert-endian of the gguf package converts it"
            raise reader.error(f"the file is big-endian, which is not supported; {hint}")
        if version not in VERSIONS:
            raise reader.error(f"the version is {version}; known: {', '.join(map(str, VERSIONS))}")

    def _read_metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            key = self._reader.read_str(f"the key of metadata entry {index}")
            if key in metadata:
                raise self._reader.error(f"`{key}` is in the metadata twice")
            metadata[key] = self._reader.read_value(f"`{key}`")
        return metadata

    def _read_tensor_entry(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape (outermost dimension first), type id and offset."""
        reader = self._reader
        name = reader.read_str(f"the name of tensor {index}")
        num_dims = reader.read_scalar("I", f"the number of dimensions of tensor `{name}`")
        if not 1 <= num_dims <= MAX_DIMS:
            raise reader.error(f"tensor `{name}` has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
        dims = [reader.read_scalar("Q", f"a dimension of tensor `{name}`") for _ in range(num_dims)]
        type_id = reader.read_scalar("I", f"the type of tensor `{name}`")
        return name, tuple(reversed(dims)), type_id, reader.read_scalar("Q", f"the offset of tensor `{name}`")

    def _get_alignment(self, metadata: Mapping[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self._reader.error(
                f"`general.alignment` must be a power of two up to {MAX_ALIGNMENT}, got {alignment!r}"
            )
        return alignment

    def _make_tensor_info(
        self, name: str, shape: tuple[int, ...], type_id: int, offset: int, start: int, alignment: int
    ) -> TensorInfo:
        """Check that the tensor is well-formed and within the file."""
        if type_id not in TENSOR_TYPES:
            raise self._reader.error(f"tensor `{name}` is of type {type_id}, which is not known")
        tensor_type = TENSOR_TYPES[type_id]
        info = TensorInfo(name, tensor_type, shape, self._path, start + offset)
        if min(shape) < 1 or shape[-1] % tensor_type.block_values:
            rule = f"rows of {tensor_type.name} are whole blocks of {tensor_type.block_values} values"
            raise self._reader.error(f"tensor `{name}` is {list(shape)}: {rule}")
        if offset % alignment:
            rule = f"no multiple of the alignment {alignment}"
            raise self._reader.error(f"the offset {offset} of tensor `{name}` is {rule}")
        end = info.offset + info.num_bytes
        if end > self._size:
            limit = f"the file at byte {self._size}: it is truncated"
            raise self._reader.error(f"tensor `{name}` ends at byte {end}, but {limit}")
        return info

    def _check_overlap(self, tensors: Iterable[TensorInfo]) -> None:
        for left, right in pairwise(sorted(tensors, key=lambda info: info.offset)):
            if left.offset + left.num_bytes > right.offset:
                names = f"`{left.name}` and `{right.name}`"
                raise self._reader.error(f"tensors {names} overlap at byte {right.offset}")

    def _index_by_name(self, tensors: Iterable[TensorInfo]) -> dict[str, TensorInfo]:
        by_name: dict[str, TensorInfo] = {}
        for info in tensors:
            if by_name.setdefault(info.name, info) is not info:
                raise self._reader.error(f"tensor `{info.name}` is there twice")
        return by_name


def _remaining_parts(path: Path, num_parts: int) -> list[Path]:
    """The parts of a split file after the first."""
    match = SPLIT_FILE_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != num_parts:
        rule = f"its name must end in -00001-of-{num_parts:05}.gguf so that the others are found"
        raise CheckpointError(f"{path} is one of {num_parts} parts; {rule}", "model")
    if int(match[2]) != 1:
        hint = f"give the first one, {match[1]}-00001-of-{match[3]}.gguf"
        raise CheckpointError(f"{path} is part {int(match[2])} of {num_parts}; {hint}", "model")
    parts = split_files(path)[1:]
    missing = ", ".join([file.name for file in parts if not file.is_file()][:3])
    if missing:
        raise CheckpointError(f"{path} has {num_parts} parts; missing in its directory: {missing}", "model")
    return parts


def _merge_parts(parts: list[GGUFFile]) -> GGUFFile:
    first = parts[0]
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        if part.metadata.get("split.no") != number or part.metadata.get("split.count") != len(parts):
            expected = f"{number} and {len(parts)}"
            raise CheckpointError(f"{part.path}: `split.no` and `split.count` must be {expected}", "model")
        duplicates = tensors.keys() & part.tensors.keys()
        if duplicates:
            raise CheckpointError(f"{part.path}: tensor `{min(duplicates)}` is in another part too", "model")
        tensors |= part.tensors
    expected_count = first.metadata.get("split.tensors.count", len(tensors))
    if expected_count != len(tensors):
        counts = f"is {expected_count}, but the parts hold {len(tensors)} tensors"
        raise CheckpointError(f"{first.path}: `split.tensors.count` {counts}", "model")
    return GGUFFile(first.path, first.metadata, tensors, tuple(part.path for part in parts))
