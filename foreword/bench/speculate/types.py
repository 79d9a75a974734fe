"""The nouns of `foreword bench speculate`: a cell, the modes compared in it, and what one round of a mode showed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from foreword.bench.speculate.workloads import Conversation
from foreword.core.outputs import DraftingStats
from foreword.core.params import Speculation
from foreword.metrics.spec_stats import SpecDecodeStats

__all__ = [
    "ADAPTIVE",
    "AUTO",
    "FIXED",
    "OFF",
    "PLAIN",
    "BenchRepetition",
    "BenchTarget",
    "Mode",
    "PairedRun",
    "RequestResult",
    "SpecCase",
    "drafting_since",
]

Key = TypeVar("Key", str, int)

ADAPTIVE, FIXED, PLAIN = (
    "adaptive",
    "fixed",
    "plain",
)  # engines: the one that is asked about, one of fixed lengths, one without


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to answer: which engine, and what its requests ask for."""

    name: str
    engine: str = ADAPTIVE
    speculation: Speculation = field(default_factory=Speculation)


OFF = Mode("off", ADAPTIVE, Speculation("off"))
AUTO = Mode("auto")


@dataclass(frozen=True, slots=True)
class SpecCase:
    """Scripts of one category, `concurrency` at once.

    make  the scripts, in the variant of that number
    full  in a KV cache too small for all of them: requests wait and are preempted
    """

    category: str
    concurrency: int
    make: Callable[[int], tuple[Conversation, ...]]
    full: bool = False

    @property
    def name(self) -> str:
        return f"{self.category} x{self.concurrency}" + (", cache full" if self.full else "")


@dataclass(slots=True)
class RequestResult:
    """One request: turn `turn` of script `script`. Seconds since it was sent.

    prompt_ids  empty where a server holds the tokenizer
    output      what was answered: token ids, or the text from a server
    first_s     until its first tokens; None: it has none
    gaps        (seconds since the tokens before, how many came) for each later burst
    error       why there is no answer, or None
    """

    conversation: int
    turn: int
    seed: int = 0
    prompt_ids: tuple[int, ...] = ()
    output: Sequence[int] | str = ()
    num_tokens: int = 0
    ttft_s: float | None = None
    total_s: float = 0.0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    error: str | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.conversation, self.turn


@dataclass(frozen=True, slots=True)
class BenchRepetition:
    """All calls of one mode, in the order of their scripts and turns, and what the engine counted meanwhile.

    seconds      from the first request to the last answer
    stages       seconds by stage of the engine's steps
    tallies      by drafter
    preemptions  requests put back to make room
    drafting     what the policy decided, in this round alone; None where nobody tells
    """

    results: tuple[RequestResult, ...]
    seconds: float
    stages: Mapping[str, float]
    draft_stats: Mapping[str, SpecDecodeStats]
    preemptions: int = 0
    drafting: DraftingStats | None = None

    @property
    def outputs(self) -> tuple[Sequence[int] | str, ...]:
        return tuple(call.output for call in self.results)

    @property
    def num_tokens(self) -> int:
        return sum(call.num_tokens for call in self.results)

    @property
    def bursts(self) -> int:
        """Steps that delivered something to a request, over all requests."""
        return sum((call.ttft_s is not None) + len(call.gaps) for call in self.results)


@dataclass(frozen=True, slots=True)
class PairedRun:
    """The same scripts without speculation and in some mode, run next to each other."""

    plain: BenchRepetition
    other: BenchRepetition

    @property
    def has_equal_outputs(self) -> bool:
        return self.plain.outputs == self.other.outputs


class BenchTarget(Protocol):
    """What answers: engines in this process, or a server."""

    def run_pairs(self, case: SpecCase, modes: Sequence[Mode], number: int) -> Mapping[str, PairedRun]:
        """Round `number` of a cell: every mode beside `off`, by its name."""


def drafting_since(before: DraftingStats, after: DraftingStats) -> DraftingStats:
    """What was decided between two totals."""
    return DraftingStats(
        draft_length_counts={
            name: _increase(before.draft_length_counts.get(name, {}), counts)
            for name, counts in after.draft_length_counts.items()
        },
        no_draft_counts=_increase(before.no_draft_counts, after.no_draft_counts),
        predicted_seconds=after.predicted_seconds - before.predicted_seconds,
        realised_seconds=after.realised_seconds - before.realised_seconds,
        exploring_seconds=after.exploring_seconds - before.exploring_seconds,
    )


def _increase(before: Mapping[Key, int], after: Mapping[Key, int]) -> dict[Key, int]:
    return {key: count - before.get(key, 0) for key, count in after.items() if count != before.get(key, 0)}
