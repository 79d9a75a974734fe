"""Cores and GPUs of one machine, shared out among the engines of several models. Imports no torch.

Each engine starts with threads for all cores that it may use. While several work at a time, each core
counts for one of them: idle models cost nobody a core, and bits do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from foreword.config.models_file import ModelsConfig
from foreword.config.topology import Machine

__all__ = ["ThreadDemand", "assign_gpus", "share_threads"]


@dataclass(frozen=True, slots=True)
class ThreadDemand:
    """An engine that works now."""

    max_threads: int  # those of its start
    cpus: tuple[int, ...]  # that it may run on


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
