"""One request as the metrics see it: what was delivered, and when."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from foreword.core.events import DraftUse, Tokens
from foreword.core.request import Request
from foreword.metrics.tally import DraftTally

__all__ = ["AnswerMetrics", "Progress"]


@dataclass(frozen=True, slots=True)
class AnswerMetrics:
    """The `metrics` object of one answer. None means that there is no such value; it is left out.

    time_per_output_token_ms, tokens_per_second  over the tokens after the first burst
    prompt_tokens_per_second                     over the prompt tokens that were not cached
    mean_acceptance_length                       delivered tokens per step that verified a draft
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
    seed: int | None = None

    def as_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}


class Progress:
    """What was delivered of a live request.

    computed     the prompt was computed: a first event came
    first_s      when its first tokens came; last_s: its newest; seconds of the recorder's clock, None: not yet
    first_burst  tokens that came at once at first_s
    """

    __slots__ = (
        "arrived_s",
        "computed",
        "drafters",
        "first_burst",
        "first_s",
        "last_s",
        "num_cached",
        "num_tokens",
        "request",
        "scheduled_s",
        "tally",
    )

    def __init__(self, request: Request, now: float) -> None:
        self.request = request
        self.arrived_s = request.arrival_s or now
        self.computed = False
        self.scheduled_s: float | None = None
        self.first_s: float | None = None
        self.last_s: float | None = None
        self.first_burst = 0
        self.num_tokens = 0
        self.num_cached = 0
        self.tally = DraftTally()
        self.drafters: set[str] = set()

    def deliver(self, event: Tokens, now: float) -> float | None:
        """Count the tokens of one event, as cut. Returns the seconds since the tokens before it, None if it is the first."""
        if not self.computed:
            self.computed = True
            self.scheduled_s = event.scheduled_s or None
            self.num_cached = event.num_cached
        if not event.token_ids:
            return None
        before_s, self.last_s = self.last_s, now
        self.num_tokens += len(event.token_ids)
        if before_s is None:
            self.first_s, self.first_burst = now, len(event.token_ids)
        if event.draft is not None and event.draft.drafted:
            self._count_draft(event.draft, len(event.token_ids))
        return None if before_s is None else max(now - before_s, 0.0)

    def _count_draft(self, use: DraftUse, emitted: int) -> None:
        self.tally.add(use.drafted, min(use.accepted, emitted), emitted)
        self.drafters.add(use.drafter)

    @property
    def queue_s(self) -> float | None:
        return None if self.scheduled_s is None else max(self.scheduled_s - self.arrived_s, 0.0)

    @property
    def first_token_s(self) -> float | None:
        return None if self.first_s is None else max(self.first_s - self.arrived_s, 0.0)

    def answer(self, speculative: bool) -> AnswerMetrics:
        """The figures so far; those of speculation only where it is configured."""
        per_token = self._seconds_per_token()
        return AnswerMetrics(
            time_to_first_token_ms=_milli(self.first_token_s),
            time_per_output_token_ms=_milli(per_token),
            prompt_tokens_per_second=self._prompt_rate(),
            tokens_per_second=1 / per_token if per_token else None,
            draft_tokens=self.tally.drafted if speculative else None,
            draft_tokens_acceptance=self.tally.acceptance,
            mean_acceptance_length=self.tally.mean_length,
            verify_steps=self.tally.verify_steps if speculative else None,
            cached_tokens=self.num_cached if self.computed else None,
            seed=self.request.seed,
        )

    def _seconds_per_token(self) -> float | None:
        """Between the first burst and the last; None where only one came."""
        later = self.num_tokens - self.first_burst
        if self.first_s is None or self.last_s is None or not later:
            return None
        return (self.last_s - self.first_s) / later

    def _prompt_rate(self) -> float | None:
        """Prompt tokens computed per second, from the first step to the first token."""
        if self.first_s is None or self.scheduled_s is None or self.first_s <= self.scheduled_s:
            return None
        return (len(self.request.prompt_ids) - self.num_cached) / (self.first_s - self.scheduled_s)


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
