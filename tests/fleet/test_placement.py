"""Cores and GPUs, shared out among engines."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.config.models_file import read_models
from foreword.config.options import Config
from foreword.fleet import placement
from foreword.fleet.placement import (
    Machine,
    ThreadDemand,
    assign_gpus,
    read_machine,
    share_threads,
    split_cpus,
)

# Two nodes of four cores with two hardware threads each, numbered as on x86 servers.
TWO_NODES = Machine(
    (
        tuple((core, core + 8) for core in range(4)),
        tuple((core, core + 8) for core in range(4, 8)),
    )
)


@pytest.mark.parametrize(
    ("count", "shares"),
    [
        (1, [tuple(range(16))]),
        (2, [(0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]),
        (3, [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15)]),
        (4, [(0, 1, 8, 9), (2, 3, 10, 11), (4, 5, 12, 13), (6, 7, 14, 15)]),
    ],
)
def test_replicas_get_nodes_or_parts_of_one(count: int, shares: list[tuple[int, ...]]) -> None:
    assert split_cpus(TWO_NODES, count) == shares


@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.integers(1, 12))
def test_replicas_have_cores_of_their_own_while_there_are_enough(sizes: list[int], count: int) -> None:
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    nodes = tuple(
        tuple((2 * core, 2 * core + 1) for core in range(start, start + size))
        for start, size in zip(starts, sizes, strict=True)
    )
    shares = split_cpus(Machine(nodes), count)
    assert len(shares) == count and all(shares)
    assert {cpu for share in shares for cpu in share} == set(Machine(nodes).cpus)
    if count <= len(sizes) or min(sizes) * len(sizes) >= count + len(sizes):
        assert sum(map(len, shares)) == len(Machine(nodes).cpus)
    if count >= len(sizes):
        assert all(
            any({*share} <= {cpu for core in node for cpu in core} for node in nodes) for share in shares
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


def test_this_machine() -> None:
    assert set(read_machine().cpus) == os.sched_getaffinity(0)


def test_a_machine_of_two_nodes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7"), (2, "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus + "\n")
    for cpu in range(8):
        topology = tmp_path / f"cpu{cpu}" / "topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    for gpu in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / gpu).mkdir(parents=True)
    monkeypatch.setattr(placement, "NODES", tmp_path)
    monkeypatch.setattr(placement, "CPUS", tmp_path)
    monkeypatch.setattr(placement, "NVIDIA_GPUS", tmp_path / "gpus")
    monkeypatch.setattr(placement.os, "sched_getaffinity", lambda pid: {0, 1, 2, 4, 5, 6, 7, 9})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert read_machine() == Machine((((0, 4), (1, 5)), ((2, 6), (7,)), ((9,),)), num_gpus=2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    assert read_machine().num_gpus == 1


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
