"""What the engine says about its requests. Plain values: they cross a process boundary.

A guess, and what became of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from foreword.core.repetition import Repetition
from foreword.errors import ForewordError

__all__ = [
    "GRAMMAR",
    "Draft",
    "DraftResult",
    "DraftingStats",
    "EmbeddingEvent",
    "ErrorEvent",
    "Event",
    "StepOutput",
    "StepReport",
    "StepStats",
    "TokenEvent",
    "TokenLogprob",
    "drop_prefix",
    "merge",
    "truncate",
]

GRAMMAR = "grammar"  # the drafter that does not guess


@dataclass(frozen=True, slots=True)
class DraftResult:
    """A draft that was verified: `accepted` of `drafted` tokens were emitted, 0 <= accepted <= drafted."""

    drafter: str
    num_drafted: int
    num_accepted: int

    @property
    def is_forced(self) -> bool:
        """A grammar left nothing else to say: no guess, and so no part of any figure of acceptance."""
        return self.drafter == GRAMMAR


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one position, of the raw distribution.

    logprob, rank   of the token that stands there (rank 1 is the likeliest)
    top             (token id, logprob), likeliest first, ties to the lower id; as many as asked for
    asked           (token id, logprob) of `logprob_token_ids`, in their order
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]
    requested: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """Tokens that one step added to one request, and perhaps its end.

    index            output index of the first token (0 for the first of the answer)
    token_ids        may be empty only if finish_reason is set
    logprobs         one per token if asked for, else empty
    prompt_logprobs  with the first event if asked for: None for the first prompt token
    draft            the draft that was verified for them, or None
    finish_reason    "stop", "length" or "repetition" on the last event, else None
    stop_id          the stop token id that ended it (it is in token_ids), or None
    num_cached       prompt tokens found in the prefix cache
    scheduled_s      time.monotonic() when the request first ran
    hashes           64-bit hashes of the raw logits, one per token, in test mode
    repeating        the pattern that the answer was found to repeat with these tokens; told once in an answer
    """

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    draft: DraftResult | None = None
    finish_reason: str | None = None
    stop_id: int | None = None
    num_cached: int = 0
    scheduled_s: float = 0.0
    logits_hashes: tuple[int, ...] = ()
    repetition: Repetition | None = None


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The request ended with an error; nothing follows."""

    request_id: str
    error: ForewordError


@dataclass(frozen=True, slots=True)
class EmbeddingEvent:
    """The prompt as one vector; nothing follows.

    vector       float32 [H] in native byte order: pooled hidden states after the final norm, not normalized
    num_cached   prompt tokens found in the prefix cache
    scheduled_s  time.monotonic() when the request first ran
    """

    request_id: str
    vector: bytes
    num_cached: int = 0
    scheduled_s: float = 0.0


Event = TokenEvent | ErrorEvent | EmbeddingEvent


@dataclass(frozen=True, slots=True)
class DraftingStats:
    """What was decided about drafts, as totals since the engine started. Seconds are of the engine's clock.

    lengths            how often a draft of so many tokens was chosen, by drafter
    none               how often a request that may be drafted for got no draft, by reason
    predicted_seconds  what the steps that verified a draft were thought to cost, drafting included
    realised_seconds   what they cost
    exploring_seconds  spent on drafts and plain steps whose only use was to learn
    """

    draft_length_counts: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    no_draft_counts: Mapping[str, int] = field(default_factory=dict)
    predicted_seconds: float = 0.0
    realised_seconds: float = 0.0
    exploring_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepStats:
    """The engine after a step. Counters are totals since the engine started.

    stage_seconds  seconds of this step by stage: encode, schedule, assemble, forward, sample, draft, commit, embed
    drafter_errors exceptions caught in drafters, by drafter
    faults         errors that were kept to the request they belong to, by stage; "nonfinite" for logits that are no numbers
    images_encoded_total, image_cache_hits_total  pictures that were encoded, and pictures of requests that need not be
    """

    step: int = 0
    requests_running: int = 0
    requests_waiting: int = 0
    longest_running_tokens: int = 0
    oldest_running_seconds: float = 0.0
    kv_cache_usage_ratio: float = 0.0
    prefix_cache_queries_total: int = 0
    prefix_cache_hits_total: int = 0
    preemptions_total: int = 0
    device_memory_bytes: int = 0
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    drafter_errors: Mapping[str, int] = field(default_factory=dict)
    drafting: DraftingStats = DraftingStats()
    faults: Mapping[str, int] = field(default_factory=dict)
    images_encoded_total: int = 0
    image_cache_hits_total: int = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """Everything one step says, handed over at once."""

    events: tuple[Event, ...]
    stats: StepStats


