"""The log lines about traffic. A figure that does not exist is left out; there is never a nan."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from foreword.core.outputs import StepStats, TokenEvent
from foreword.core.repetition import Repetition
from foreword.core.request import Request
from foreword.metrics.request_stats import RequestProgress
from foreword.metrics.spec_stats import SpecDecodeStats

__all__ = [
    "LogInterval",
    "PromptChoices",
    "format_embedding",
    "format_repetition",
    "format_request",
    "format_speculation",
    "format_throughput",
    "logger",
]

logger = logging.getLogger("foreword.metrics")

MAX_VALUE_CHARS = 80
REDACTED_PARAMS = frozenset({"bad_words", "dry_sequence_breakers", "prediction", "stop", "structured"})


class LogInterval:
    """Traffic since the last throughput line.

    busy_s  seconds in which at least one request was open: idle time does not dilute a rate
    """

    __slots__ = (
        "busy_s",
        "embedding_tokens",
        "generation_tokens",
        "prefix_hits",
        "prefix_queries",
        "prompt_tokens",
        "spec_stats",
    )

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.embedding_tokens = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.spec_stats = SpecDecodeStats()

    @property
    def has_traffic(self) -> bool:
        return self.busy_s > 0 and bool(self.prompt_tokens or self.generation_tokens or self.embedding_tokens)


def format_throughput(interval: LogInterval, stats: StepStats) -> str:
    """Needs an interval with traffic."""
    parts = [
        f"Throughput: prompt {interval.prompt_tokens / interval.busy_s:.1f} tokens/s",
        f"generation {interval.generation_tokens / interval.busy_s:.1f} tokens/s",
        f"busy {interval.busy_s:.1f} s",
        f"running {stats.requests_running}",
        f"waiting {stats.requests_waiting}",
        f"KV cache {stats.kv_cache_usage_ratio:.1%}",
    ]
    if interval.embedding_tokens:
        parts.append(f"embedding {interval.embedding_tokens / interval.busy_s:.1f} tokens/s")
    if interval.prefix_queries:
        parts.append(f"prefix cache hits {interval.prefix_hits / interval.prefix_queries:.1%}")
    return ", ".join(parts)


def format_speculation(stats: SpecDecodeStats) -> str:
    """Needs a tally that has drafted tokens."""
    rates = ", ".join(f"{rate:.3f}" for rate in stats.acceptance_per_position)
    return (
        f"SpecDecoding metrics: Mean acceptance length: {stats.mean_acceptance_len:.2f}, "
        f"Draft acceptance rate: {stats.acceptance_rate:.1%}, System efficiency: {stats.system_efficiency:.1%}, "
        f"Accepted: {stats.num_accepted} tokens, Drafted: {stats.num_drafted} tokens, "
        f"Per-position acceptance rate: {rates}"
    )


def format_embedding(task: str, reason: str, num_inputs: int, num_tokens: int, seconds: float) -> str:
    """How one request for vectors or scores went."""
    return f"{task}: {reason}; {num_inputs} inputs, {num_tokens} tokens; times total {seconds * 1000:.1f} ms"


class PromptChoices:
    """The choices of one prompt: they arrive together, and have one log line when the last has ended."""

    __slots__ = ("finished", "is_prompt_computed", "num_requested")

    def __init__(self) -> None:
        self.num_requested = 0
        self.is_prompt_computed = False  # a first event came: the prompt is counted once for all choices
        self.finished: list[tuple[RequestProgress, str]] = []

    @property
    def is_complete(self) -> bool:
        return len(self.finished) == self.num_requested


def format_request(name: str, choices: PromptChoices, now: float) -> str:
    """How one request went: parameters and figures, never a word of the prompt or the answer."""
    all_progress = [progress for progress, _ in choices.finished]
    first = min(all_progress, key=lambda progress: progress.request.id)
    generated = sum(progress.num_tokens for progress in all_progress)
    parts = [
        f"request {name}: {_format_finish(choices)}",
        f"params {_format_params(first)}",
        f"tokens {_format_prompt(first)}, {_format_prediction(first)}{generated} generated",
        *_format_drafting(all_progress),
        _format_times(first, now),
    ]
    return "; ".join(parts)


def format_repetition(request: Request, event: TokenEvent, repetition: Repetition) -> str:
    """That an answer repeats itself, and what becomes of it; never what it repeats."""
    fate = "it goes on" if event.finish_reason is None else f"it ended: {event.finish_reason}"
    return (
        f"request {request.id} runs away: {event.index + repetition.num_tokens} tokens so far, and their end repeats a pattern "
        f"of length {repetition.pattern_len}; {fate} (on_runaway {request.params.on_runaway})"
    )


def _format_prompt(progress: RequestProgress) -> str:
    """How long the prompt is, and how much of it was seen; never what."""
    request, pictures = progress.request, progress.request.images
    count = f"{len(pictures)} picture{'s' * (len(pictures) > 1)}"
    seen = f", {sum(picture.num_tokens for picture in pictures)} for {count}" if pictures else ""
    return f"{len(request.prompt_ids)} prompt ({progress.num_cached} cached{seen})"


def _format_prediction(progress: RequestProgress) -> str:
    count = len(progress.request.prediction_ids)
    return f"{count} predicted, " if count else ""


def _format_finish(choices: PromptChoices) -> str:
    """How many choices were asked for and returned, and why they ended."""
    reasons = Counter(reason for _, reason in choices.finished)
    returned = reasons["stop"] + reasons["length"] + reasons["repetition"]
    listed = ", ".join(
        f"{reason} {count}" if choices.num_requested > 1 else reason
        for reason, count in sorted(reasons.items())
    )
    return f"{listed}; n {choices.num_requested} asked, {returned} returned"


def _format_drafting(all_progress: Sequence[RequestProgress]) -> list[str]:
    drafted = sum(progress.spec_stats.num_drafted for progress in all_progress)
    if not drafted:
        return []
    names = ", ".join(sorted({name for progress in all_progress for name in progress.drafters}))
    accepted = sum(progress.spec_stats.num_accepted for progress in all_progress)
    return [f"drafter {names} ({accepted} of {drafted} accepted)"]


def _format_params(progress: RequestProgress) -> str:
    request = progress.request
    changed = {**request.params.non_default_fields(), "seed": request.seed}
    return " ".join(f"{name}={_redact(name, value)}" for name, value in changed.items())


def _redact(name: str, value: object) -> str:
    """Values that are text out of the request are not told."""
    return "..." if name in REDACTED_PARAMS else _shorten(value)


def _format_times(progress: RequestProgress, now: float) -> str:
    spans = (
        ("queue", progress.queue_s),
        ("first token", progress.first_token_s),
        ("total", now - progress.arrival_s),
    )
    return "times " + ", ".join(f"{name} {span * 1000:.1f} ms" for name, span in spans if span is not None)


def _shorten(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_VALUE_CHARS else text[: MAX_VALUE_CHARS - 3] + "..."
