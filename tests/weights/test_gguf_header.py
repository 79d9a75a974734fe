"""Headers of GGUF files, valid and invalid."""

import resource
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foreword.errors import CheckpointError
from foreword.weights.gguf.header import TENSOR_TYPES, is_gguf, open_gguf
from tests.support.budget import SHARED_FIXTURES, examples
from tests.support.gguf_files import RawGGUF, finish

Q1_SUM = 9  # q8_1, of which the package and the C code disagree; no file holds it


def written(path: Path, raw: RawGGUF | bytes) -> Path:
    path.write_bytes(raw if isinstance(raw, bytes) else raw.bytes())
    return path


def test_valid_file(tmp_path: Path) -> None:
    opened = open_gguf(written(tmp_path / "x.gguf", RawGGUF.sample()))
    assert opened.metadata == {
        "general.architecture": "llama",
        "b": "ü",
        "texts": ["x", "yz"],
        "numbers": [0.5, 1.0, 2.0],
        "flag": True,
    }
    one, two = opened.tensors["one"], opened.tensors["two"]
    assert (one.tensor_type.name, one.shape, one.num_bytes) == ("f32", (2, 4), 32)
    assert (two.tensor_type.name, two.shape, two.row_bytes, two.num_bytes) == ("q8_0", (3, 32), 34, 102)
    assert two.offset == one.offset + 32 and one.offset % 32 == 0


def test_files_of_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    numbers = {
        "uint8": 255,
        "int8": -5,
        "uint16": 65535,
        "int16": -7,
        "uint32": 2**32 - 1,
        "int32": -9,
        "uint64": 2**63,
    }
    for kind, value in numbers.items():
        getattr(writer, f"add_{kind}")(kind, value)
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("no", False)
    writer.add_array("ids", [1, 2, 3])
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    finish(writer)
    opened = open_gguf(path)
    expected = {
        "general.architecture": "qwen2",
        **numbers,
        "f32": 0.5,
        "f64": 0.1,
        "no": False,
        "ids": [1, 2, 3],
    }
    assert opened.metadata == expected
    info = opened.tensors["t"]
    assert path.read_bytes()[info.offset :][: info.num_bytes] == np.arange(6, dtype=np.float32).tobytes()


def test_block_sizes_equal_the_gguf_package() -> None:
    for number, kind in TENSOR_TYPES.items():
        known = gguf.GGMLQuantizationType(number)
        assert known.name.lower() == kind.name
        assert number == Q1_SUM or gguf.GGML_QUANT_SIZES[known] == (kind.block_values, kind.block_bytes)


def test_tensor_alignment(tmp_path: Path) -> None:
    raw = RawGGUF.sample()
    raw.alignment = 128
    raw.pairs.append(RawGGUF.pair("general.alignment", 4, struct.pack("<I", 128)))
    raw.tensors[1] = RawGGUF.tensor("two", (32, 3), 8, 128)
    raw.data = bytes(128 + 102)
    assert open_gguf(written(tmp_path / "x.gguf", raw)).tensors["one"].offset % 128 == 0


def test_is_gguf(tmp_path: Path) -> None:
    assert is_gguf(written(tmp_path / "x.GGUF", b"anything"))
    assert is_gguf(written(tmp_path / "blob", b"GGUF and more"))
    assert not is_gguf(written(tmp_path / "x.bin", b"GGU"))
    assert not is_gguf(tmp_path)
    assert not is_gguf(tmp_path / "missing.gguf")


def changed(**fields: Any) -> RawGGUF:
    raw = RawGGUF.sample()
    for name, value in fields.items():
        setattr(raw, name, value)
    return raw


def with_pair(key: str, kind: int, value: bytes) -> RawGGUF:
    raw = RawGGUF.sample()
    raw.pairs.append(RawGGUF.pair(key, kind, value))
    return raw


def with_tensor(*entry: Any) -> RawGGUF:
    raw = RawGGUF.sample()
    raw.tensors.append(RawGGUF.tensor(*entry))
    raw.data += bytes(1024)
    return raw