def truncate(event: TokenEvent, num_kept: int, finish_reason: str) -> TokenEvent:
    """The event as if the run had ended after its first `kept` tokens: what counts as delivered.

    Accepted draft tokens beyond the cut were never delivered and are not counted.
    """
    assert 0 <= num_kept <= len(event.token_ids)
    use = event.draft
    if use is not None:
        use = replace(use, num_accepted=min(use.num_accepted, num_kept))
    return replace(
        event,
        token_ids=event.token_ids[:num_kept],
        logprobs=event.logprobs[:num_kept],
        logits_hashes=event.logits_hashes[:num_kept],
        draft=use,
        finish_reason=finish_reason,
        stop_id=None,
        repetition=event.repetition if event.repetition and event.repetition.num_tokens <= num_kept else None,
    )


def drop_prefix(event: TokenEvent, count: int) -> TokenEvent:
    """The event without its first `count` tokens, which were delivered before: what is new of it.

    The draft tokens among them were counted when they were delivered.
    """
    assert 0 <= count <= len(event.token_ids)
    use = event.draft
    if use is not None:
        left = use.num_drafted - count
        use = (
            replace(use, num_drafted=left, num_accepted=max(use.num_accepted - count, 0))
            if left > 0
            else None
        )
    return replace(
        event,
        index=event.index + count,
        token_ids=event.token_ids[count:],
        logprobs=event.logprobs[count:],
        logits_hashes=event.logits_hashes[count:],
        draft=use,
        repetition=event.repetition and event.repetition.shifted(count),
    )


def merge(events: Sequence[TokenEvent]) -> TokenEvent:
    """Events that follow each other as one. Their drafts are told as one draft of the first drafter."""
    last, uses = events[-1], [event.draft for event in events if event.draft is not None]
    return replace(
        events[0],
        token_ids=tuple(token for event in events for token in event.token_ids),
        logprobs=tuple(token for event in events for token in event.logprobs),
        draft=DraftResult(
            uses[0].drafter, sum(use.num_drafted for use in uses), sum(use.num_accepted for use in uses)
        )
        if uses
        else None,
        finish_reason=last.finish_reason,
        stop_id=last.stop_id,
        num_cached=max(event.num_cached for event in events),
        logits_hashes=tuple(one for event in events for one in event.logits_hashes),
        repetition=next((event.repetition for event in events if event.repetition), None),
    )


@dataclass(frozen=True, slots=True)
class Draft:
    """A guessed continuation of one request.

    token_ids   guessed ids, first to be verified first
    drafter     name of the drafter, as in `--speculate`
    confidence  probability that the drafter gives each guess; empty if it has none
    """

    token_ids: tuple[int, ...]
    drafter: str
    confidence: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step yielded for one request, after the cut at EOS, stop ids and limits.

    token_ids      emitted tokens; empty if the step computed only part of what is known
    accepted       how many of the verified draft tokens were emitted
    logprobs       one per token if asked for
    prompt_logprobs  those of the prompt tokens that this step scored, if asked for
    hashes         one per token in test mode
    finish_reason  "stop", "length", "repetition", or None while the request goes on
    stop_id        the id that stopped it
    repeating      the pattern that the answer was found to repeat with these tokens, or None
    error          why the request ends after these tokens, or None
    """

    token_ids: tuple[int, ...] = ()
    num_accepted: int = 0
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    logits_hashes: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_id: int | None = None
    repetition: Repetition | None = None
    error: ForewordError | None = None

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None
