"""DeviceLoader: tensors equal the file's bytes for any buffer size; read errors name the file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foreword.errors import CheckpointError
from foreword.kernels.reference.backend import ReferenceOps
from foreword.models import model_loader
from foreword.models.interfaces import Precision
from foreword.models.model_loader import load_model
from foreword.weights import file_to_device
from foreword.weights.file_to_device import DeviceLoader, FileSpan
from tests.support.budget import examples
from tests.support.checkpoints import write_checkpoint
from tests.support.forward_helpers import ForwardHelper
from tests.support.gguf_files import Kind, write_gguf


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("staging") / "bytes"
    path.write_bytes(os.urandom(10_000))
    return path


@settings(max_examples=examples(60))
@given(
    spans=st.lists(st.tuples(st.integers(0, 9_000), st.integers(0, 1_000)), min_size=1, max_size=12),
    buffer_bytes=st.integers(1, 400),
    num_readers=st.integers(1, 5),
)
def test_device_loader_returns_file_bytes(
    file: Path, spans: Sequence[tuple[int, int]], buffer_bytes: int, num_readers: int
) -> None:
    """Uneven sizes, more tensors than buffers, tensors larger than both buffers, empty tensors."""
    content = file.read_bytes()
    with DeviceLoader("cpu", pinned=False, buffer_bytes=buffer_bytes, num_readers=num_readers) as staged:
        found = [staged.tensor(FileSpan(file, start, size), torch.uint8, [size]) for start, size in spans]
    assert [bytes(tensor.tolist()) for tensor in found] == [
        content[start : start + size] for start, size in spans
    ]


def test_device_loader_keeps_type_and_shape(tmp_path: Path) -> None:
    values = torch.arange(24, dtype=torch.float32).to(torch.bfloat16).view(2, 3, 4)
    (tmp_path / "x").write_bytes(b"?" + values.view(torch.uint8).numpy().tobytes())
    with DeviceLoader("cpu", buffer_bytes=10) as staged:
        found = staged.tensor(FileSpan(tmp_path / "x", 1, 48), torch.bfloat16, (2, 3, 4))
    assert found.dtype == torch.bfloat16 and torch.equal(found, values)


def test_short_reads_are_continued(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, offset: whole(fd, [views[0][:7]], offset))
    with DeviceLoader("cpu", buffer_bytes=64) as staged:
        assert (
            bytes(staged.tensor(FileSpan(file, 3, 500), torch.uint8, [500]).tolist())
            == file.read_bytes()[3:503]
        )


@pytest.mark.parametrize("num_readers", [1, 4])
def test_truncated_file_is_named(file: Path, num_readers: int) -> None:
    with (
        DeviceLoader("cpu", buffer_bytes=64, num_readers=num_readers) as staged,
        pytest.raises(CheckpointError, match=r"bytes is damaged: it ends before byte 10020"),
    ):
        staged.tensor(FileSpan(file, 9_900, 120), torch.uint8, [120])


def test_loader_works_after_a_disk_error(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, views: Sequence[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    with DeviceLoader("cpu", buffer_bytes=64) as staged:
        with monkeypatch.context() as patched:
            patched.setattr(os, "preadv", broken)
            with pytest.raises(CheckpointError, match="bytes cannot be read: Input/output error"):
                staged.tensor(FileSpan(file, 0, 200), torch.uint8, [200])
        assert (
            bytes(staged.tensor(FileSpan(file, 0, 200), torch.uint8, [200]).tolist())
            == file.read_bytes()[:200]
        )


def test_missing_file_is_named(tmp_path: Path) -> None:
    with (
        DeviceLoader("cpu") as staged,
        pytest.raises(CheckpointError, match="nothing cannot be read: No such file"),
    ):
        staged.tensor(FileSpan(tmp_path / "nothing", 0, 1), torch.uint8, [1])


def test_missing_pinned_memory_is_logged(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain = torch.empty

    def empty(*shape: int, pin_memory: bool = False, **options: torch.dtype) -> Tensor:
        if pin_memory:
            raise RuntimeError("CUDA error: out of memory\nand much else")
        return plain(*shape, **options)

    monkeypatch.setattr(file_to_device.torch, "empty", empty)
    with DeviceLoader("cpu", pinned=True, buffer_bytes=64) as staged:
        assert "pinned memory is not available (CUDA error: out of memory)" in caplog.text
        assert (
            bytes(staged.tensor(FileSpan(file, 0, 200), torch.uint8, [200]).tolist())
            == file.read_bytes()[:200]
        )


def test_readahead_requests_each_byte_once(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(file_to_device, "READAHEAD_BYTES", 1000)
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, start, size, advice: asked.append((start, start + size))
    )
    with DeviceLoader("cpu") as staged:
        for start in (*range(0, 2_000, 100), 0):
            staged.tensor(FileSpan(file, start, 100), torch.uint8, [100])
    assert asked == [(100, 1100), (1100, 1600), (1600, 2100), (2100, 2600), (100, 1100)]


class Copies:
    """Pinned memory without a GPU: a copy happens when its event is waited for."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.most = 0

    def queue(self, target: Tensor, source: Tensor) -> None:
        self.waiting.append((target, source))
        self.most = max(self.most, len(self.waiting))

    def finish(self, source: Tensor) -> None:
        for target, of in self.waiting:
            if of.data_ptr() == source.data_ptr():
                target.copy_(of)
        self.waiting = [one for one in self.waiting if one[1].data_ptr() != source.data_ptr()]


def test_buffer_is_not_filled_during_its_copy(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies()
    monkeypatch.setattr(
        file_to_device._Buffer,
        "copy_to",
        lambda self, target: copies.queue(target, self._bytes[: len(target)]),
    )
    monkeypatch.setattr(file_to_device._Buffer, "wait", lambda self: copies.finish(self._bytes))
    with DeviceLoader("cpu", buffer_bytes=64) as staged:
        found = [
            staged.tensor(FileSpan(file, start, 100), torch.uint8, [100]) for start in range(0, 2_000, 100)
        ]
    assert copies.most == file_to_device.NUM_BUFFERS and not copies.waiting
    assert b"".join(bytes(tensor.tolist()) for tensor in found) == file.read_bytes()[:2_000]


@pytest.mark.parametrize("kind", [None, Kind.Q8_0, Kind.F16])
def test_model_is_equal_mapped_and_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind | None
) -> None:
    """Mapped files against DeviceLoader, for safetensors and GGUF."""
    path = write_checkpoint(tmp_path / "model", "llama", seed=3, dtype="bfloat16")
    if kind is not None:
        path = write_gguf(path, tmp_path / "model.gguf", kind)
    mapped = ForwardHelper(path).logits([1, 2, 3])
    monkeypatch.setattr(
        model_loader, "open_device_loader", lambda device: DeviceLoader("cpu", buffer_bytes=1000)
    )
    assert torch.equal(ForwardHelper(path).logits([1, 2, 3]), mapped)


def test_threads_and_files_are_closed_after_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_checkpoint(tmp_path, "llama")
    (path / "model.safetensors").write_bytes((path / "model.safetensors").read_bytes()[:-100])
    made: list[DeviceLoader] = []
    monkeypatch.setattr(
        model_loader, "open_device_loader", lambda device: made.append(DeviceLoader("cpu")) or made[0]
    )
    with pytest.raises(CheckpointError, match="damaged"):
        load_model(path, ReferenceOps(), Precision.from_dtypes("float32"), "cpu", 64)
    assert made[0]._readers._shutdown and not made[0]._files
