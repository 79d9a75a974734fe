"""Engines in this process, driven step by step, and replay of recorded answers with set acceptance.

Replay measures random weights of any size, and the machinery apart from draft quality. In the category
"replay 0.6" each draft token is right with probability 0.6; "replay mixed" has requests of all rates
together.
"""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foreword.bench.common import rotate
from foreword.bench.speculate.types import (
    ADAPTIVE,
    OFF,
    REPLAY,
    BenchRepetition,
    Mode,
    PairedRun,
    RequestResult,
    SpecCase,
    drafting_since,
)
from foreword.bench.speculate.workloads import (
    Conversation,
    ConversationFactory,
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

MIXED_REPLAY = REPLAY + "mixed"
RANDOM = "random"


@dataclass(slots=True)
class _InflightRequest:
    """Times are of time.perf_counter()."""

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
        """The prompt of the next turn; `history` holds the answers so far."""
        if conversation.prompt_ids:
            return list(conversation.prompt_ids)
        text, templated = prompt_text(conversation, history, self.template)
        return self.tokenizer.encode(text, add_special_tokens=not templated)

    def make_output(self, request: Request) -> ChoiceOutput:
        """Where the answer to a request grows."""
        return ChoiceOutput(self.tokenizer, request)

    def run(
        self, conversations: Sequence[Conversation], mode: Mode, concurrency: int, cache_salt: str
    ) -> BenchRepetition:
        """Answer all conversations, `concurrency` at once, each with its slot until its last turn.

        Another `cache_salt` finds neither their KV nor their outputs.
        """
        return _RepetitionRun(self, conversations, mode, cache_salt).run(concurrency)

    def step(self) -> StepReport:
        report = self.client.step()
        self.stats = report.stats
        return report


def prompt_text(
    conversation: Conversation, history: Sequence[str], template: ChatTemplate | None
) -> tuple[str, bool]:
    """The text of the next turn, and whether it is templated."""
    messages = conversation.messages(history)
    if conversation.raw or template is None:
        return "\n\n".join(message["content"] for message in messages), False
    return template.render(messages), True


class _RepetitionRun:
    """One round of one mode on one engine."""

    def __init__(
        self, engine: LocalEngine, conversations: Sequence[Conversation], mode: Mode, cache_salt: str
    ) -> None:
        self._engine = engine
        self._conversations = conversations
        self._mode = mode
        self._cache_salt = cache_salt
        # Index of a conversation and the answers to its earlier turns.
        self._waiting: deque[tuple[int, tuple[str, ...]]] = deque(
            (number, ()) for number in range(len(conversations))
        )
        self._inflight: dict[str, _InflightRequest] = {}
        self._results: list[RequestResult] = []
        self._stages: Counter[str] = Counter()
        self._draft_stats: dict[str, SpecDecodeStats] = {}
        self._before = engine.stats
        self._max_at_once = 0

    def run(self, concurrency: int) -> BenchRepetition:
        started = time.perf_counter()
        try:
            while self._waiting or self._inflight:
                while self._waiting and len(self._inflight) < concurrency:
                    self._submit(*self._waiting.popleft())
                if self._inflight:
                    self._process_report(self._engine.step())
        finally:  # an error or Ctrl-C leaves requests, which the next round must not meet
            for request_id in self._inflight:
                self._engine.client.abort(request_id)
        seconds = time.perf_counter() - started
        results = tuple(sorted(self._results, key=lambda result: result.key))
        before, after = self._before, self._engine.stats
        preemptions = after.preemptions_total - before.preemptions_total
        drafting = drafting_since(before.drafting, after.drafting)
        return BenchRepetition(
            results,
            seconds,
            dict(self._stages),
            self._draft_stats,
            preemptions,
            drafting,
            self._max_at_once,
        )

    def _submit(self, number: int, history: tuple[str, ...]) -> None:
        """Submit a conversation's next turn, unless its history exceeds the context."""
        conversation, turn = self._conversations[number], len(history)
        prompt_ids = self._engine.prompt_ids(conversation, history)
        if turn and len(prompt_ids) + conversation.max_tokens > self._engine.max_len:
            return
        request = self._request(conversation, turn, prompt_ids)
        self._engine.client.submit(request)
        now = time.perf_counter()
        result = RequestResult(number, turn, request.seed, request.prompt_ids)
        output = self._engine.make_output(request)
        self._inflight[request.id] = _InflightRequest(result, output, now, now, history)

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
        (request,) = make_requests(
            prompt_ids,
            params,
            engine.tokenizer,
            name,
            engine.max_len,
            cache_salt=self._cache_salt,
            vocab_size=engine.info.vocab_size,
        )
        return request

    def _process_report(self, report: StepReport) -> None:
        now = time.perf_counter()
        ended = sum(getattr(event, "finish_reason", None) is not None for event in report.events)
        self._max_at_once = max(self._max_at_once, report.stats.requests_running + ended)
        self._stages.update(report.stats.stage_seconds)
        for event in report.events:
            if isinstance(event, ErrorEvent):
                raise event.error
            assert isinstance(event, TokenEvent)
            self._deliver(self._inflight[event.request_id], event, now)

    def _deliver(self, inflight: _InflightRequest, event: TokenEvent, now: float) -> None:
        result, count = inflight.result, len(event.token_ids)
        inflight.output.feed(event)
        result.logits_hashes += event.logits_hashes
        if event.draft is not None and event.draft.num_drafted:
            stats = self._draft_stats.setdefault(event.draft.drafter, SpecDecodeStats())
            stats.add(event.draft.num_drafted, event.draft.num_accepted, count)
        if count and result.ttft_s is None:
            result.ttft_s = now - inflight.sent_s
        elif count:
            result.gaps.append((now - inflight.last_s, count))
        inflight.last_s = now
        if event.finish_reason is not None:
            self._end(event.request_id, now)

    def _end(self, request_id: str, now: float) -> None:
        inflight = self._inflight.pop(request_id)
        result, output = inflight.result, inflight.output
        result.output, result.num_tokens = tuple(output.token_ids), output.num_tokens
        result.events, result.num_cached = output.events, output.num_cached
        result.total_s = now - inflight.sent_s
        self._results.append(result)
        if result.turn + 1 < self._conversations[result.conversation].num_turns:
            self._waiting.appendleft((result.conversation, (*inflight.history, output.text)))


class LocalTarget:
    """Engines by name (ADAPTIVE, FIXED, PLAIN), loaded side by side so that their rounds alternate."""

    def __init__(self, configs: Mapping[str, Config]) -> None:
        self.engines = {name: LocalEngine(config) for name, config in configs.items()}
        self._num_plain = 0

    def run_plain(self, conversation: Conversation) -> float:
        """Seconds of one conversation without speculation."""
        self._num_plain += 1
        salt = f"plain {self._num_plain}"
        return self.engines[ADAPTIVE].run((conversation,), OFF, 1, salt).seconds

    def run_pairs(self, case: SpecCase, modes: Sequence[Mode], number: int) -> Mapping[str, PairedRun]:
        """Every mode and round has a cache salt of its own, so that all start without KV and corpus."""
        conversations = case.make(0)
        rounds: dict[str, BenchRepetition] = {}
        for mode in rotate((OFF, *modes), number):
            salt = f"{case.name}, {mode.name}, round {number}"
            rounds[mode.name] = self.engines[mode.engine].run(conversations, mode, case.concurrency, salt)
            rounds[mode.name].check(case, mode)
        return {mode.name: PairedRun(rounds[OFF.name], rounds[mode.name]) for mode in modes}


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
    return (*(f"{REPLAY}{rate:g}" for rate in rates), *((MIXED_REPLAY,) if len(rates) > 1 else ()))


def make_replay_conversations(
    category: str, count: int, variant: int, base: Sequence[str], make: ConversationFactory
) -> tuple[Conversation, ...]:
    """Conversations of the base categories in turn, under seeds of their own."""
    columns = [make(name, count, variant) for name in base if name != RANDOM]
    return tuple(
        replace(columns[number % len(columns)][number], category=category, seed=stable_seed(category, number))
        for number in range(count)
    )


def record_outputs(
    engine: LocalEngine,
    groups: Sequence[tuple[Conversation, ...]],
    rates: Sequence[float],
    concurrency: int,
    path: Path,
) -> None:
    """Answer everything once without speculation and write the replay file."""
    lines = []
    for conversations in groups:
        for result in engine.run(conversations, OFF, concurrency, "recording").results:
            category = conversations[result.conversation].category
            rate = (
                rates[result.conversation % len(rates)]
                if category == MIXED_REPLAY
                else float(category.removeprefix(REPLAY))
            )
            line = {"prompt_token_ids": result.prompt_ids, "token_ids": result.output}
            lines.append({**line, "seed": result.seed, "error_rate": 1.0 - rate})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
