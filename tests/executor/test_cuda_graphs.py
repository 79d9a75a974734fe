"""Sizes of graphs, and what happens where nothing can be captured."""

import itertools
import logging

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foreword.executor.cuda_graphs import CudaGraphPool, capture_sizes, pick_size


@given(most=st.integers(1, 2000))
def test_sizes(most: int) -> None:
    sizes = capture_sizes(most)
    assert sizes[0] == 1 and sizes[-1] == most
    assert all(one < other <= 2 * one for one, other in itertools.pairwise(sizes))
    assert all(other <= 1.25 * one for one, other in itertools.pairwise(sizes) if one >= 32)
    assert len(sizes) <= 23 + max(most - 512, 0) / 64 + 1


@given(most=st.integers(1, 300), data=st.data())
def test_the_smallest_that_has_room(most: int, data: st.DataObject) -> None:
    sizes, count = capture_sizes(most), data.draw(st.integers(1, most))
    found = pick_size(count, sizes)
    assert found >= count and not any(count <= size < found for size in sizes)


def test_on_a_cpu_nothing_is_captured() -> None:
    def run() -> None: ...

    graphs = CudaGraphPool(torch.device("cpu"))
    assert graphs.capture(run) is run and graphs.num_graphs == graphs.num_bytes == 0


class Failing(CudaGraphPool):
    tries = 0

    def _capture_graph(self, run: object) -> None:  # type: ignore[override]
        self.tries += 1
        raise RuntimeError("operation not permitted when stream is capturing")


def test_what_cannot_be_captured_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def run() -> None: ...

    graphs = Failing(torch.device("cuda"))
    with caplog.at_level(logging.WARNING):
        assert graphs.capture(run) is run
        assert graphs.capture(run) is run
    assert graphs.tries == 1 and len(caplog.records) == 1 and "not permitted" in caplog.text


def test_nobody_wants_graphs() -> None:
    def run() -> None: ...

    graphs = Failing(torch.device("cuda"), eager=True)
    assert graphs.capture(run) is run and graphs.tries == 0
