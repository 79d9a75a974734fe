"""CPUs by NUMA node and core, and GPUs, for engines that work side by side. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from foreword.config.options import Config
from foreword.config.units import format_cpus, parse_cpus
from foreword.errors import ConfigError

NODES = Path("/sys/devices/system/node")
CPUS = Path("/sys/devices/system/cpu")
NVIDIA_GPUS = Path("/proc/driver/nvidia/gpus")  # a directory for each


@dataclass(frozen=True, slots=True)
class Machine:
    """CPUs and GPUs that this process may use."""

    nodes: tuple[tuple[tuple[int, ...], ...], ...]  # NUMA nodes of cores of CPUs (hardware threads)
    gpus: tuple[str, ...] = ()  # as CUDA_VISIBLE_DEVICES names them

    @property
    def cpus(self) -> tuple[int, ...]:
        return tuple(sorted(cpu for node in self.nodes for core in node for cpu in core))

    def restrict(self, cpus: Collection[int]) -> Machine:
        """Without CPUs that are not in `cpus`."""
        nodes = []
        for node in self.nodes:
            cores = (tuple(cpu for cpu in core if cpu in cpus) for core in node)
            nodes.append(tuple(core for core in cores if core))
        return Machine(tuple(node for node in nodes if node), self.gpus)


def read_machine() -> Machine:
    """The CPUs of this process, by NUMA node and core."""
    allowed = os.sched_getaffinity(0)
    nodes = [_read_cpus(file) & allowed for file in sorted(NODES.glob("node[0-9]*/cpulist"))]
    nodes.append(allowed - {cpu for node in nodes for cpu in node})
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        gpus = [str(number) for number, _ in enumerate(NVIDIA_GPUS.glob("*"))]
    else:
        gpus = [name.strip() for name in visible.split(",") if name.strip()]
    return Machine(tuple(tuple(_cores_of(node)) for node in nodes if node), tuple(gpus))


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


def replica_configs(config: Config, machine: Machine) -> list[Config]:
    """The options of each replica: a GPU of its own, or CPUs of its own where there are NUMA nodes or `cpus`.

    More replicas than GPUs share the memory of theirs. On one node, the kernel places the threads.
    """
    count = config.replicas
    own = [config] * count
    if config.trace is not None:
        own = [replace(each, trace=f"{config.trace}.replica{index}") for index, each in enumerate(own)]
    if count <= 1:
        return own
    gpus = machine.gpus if config.gpus is None else tuple(config.gpus.split(","))
    if gpus and config.device != "cpu":
        share = config.gpu_memory_utilization / -(-count // len(gpus))
        return [
            replace(each, gpus=gpus[index % len(gpus)], gpu_memory_utilization=share)
            for index, each in enumerate(own)
        ]
    if config.cpus is not None:
        machine = machine.restrict(parse_cpus(config.cpus))
    elif len(machine.nodes) == 1:
        return own
    parts = split_cpus(machine, count)
    return [replace(each, cpus=format_cpus(part)) for each, part in zip(own, parts, strict=True)]
