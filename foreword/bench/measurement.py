"""The harness of benchmarks that compare modes: every round answers the same requests in all of them.

A case is a set of conversations, a number of them at once; a mode is an engine and the `speculation` field of
its requests. Modes run one after the other, in another order each round, so that a ratio is that of
neighbours. A round that was not what its case and mode claim raises RegimeError, and its case has no figures.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from foreword.bench.regime import require
from foreword.bench.session import BenchStep
from foreword.bench.workloads import Conversation
from foreword.chat_formats.events import ChatEvent
from foreword.config.options import Config
from foreword.core.outputs import DraftingStats
from foreword.core.params import Speculation
from foreword.demo import DEFAULT_MODEL
from foreword.metrics.request_stats import SpecDecodeStats

# Engines: the measured one, one with fixed draft lengths, one started without speculation.
ADAPTIVE, FIXED, PLAIN = "adaptive", "fixed", "plain"
REPLAY = "replay "  # categories of recorded answers begin with this
# Share of a case's requests: where prompts queue, the first answers end before the last begin.
MIN_AT_ONCE_SHARE = 0.8
PROBE_TOKENS = 16  # answer that estimates rest on
# Estimates for expected times: rows that double a step's time, and prompt tokens that cost one step.
ROWS_PER_STEP = 16
CHARS_PER_TOKEN = 3


@dataclass(frozen=True, slots=True)
class Mode:
    """An engine and the `speculation` field of its requests."""

    name: str
    engine: str = ADAPTIVE
    speculation: Speculation = field(default_factory=Speculation)


OFF = Mode("off", ADAPTIVE, Speculation("off"))
AUTO = Mode("auto")


def with_all_drafters(config: Config) -> Config:
    """Add the demo's draft model where `auto` serves the demo."""
    if config.speculate != "auto" or config.draft_model is not None:
        return config
    return replace(config, draft_model=DEFAULT_MODEL) if model_name(config) == DEFAULT_MODEL else config


def model_name(config: Config) -> str:
    return str(config.model or DEFAULT_MODEL)


def compared_modes(drafters: Sequence[str]) -> tuple[Mode, ...]:
    """`off`, each drafter alone where there are several, and `auto`; a single drafter by its name.

    The prompts have no predictions or grammars: the drafters that need them are left out.
    """
    if len(drafters) == 1:
        return OFF, Mode(drafters[0], speculation=Speculation(drafters[0]))
    alone = [name for name in drafters if name not in ("prediction", "grammar")]
    modes = [Mode(name, speculation=Speculation(name)) for name in alone] if len(alone) > 1 else []
    return (OFF, *modes, *((AUTO,) if drafters else ()))


@dataclass(frozen=True, slots=True)
class BenchCase:
    """Conversations of one category, `concurrency` at once."""

    category: str
    concurrency: int
    make: Callable[[int], tuple[Conversation, ...]]  # called with the number of a variant
    full: bool = False  # the KV cache is too small: requests wait and are preempted
    # Raises RegimeError where round `number` is not what the case claims beyond BenchRepetition.check().
    claim: Callable[[Mode, int, BenchRepetition], None] = lambda mode, number, repetition: None

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
    logits_hashes: tuple[int, ...] = ()  # one per token in test mode

    @property
    def key(self) -> tuple[int, int]:
        return self.conversation, self.turn


@dataclass(frozen=True, slots=True)
class BenchRepetition:
    """All requests of one mode in one round, by conversation and turn, and the engine's counts."""

    results: tuple[RequestResult, ...]
    seconds: float  # time between the first request and the last answer
    stages: Mapping[str, float]  # seconds by stage of the engine's steps
    draft_stats: Mapping[str, SpecDecodeStats]  # drafter: statistics
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

    def check(self, case: BenchCase, mode: Mode) -> None:
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
            room = (
                max(result.num_tokens for result in self.results) - 2
            )  # all tokens but the first and the last
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

    @property
    def errors(self) -> list[str]:
        """Errors of requests that were not answered."""
        results = (*self.plain.results, *self.other.results)
        return [result.error for result in results if result.error is not None]


class BenchTarget(Protocol):
    """Engines in this process, or a server."""

    runs_per_mode: float  # runs of the conversations a round, beside one without speculation

    def run_pairs(self, case: BenchCase, modes: Sequence[Mode], number: int) -> Mapping[str, PairedRun]:
        """Round `number` of a case: every mode paired with `off`, by name."""


Pairs = Mapping[str, Sequence[PairedRun]]  # rounds by mode
Summarize = Callable[[BenchCase, Sequence[Mode], Pairs], dict[str, Any]]


