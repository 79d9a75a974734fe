"""Drafts, outputs of a step, and events that the engine sends to its client (plain values, picklable).

What every request has in every step is a named tuple: a frozen dataclass takes five times as long to make.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from foreword.core.finish import Repetition
from foreword.errors import ForewordError

GRAMMAR = "grammar"  # name of the drafter of forced text
T = TypeVar("T")


def _pickled_as_call(cls: type[T]) -> type[T]:
    """Pickle an instance as a call of its class: four times as fast as a slotted dataclass's own state."""
    values = attrgetter(*(each.name for each in fields(cls)))  # type: ignore[arg-type]

    def reduce(self: T) -> tuple[type[T], tuple[Any, ...]]:
        return cls, values(self)

    cls.__reduce__ = reduce  # type: ignore[assignment, method-assign]
    return cls


@dataclass(frozen=True, slots=True)
class Draft:
    """A proposed continuation of one request."""

    token_ids: tuple[int, ...]  # first to be verified first
    drafter: str = ""  # as in `--speculate`; the engine fills it in
    confidence: tuple[float, ...] = ()  # the drafter's probability of each token; empty if it has none


@_pickled_as_call
@dataclass(frozen=True, slots=True)
class DraftResult:
    """A draft that was verified; 0 <= num_accepted <= num_drafted."""

    drafter: str
    num_drafted: int
    num_accepted: int
    confidence: tuple[
        float, ...
    ] = ()  # the drafter's probability of each accepted token; empty if it has none

    @property
    def is_forced(self) -> bool:
        """The grammar allowed no other text, so acceptance statistics leave the draft out."""
        return self.drafter == GRAMMAR


@_pickled_as_call
@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probabilities at one position, of the raw distribution."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top: tuple[tuple[int, float], ...]  # (token id, logprob), most likely first, ties to the lower id
    requested: tuple[tuple[int, float], ...] = ()  # the same for `logprob_token_ids`, in their order


class TokenEvent(NamedTuple):
    """Tokens that one step added to one request, and its end if it ended."""

    request_id: str
    index: int  # type: ignore[assignment]  # output index of the first token; tuple.index() is not used
    token_ids: tuple[int, ...]  # empty only if finish_reason is set
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token if requested
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()  # sent with the first event; the first is None
    draft: DraftResult | None = None  # the draft that was verified for these tokens
    finish_reason: str | None = None  # "stop", "length" or "repetition", on the last event
    stop_id: int | None = None  # the stop token that ended the request; it is in token_ids
    num_cached: int = 0  # prompt tokens found in the prefix cache
    scheduled_s: float = 0.0  # time.monotonic() when the request first ran
    logits_hashes: tuple[int, ...] = ()  # 64-bit hashes of the raw logits, one per token, in test mode
    repetition: Repetition | None = None  # detected with these tokens; reported once per request


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """The request failed; its last event."""

    request_id: str
    error: ForewordError


@dataclass(frozen=True, slots=True)
class EmbeddingEvent:
    """The prompt as one vector; the last event of an embedding request."""

    request_id: str
    vector: bytes  # float32 [H], native byte order: pooled after the final norm, not normalized
    num_cached: int = 0  # prompt tokens found in the prefix cache
    scheduled_s: float = 0.0  # time.monotonic() when the request first ran


Event = TokenEvent | ErrorEvent | EmbeddingEvent


@_pickled_as_call
@dataclass(frozen=True, slots=True)
class DraftingStats:
    """Decisions about drafts, as totals since the engine started. Seconds are engine time."""

    draft_length_counts: Mapping[str, Mapping[int, int]] = field(default_factory=dict)  # by drafter, length
    no_draft_counts: Mapping[str, int] = field(default_factory=dict)  # requests without a draft, by reason
    # predicted time, drafting included, of steps that verified a draft, or ran draft passes that were to pay
    predicted_seconds: float = 0.0
    realised_seconds: float = 0.0  # the same steps, measured
    plain_seconds: float = 0.0  # estimate of plain decoding for the tokens of these steps
    exploring_seconds: float = 0.0  # drafts and plain steps made only to measure, without passes that paid


@_pickled_as_call
@dataclass(slots=True)
class KVTierStats:
    """A tier of the KV cache, as totals since the engine started. A report has a copy."""

    hit_tokens: int = 0  # whose KV was read
    avoided_seconds: float = 0.0  # expected time to compute them
    read_bytes: int = 0
    read_seconds: float = 0.0
    written_bytes: int = 0
    write_seconds: float = 0.0
    write_errors: int = 0
    dropped_blocks: int = 0  # not written: too many were queued
    refused: Counter[str] = field(default_factory=Counter)  # files that were not used, by reason


