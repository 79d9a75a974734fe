"""Whether an engine could run a step now, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Readiness"]


@dataclass(frozen=True, slots=True)
class Readiness:
    """The state of an engine as its client sees it.

    status    "ok": a step could run now; "loading": the first start; "restarting": it died or hung, and its replacement is on
              the way; "unresponsive": it gives no sign of life; "dead": it will not come back
    detail    in words, what an operator should know; empty where all is well
    progress  0..1, how much of the weights is loaded, while it is loading or restarting
    restarts  how often it was replaced so far
    """

    status: str
    detail: str = ""
    progress: float | None = None
    restarts: int = 0

    @property
    def is_ready(self) -> bool:
        return self.status == "ok"