def request_errors(pairs: Pairs) -> list[str]:
    return sorted({error for of_mode in pairs.values() for pair in of_mode for error in pair.errors})


def has_equal_outputs(pairs: Pairs) -> bool:
    """True where all modes gave the same answers in all rounds."""
    runs = [run for of_mode in pairs.values() for pair in of_mode for run in (pair.plain, pair.other)]
    return len({run.outputs for run in runs}) <= 1


@dataclass(slots=True)
class Measurement:
    """Cases on a target, round after round, and the figures of those that are complete."""

    target: BenchTarget  # steps may replace it
    modes: tuple[Mode, ...]
    rounds: int  # counted rounds; one before them is a warm-up
    summarize: Summarize
    token_s: float = 0.0  # estimate, of a plain step of one request
    steps: list[BenchStep] = field(default_factory=list)
    cells: list[dict[str, Any]] = field(default_factory=list)  # figures by case
    num_cases: int = 0
    _begun: dict[str, tuple[BenchCase, dict[str, list[PairedRun]]]] = field(default_factory=dict)

    def add(self, cases: Sequence[BenchCase], run_plain: Callable[[Conversation], float]) -> None:
        """Plan an uncounted round and `rounds` counted ones of each case.

        run_plain  seconds of one conversation without speculation, for an estimate
        """
        self.token_s = self.token_s or _measure_token_s(run_plain, cases[0].make(0)[0])
        for case in cases:
            weight = sum(map(functools.partial(_weight, case.concurrency), case.make(0)))
            runs = 1 + self.target.runs_per_mode * len(applicable_modes(self.modes, case))
            self.plan(case, [weight * runs * self.token_s] * (self.rounds + 1))

    def plan(self, case: BenchCase, expected_s: Sequence[float]) -> None:
        """Plan a case whose rounds take about `expected_s`."""
        self.num_cases += 1
        for number, seconds in enumerate(expected_s):
            label = f"{case.name}, " + (f"round {number} of {self.rounds}" if number else "warm-up")
            self.steps.append(
                BenchStep(case.name, label, seconds, functools.partial(self._measure, case, number))
            )

    def end(self, failed: Container[str]) -> list[dict[str, Any]]:
        """The figures of all cases; an interrupted one that did not fail counts with its complete rounds."""
        for case, pairs in self._begun.values():
            if case.name not in failed:
                self._summarize(case, pairs)
        self._begun.clear()
        return self.cells

    def _measure(self, case: BenchCase, number: int) -> None:
        pairs = self.target.run_pairs(case, applicable_modes(self.modes, case), number)
        if number == 0:
            return
        _, measured = self._begun.setdefault(case.name, (case, {name: [] for name in pairs}))
        for name, pair in pairs.items():
            measured[name].append(pair)
        if number == self.rounds:
            self._summarize(*self._begun.pop(case.name))

    def _summarize(self, case: BenchCase, pairs: Pairs) -> None:
        self.cells.append(self.summarize(case, applicable_modes(self.modes, case), pairs))


def applicable_modes(modes: Sequence[Mode], case: BenchCase) -> tuple[Mode, ...]:
    """Leave out drafters without input: no category has a grammar, few have predictions."""
    idle = {"grammar"} if any(each.prediction for each in case.make(0)) else {"grammar", "prediction"}
    return tuple(mode for mode in modes if mode.speculation.method not in idle) or tuple(modes)


def expected_weight(answer_tokens: float, concurrency: int, prompt_tokens: float = 0.0) -> float:
    """Time of requests that run `concurrency` at once, in steps of one request: a rough estimate."""
    step = 1 + (concurrency - 1) / ROWS_PER_STEP
    return answer_tokens * step / concurrency + prompt_tokens / ROWS_PER_STEP


def _measure_token_s(run_plain: Callable[[Conversation], float], conversation: Conversation) -> float:
    """Seconds of a plain step of one request, with its share of the prompt."""
    short = replace(conversation, turns=conversation.turns[:1], max_tokens=PROBE_TOKENS, ignore_eos=True)
    run_plain(short)
    return run_plain(short) / _weight(1, short)


def _weight(concurrency: int, conversation: Conversation) -> float:
    """Time of a conversation among others, in steps of one request."""
    history = [text for _, text in conversation.history]
    num_chars = sum(map(len, (*history, *conversation.turns)))
    prompt_tokens = len(conversation.prompt_ids) or num_chars / CHARS_PER_TOKEN
    return expected_weight(conversation.max_tokens * conversation.num_turns, concurrency, prompt_tokens)
