"""Capture sizes, the fallback without capture, and what a failed capture leaves behind."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreword.cuda_graphs.capture import CudaGraphPool, capture_sizes, pick_size


def do_nothing() -> None: ...


@given(max_size=st.integers(1, 2000))
def test_capture_sizes_are_dense(max_size: int) -> None:
    sizes = capture_sizes(max_size)
    assert sizes[0] == 1 and sizes[-1] == max_size
    assert all(a < b <= 2 * a for a, b in itertools.pairwise(sizes))
    assert all(b <= 1.25 * a for a, b in itertools.pairwise(sizes) if a >= 32)
    assert len(sizes) <= 23 + max(max_size - 512, 0) / 64 + 1


@given(max_size=st.integers(1, 300), data=st.data())
def test_pick_size_is_the_smallest_with_room(max_size: int, data: st.DataObject) -> None:
    sizes, count = capture_sizes(max_size), data.draw(st.integers(1, max_size))
    picked = pick_size(count, sizes)
    assert picked >= count and not any(count <= size < picked for size in sizes)


def test_cpu_captures_nothing() -> None:
    graphs = CudaGraphPool(torch.device("cpu"))
    assert graphs.capture(do_nothing) is do_nothing and graphs.num_graphs == graphs.num_bytes == 0


def test_dry_run_runs_once_and_captures_nothing() -> None:
    graphs, runs = CudaGraphPool(torch.device("cuda"), dry_run=True), list[int]()
    run = graphs.capture(lambda: runs.append(1))
    assert runs == [1] and graphs.num_graphs == 0
    run()
    assert runs == [1, 1]


class Failing(CudaGraphPool):
    tries = 0
    error = RuntimeError("operation not permitted when stream is capturing")

    def _capture_graph(self, run: object) -> None:  # type: ignore[override]
        self.tries += 1
        raise self.error


def test_failed_capture_falls_back_once(caplog: pytest.LogCaptureFixture) -> None:
    graphs = Failing(torch.device("cuda"))
    with caplog.at_level(logging.WARNING):
        assert graphs.capture(do_nothing) is do_nothing
        assert graphs.capture(do_nothing) is do_nothing
    assert graphs.tries == 1 and len(caplog.records) == 1 and "not permitted" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: misaligned address"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
)
def test_lost_device_and_out_of_memory_are_raised(error: RuntimeError) -> None:
    graphs = Failing(torch.device("cuda"))
    graphs.error = error
    with pytest.raises(type(error), match=str(error)[:20].replace("[", r"\[")):
        graphs.capture(lambda: None)


def test_refused_operation_in_a_capture_is_no_lost_device() -> None:
    """Torch raises the errors of a capture as AcceleratorError, too; the device goes on."""
    graphs = Failing(torch.device("cuda"))
    graphs.error = torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
    assert graphs.capture(do_nothing) is do_nothing


class FakeTorchCuda:
    """The calls of a capture. Its end raises, as torch's does after an error, before it leaves the stream."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = torch.device("cuda", 0)
        self.main, self.capturing = SimpleNamespace(device=device), SimpleNamespace(device=device)
        self.current = self.main
        self.pools_left: list[tuple[int, object]] = []
        for name, function in {
            "current_stream": lambda device: self.current,
            "set_stream": self.set_stream,
            "graph_pool_handle": lambda: (0, 1),
            "synchronize": lambda device: None,
            "empty_cache": lambda: None,
            "mem_get_info": lambda device: (1, 1),
            "CUDAGraph": SimpleNamespace,
            "graph": lambda graph, **options: self,
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.leave_pool)
        monkeypatch.setattr(CudaGraphPool, "_warm_up", lambda self, run: None)

    def set_stream(self, stream: Any) -> None:
        self.current = stream

    def leave_pool(self, index: int, pool: object) -> None:
        self.pools_left.append((index, pool))
        raise RuntimeError("not currently recording to this pool")

    def __enter__(self) -> None:
        self.current = self.capturing

    def __exit__(self, kind: object, *rest: object) -> None:
        if kind is not None:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        self.current = self.main


def raising(error: Exception) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


def test_failed_capture_leaves_its_stream_and_its_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, graphs = FakeTorchCuda(monkeypatch), CudaGraphPool(torch.device("cuda"))
    run = raising(RuntimeError("operation not permitted when stream is capturing"))
    assert graphs.capture(run) is run
    assert cuda.current is cuda.main and cuda.pools_left == [(0, (0, 1))]


def test_capture_raises_its_first_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, graphs = FakeTorchCuda(monkeypatch), CudaGraphPool(torch.device("cuda"))
    with pytest.raises(torch.OutOfMemoryError, match="2 GiB"):
        graphs.capture(raising(torch.OutOfMemoryError("CUDA out of memory: 2 GiB")))
    assert cuda.current is cuda.main


def test_eager_captures_nothing() -> None:
    graphs = Failing(torch.device("cuda"), eager=True)
    assert graphs.capture(do_nothing) is do_nothing and graphs.tries == 0
