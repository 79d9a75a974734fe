"""Capture sizes, and the fallback without capture."""

import itertools
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreword.executor.cuda_graphs import CudaGraphPool, capture_sizes, pick_size


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
    def run() -> None: ...

    graphs = CudaGraphPool(torch.device("cpu"))
    assert graphs.capture(run) is run and graphs.num_graphs == graphs.num_bytes == 0


class Failing(CudaGraphPool):
    tries = 0

    def _capture_graph(self, run: object) -> None:  # type: ignore[override]
        self.tries += 1
        raise RuntimeError("operation not permitted when stream is capturing")


def test_failed_capture_falls_back_once(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None: ...

    graphs = Failing(torch.device("cuda"))
    with caplog.at_level(logging.WARNING):
        assert graphs.capture(run) is run
        assert graphs.capture(run) is run
    assert graphs.tries == 1 and len(caplog.records) == 1 and "not permitted" in caplog.text


def test_eager_captures_nothing() -> None:
    def run() -> None: ...

    graphs = Failing(torch.device("cuda"), eager=True)
    assert graphs.capture(run) is run and graphs.tries == 0
