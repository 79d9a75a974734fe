"""Statistics of single requests, and of speculation in requests, drafters and log intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from foreword.core.outputs import TokenEvent
from foreword.core.request import Request
from foreword.metrics.tracing import RequestSpan


@dataclass(slots=True, eq=False)
class SpecDecodeStats:
    """Sums over steps that verified a draft, after stop conditions. Ratios are None without drafts."""

    num_verify_steps: int = 0
    num_drafted: int = 0  # tokens drafted and verified
    num_accepted: int = 0  # drafted tokens delivered
    num_emitted: int = 0  # tokens delivered, including the one after the draft
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)

    def add(self, num_drafted: int, num_accepted: int, num_emitted: int) -> None:
        """Count one verified draft."""
        assert 0 <= num_accepted <= num_drafted and num_accepted <= num_emitted <= num_accepted + 1
        self.num_verify_steps += 1
        self.num_drafted += num_drafted
        self.num_accepted += num_accepted
        self.num_emitted += num_emitted
        _count_positions(self.drafted_per_position, num_drafted)
        _count_positions(self.accepted_per_position, num_accepted)

    def merge(self, other: SpecDecodeStats) -> None:
        """Add the sums of `other`."""
        self.num_verify_steps += other.num_verify_steps
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        self.num_emitted += other.num_emitted
        for name in ("drafted_per_position", "accepted_per_position"):
            pairs = zip_longest(getattr(self, name), getattr(other, name), fillvalue=0)
            setattr(self, name, [left + right for left, right in pairs])

    @property
    def acceptance_rate(self) -> float | None:
        return self.num_accepted / self.num_drafted if self.num_drafted else None

    @property
    def mean_acceptance_len(self) -> float | None:
        return self.num_emitted / self.num_verify_steps if self.num_verify_steps else None

    @property
    def system_efficiency(self) -> float | None:
        """Delivered tokens per verified row: drafted tokens and one more per step."""
        num_rows = self.num_drafted + self.num_verify_steps
        return self.num_emitted / num_rows if self.num_verify_steps else None

    @property
    def acceptance_per_position(self) -> tuple[float, ...]:
        """Share accepted among the drafts that reach each position."""
        pairs = zip_longest(self.accepted_per_position, self.drafted_per_position, fillvalue=0)
        return tuple(accepted / drafted for accepted, drafted in pairs)


def _count_positions(counts: list[int], length: int) -> None:
    counts.extend([0] * (length - len(counts)))
    for position in range(length):
        counts[position] += 1


@dataclass(frozen=True, slots=True)
class AnswerMetrics:
    """The `metrics` object of one or all choices of a response. Values of None are omitted."""

    time_to_first_token_ms: float | None = None  # earliest choice
    time_per_output_token_ms: float | None = None  # one choice, after its first burst
    prompt_tokens_per_second: float | None = None  # first choice, cached tokens excluded
    tokens_per_second: float | None = None  # all choices, after their first bursts
    draft_tokens: int | None = None
    draft_tokens_acceptance: float | None = None
    mean_acceptance_length: float | None = None  # delivered tokens per step that verified a draft
    verify_steps: int | None = None
    cached_tokens: int | None = None  # each prompt once
    repeating_tokens: int | None = None  # pattern length of the first choice that repeats itself
    seed: int | None = None  # seed of the first choice

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class ChoiceStats:
    """Statistics of one choice. Times are in seconds of the recorder's clock."""

    prompt_id: str  # shared by all choices of a prompt
    seed: int
    first_token_s: float | None  # time since arrival
    first_token_at_s: float
    last_token_at_s: float
    num_later_tokens: int  # tokens after the first burst
    prompt_tokens_per_s: float | None  # rate of the steps before the first token
    num_cached: int | None  # None: the prompt was not computed
    repetition_len: int | None  # length of the repeating pattern
    spec_stats: SpecDecodeStats


