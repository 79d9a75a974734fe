"""Engines in this process, driven step by step, as `LLM` drives its own.

Acceptance as asked for: recorded answers are drafted, with so many tokens made wrong.

Random weights of any size can be measured so, and the machinery apart from the guessing. The category "replay 0.6"
has drafts whose tokens are right with probability 0.6 each; "replay mixed" has requests of all rates together.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foreword.bench.common import rotate
from foreword.bench.speculate.types import (
    OFF,
    BenchRepetition,
    Mode,
    PairedRun,
    RequestResult,
    SpecCase,
    drafting_since,
)
from foreword.bench.speculate.workloads import (
    Conversation,
    PromptBudget,
    interleave,
    make_conversations,
    stable_seed,
)
from foreword.checkpoint import prepare_checkpoint
from foreword.config.options import Config
from foreword.core.outputs import ErrorEvent, StepReport, StepStats, TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine_client.local import LocalClient
from foreword.errors import ConfigError
from foreword.metrics.spec_stats import SpecDecodeStats
from foreword.tokenizer.chat_template import ChatTemplate
from foreword.tokenizer.input_processor import make_requests
from foreword.tokenizer.output_processor import ChoiceOutput

__all__ = [
    "MIXED_REPLAY",
    "LocalEngine",
    "LocalTarget",
    "make_replay_conversations",
    "parse_acceptance_rates",
    "prompt_text",
    "record_outputs",
    "replay_categories",
]


@dataclass(slots=True)
class _InflightRequest:
    """A request under way. Seconds are of time.perf_counter()."""

    result: RequestResult
    output: ChoiceOutput
    sent_s: float
    last_s: float
    history: tuple[str, ...]


class LocalEngine:
    """One engine with its tokenizer. Raises what `LLM` raises."""

    def __init__(self, config: Config) -> None:
        prepared = prepare_checkpoint(config)
        self.tokenizer = prepared.tokenizer
        self.template = ChatTemplate.from_tokenizer(self.tokenizer) if self.tokenizer.chat_template else None
        self.client = LocalClient(prepared.config, prepared.never_sampled_ids, prepared.tokenizer.vocabulary)
        self.info = self.client.info
        self.stats = StepStats()
        last = min(self.tokenizer.vocab_size, self.info.vocab_size)
        special = {*self.tokenizer.eos_token_ids, *prepared.never_sampled_ids}
        self.plain_ids = tuple(token_id for token_id in range(last) if token_id not in special)

    @property
    def max_len(self) -> int:
        """Tokens that a prompt and its answer may fill."""
        return self.info.resolved.max_model_len

    def prompt_ids(self, conversation: Conversation, history: Sequence[str]) -> list[int]:
        """The prompt of the next turn; `history` holds the answers to the turns before."""
        if conversation.prompt_ids:
            return list(conversation.prompt_ids)
        text, templated = prompt_text(conversation, history, self.template)
        return self.tokenizer.encode(text, add_special_tokens=not templated)

    def run(
        self, conversations: Sequence[Conversation], mode: Mode, concurrency: int, cache_salt: str
    ) -> BenchRepetition:
        """Answer all scripts, `concurrency` at once; a script keeps its place until its last turn is answered.

        tenant  whose text it is: another one finds neither its KV nor its outputs
        """
        return _RepetitionRun(self, conversations, mode, cache_salt).run(concurrency)

    def step(self) -> StepReport:
        report = self.client.step()
        self.stats = report.stats
        return report


def prompt_text(
    conversation: Conversation, history: Sequence[str], template: ChatTemplate | None
) -> tuple[str, bool]:
    """The text of the next turn, and whether a chat template made it."""
    parts = interleave(conversation.turns, history)
    if conversation.raw or template is None:
        return "\n\n".join(parts), False
    roles = ("user", "assistant")
    return template.render(
        [{"role": roles[index % 2], "content": part} for index, part in enumerate(parts)]
    ), True


class _RepetitionRun:
    """One round of one mode on one engine."""

    def __init__(
        self, engine: LocalEngine, conversations: Sequence[Conversation], mode: Mode, cache_salt: str
    ) -> None:
        self._engine = engine
        self._conversations = conversations
        self._mode = mode
        self._cache_salt = cache_salt
        self._waiting: deque[tuple[int, tuple[str, ...]]] = deque(
            (number, ()) for number in range(len(conversations))
        )
        self._inflight: dict[str, _InflightRequest] = {}
        self._results: list[RequestResult] = []
        self._stages: Counter[str] = Counter()
        self._draft_stats: dict[str, SpecDecodeStats] = {}
        self._before = engine.stats

    def run(self, concurrency: int) -> BenchRepetition:
        started = time.perf_counter()
        while self._waiting or self._inflight:
            while self._waiting and len(self._inflight) < concurrency:
                self._submit(*self._waiting.popleft())
            if self._inflight:
                self._process_report(self._engine.step())
        seconds = time.perf_counter() - started
        calls = tuple(sorted(self._results, key=lambda call: call.key))
        before, after = self._before, self._engine.stats
        preemptions = after.preemptions_total - before.preemptions_total
        drafting = drafting_since(before.drafting, after.drafting)
        return BenchRepetition(calls, seconds, dict(self._stages), self._draft_stats, preemptions, drafting)

    def _submit(self, number: int, history: tuple[str, ...]) -> None:
        """Send a script's next turn, unless its history has outgrown the context."""
        script, turn = self._conversations[number], len(history)
        prompt_ids = self._engine.prompt_ids(script, history)
        if turn and len(prompt_ids) + script.max_tokens > self._engine.max_len:
            return
        request = self._request(script, turn, prompt_ids)
        self._engine.client.submit(request)
        now = time.perf_counter()
        call = RequestResult(number, turn, request.seed, request.prompt_ids)
        self._inflight[request.id] = _InflightRequest(
            call, ChoiceOutput(self._engine.tokenizer, request), now, now, history
        )

    def _request(self, conversation: Conversation, turn: int, prompt_ids: Sequence[int]) -> Request:
        params = SamplingParams(
            temperature=conversation.temperature,
            max_tokens=conversation.max_tokens,
            ignore_eos=conversation.ignore_eos,
            prediction=conversation.prediction,
            seed=conversation.seed + turn,
            speculation=self._mode.speculation,
        )
        name = f"{self._cache_salt}-{conversation.category}-{conversation.seed}-{turn}"
        engine = self._engine
        vocab_size = engine.info.vocab_size
        (request,) = make_requests(
            prompt_ids,
            params,
            engine.tokenizer,
            name,
            engine.max_len,
            cache_salt=self._cache_salt,
            vocab_size=vocab_size,
        )
        return request

    def _process_report(self, report: StepReport) -> None:
        now = time.perf_counter()
        self._stages.update(report.stats.stage_seconds)
        for event in report.events:
            if isinstance(event, ErrorEvent):
                raise event.error
            assert isinstance(event, TokenEvent)
            self._deliver(self._inflight[event.request_id], event, now)

    def _deliver(self, inflight: _InflightRequest, event: TokenEvent, now: float) -> None:
        call, count = inflight.result, len(event.token_ids)
        inflight.output.feed(event)
        if event.draft is not None and event.draft.num_drafted:
            tally = self._draft_stats.setdefault(event.draft.drafter, SpecDecodeStats())
            tally.add(event.draft.num_drafted, event.draft.num_accepted, count)
        if count and call.ttft_s is None:
            call.ttft_s = now - inflight.sent_s
        elif count:
            call.gaps.append((now - inflight.last_s, count))
        inflight.last_s = now
        if event.finish_reason is not None:
            self._end(event.request_id, now)

    def _end(self, request_id: str, now: float) -> None:
        open_ = self._inflight.pop(request_id)
        call, answer = open_.result, open_.output
        call.output, call.num_tokens = tuple(answer.token_ids), answer.num_tokens
        call.total_s = now - open_.sent_s
        self._results.append(call)
        if call.turn + 1 < self._conversations[call.conversation].num_turns:
            self._waiting.appendleft((call.conversation, (*open_.history, answer.text)))


