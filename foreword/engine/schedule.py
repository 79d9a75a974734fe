"""What one step is to compute, and what it tells the caller."""

from __future__ import annotations

from dataclasses import dataclass

from foreword.core.outputs import DraftResult, StepOutput, TokenEvent
from foreword.core.request import RequestState

__all__ = ["ScheduleOutput", "ScheduledRequest", "make_token_event"]


@dataclass(frozen=True, slots=True)
class ScheduledRequest:
    """Rows of one request: `num_tokens` known tokens from `start` on, then `num_draft` drafted ones.

    samples  the last known token is among them, so that new tokens come out
    """

    state: RequestState
    start: int
    num_tokens: int
    is_sampled: bool
    num_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class ScheduleOutput:
    """One step. `preempted` lost their blocks to others and wait again.

    pooled  work on prompts that become vectors; it has a pass of its own
    """

    requests: tuple[ScheduledRequest, ...]
    preempted_ids: tuple[str, ...] = ()
    pooling_requests: tuple[ScheduledRequest, ...] = ()


def make_token_event(request: ScheduledRequest, output: StepOutput, index: int) -> TokenEvent:
    """New tokens of a request; `index` is the place of the first in its answer."""
    state = request.state
    first = index == len(state.request.resume_output_ids)
    asked = state.params.prompt_logprobs is not None and first
    return TokenEvent(
        request_id=state.id,
        index=index,
        token_ids=output.token_ids,
        logprobs=output.logprobs,
        prompt_logprobs=(None, *state.prompt_logprobs) if asked else (),
        draft=DraftResult(state.drafter, request.num_draft_tokens, output.num_accepted)
        if request.num_draft_tokens
        else None,
        finish_reason=output.finish_reason,
        stop_id=output.stop_id,
        num_cached=state.num_cached,
        scheduled_s=state.scheduled_s or 0.0,
        logits_hashes=output.logits_hashes,
        repetition=output.repetition,
    )
