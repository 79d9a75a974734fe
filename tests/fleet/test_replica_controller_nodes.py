"""Where a server is placed, and how many there are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.fleet.replica_controller import Autoscaler, ModelLoad, Needs, NodeFacts, choose_node, why_not

GIB = 1 << 30
NEEDS = Needs(4 * GIB, 2)
NODE = NodeFacts("a", "10.0.0.1", 8 * GIB, 4.0, 0.0, True, "build")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"free_bytes": 3 * GIB}, "3.00 GiB of memory are free, it needs 4.00 GiB"),
        ({"free_cores": 1.0}, "1 cores are free, it needs 2"),
        ({"build": "other"}, "another build of Foreword"),
        ({"build": ""}, "no Foreword is installed"),
    ],
)
def test_reason_against_a_machine(changes: dict[str, object], reason: str) -> None:
    assert why_not(replace(NODE, **changes), NEEDS, "build") == reason  # type: ignore[arg-type]
    assert (choose_node([replace(NODE, **changes)], NEEDS, "build") is None) == bool(reason)  # type: ignore[arg-type]


def test_gpu_server_needs_a_gpu_and_no_host_memory() -> None:
    needs = Needs(40 * GIB, 1, gpus=1)
    assert why_not(NODE, needs, "build") == "0 GPUs are free, it needs 1"
    assert why_not(replace(NODE, free_gpus=1.0), needs, "build") == ""


def test_machines_without_a_server_come_first_then_those_with_files_then_the_free_ones() -> None:
    busy = replace(NODE, id="busy", num_servers=1, free_bytes=100 * GIB)
    bare = replace(NODE, id="bare", has_files=False, free_bytes=50 * GIB)
    large = replace(NODE, id="large", free_bytes=10 * GIB)
    order = []
    nodes = [busy, bare, NODE, large]
    while (node := choose_node(nodes, NEEDS, "build")) is not None:
        order.append(node.id)
        nodes.remove(node)
    assert order == ["large", "a", "bare", "busy"]


def load(wait_s: float = 0.0, num_requests: int = 0) -> ModelLoad:
    return ModelLoad(wait_s, num_requests, max_num_seqs=8)


def test_waiting_requests_add_one_server_at_a_time_up_to_the_maximum() -> None:
    scaler = Autoscaler(1, 3, up_wait_s=5.0, down_after_s=60.0)
    assert scaler.update(load(4.9), 1, 0.0) == 1
    assert scaler.update(load(5.0), 1, 1.0) == 2
    assert scaler.update(load(9.0), 1, 2.0) == 2  # the second one is starting
    assert scaler.update(load(9.0), 2, 3.0) == 3
    assert scaler.update(load(99.0), 3, 4.0) == 3


def test_spare_servers_are_removed_after_a_while_down_to_the_minimum() -> None:
    scaler = Autoscaler(1, 3, up_wait_s=5.0, down_after_s=60.0)
    scaler.target = 3
    assert scaler.update(load(num_requests=8), 3, 0.0) == 3  # two servers run 16
    assert scaler.update(load(num_requests=9), 3, 30.0) == 3  # not spare: it begins again
    assert scaler.update(load(num_requests=8), 3, 31.0) == 3
    assert scaler.update(load(num_requests=8), 3, 90.0) == 3
    assert scaler.update(load(num_requests=4), 3, 91.0) == 2
    assert scaler.update(load(), 2, 92.0) == 2
    assert scaler.update(load(), 2, 152.0) == 1
    assert scaler.update(load(), 1, 1000.0) == 1


LOADS = st.tuples(
    st.builds(load, st.floats(0, 100), st.integers(0, 40)), st.integers(0, 6), st.floats(0, 100)
)


@given(st.integers(1, 3), st.integers(0, 3), st.lists(LOADS, max_size=50))
def test_target_stays_in_its_bounds(
    minimum: int, more: int, history: list[tuple[ModelLoad, int, float]]
) -> None:
    scaler, now_s, before = Autoscaler(minimum, minimum + more, 5.0, 60.0), 0.0, minimum
    for each, num_ready, passed_s in history:
        now_s += passed_s
        target = scaler.update(each, num_ready, now_s)
        assert minimum <= target <= minimum + more
        assert abs(target - before) <= 1
        before = target
