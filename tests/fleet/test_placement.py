"""Cores and GPUs, shared out among engines."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.config.models_file import read_models
from foreword.config.options import Config
from foreword.fleet.placement import (
    Machine,
    ThreadDemand,
    assign_gpus,
    share_threads,
)


def everywhere(max_threads: int, num_cpus: int = 8) -> ThreadDemand:
    return ThreadDemand(max_threads, tuple(range(num_cpus)))


@pytest.mark.parametrize(
    ("demands", "threads"),
    [
        ([everywhere(8)], [8]),
        ([everywhere(8), everywhere(8)], [4, 4]),
        ([everywhere(8), everywhere(8), everywhere(8)], [3, 3, 2]),
        ([everywhere(8), everywhere(1), everywhere(2)], [5, 1, 2]),
        ([everywhere(8), ThreadDemand(4, (0, 1, 2, 3))], [4, 4]),
        ([ThreadDemand(4, (0, 1, 2, 3)), ThreadDemand(4, (4, 5, 6, 7))], [4, 4]),
        ([everywhere(2, 2)] * 3, [1, 1, 1]),
        ([], []),
    ],
)
def test_engines_that_work_share_the_cores(demands: list[ThreadDemand], threads: list[int]) -> None:
    named = {str(index): demand for index, demand in enumerate(demands)}
    assert list(share_threads(named).values()) == threads


@given(st.lists(st.builds(everywhere, st.integers(1, 9)), max_size=8))
def test_engines_have_no_more_threads_than_there_are_cores(demands: list[ThreadDemand]) -> None:
    named = {str(index): demand for index, demand in enumerate(demands)}
    threads = share_threads(named)
    assert sum(threads.values()) <= 8
    assert all(1 <= threads[name] <= demand.max_threads for name, demand in named.items())
    unserved = [name for name, demand in named.items() if threads[name] < demand.max_threads]
    assert not unserved or sum(threads.values()) == 8


def test_models_go_to_the_gpu_with_the_fewest() -> None:
    models = read_models(Config(models="a,b,c,d"))
    assigned = assign_gpus(models, Machine((), num_gpus=3))
    assert [entry.config.gpus for entry in assigned.entries] == ["0", "1", "2", "0"]
    assert assign_gpus(models, Machine((), num_gpus=1)) == models
    on_cpu = read_models(Config(models="a,b", device="cpu"))
    assert assign_gpus(on_cpu, Machine((), num_gpus=3)) == on_cpu


def test_models_that_name_a_gpu_keep_it(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models:\n  a:\n  b: {gpus: 0}\n  c: {gpus: '0,1'}\n  d:\n  e: {device: cpu}\n")
    assigned = assign_gpus(read_models(Config(models=str(file))), Machine((), num_gpus=2))
    assert [entry.config.gpus for entry in assigned.entries] == ["1", "0", "0,1", "0", None]