@_pickled_as_call
@dataclass(frozen=True, slots=True)
class StepStats:
    """The engine after a step. Counters are totals since the engine started."""

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
    # seconds of this step by stage: encode, schedule, assemble, forward, sample, draft, commit, embed
    stage_seconds: Mapping[str, float] = field(default_factory=dict)
    drafter_errors: Mapping[str, int] = field(default_factory=dict)  # exceptions caught, by drafter
    drafting: DraftingStats = DraftingStats()
    faults: Mapping[str, int] = field(default_factory=dict)  # errors of one request, by stage or "nonfinite"
    images_encoded_total: int = 0
    image_cache_hits_total: int = 0
    adopted_tokens: int = 0  # whose KV the engine had at its start: the one before has left it in memory
    kv_tiers: Mapping[str, KVTierStats] = field(default_factory=dict)  # "host" and "disk", where they are
    replica: str = ""  # id of the engine among the replicas of its model; empty: the only one


class BlockUpdate(NamedTuple):
    """Hashes of KV blocks that an engine's prefix cache gained and lost since the update before."""

    sequence: int  # consecutive; after a gap the receiver asks for a snapshot
    added: tuple[bytes, ...]
    removed: tuple[bytes, ...] = ()
    is_snapshot: bool = False  # `added` is all that is cached; an engine's first update is one


@_pickled_as_call
@dataclass(frozen=True, slots=True)
class StepReport:
    """Events and statistics of one step."""

    events: tuple[Event, ...]
    stats: StepStats
    blocks: BlockUpdate | None = None  # None: nothing changed, or the engine does not publish


def truncate(event: TokenEvent, num_kept: int, finish_reason: str) -> TokenEvent:
    """The event as if the request had ended after its first `num_kept` tokens.

    Accepted draft tokens after the cut were never delivered and are not counted.
    """
    assert 0 <= num_kept <= len(event.token_ids)
    draft, repetition = event.draft, event.repetition
    return event._replace(
        token_ids=event.token_ids[:num_kept],
        logprobs=event.logprobs[:num_kept],
        logits_hashes=event.logits_hashes[:num_kept],
        draft=draft
        and replace(
            draft, num_accepted=min(draft.num_accepted, num_kept), confidence=draft.confidence[:num_kept]
        ),
        finish_reason=finish_reason,
        stop_id=None,
        repetition=repetition if repetition and repetition.num_tokens <= num_kept else None,
    )


def drop_prefix(event: TokenEvent, count: int) -> TokenEvent:
    """The event without its first `count` tokens, which were delivered, with their draft tokens, before."""
    assert 0 <= count <= len(event.token_ids)
    draft = event.draft
    if draft is not None:
        drafted, accepted = draft.num_drafted - count, max(draft.num_accepted - count, 0)
        rest = DraftResult(draft.drafter, drafted, accepted, draft.confidence[count:])
        draft = rest if drafted > 0 else None
    return event._replace(
        index=event.index + count,
        token_ids=event.token_ids[count:],
        logprobs=event.logprobs[count:],
        logits_hashes=event.logits_hashes[count:],
        draft=draft,
        repetition=event.repetition and event.repetition.shifted(count),
    )


def merge(events: Sequence[TokenEvent]) -> TokenEvent:
    """Join consecutive events. Their drafts become one draft of the first drafter."""
    last, drafts = events[-1], [event.draft for event in events if event.draft is not None]
    drafted, accepted = sum(d.num_drafted for d in drafts), sum(d.num_accepted for d in drafts)
    confidence = tuple(prob for d in drafts for prob in d.confidence)
    confidence = confidence if len(confidence) == accepted else ()
    return events[0]._replace(
        token_ids=tuple(token_id for event in events for token_id in event.token_ids),
        logprobs=tuple(logprob for event in events for logprob in event.logprobs),
        draft=DraftResult(drafts[0].drafter, drafted, accepted, confidence) if drafts else None,
        finish_reason=last.finish_reason,
        stop_id=last.stop_id,
        num_cached=max(event.num_cached for event in events),
        logits_hashes=tuple(value for event in events for value in event.logits_hashes),
        repetition=next((event.repetition for event in events if event.repetition), None),
    )


class StepOutput(NamedTuple):
    """Result of one step for one request, cut at EOS, stop ids and limits."""

    token_ids: tuple[int, ...] = ()  # emitted; empty if the step computed only part of the prompt
    num_accepted: int = 0  # emitted draft tokens
    logprobs: tuple[TokenLogprob, ...] = ()  # one per token if requested
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # prompt tokens scored by this step, if requested
    logits_hashes: tuple[int, ...] = ()  # one per token in test mode
    finish_reason: str | None = None  # "stop", "length", "repetition"; None: the request continues
    stop_id: int | None = None  # the token id that stopped it
    repetition: Repetition | None = None  # detected with these tokens
    error: ForewordError | None = None  # ends the request after these tokens

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None
