"""What one step is to compute, and what it tells the caller."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.core.draft import Outcome
from foreword.core.events import DraftUse, Tokens
from foreword.core.request import RequestState

__all__ = ["Plan", "Work", "tokens_event"]


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


def tokens_event(work: Work, outcome: Outcome, index: int) -> Tokens:
    """New tokens of a request; `index` is the place of the first in its answer."""
    state = work.state
    first = index == len(state.request.delivered_ids)
    asked = state.params.prompt_logprobs is not None and first
    return Tokens(
        request_id=state.id,
        index=index,
        token_ids=outcome.token_ids,
        logprobs=outcome.logprobs,
        prompt_logprobs=(None, *state.prompt_logprobs) if asked else (),
        draft=DraftUse(state.drafter, work.num_draft, outcome.accepted) if work.num_draft else None,
        finish_reason=outcome.finish_reason,
        stop_id=outcome.stop_id,
        num_cached=state.num_cached,
        scheduled_s=state.scheduled_s or 0.0,
        hashes=outcome.hashes,
        repeating=outcome.repeating,
    )
