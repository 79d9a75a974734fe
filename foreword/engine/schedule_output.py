"""The output of the scheduler for one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from foreword.core.request import RequestState


class ScheduledRequest(NamedTuple):
    """Rows of one request: `num_tokens` known tokens from index `start`, then `num_draft_tokens`."""

    state: RequestState
    start: int
    num_tokens: int
    is_sampled: bool  # the rows include the last known token, so the step yields new tokens
    num_draft_tokens: int = 0

    @property
    def is_last_chunk(self) -> bool:
        """The rows include the last known token."""
        return self.start + self.num_tokens == len(self.state.tokens)


@dataclass(frozen=True, slots=True)
class ScheduleOutput:
    requests: tuple[ScheduledRequest, ...]
    preempted_ids: tuple[str, ...] = ()
    pooling_requests: tuple[ScheduledRequest, ...] = ()  # embeddings, computed by a pass of their own
