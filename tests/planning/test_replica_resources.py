"""CPUs by NUMA node and core."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.config.options import Config
from foreword.config.units import parse_cpus
from foreword.planning import replica_resources
from foreword.planning.replica_resources import Machine, read_machine, replica_configs, split_cpus

REMOTE = {"replicas": 0, "replica_urls": "http://10.0.0.7:8000", "engine_key": "a key of the engines"}
ONE_NODE = Machine((((0,), (1,), (2,), (3,), (4,)),))
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


@pytest.mark.parametrize(
    ("options", "machine", "expected"),
    [
        (REMOTE, TWO_NODES, []),
        ({"replicas": 1}, TWO_NODES, [None]),
        ({"replicas": 2}, ONE_NODE, [None, None]),  # the kernel places the threads
        ({"replicas": 2}, TWO_NODES, split_cpus(TWO_NODES, 2)),
        ({"replicas": 2, "cpus": "0-3"}, ONE_NODE, [(0, 1), (2, 3)]),
    ],
)
def test_replicas_get_cpus(
    options: dict[str, Any], machine: Machine, expected: list[tuple[int, ...] | None]
) -> None:
    configs = replica_configs(Config(**options), machine)
    assert [None if each.cpus is None else parse_cpus(each.cpus) for each in configs] == expected


def test_replicas_get_gpus_and_share_their_memory() -> None:
    machine = Machine(ONE_NODE.nodes, ("0", "1"))
    configs = replica_configs(Config(replicas=3, gpu_memory_utilization=0.9, trace="t"), machine)
    assert [each.gpus for each in configs] == ["0", "1", "0"]
    assert [each.gpu_memory_utilization for each in configs] == [0.45] * 3
    assert [each.trace for each in configs] == ["t.replica0", "t.replica1", "t.replica2"]
    assert replica_configs(Config(replicas=2, gpus="1"), machine)[1].gpus == "1"
    assert [each.gpus for each in replica_configs(Config(replicas=2, device="cpu"), machine)] == [None, None]


def test_this_machine() -> None:
    assert set(read_machine().cpus) == os.sched_getaffinity(0)


def test_a_machine_of_two_nodes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node, cpus in ((0, "0-1,4-5"), (1, "2-3,6-7"), (2, "")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cpus + "\n")
    for cpu in range(8):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    for gpu in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / "gpus" / gpu).mkdir(parents=True)
    monkeypatch.setattr(replica_resources, "NODES", tmp_path)
    monkeypatch.setattr(replica_resources, "CPUS", tmp_path)
    monkeypatch.setattr(replica_resources, "NVIDIA_GPUS", tmp_path / "gpus")
    monkeypatch.setattr(replica_resources.os, "sched_getaffinity", lambda pid: {0, 1, 2, 4, 5, 6, 7, 9})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert read_machine() == Machine((((0, 4), (1, 5)), ((2, 6), (7,)), ((9,),)), gpus=("0", "1"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-5a")
    assert read_machine().gpus == ("3", "GPU-5a")