def summarize_choices(choices: Sequence[ChoiceStats]) -> AnswerMetrics:
    """Metrics of a response with these choices, at least one."""
    spec_stats = SpecDecodeStats()
    for choice in choices:
        spec_stats.merge(choice.spec_stats)
    cached = {
        choice.prompt_id: choice.num_cached for choice in reversed(choices) if choice.num_cached is not None
    }
    firsts = [choice.first_token_s for choice in choices if choice.first_token_s is not None]
    per_token, rate = _token_rates([choice for choice in choices if choice.num_later_tokens])
    return AnswerMetrics(
        time_to_first_token_ms=min(firsts) * 1000 if firsts else None,
        time_per_output_token_ms=per_token,
        prompt_tokens_per_second=choices[0].prompt_tokens_per_s,
        tokens_per_second=rate,
        draft_tokens=spec_stats.num_drafted or None,
        draft_tokens_acceptance=spec_stats.acceptance_rate,
        mean_acceptance_length=spec_stats.mean_acceptance_len,
        verify_steps=spec_stats.num_verify_steps or None,
        cached_tokens=sum(cached.values()) if cached else None,
        repeating_tokens=next((choice.repetition_len for choice in choices if choice.repetition_len), None),
        seed=choices[0].seed,
    )


def _token_rates(choices: Sequence[ChoiceStats]) -> tuple[float | None, float | None]:
    """(milliseconds per token of a choice, tokens per second of all choices), after their first bursts."""
    if not choices:
        return None, None
    tokens = sum(choice.num_later_tokens for choice in choices)
    seconds = sum(choice.last_token_at_s - choice.first_token_at_s for choice in choices)
    start = min(choice.first_token_at_s for choice in choices)
    span = max(choice.last_token_at_s for choice in choices) - start
    return seconds * 1000 / tokens, tokens / span if span else None


@dataclass(slots=True, eq=False)
class RequestProgress:
    """Delivered tokens and times of a live request."""

    request: Request
    arrival_s: float
    span: RequestSpan | None = None  # span of the HTTP request; None: it is not traced
    is_prompt_computed: bool = False  # a first event arrived
    scheduled_s: float | None = None
    first_token_at_s: float | None = None
    last_token_at_s: float | None = None
    first_burst_tokens: int = 0  # tokens of the first event
    num_tokens: int = 0
    num_cached: int = 0
    repetition_len: int | None = None
    spec_stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)
    drafters: set[str] = field(default_factory=set)

    def record_tokens(self, event: TokenEvent, now: float) -> float | None:
        """Count an event's tokens. Returns seconds since the last event with tokens, or None."""
        if not self.is_prompt_computed:
            self.is_prompt_computed = True
            self.scheduled_s = event.scheduled_s or None
            self.num_cached = event.num_cached
        if event.repetition is not None:
            self.repetition_len = event.repetition.pattern_len
        draft, num_tokens = event.draft, len(event.token_ids)
        if draft is not None and draft.num_drafted and not draft.is_forced:
            self.spec_stats.add(draft.num_drafted, min(draft.num_accepted, num_tokens), num_tokens)
            self.drafters.add(draft.drafter)
        if not num_tokens:
            return None
        previous_s, self.last_token_at_s = self.last_token_at_s, now
        self.num_tokens += num_tokens
        if previous_s is None:
            self.first_token_at_s, self.first_burst_tokens = now, num_tokens
        return None if previous_s is None else max(now - previous_s, 0.0)

    @property
    def queue_s(self) -> float | None:
        return None if self.scheduled_s is None else max(self.scheduled_s - self.arrival_s, 0.0)

    @property
    def first_token_s(self) -> float | None:
        return None if self.first_token_at_s is None else max(self.first_token_at_s - self.arrival_s, 0.0)

    def snapshot(self, prompt_id: str) -> ChoiceStats:
        """Statistics so far."""
        return ChoiceStats(
            prompt_id=prompt_id,
            seed=self.request.seed,
            first_token_s=self.first_token_s,
            first_token_at_s=self.first_token_at_s or 0.0,
            last_token_at_s=self.last_token_at_s or 0.0,
            num_later_tokens=self.num_tokens - self.first_burst_tokens,
            prompt_tokens_per_s=self._prompt_tokens_per_s(),
            num_cached=self.num_cached if self.is_prompt_computed else None,
            repetition_len=self.repetition_len,
            spec_stats=self.spec_stats,
        )

    def _prompt_tokens_per_s(self) -> float | None:
        """Prompt tokens computed per second, from the first step to the first token."""
        first_s, scheduled_s = self.first_token_at_s, self.scheduled_s
        if first_s is None or scheduled_s is None or first_s <= scheduled_s:
            return None
        return (len(self.request.prompt_ids) - self.num_cached) / (first_s - scheduled_s)
