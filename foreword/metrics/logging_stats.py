"""Log lines about traffic. Values that do not exist are omitted."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from foreword.core.finish import Repetition
from foreword.core.outputs import StepStats, TokenEvent
from foreword.core.request import Request
from foreword.metrics.request_stats import RequestProgress, SpecDecodeStats

logger = logging.getLogger("foreword.metrics")

MAX_VALUE_CHARS = 80
MAX_SHOWN_POSITIONS = 8  # positions of a draft in a log line
# Parameters with text of the request.
REDACTED_PARAMS = frozenset({"bad_words", "dry_sequence_breakers", "prediction", "stop", "structured"})


@dataclass(slots=True, eq=False)
class LogInterval:
    """Traffic since the last throughput line."""

    busy_s: float = 0.0  # time with an open request: idle time does not lower rates
    prompt_tokens: int = 0
    generation_tokens: int = 0
    embedding_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    spec_stats: SpecDecodeStats = field(default_factory=SpecDecodeStats)

    @property
    def has_traffic(self) -> bool:
        return self.busy_s > 0 and bool(self.prompt_tokens or self.generation_tokens or self.embedding_tokens)


def format_throughput(interval: LogInterval, stats: StepStats) -> str:
    """The interval must have traffic."""
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


def throughput_fields(interval: LogInterval, stats: StepStats) -> dict[str, Any]:
    """The throughput line as fields of a JSON line."""
    return {
        "prompt_tokens": interval.prompt_tokens,
        "generation_tokens": interval.generation_tokens,
        "embedding_tokens": interval.embedding_tokens or None,
        "busy_seconds": round(interval.busy_s, 3),
        "requests_running": stats.requests_running,
        "requests_waiting": stats.requests_waiting,
        "kv_cache_usage": round(stats.kv_cache_usage_ratio, 4),
    }


def speculation_fields(stats: SpecDecodeStats) -> dict[str, Any]:
    return {
        "verify_steps": stats.num_verify_steps,
        "draft_tokens": stats.num_drafted,
        "accepted_tokens": stats.num_accepted,
        "emitted_tokens": stats.num_emitted,
    }


def format_speculation(stats: SpecDecodeStats) -> str:
    """The statistics must have drafted tokens."""
    rates = ", ".join(f"{rate:.3f}" for rate in stats.acceptance_per_position[:MAX_SHOWN_POSITIONS])
    if (num_hidden := len(stats.acceptance_per_position) - MAX_SHOWN_POSITIONS) > 0:
        rates += f" and {num_hidden} more in /metrics"
    return (
        f"SpecDecoding metrics: Mean acceptance length: {stats.mean_acceptance_len:.2f}, "
        f"Draft acceptance rate: {stats.acceptance_rate:.1%}, "
        f"System efficiency: {stats.system_efficiency:.1%}, "
        f"Accepted: {stats.num_accepted} tokens, Drafted: {stats.num_drafted} tokens, "
        f"Per-position acceptance rate: {rates}"
    )


def format_embedding(task: str, reason: str, num_inputs: int, num_tokens: int, seconds: float) -> str:
    """The log line of an embedding or ranking request."""
    return f"{task}: {reason}; {num_inputs} inputs, {num_tokens} tokens; times total {seconds * 1000:.1f} ms"


@dataclass(slots=True, eq=False)
class PromptChoices:
    """Choices of one prompt: submitted together, logged together when the last has ended."""

    num_requested: int = 0
    is_prompt_computed: bool = False  # the prompt is counted once for all choices
    finished: list[tuple[RequestProgress, str]] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return len(self.finished) == self.num_requested


def format_request(name: str, choices: PromptChoices, now: float) -> str:
    """The log line of a request: parameters and numbers, no text of prompt or output."""
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


def request_fields(name: str, choices: PromptChoices, now: float) -> dict[str, Any]:
    """The log line of a request as fields of a JSON line."""
    all_progress = [progress for progress, _ in choices.finished]
    first = min(all_progress, key=lambda progress: progress.request.id)
    spans = {
        "queue_ms": first.queue_s,
        "first_token_ms": first.first_token_s,
        "total_ms": now - first.arrival_s,
    }
    return {
        "id": name,
        "finish_reasons": Counter(reason for _, reason in choices.finished),
        "prompt_tokens": len(first.request.prompt_ids),
        "cached_tokens": first.num_cached,
        "generated_tokens": sum(progress.num_tokens for progress in all_progress),
        "draft_tokens": sum(progress.spec_stats.num_drafted for progress in all_progress),
        "accepted_tokens": sum(progress.spec_stats.num_accepted for progress in all_progress),
        **{name: None if span is None else round(span * 1000, 1) for name, span in spans.items()},
    }


def format_repetition(request: Request, event: TokenEvent, repetition: Repetition) -> str:
    """The log line of a request with repetitive output, without its text."""
    outcome = "continuing" if event.finish_reason is None else f"finished: {event.finish_reason}"
    return (
        f"request {request.id}: repetitive output, pattern length {repetition.pattern_len}, after "
        f"{event.index + repetition.num_tokens} tokens; {outcome} (on_runaway {request.params.on_runaway})"
    )


def _format_prompt(progress: RequestProgress) -> str:
    """Number of prompt tokens, cached tokens and image tokens."""
    request, images = progress.request, progress.request.images
    count = f"{len(images)} image{'s' * (len(images) > 1)}"
    for_images = f", {sum(image.num_tokens for image in images)} for {count}" if images else ""
    return f"{len(request.prompt_ids)} prompt ({progress.num_cached} cached{for_images})"


def _format_prediction(progress: RequestProgress) -> str:
    count = len(progress.request.prediction_ids)
    return f"{count} predicted, " if count else ""


def _format_finish(choices: PromptChoices) -> str:
    """Finish reasons, and numbers of requested and returned choices."""
    reasons = Counter(reason for _, reason in choices.finished)
    returned = reasons["stop"] + reasons["length"] + reasons["repetition"]
    is_single = choices.num_requested == 1
    counted = ", ".join(reason if is_single else f"{reason} {n}" for reason, n in sorted(reasons.items()))
    return f"{counted}; n {choices.num_requested} requested, {returned} returned"


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
    return " ".join(
        f"{name}={'...' if name in REDACTED_PARAMS else _shorten(value)}" for name, value in changed.items()
    )


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
