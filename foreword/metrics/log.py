"""The log lines about traffic. A figure that does not exist is left out; there is never a nan."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from foreword.core.events import StepStats, Tokens
from foreword.core.request import Request
from foreword.core.runaway import Repetition
from foreword.metrics.answer import Progress
from foreword.metrics.tally import DraftTally

__all__ = [
    "Choices",
    "Interval",
    "embedding_line",
    "logger",
    "request_line",
    "runaway_line",
    "speculation_line",
    "throughput_line",
]

logger = logging.getLogger("foreword.metrics")

LONGEST_VALUE = 80
TEXTS = frozenset({"bad_words", "dry_sequence_breakers", "prediction", "stop", "structured"})


class Interval:
    """Traffic since the last throughput line.

    busy_s  seconds in which at least one request was open: idle time does not dilute a rate
    """

    __slots__ = ("busy_s", "embedded", "generated", "prefix_hits", "prefix_queries", "prompt", "tally")

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.prompt = 0
        self.generated = 0
        self.embedded = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.tally = DraftTally()

    @property
    def traffic(self) -> bool:
        return self.busy_s > 0 and bool(self.prompt or self.generated or self.embedded)


def throughput_line(interval: Interval, stats: StepStats) -> str:
    """Needs an interval with traffic."""
    parts = [
        f"Throughput: prompt {interval.prompt / interval.busy_s:.1f} tokens/s",
        f"generation {interval.generated / interval.busy_s:.1f} tokens/s",
        f"busy {interval.busy_s:.1f} s",
        f"running {stats.requests_running}",
        f"waiting {stats.requests_waiting}",
        f"KV cache {stats.kv_cache_usage_ratio:.1%}",
    ]
    if interval.embedded:
        parts.append(f"embedding {interval.embedded / interval.busy_s:.1f} tokens/s")
    if interval.prefix_queries:
        parts.append(f"prefix cache hits {interval.prefix_hits / interval.prefix_queries:.1%}")
    return ", ".join(parts)


def speculation_line(tally: DraftTally) -> str:
    """Needs a tally that has drafted tokens."""
    rates = ", ".join(f"{rate:.3f}" for rate in tally.acceptance_at)
    return (
        f"SpecDecoding metrics: Mean acceptance length: {tally.mean_length:.2f}, "
        f"Draft acceptance rate: {tally.acceptance:.1%}, System efficiency: {tally.efficiency:.1%}, "
        f"Accepted: {tally.accepted} tokens, Drafted: {tally.drafted} tokens, "
        f"Per-position acceptance rate: {rates}"
    )


def embedding_line(kind: str, reason: str, num_inputs: int, num_tokens: int, seconds: float) -> str:
    """How one request for vectors or scores went."""
    return f"{kind}: {reason}; {num_inputs} inputs, {num_tokens} tokens; times total {seconds * 1000:.1f} ms"


class Choices:
    """The choices of one prompt: they arrive together, and have one log line when the last has ended."""

    __slots__ = ("asked", "computed", "ended")

    def __init__(self) -> None:
        self.asked = 0
        self.computed = False  # a first event came: the prompt is counted once for all choices
        self.ended: list[tuple[Progress, str]] = []

    @property
    def complete(self) -> bool:
        return len(self.ended) == self.asked


def request_line(name: str, choices: Choices, now: float) -> str:
    """How one request went: parameters and figures, never a word of the prompt or the answer."""
    all_progress = [progress for progress, _ in choices.ended]
    first = min(all_progress, key=lambda progress: progress.request.id)
    generated = sum(progress.num_tokens for progress in all_progress)
    parts = [
        f"request {name}: {_ends(choices)}",
        f"params {_params(first)}",
        f"tokens {_read(first)}, {_predicted(first)}{generated} generated",
        *_drafting(all_progress),
        _times(first, now),
    ]
    return "; ".join(parts)


def runaway_line(request: Request, event: Tokens, found: Repetition) -> str:
    """That an answer repeats itself, and what becomes of it; never what it repeats."""
    fate = "it goes on" if event.finish_reason is None else f"it ended: {event.finish_reason}"
    return (
        f"request {request.id} runs away: {event.index + found.num_tokens} tokens so far, and their end repeats a pattern "
        f"of length {found.pattern}; {fate} (on_runaway {request.params.on_runaway})"
    )


def _read(progress: Progress) -> str:
    """How long the prompt is, and how much of it was seen; never what."""
    request, pictures = progress.request, progress.request.pictures
    count = f"{len(pictures)} picture{'s' * (len(pictures) > 1)}"
    seen = f", {sum(picture.num_tokens for picture in pictures)} for {count}" if pictures else ""
    return f"{len(request.prompt_ids)} prompt ({progress.num_cached} cached{seen})"


def _predicted(progress: Progress) -> str:
    count = len(progress.request.prediction_ids)
    return f"{count} predicted, " if count else ""


def _ends(choices: Choices) -> str:
    """How many choices were asked for and returned, and why they ended."""
    reasons = Counter(reason for _, reason in choices.ended)
    returned = reasons["stop"] + reasons["length"] + reasons["repetition"]
    listed = ", ".join(f"{reason} {count}" if choices.asked > 1 else reason for reason, count in sorted(reasons.items()))
    return f"{listed}; n {choices.asked} asked, {returned} returned"


def _drafting(all_progress: Sequence[Progress]) -> list[str]:
    drafted = sum(progress.tally.drafted for progress in all_progress)
    if not drafted:
        return []
    names = ", ".join(sorted({name for progress in all_progress for name in progress.drafters}))
    accepted = sum(progress.tally.accepted for progress in all_progress)
    return [f"drafter {names} ({accepted} of {drafted} accepted)"]


def _params(progress: Progress) -> str:
    request = progress.request
    changed = {**request.params.changed(), "seed": request.seed}
    return " ".join(f"{name}={_told(name, value)}" for name, value in changed.items())


def _told(name: str, value: object) -> str:
    """Values that are text out of the request are not told."""
    return "..." if name in TEXTS else _short(value)


def _times(progress: Progress, now: float) -> str:
    spans = (("queue", progress.queue_s), ("first token", progress.first_token_s), ("total", now - progress.arrived_s))
    return "times " + ", ".join(f"{name} {span * 1000:.1f} ms" for name, span in spans if span is not None)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."
