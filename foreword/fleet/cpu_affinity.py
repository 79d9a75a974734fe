"""Cores and GPUs of one machine, shared out among the engines of several models. Imports no torch.

Each engine starts with threads for all cores that it may use. While several work at a time, each core
counts for one of them: idle models hold no cores. Thread counts do not change results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from foreword.config.models_file import ModelsConfig
from foreword.config.options import Config
from foreword.config.units import parse_cpus
from foreword.engine_client.base import EngineClient
from foreword.planning.replica_resources import Machine


@dataclass(frozen=True, slots=True)
class ThreadDemand:
    """An engine that works now."""

    max_threads: int  # those of its start
    cpus: tuple[int, ...]  # CPUs that it may run on


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


class ThreadSharing:
    """Tells the engines that work how many threads each may use now."""

    def __init__(self, machine: Machine) -> None:
        self._cpus = machine.cpus
        self._threads: dict[EngineClient, int] = {}  # last set, by working engine

    def update(self, working: Mapping[str, tuple[EngineClient, Config]]) -> None:
        """Call it when a model begins or ends to work.

        working  engines with open answers and their options, by model; those of other machines use no core
        """
        working = {name: each for name, each in working.items() if each[1].replicas}
        if [client for client, _ in working.values()] == list(self._threads):
            return
        threads = share_threads({name: self._demand(*each) for name, each in working.items()})
        told, self._threads = self._threads, {}
        for name, (client, config) in working.items():
            self._threads[client] = threads[name]
            if told.get(client) != threads[name]:
                client.set_threads(max(threads[name] // config.replicas, 1))

    def _demand(self, client: EngineClient, config: Config) -> ThreadDemand:
        assert client.info is not None, "a model that works has a started engine"
        cpus = self._cpus if config.cpus is None else parse_cpus(config.cpus)
        return ThreadDemand(client.info.resolved.threads * config.replicas, cpus)


def assign_gpus(models: ModelsConfig, machine: Machine) -> ModelsConfig:
    """A GPU for each model that names none, where there are several: the one with the fewest models."""
    if len(machine.gpus) < 2:
        return models
    taken = dict.fromkeys(machine.gpus, 0)
    for entry in models.entries:
        for gpu in (entry.config.gpus or "").split(","):
            if gpu in taken:
                taken[gpu] += 1
    entries = []
    for entry in models.entries:
        if entry.config.gpus is None and entry.config.device != "cpu" and entry.config.replicas:
            gpu = min(taken, key=taken.__getitem__)
            taken[gpu] += 1
            entry = replace(entry, config=replace(entry.config, gpus=gpu))
        entries.append(entry)
    return replace(models, entries=tuple(entries))
