"""Safetensors files: damaged ones are refused with a reason; pages can be released."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from foreword.errors import CheckpointError
from foreword.weights.mapped_file import MappedFile
from foreword.weights.safetensors_weights import SafetensorsFile
from tests.support.budget import examples

TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.arange(4).to(torch.bfloat16),
    "c": torch.arange(5).to(torch.float16),
    "empty": torch.empty(0, 3),
    "whole": torch.arange(3, dtype=torch.int8),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    return tmp_path / "x.safetensors"


def write(path: Path, header: Any, data: bytes = bytes(24)) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def test_tensors_are_memory_mapped(file: Path):
    found = SafetensorsFile(file)
    assert set(found.entries) == set(TENSORS)
    for name in ("a", "b", "c", "empty"):
        assert found.tensor(name).dtype == TENSORS[name].dtype
        assert torch.equal(found.tensor(name), TENSORS[name])


def test_released_tensor_can_be_read_again(file: Path):
    found = SafetensorsFile(file)
    tensor = found.tensor("a")
    for name in found.entries:
        found.release(name)
    assert torch.equal(tensor, TENSORS["a"])


def test_release_frees_memory(tmp_path: Path):
    path = tmp_path / "zeros"
    path.write_bytes(bytes(32 << 20))
    mapped = MappedFile(path)
    before = resident()
    values = mapped.tensor(torch.uint8, 0, mapped.num_bytes)
    assert int(values.sum()) == 0
    assert resident() - before > 30 << 20, "reading does not load pages"
    mapped.release(5, mapped.num_bytes - 5)
    assert resident() - before < 8 << 20


def resident() -> int:
    """Resident bytes of mapped files."""
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("this system does not tell what is in memory")
    (line,) = (line for line in status.read_text().splitlines() if line.startswith("RssFile"))
    return int(line.split()[1]) << 10


def test_unsupported_type_is_named(file: Path):
    with pytest.raises(CheckpointError, match="`whole` is of type I8; weights must be F32, BF16, F16"):
        SafetensorsFile(file).tensor("whole")


def test_invalid_header_is_refused(tmp_path: Path):
    for header, why in [
        (b"{", "not JSON"),
        (b"[" * 200_000, "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ([], "not a JSON object"),
        ({"a": 3}, "`a` has the entry 3"),
        ({"a": {"dtype": "F32", "shape": [6]}}, "`a` has the entry"),
        ({"a": {"dtype": "F32", "shape": [-6], "data_offsets": [0, 24]}}, "`a` has the entry"),
        ({"a": {"dtype": "F32", "shape": 6, "data_offsets": [0, 24]}}, "`a` has the entry"),
        ({"a": {"dtype": "F32", "shape": [6], "data_offsets": [0, 24, 48]}}, "`a` has the entry"),
        ({"a": {"dtype": "F32", "shape": [6], "data_offsets": [24, 0]}}, "ends at byte"),
        ({"a": {"dtype": "F32", "shape": [7], "data_offsets": [0, 28]}}, "ends at byte"),
        ({"a": {"dtype": "F32", "shape": [1 << 62], "data_offsets": [0, 1 << 64]}}, "ends at byte"),
        ({"a": {"dtype": "F32", "shape": [1 << 40] * 2, "data_offsets": [0, 24]}}, "has 24 bytes"),
        ({"a": {"dtype": "F32", "shape": [1] * 9, "data_offsets": [0, 4]}}, "and more of type F32 has 4"),
    ]:
        with pytest.raises(CheckpointError, match=rf"x is damaged or incomplete: .*{why}"):
            SafetensorsFile(write(tmp_path / "x", header))


def test_truncated_file_is_refused(tmp_path: Path):
    for content in [b"", b"abc", (1 << 60).to_bytes(8, "little"), (99).to_bytes(8, "little") + b"{}"]:
        path = tmp_path / "x.safetensors"
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"x\.safetensors is damaged or incomplete"):
            SafetensorsFile(path)


def test_pointer_of_git_lfs_is_named(tmp_path: Path):
    path = tmp_path / "x.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0a\nsize 123456\n")
    with pytest.raises(CheckpointError, match=r"x\.safetensors is a pointer of Git LFS: `git lfs pull`"):
        SafetensorsFile(path)


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"the file x\.safetensors is missing"):
        SafetensorsFile(tmp_path / "x.safetensors")


@settings(max_examples=examples(300))
@given(data=st.data())
def test_flipped_bytes_never_crash(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject):
    path = tmp_path_factory.mktemp("flipped") / "x.safetensors"
    save_file(TENSORS, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        found = SafetensorsFile(path)
        sizes = [
            found.tensor(name).numel() for name, entry in found.entries.items() if entry.dtype_name != "I8"
        ]
    except CheckpointError as error:
        assert "x.safetensors" in error.message
    else:
        assert sum(sizes) <= len(content)
