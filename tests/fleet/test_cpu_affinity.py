"""Cores and GPUs, shared out among engines."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foreword.config.models_file import read_models
from foreword.config.options import Config
from foreword.fleet.cpu_affinity import ThreadDemand, ThreadSharing, assign_gpus, share_threads
from foreword.planning.replica_resources import Machine


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


class Client:
    """An engine that remembers what it is told."""

    def __init__(self, threads: int) -> None:
        self.info = SimpleNamespace(resolved=SimpleNamespace(threads=threads))
        self.told: list[int] = []

    def set_threads(self, num_threads: int) -> None:
        self.told.append(num_threads)


def test_engines_are_told_when_others_begin_or_end_to_work() -> None:
    a, b, c = Client(8), Client(8), Client(1)
    sharing = ThreadSharing(Machine((tuple((cpu,) for cpu in range(8)),)))

    def work(**clients: Client) -> list[list[int]]:
        sharing.update({name: (client, Config()) for name, client in clients.items()})  # type: ignore[misc]
        told = [client.told for client in (a, b, c)]
        for client in (a, b, c):
            client.told = []
        return told

    assert work(a=a) == [[8], [], []]
    assert work(a=a) == [[], [], []]
    assert work(a=a, b=b) == [[4], [4], []]
    assert work(a=a, b=b, c=c) == [[], [3], [1]]
    assert work(b=b) == [[], [8], []]
    assert work() == [[], [], []]
    assert work(b=b) == [[], [8], []]
    sharing.update({"a": (a, Config(cpus="0-1")), "b": (b, Config())})  # type: ignore[dict-item]
    assert (a.told, b.told) == ([2], [6])


def test_engines_of_other_machines_use_no_core() -> None:
    here, elsewhere = Client(8), Client(64)
    sharing = ThreadSharing(Machine((tuple((cpu,) for cpu in range(8)),)))
    router = Config(replicas=0, replica_urls="http://a", engine_key="a key of the engines")
    sharing.update({"a": (here, Config()), "b": (elsewhere, router)})  # type: ignore[dict-item]
    assert (here.told, elsewhere.told) == ([8], [])


def test_models_go_to_the_gpu_with_the_fewest() -> None:
    models = read_models(Config(models="a,b,c,d"))
    assigned = assign_gpus(models, Machine((), ("3", "1", "0")))
    assert [entry.config.gpus for entry in assigned.entries] == ["3", "1", "0", "3"]
    assert assign_gpus(models, Machine((), ("0",))) == models
    on_cpu = read_models(Config(models="a,b", device="cpu"))
    assert assign_gpus(on_cpu, Machine((), ("3", "1", "0"))) == on_cpu


def test_models_that_name_a_gpu_keep_it(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models:\n  a:\n  b: {gpus: 0}\n  c: {gpus: '0,1'}\n  d:\n  e: {device: cpu}\n")
    assigned = assign_gpus(read_models(Config(models=str(file))), Machine((), ("0", "1")))
    assert [entry.config.gpus for entry in assigned.entries] == ["1", "0", "0,1", "0", None]
