"""Records of `foreword bench speculate`: cases, the modes compared in them, and the results of a round."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from foreword.bench.regime import require
from foreword.bench.speculate.workloads import Conversation
from foreword.chat_formats.events import ChatEvent
from foreword.core.outputs import DraftingStats
from foreword.core.params import Speculation
from foreword.metrics.spec_stats import SpecDecodeStats

Key = TypeVar("Key", str, int)

# Engines: the measured one, one with fixed draft lengths, one started without speculation.
ADAPTIVE, FIXED, PLAIN = "adaptive", "fixed", "plain"
REPLAY = "replay "  # categories of recorded answers begin with this
MIN_AT_ONCE_SHARE = (
    0.8  # of a case's requests: where prompts queue, the first answers end before the last begin
)


@dataclass(frozen=True, slots=True)
class Mode:
    """An engine and the `speculation` field of its requests."""

    name: str
    engine: str = ADAPTIVE
    speculation: Speculation = field(default_factory=Speculation)


OFF = Mode("off", ADAPTIVE, Speculation("off"))
AUTO = Mode("auto")


@dataclass(frozen=True, slots=True)
class SpecCase:
    """Conversations of one category, `concurrency` at once."""

    category: str
    concurrency: int
    make: Callable[[int], tuple[Conversation, ...]]  # by variant
    full: bool = False  # the KV cache is too small: requests wait and are preempted

    @property
    def name(self) -> str:
        return f"{self.category} x{self.concurrency}" + (", cache full" if self.full else "")

    @property
    def is_replay(self) -> bool:
        """Every step has a draft of any length: the recorded answer."""
        return self.category.startswith(REPLAY)


@dataclass(slots=True)
class RequestResult:
    """One turn of a conversation."""

    conversation: int
    turn: int
    seed: int = 0
    prompt_ids: tuple[int, ...] = ()  # () where a server holds the tokenizer
    output: Sequence[int] | str = ()  # token ids, or a server's text
    num_tokens: int = 0
    ttft_s: float | None = None
    total_s: float = 0.0
    gaps: list[tuple[float, int]] = field(default_factory=list)  # (seconds, tokens) of each later burst
    error: str | None = None
    num_cached: int = 0  # prompt tokens from the prefix cache
    events: tuple[ChatEvent, ...] = ()  # () from a server
    logits_hashes: tuple[int, ...] = ()  # in test mode

    @property
    def key(self) -> tuple[int, int]:
        return self.conversation, self.turn


@dataclass(frozen=True, slots=True)
class BenchRepetition:
    """All requests of one mode in one round, by conversation and turn, and the engine's counts."""

    results: tuple[RequestResult, ...]
    seconds: float  # from the first request to the last answer
    stages: Mapping[str, float]  # seconds by stage of the engine's steps
    draft_stats: Mapping[str, SpecDecodeStats]  # by drafter
    preemptions: int = 0
    drafting: DraftingStats | None = None  # decisions of the policy in this round; None from a server
    max_at_once: int = 0  # requests in one step, or in flight to a server

    @property
    def outputs(self) -> tuple[Sequence[int] | str, ...]:
        return tuple(result.output for result in self.results)

    @property
    def num_tokens(self) -> int:
        return sum(result.num_tokens for result in self.results)

    @property
    def num_drafted(self) -> int:
        """Draft tokens that were verified."""
        return sum(stats.num_drafted for stats in self.draft_stats.values())

    def check(self, case: SpecCase, mode: Mode) -> None:
        """Raise RegimeError where the round was not what the case and the mode claim."""
        if any(result.error is not None for result in self.results):
            return  # reported with the case
        if not case.full:
            least = math.ceil(MIN_AT_ONCE_SHARE * case.concurrency)
            require(f"{mode.name}: requests at once", min(self.max_at_once, least), least)
        if mode.speculation.method == "off":
            require(f"{mode.name}: draft tokens verified", self.num_drafted, 0)
        elif mode.engine == FIXED and case.is_replay:
            lengths = [len(stats.drafted_per_position) for stats in self.draft_stats.values()]
            room = max(result.num_tokens for result in self.results) - 2  # beside the first and the last
            wanted = min(mode.speculation.max_draft_tokens or 0, room)
            longest = min(max(lengths, default=0), room)
            require(f"{mode.name}: tokens of the longest verified draft", longest, wanted)
        conversations = case.make(0)
        for result in self.results:
            asked = conversations[result.conversation]
            if asked.ignore_eos:
                require(f"{mode.name}: tokens of an answer", result.num_tokens, asked.max_tokens)

    @property
    def bursts(self) -> int:
        """Deliveries of tokens to a request, over all requests."""
        return sum((result.ttft_s is not None) + len(result.gaps) for result in self.results)


@dataclass(frozen=True, slots=True)
class PairedRun:
    """The same conversations without speculation and in another mode, run next to each other."""

    plain: BenchRepetition
    other: BenchRepetition

    @property
    def has_equal_outputs(self) -> bool:
        return self.plain.outputs == self.other.outputs


class BenchTarget(Protocol):
    """Engines in this process, or a server."""

    def run_plain(self, conversation: Conversation) -> float:
        """Seconds of one conversation without speculation, for an estimate."""

    def run_pairs(self, case: SpecCase, modes: Sequence[Mode], number: int) -> Mapping[str, PairedRun]:
        """Round `number` of a case: every mode paired with `off`, by name."""


def drafting_since(before: DraftingStats, after: DraftingStats) -> DraftingStats:
    """Decisions between two totals."""
    return DraftingStats(
        draft_length_counts={
            name: _increase(before.draft_length_counts.get(name, {}), counts)
            for name, counts in after.draft_length_counts.items()
        },
        no_draft_counts=_increase(before.no_draft_counts, after.no_draft_counts),
        predicted_seconds=after.predicted_seconds - before.predicted_seconds,
        realised_seconds=after.realised_seconds - before.realised_seconds,
        plain_seconds=after.plain_seconds - before.plain_seconds,
        exploring_seconds=after.exploring_seconds - before.exploring_seconds,
    )


def _increase(before: Mapping[Key, int], after: Mapping[Key, int]) -> dict[Key, int]:
    return {key: count - before.get(key, 0) for key, count in after.items() if count != before.get(key, 0)}
