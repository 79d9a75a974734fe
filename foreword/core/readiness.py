"""Readiness of an engine, as its client sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# (stage, done, total): bytes of a "download" or "weights"; "kernels" compiled for a GPU; "graphs" captured
OnLoadProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether the engine can run a step now."""

    # "ok"; "loading" (first start); "restarting" (a replacement loads after a crash or hang);
    # "unresponsive" (no heartbeat); "dead" (no further restart)
    status: str
    detail: str = ""  # reason for the operator; empty if ok
    progress: float | None = None  # 0..1 of a stage, while loading or restarting
    restarts: int = 0

    @property
    def is_ready(self) -> bool:
        return self.status == "ok"


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica, as the API shows it."""

    id: str
    address: str | None
    status: str  # as in Readiness; "draining"; "different": it gets no requests, `detail` says why
    detail: str
    fingerprint: str | None
    running: int
    waiting: int
