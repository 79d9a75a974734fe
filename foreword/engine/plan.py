"""What one step is to compute."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.core.request import RequestState

__all__ = ["Plan", "Work"]


@dataclass(frozen=True, slots=True)
class Work:
    """Rows of one request: `num_tokens` known tokens from `start` on, then `num_draft` drafted ones.

    samples  the last known token is among them, so that new tokens come out
    """

    state: RequestState
    start: int
    num_tokens: int
    samples: bool
    num_draft: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """One step. `preempted` lost their blocks to others and wait again.

    pooled  work on prompts that become vectors; it has a pass of its own
    """

    work: tuple[Work, ...]
    preempted: tuple[str, ...] = ()
    pooled: tuple[Work, ...] = ()
