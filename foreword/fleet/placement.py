"""Cores, NUMA nodes and GPUs of one machine, shared out among engines. Imports no torch.

Each engine starts with threads for all cores that it may use. While several work at a time, each core
counts for one of them (`share_threads`): idle models cost nobody a core, and bits do not depend on threads.
Replicas of a model, which work at the same time, have cores of their own (`split_cpus`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from foreword.config.models_file import ModelsConfig
from foreword.config.options import parse_cpus
from foreword.errors import ConfigError

__all__ = ["Machine", "ThreadDemand", "assign_gpus", "read_machine", "share_threads", "split_cpus"]

NODES = Path("/sys/devices/system/node")
CPUS = Path("/sys/devices/system/cpu")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")  # a directory for each


@dataclass(frozen=True, slots=True)
class Machine:
    """What this process may use of the machine."""

    nodes: tuple[tuple[tuple[int, ...], ...], ...]  # NUMA nodes of cores of CPUs (hardware threads)
    num_gpus: int = 0

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for node in self.nodes for core in node for cpu in core))


@dataclass(frozen=True, slots=True)
class ThreadDemand:
    """An engine that works now."""

    max_threads: int  # those of its start
    cpus: tuple[int, ...]  # that it may run on


def read_machine() -> Machine:
    """The CPUs of this process, by NUMA node and core."""
    allowed = os.sched_getaffinity(0)
    nodes = [_read_cpus(file) & allowed for file in sorted(NODES.glob("node[0-9]*/cpulist"))]
    nodes.append(allowed - {cpu for node in nodes for cpu in node})
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    num_gpus = (
        len(list(NVIDIA_GPUS.glob("*"))) if visible is None else len(list(filter(None, visible.split(","))))
    )
    return Machine(tuple(tuple(_cores_of(node)) for node in nodes if node), num_gpus)


def _cores_of(cpus: set[int]) -> Iterable[tuple[int, ...]]:
    """The CPUs of each core."""
    left = sorted(cpus)
    while left:
        siblings = _read_cpus(CPUS / f"cpu{left[0]}" / "topology" / "thread_siblings_list") | {left[0]}
        core = tuple(cpu for cpu in left if cpu in siblings)
        left = [cpu for cpu in left if cpu not in siblings]
        yield core


def _read_cpus(file: Path) -> set[int]:
    try:
        return set(parse_cpus(file.read_text().strip()))
    except (OSError, ConfigError):  # a system without the file, or a node without CPUs
        return set()


def split_cpus(machine: Machine, count: int) -> list[tuple[int, ...]]:
    """CPUs for each of `count` replicas: whole NUMA nodes, else a part of one, so that memory is near.

    The hardware threads of a core stay together. With more replicas than cores, some share one.
    """
    assert count > 0
    nodes = sorted(machine.nodes, key=len, reverse=True)
    if count <= len(nodes):
        parts = [
            sorted(cpu for node in nodes[index::count] for core in node for cpu in core)
            for index in range(count)
        ]
        return [tuple(part) for part in parts]
    shares: list[tuple[int, ...]] = []
    for index, node in enumerate(nodes):
        num = count // len(nodes) + (index < count % len(nodes))
        for part in range(num):
            cores = node[part * len(node) // num : (part + 1) * len(node) // num] or (node[part % len(node)],)
            shares.append(tuple(sorted(cpu for core in cores for cpu in core)))
    return shares


def share_threads(demands: Mapping[str, ThreadDemand]) -> dict[str, int]:
    """Threads of each working engine, at least one: each CPU counts for one of them, as evenly as it goes."""
    threads = dict.fromkeys(demands, 0)
    cpus = sorted({cpu for demand in demands.values() for cpu in demand.cpus})
    users = {cpu: [name for name, demand in demands.items() if cpu in demand.cpus] for cpu in cpus}
    for cpu in sorted(cpus, key=lambda cpu: len(users[cpu])):  # what only one can use is its own
        open_to = [name for name in users[cpu] if threads[name] < demands[name].max_threads]
        if open_to:
            threads[min(open_to, key=threads.__getitem__)] += 1
    return {name: max(count, 1) for name, count in threads.items()}


def assign_gpus(models: ModelsConfig, machine: Machine) -> ModelsConfig:
    """A GPU for each model that names none, where there are several: the one with the fewest models."""
    if machine.num_gpus < 2:
        return models
    taken = {str(gpu): 0 for gpu in range(machine.num_gpus)}
    for entry in models.entries:
        for gpu in (entry.config.gpus or "").split(","):
            if gpu in taken:
                taken[gpu] += 1
    entries = []
    for entry in models.entries:
        if entry.config.gpus is None and entry.config.device != "cpu":
            gpu = min(taken, key=taken.__getitem__)
            taken[gpu] += 1
            entry = replace(entry, config=replace(entry.config, gpus=gpu))
        entries.append(entry)
    return replace(models, entries=tuple(entries))