HUGE = 2**62
INVALID_FILES: dict[str, tuple[RawGGUF | bytes, str]] = {
    "empty": (b"", "is empty"),
    "three bytes": (
        b"GGU",
        "the magic number begins at byte 0 and takes 4 bytes, but the file ends at byte 3",
    ),
    "another format": (b"PK\x03\x04" + bytes(100), "is no GGUF file: it begins with b'PK"),
    "version 1": (changed(version=1), "the version is 1; known: 2, 3"),
    "version 9": (changed(version=9), "the version is 9"),
    "big-endian": (changed(version=3 << 24), "big-endian"),
    "count of pairs": (
        RawGGUF.sample().bytes(num_pairs=HUGE),
        f"the number of metadata entries is {HUGE}, but there is room for",
    ),
    "count of tensors": (
        RawGGUF.sample().bytes(num_tensors=HUGE),
        f"the number of tensors is {HUGE}, but there is room for",
    ),
    "one pair too many": (RawGGUF.sample().bytes(num_pairs=6), "the name of tensor 0 begins at byte"),
    "one tensor too many": (RawGGUF.sample().bytes(num_tensors=3), "tensor `` has 16256 dimensions"),
    "length of a text": (
        with_pair("k", 8, struct.pack("<Q", HUGE)),
        f"`k` begins at byte .* takes {HUGE} bytes, but the file ends",
    ),
    "length of a list": (
        with_pair("k", 9, struct.pack("<IQ", 5, HUGE)),
        f"the length of `k` is {HUGE}, but there is room for",
    ),
    "length of texts": (with_pair("k", 9, struct.pack("<IQ", 8, HUGE)), "the length of `k`"),
    "text in a list": (
        with_pair("k", 9, struct.pack("<IQQ", 8, 1, HUGE)),
        rf"`k`\[0\] begins at byte \d+ and takes {HUGE + 8} bytes",
    ),
    "type of a value": (with_pair("k", 13, b""), "the type of `k` is 13; known: 0, 1"),
    "type of elements": (with_pair("k", 9, struct.pack("<IQ", 9, 1)), "the element type of `k` is 9"),
    "a bool of 2": (with_pair("k", 7, b"\x02"), r"`k` must be 0 or 1 \(false or true\), got 2"),
    "no UTF-8": (with_pair("k", 8, struct.pack("<Q", 2) + b"\xff\xfe"), "`k` is not UTF-8"),
    "a key twice": (with_pair("b", 8, RawGGUF.text("x")), "`b` is in the metadata twice"),
    "alignment": (
        with_pair("general.alignment", 4, struct.pack("<I", 12)),
        "`general.alignment` must be a power of two",
    ),
    "alignment 0": (with_pair("general.alignment", 4, bytes(4)), "`general.alignment` must be"),
    "a tensor twice": (with_tensor("one", (8,), 0, 160), "tensor `one` is there twice"),
    "overlap": (
        with_tensor("three", (8,), 0, 32),
        "tensors `two` and `three` overlap at byte|tensors `three` and `two` overlap",
    ),
    "type of a tensor": (
        with_tensor("three", (8,), 4, 160),
        "tensor `three` is of type 4, which is not known",
    ),
    "half a block": (
        with_tensor("three", (48,), 8, 160),
        r"tensor `three` is \[48\]: rows of q8_0 are whole blocks of 32 values",
    ),
    "no values": (with_tensor("three", (0, 3), 0, 160), r"tensor `three` is \[3, 0\]"),
    "five dimensions": (
        with_tensor("three", (1, 1, 1, 1, 1), 0, 160),
        "tensor `three` has 5 dimensions; 1 to 4 are possible",
    ),
    "offset": (with_tensor("three", (8,), 0, HUGE), "tensor `three` ends at byte .*, but the file at byte"),
    "offset off the grid": (
        with_tensor("three", (8,), 0, 161),
        "the offset 161 of tensor `three` is no multiple of the alignment 32",
    ),
    "dimensions": (with_tensor("three", (HUGE, HUGE), 0, 160), "tensor `three` ends at byte"),
    "data cut off": (RawGGUF.sample().bytes()[:-1], "tensor `two` ends at byte .* it is truncated"),
}


