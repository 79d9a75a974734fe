"""Opens GGUF files: metadata as plain values, and where each tensor lies. Does not import torch, and believes nothing.

Opening reads the header only; of a file that was split, each part's.
"""

from __future__ import annotations

import math
import mmap
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from foreword.errors import CheckpointError
from foreword.models.gguf.binary_reader import BinaryReader
from foreword.models.gguf.tensor_types import TENSOR_TYPES, TensorType

__all__ = ["GGUFFile", "TensorInfo", "is_gguf", "open_gguf", "split_files"]

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32  # where general.alignment does not say
MAX_ALIGNMENT = 1 << 20
MAX_DIMS = 4
MIN_ENTRY_BYTES = 8 + 4 + 1  # bytes of a metadata entry: length of the key, type, value
MIN_TENSOR_INFO_BYTES = (
    8 + 4 + 8 + 4 + 8
)  # bytes of a tensor's entry: length of the name, dimensions, one of them, type, offset
SPLIT_FILE_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor in a file.

    shape   outermost dimension first, as torch has it
    offset  of its first byte in `file`
    """

    name: str
    tensor_type: TensorType
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.tensor_type.block_values * self.tensor_type.block_bytes

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """What stands in a file's header: numbers, bools, texts and lists by key; tensors by name.

    files  the file itself, or all parts of a split one
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]
    files: tuple[Path, ...]


def is_gguf(path: Path) -> bool:
    """Whether `path` names a file in this format, by its ending or its first bytes."""
    if not path.is_file():
        return False
    if path.suffix.lower() == ".gguf":
        return True
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_gguf(path: Path) -> GGUFFile:
    """Read the header, and those of the other parts of a split file.

    Raises CheckpointError, which names the file, the field and the limit.
    """
    first = _read_header(path)
    parts = first.metadata.get("split.count", 1)
    if not isinstance(parts, int) or parts <= 1:
        return first
    others = [_read_header(file) for file in _remaining_parts(path, parts)]
    return _merge_parts([first, *others])


def split_files(path: Path) -> list[Path]:
    """The file itself, or all parts of a split one, by their names alone."""
    match = SPLIT_FILE_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    return [
        path.with_name(f"{match[1]}-{number:05}-of-{match[3]}.gguf") for number in range(1, int(match[3]) + 1)
    ]


def _read_header(path: Path) -> GGUFFile:
    try:
        if path.stat().st_size == 0:
            raise CheckpointError(f"{path} is empty", "model")
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _HeaderReader(BinaryReader(data, path), path, len(data)).read()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}", "model") from None


class _HeaderReader:
    """Reads one file's header, from its first byte on."""

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
        cursor = self._reader
        magic = cursor.read_scalar("4s", "the magic number")
        if magic != MAGIC:
            raise cursor.error(f"this is no GGUF file: it begins with {magic!r}, not {MAGIC!r}")
        version = cursor.read_scalar("I", "the version")
        if version & 0xFFFF == 0:
            raise cursor.error(
                "the file is big-endian, which is not supported; gguf-convert-endian of the gguf package converts it"
            )
        if version not in VERSIONS:
            raise cursor.error(f"the version is {version}; known: {', '.join(map(str, VERSIONS))}")

    def _read_metadata(self, count: int) -> dict[str, Any]:
        metadata: dict[str, Any] = {}
        for index in range(count):
            key = self._reader.read_str(f"the key of metadata entry {index}")
            if key in metadata:
                raise self._reader.error(f"`{key}` stands in the metadata twice")
            metadata[key] = self._reader.read_value(f"`{key}`")
        return metadata

    def _read_tensor_entry(self, index: int) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape (outermost dimension first), type and offset of a tensor."""
        cursor = self._reader
        name = cursor.read_str(f"the name of tensor {index}")
        num_dims = cursor.read_scalar("I", f"the number of dimensions of tensor `{name}`")
        if not 1 <= num_dims <= MAX_DIMS:
            raise cursor.error(f"tensor `{name}` has {num_dims} dimensions; 1 to {MAX_DIMS} are possible")
        dims = [cursor.read_scalar("Q", f"a dimension of tensor `{name}`") for _ in range(num_dims)]
        kind = cursor.read_scalar("I", f"the type of tensor `{name}`")
        return name, tuple(reversed(dims)), kind, cursor.read_scalar("Q", f"the offset of tensor `{name}`")

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
        """The tensor, if it lies within the file."""
        if type_id not in TENSOR_TYPES:
            raise self._reader.error(f"tensor `{name}` is of type {type_id}, which is not known")
        info = TensorInfo(name, TENSOR_TYPES[type_id], shape, self._path, start + offset)
        if min(shape) < 1 or shape[-1] % info.tensor_type.block_values:
            block = info.tensor_type.block_values
            raise self._reader.error(
                f"tensor `{name}` is {list(shape)}: rows of {info.tensor_type.name} are whole blocks of {block} values"
            )
        if offset % alignment:
            raise self._reader.error(
                f"the offset {offset} of tensor `{name}` is no multiple of the alignment {alignment}"
            )
        if info.offset + info.num_bytes > self._size:
            raise self._reader.error(
                f"tensor `{name}` ends at byte {info.offset + info.num_bytes}, but the file at byte {self._size}: it is truncated"
            )
        return info

    def _check_overlap(self, tensors: Iterable[TensorInfo]) -> None:
        for left, right in pairwise(sorted(tensors, key=lambda info: info.offset)):
            if left.offset + left.num_bytes > right.offset:
                raise self._reader.error(
                    f"tensors `{left.name}` and `{right.name}` overlap at byte {right.offset}"
                )

    def _index_by_name(self, tensors: Iterable[TensorInfo]) -> dict[str, TensorInfo]:
        named: dict[str, TensorInfo] = {}
        for info in tensors:
            if named.setdefault(info.name, info) is not info:
                raise self._reader.error(f"tensor `{info.name}` is there twice")
        return named


def _remaining_parts(path: Path, num_parts: int) -> list[Path]:
    """The files after the first one of a split file."""
    match = SPLIT_FILE_NAME.fullmatch(path.name)
    if match is None or int(match[3]) != num_parts:
        raise CheckpointError(
            f"{path} is one of {num_parts} parts; its name must end in -00001-of-{num_parts:05}.gguf so that the others are found",
            "model",
        )
    if int(match[2]) != 1:
        first = f"{match[1]}-00001-of-{match[3]}.gguf"
        raise CheckpointError(
            f"{path} is part {int(match[2])} of {num_parts}; give the first one, {first}", "model"
        )
    others = split_files(path)[1:]
    missing = [file.name for file in others if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{path} has {num_parts} parts; missing beside it: {', '.join(missing[:3])}", "model"
        )
    return others


def _merge_parts(parts: list[GGUFFile]) -> GGUFFile:
    first = parts[0]
    tensors: dict[str, TensorInfo] = {}
    for number, part in enumerate(parts):
        if part.metadata.get("split.no") != number or part.metadata.get("split.count") != len(parts):
            raise CheckpointError(
                f"{part.path}: `split.no` and `split.count` must say {number} and {len(parts)}", "model"
            )
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise CheckpointError(f"{part.path}: tensor `{min(twice)}` is in another part too", "model")
        tensors |= part.tensors
    wanted = first.metadata.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise CheckpointError(
            f"{first.path}: `split.tensors.count` is {wanted}, but the parts hold {len(tensors)} tensors",
            "model",
        )
    return GGUFFile(first.path, first.metadata, tensors, tuple(part.path for part in parts))