class LocalTarget:
    """Engines by name (ADAPTIVE, FIXED, PLAIN), loaded side by side so that their rounds can take turns."""

    def __init__(self, configs: Mapping[str, Config]) -> None:
        self.engines = {name: LocalEngine(config) for name, config in configs.items()}

    def run_pairs(self, case: SpecCase, modes: Sequence[Mode], number: int) -> Mapping[str, PairedRun]:
        """Every mode has a tenant of its own, and in each round another: all of them start without KV and corpus."""
        scripts = case.make(0)
        rounds: dict[str, BenchRepetition] = {}
        for mode in rotate((OFF, *modes), number):
            tenant = f"{case.name}, {mode.name}, round {number}"
            rounds[mode.name] = self.engines[mode.engine].run(scripts, mode, case.concurrency, tenant)
        return {mode.name: PairedRun(rounds[OFF.name], rounds[mode.name]) for mode in modes}


PREFIX = "replay "
MIXED_REPLAY = PREFIX + "mixed"
RANDOM = "random"


def parse_acceptance_rates(text: str) -> tuple[float, ...]:
    """ "0,0.3,0.9" as numbers. Raises ConfigError."""
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        rates = (-1.0,)
    if not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError(f"--replay-acceptance must be numbers from 0 to 1 joined by commas, got {text!r}")
    return rates


def replay_categories(rates: Sequence[float]) -> tuple[str, ...]:
    return (*(f"{PREFIX}{rate:g}" for rate in rates), *((MIXED_REPLAY,) if len(rates) > 1 else ()))


def make_replay_conversations(
    category: str, count: int, variant: int, base: Sequence[str], budget: PromptBudget
) -> tuple[Conversation, ...]:
    """Scripts of the base categories in turn, under seeds of their own: a recording is found by prompt and seed."""
    each = [make_conversations(name, count, variant, budget) for name in base if name != RANDOM]
    return tuple(
        replace(each[number % len(each)][number], category=category, seed=stable_seed(category, number))
        for number in range(count)
    )


def record_outputs(
    engine: LocalEngine,
    groups: Sequence[tuple[Conversation, ...]],
    rates: Sequence[float],
    concurrency: int,
    path: Path,
) -> None:
    """Answer everything once without speculation and write what the drafter `replay` reads."""
    with path.open("w", encoding="utf-8") as file:
        for scripts in groups:
            for line in _lines(engine, scripts, rates, concurrency):
                file.write(json.dumps(line) + "\n")


def _lines(
    engine: LocalEngine, conversations: tuple[Conversation, ...], rates: Sequence[float], concurrency: int
) -> Iterator[dict[str, object]]:
    for call in engine.run(conversations, OFF, concurrency, "recording").results:
        yield {
            "prompt_token_ids": call.prompt_ids,
            "token_ids": call.output,
            "seed": call.seed,
            "error_rate": 1.0 - _rate(conversations[call.conversation], call.conversation, rates),
        }


def _rate(conversation: Conversation, number: int, rates: Sequence[float]) -> float:
    if conversation.category == MIXED_REPLAY:
        return rates[number % len(rates)]
    return float(conversation.category.removeprefix(PREFIX))