def test_invalid_headers_are_named(tmp_path: Path) -> None:
    for case in INVALID_FILES:
        raw, message = INVALID_FILES[case]
        path = written(tmp_path / "case.gguf", raw)
        with pytest.raises(CheckpointError, match=message) as caught:
            open_gguf(path)
        assert str(path) in str(caught.value)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    whole = RawGGUF.sample().bytes()
    for length in range(len(whole)):
        with pytest.raises(CheckpointError):
            open_gguf(written(tmp_path / "x.gguf", whole[:length]))


@settings(
    max_examples=examples(400),
    suppress_health_check=SHARED_FIXTURES,
)
@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_never_crash(tmp_path: Path, changes: list[tuple[int, int]]) -> None:
    raw = bytearray(RawGGUF.sample().bytes())
    for place, value in changes:
        raw[place % len(raw)] = value
    try:
        opened = open_gguf(written(tmp_path / "x.gguf", bytes(raw)))
    except CheckpointError:
        return
    assert all(info.offset + info.num_bytes <= len(raw) for info in opened.tensors.values())


MANY, LONG = struct.pack("<IQ", 0, 2**32), struct.pack("<Q", 2**32)


@pytest.mark.parametrize(
    "kind, value, message",
    [
        (9, MANY, "the length of `k` is 4294967296, but there is room for 16777216"),
        (8, LONG, "`k` begins at byte .* and takes 4294967296 bytes, but a header may end at byte 268435456"),
    ],
)
def test_huge_lengths_allocate_nothing(kind: int, value: bytes, message: str, tmp_path: Path) -> None:
    """The sparse file of 64 GB has room for the claimed length."""
    path = written(tmp_path / "x.gguf", with_pair("k", kind, value).bytes(num_tensors=0))
    with path.open("r+b") as file:
        file.truncate(1 << 36)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=message):
        open_gguf(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"x\.gguf cannot be read: No such file"):
        open_gguf(tmp_path / "x.gguf")


# Split files


def split(path: Path, count: int = 3) -> list[Path]:
    """Parts of one tensor each, as gguf-split writes them."""
    files = [path / f"m-{number + 1:05}-of-{count:05}.gguf" for number in range(count)]
    for number, file in enumerate(files):
        pairs = [
            RawGGUF.pair("split.no", 2, struct.pack("<H", number)),
            RawGGUF.pair("split.count", 2, struct.pack("<H", count)),
            RawGGUF.pair("split.tensors.count", 5, struct.pack("<i", count)),
        ]
        written(file, RawGGUF(pairs, [RawGGUF.tensor(f"t{number}", (8,))], bytes(32)))
    return files


def test_split_file_is_merged(tmp_path: Path) -> None:
    files = split(tmp_path)
    opened = open_gguf(files[0])
    assert [opened.tensors[f"t{number}"].file for number in range(3)] == files
    assert opened.files == tuple(files)


def test_later_part_names_the_first(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is part 2 of 3; give the first one, m-00001-of-00003\.gguf"):
        open_gguf(split(tmp_path)[1])


def test_missing_part_is_named(tmp_path: Path) -> None:
    files = split(tmp_path)
    files[2].unlink()
    with pytest.raises(CheckpointError, match=r"missing in its directory: m-00003-of-00003\.gguf"):
        open_gguf(files[0])


def test_part_with_another_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"its name must end in -00001-of-00003\.gguf"):
        open_gguf(split(tmp_path)[0].rename(tmp_path / "model.gguf"))


def test_inconsistent_parts_are_refused(tmp_path: Path) -> None:
    files = split(tmp_path)
    files[1].write_bytes(files[2].read_bytes())
    with pytest.raises(
        CheckpointError, match=r"00002-of-00003\.gguf: `split.no` and `split.count` must be 1 and 3"
    ):
        open_gguf(files[0])


@pytest.mark.parametrize("rows", [(1 << 24) + 1, 1 << 31])
def test_vocabulary_beyond_the_limit_is_refused(rows: int, tmp_path: Path) -> None:
    """The API process makes a list of the rows without a token."""
    path = written(tmp_path / "x.gguf", RawGGUF([], [RawGGUF.tensor("token_embd.weight", (1, rows), 24)]))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + rows)
    with pytest.raises(CheckpointError, match=r"`token_embd.weight` must be .* at most 16777216"):
        _ = open_gguf(path).vocab_size
