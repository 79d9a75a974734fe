"""How many servers a model has on the machines of a cluster, and on which machines. No I/O and no clocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from foreword.planning.memory import format_bytes

MIN_SPARE_SHARE: Final = 0.5  # free share of the remaining servers before one is removed


@dataclass(frozen=True, slots=True)
class Needs:
    """Resources that one server of a model takes."""

    num_bytes: int  # memory, of the GPU if it runs there
    cores: int
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """A machine of the cluster, before a server is placed on it."""

    id: str
    address: str  # network address
    free_bytes: int  # free memory
    free_cores: float
    free_gpus: float
    has_files: bool  # whether it has the model's files
    build: str  # digest of its installation of Foreword, "" without one
    num_servers: int = 0  # servers of this model


def choose_node(nodes: Sequence[NodeFacts], needs: Needs, build: str) -> NodeFacts | None:
    """The machine for one more server; None if it fits on none.

    Machines with fewer servers of the model come first, then those that have its files, then those with more
    free memory.
    """
    fitting = [node for node in nodes if not why_not(node, needs, build)]
    return max(
        fitting, key=lambda node: (-node.num_servers, node.has_files, node.free_bytes, node.id), default=None
    )


def why_not(node: NodeFacts, needs: Needs, build: str) -> str:
    """Why a server does not run on this machine; "" if it does."""
    if node.build != build:
        return "another build of Foreword" if node.build else "no Foreword is installed"
    if not needs.gpus and node.free_bytes < needs.num_bytes:
        return f"{format_bytes(node.free_bytes)} of memory are free, it needs {format_bytes(needs.num_bytes)}"
    if node.free_cores < needs.cores:
        return f"{node.free_cores:g} cores are free, it needs {needs.cores}"
    if node.free_gpus < needs.gpus:
        return f"{node.free_gpus:g} GPUs are free, it needs {needs.gpus}"
    return ""


@dataclass(frozen=True, slots=True)
class ModelLoad:
    """The requests of a model at one moment."""

    longest_wait_s: float  # age of the oldest request without a token
    num_requests: int  # running and waiting
    max_num_seqs: int  # requests that one server runs at a time


class Autoscaler:
    """The number of servers of one model, by the time that its requests wait.

    One more server as soon as a request has waited `up_wait_s`, unless one is starting already. One less
    once the others could have run all requests, with as much to spare, for `down_after_s`.
    """

    def __init__(self, minimum: int, maximum: int, up_wait_s: float, down_after_s: float) -> None:
        assert 1 <= minimum <= maximum
        self.target = minimum
        self._minimum, self._maximum = minimum, maximum
        self._up_wait_s, self._down_after_s = up_wait_s, down_after_s
        self._spare_since_s: float | None = None

    def update(self, load: ModelLoad, num_ready: int, now_s: float) -> int:
        """The number wanted now, where `num_ready` servers answer."""
        if load.longest_wait_s >= self._up_wait_s:
            self._spare_since_s = None
            if num_ready >= self.target:
                self.target = min(self.target + 1, self._maximum)
            return self.target
        others = (num_ready - 1) * load.max_num_seqs * MIN_SPARE_SHARE
        if num_ready < self.target or self.target <= self._minimum or load.num_requests > others:
            self._spare_since_s = None
        elif self._spare_since_s is None:
            self._spare_since_s = now_s
        elif now_s - self._spare_since_s >= self._down_after_s:
            self.target -= 1
            self._spare_since_s = None
        return self.target
