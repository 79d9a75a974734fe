"""A completed step, as it is reported to the policy of draft lengths."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from foreword.core.request import RequestState


@dataclass(frozen=True, slots=True)
class PrefillLoad:
    """Prefill that shares the next step: its rows, and the context tokens that they read."""

    num_rows: int = 0
    num_context_tokens: int = 0


class RequestStep(NamedTuple):
    """One request in one step."""

    state: RequestState
    num_tokens: int  # known tokens that were computed
    num_draft_tokens: int  # verified
    is_sampled: bool  # whether a token was sampled
    num_emitted: int
    context_len: int  # tokens whose KV its last row read


@dataclass(frozen=True, slots=True)
class StepRecord:
    """The requests of a step, and its duration."""

    requests: tuple[RequestStep, ...]
    seconds_by_stage: Mapping[str, float]  # schedule, assemble, forward, sample, draft, commit
