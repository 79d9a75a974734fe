"""One request as the metrics see it: what was delivered, and when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from foreword.core.outputs import DraftResult, TokenEvent
from foreword.core.request import Request
from foreword.metrics.spec_stats import SpecDecodeStats

__all__ = ["AnswerMetrics", "ChoiceStats", "RequestProgress", "summarize_choices"]


@dataclass(frozen=True, slots=True)
class AnswerMetrics:
    """The `metrics` object of one choice, or of all choices of an answer. None means that there is no such value;
    it is left out. Those of speculation exist where something was drafted.

    time_to_first_token_ms    of the choice that began first
    time_per_output_token_ms  over the tokens after each choice's first burst: how fast one choice comes
    tokens_per_second         over the same tokens: how fast all choices come together
    prompt_tokens_per_second  over the prompt tokens that were not cached, of the first choice
    mean_acceptance_length    delivered tokens per step that verified a draft
    cached_tokens             of each prompt once
    repeating_tokens          length of the pattern that a choice was found to repeat, of the first that was
    seed                      of the first choice
    """

    time_to_first_token_ms: float | None = None
    time_per_output_token_ms: float | None = None
    prompt_tokens_per_second: float | None = None
    tokens_per_second: float | None = None
    draft_tokens: int | None = None
    draft_tokens_acceptance: float | None = None
    mean_acceptance_length: float | None = None
    verify_steps: int | None = None
    cached_tokens: int | None = None
    repeating_tokens: int | None = None
    seed: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True)
class ChoiceStats:
    """What one choice's metrics are made of.

    prompt        the name that all choices of a prompt share
    first_token_s seconds from arrival to the first token; None: there was none
    first_s       when the first tokens came; last_s: the newest; seconds of the recorder's clock
    later_tokens  that came after the first burst
    prompt_rate   prompt tokens computed per second, from the first step to the first token
    num_cached    prompt tokens found in the prefix cache; None: the prompt was not computed
    repeating     length of the pattern that it was found to repeat; None: it was not
    """

    prompt_id: str
    seed: int
    first_token_s: float | None
    first_token_at_s: float
    last_token_at_s: float
    num_later_tokens: int
    prompt_tokens_per_s: float | None
    num_cached: int | None
    repetition_len: int | None
    spec_stats: SpecDecodeStats


def summarize_choices(choices: Sequence[ChoiceStats]) -> AnswerMetrics:
    """The metrics of an answer with these choices, at least one."""
    tally = SpecDecodeStats()
    for choice in choices:
        tally.merge(choice.spec_stats)
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
        draft_tokens=tally.num_drafted or None,
        draft_tokens_acceptance=tally.acceptance_rate,
        mean_acceptance_length=tally.mean_acceptance_len,
        verify_steps=tally.num_verify_steps or None,
        cached_tokens=sum(cached.values()) if cached else None,
        repeating_tokens=next((choice.repetition_len for choice in choices if choice.repetition_len), None),
        seed=choices[0].seed,
    )


def _token_rates(choices: Sequence[ChoiceStats]) -> tuple[float | None, float | None]:
    """(milliseconds per token of a choice, tokens per second of all together), where tokens came after a first burst."""
    if not choices:
        return None, None
    tokens = sum(choice.num_later_tokens for choice in choices)
    seconds = sum(choice.last_token_at_s - choice.first_token_at_s for choice in choices)
    span = max(choice.last_token_at_s for choice in choices) - min(
        choice.first_token_at_s for choice in choices
    )
    return seconds * 1000 / tokens, tokens / span if span else None


class RequestProgress:
    """What was delivered of a live request.

    computed     the prompt was computed: a first event came
    first_s      when its first tokens came; last_s: its newest; seconds of the recorder's clock, None: not yet
    first_burst  tokens that came at once at first_s
    """

    __slots__ = (
        "arrival_s",
        "drafters",
        "first_burst_tokens",
        "first_token_at_s",
        "is_prompt_computed",
        "last_token_at_s",
        "num_cached",
        "num_tokens",
        "repetition_len",
        "request",
        "scheduled_s",
        "spec_stats",
    )

    def __init__(self, request: Request, now: float) -> None:
        self.request = request
        self.arrival_s = request.arrival_s or now
        self.is_prompt_computed = False
        self.scheduled_s: float | None = None
        self.first_token_at_s: float | None = None
        self.last_token_at_s: float | None = None
        self.first_burst_tokens = 0
        self.num_tokens = 0
        self.num_cached = 0
        self.repetition_len: int | None = None
        self.spec_stats = SpecDecodeStats()
        self.drafters: set[str] = set()

    def record_tokens(self, event: TokenEvent, now: float) -> float | None:
        """Count the tokens of one event, as cut. Returns the seconds since the tokens before it, None if it is the first."""
        if not self.is_prompt_computed:
            self.is_prompt_computed = True
            self.scheduled_s = event.scheduled_s or None
            self.num_cached = event.num_cached
        if event.repetition is not None:
            self.repetition_len = event.repetition.pattern_len
        if event.draft is not None and event.draft.num_drafted and not event.draft.is_forced:
            self._count_draft(event.draft, len(event.token_ids))
        if not event.token_ids:
            return None
        before_s, self.last_token_at_s = self.last_token_at_s, now
        self.num_tokens += len(event.token_ids)
        if before_s is None:
            self.first_token_at_s, self.first_burst_tokens = now, len(event.token_ids)
        return None if before_s is None else max(now - before_s, 0.0)

    def _count_draft(self, use: DraftResult, emitted: int) -> None:
        self.spec_stats.add(use.num_drafted, min(use.num_accepted, emitted), emitted)
        self.drafters.add(use.drafter)

    @property
    def queue_s(self) -> float | None:
        return None if self.scheduled_s is None else max(self.scheduled_s - self.arrival_s, 0.0)

    @property
    def first_token_s(self) -> float | None:
        return None if self.first_token_at_s is None else max(self.first_token_at_s - self.arrival_s, 0.0)

    def snapshot(self, prompt_id: str) -> ChoiceStats:
        """The figures so far."""
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
        if (
            self.first_token_at_s is None
            or self.scheduled_s is None
            or self.first_token_at_s <= self.scheduled_s
        ):
            return None
        return (len(self.request.prompt_ids) - self.num_cached) / (self.first_token_at_s - self.scheduled_s)
