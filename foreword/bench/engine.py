"""Engines in this process, driven step by step."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from foreword.bench.measurement import (
    ADAPTIVE,
    OFF,
    BenchCase,
    BenchRepetition,
    Mode,
    PairedRun,
    RequestResult,
)
from foreword.bench.statistics import rotate
from foreword.bench.workloads import Conversation
from foreword.checkpoint import prepare_checkpoint
from foreword.config.options import Config
from foreword.core.outputs import DraftingStats, ErrorEvent, StepReport, StepStats, TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.readiness import OnLoadProgress
from foreword.core.request import Request
from foreword.engine_client.local import LocalClient
from foreword.metrics.request_stats import SpecDecodeStats
from foreword.tokenizer.chat_template import ChatTemplate
from foreword.tokenizer.input_processor import make_requests
from foreword.tokenizer.output_processor import ChoiceOutput


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

    def __init__(self, config: Config, on_progress: OnLoadProgress | None = None) -> None:
        prepared = prepare_checkpoint(config)
        self.tokenizer = prepared.tokenizer
        self.template = ChatTemplate.from_tokenizer(self.tokenizer) if self.tokenizer.chat_template else None
        vocabulary = prepared.tokenizer.engine_vocabulary
        self.client = LocalClient(prepared.config, prepared.never_sampled_ids, vocabulary, on_progress)
        self.info = self.client.info
        self.stats = StepStats()
        last = min(self.tokenizer.vocab_size, self.info.vocab_size)
        special = {*self.tokenizer.eos_token_ids, *prepared.never_sampled_ids}
        self._plain_ids = tuple(token_id for token_id in range(last) if token_id not in special)

    @property
    def max_len(self) -> int:
        """Tokens that a prompt and its answer may fill."""
        return self.info.resolved.max_model_len

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))

    def plain_ids(self) -> Sequence[int]:
        """Ids of tokens that a model may sample, for random prompts."""
        return self._plain_ids

    def prompt_ids(self, conversation: Conversation, history: Sequence[str]) -> list[int]:
        """The prompt of the next turn; `history` holds the answers so far."""
        if conversation.prompt_ids:
            return list(conversation.prompt_ids)
        messages = conversation.messages(history)
        if conversation.raw or self.template is None:
            return self.tokenizer.encode("\n\n".join(message["content"] for message in messages))
        return self.tokenizer.encode(self.template.render(messages), add_special_tokens=False)

    def make_output(self, request: Request) -> ChoiceOutput:
        """Collects the answer to a request."""
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
            results, seconds, dict(self._stages), self._draft_stats, preemptions, drafting, self._max_at_once
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
            vocab_size=engine.info.vocab_size,
        )
        return replace(request, cache_salt=self._cache_salt)

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
    """Engines by name (ADAPTIVE, FIXED, PLAIN), loaded side by side so that their rounds alternate.

    isolated  every mode and round has a cache salt of its own, so that all start without KV and corpus
    """

    runs_per_mode = 1.0

    def __init__(
        self, configs: Mapping[str, Config], isolated: bool = True, on_progress: OnLoadProgress | None = None
    ) -> None:
        self.engines = {name: LocalEngine(config, on_progress) for name, config in configs.items()}
        self._isolated = isolated
        self._num_plain = 0

    def run_plain(self, conversation: Conversation) -> float:
        """Seconds of one conversation without speculation."""
        self._num_plain += 1
        return self.engines[ADAPTIVE].run((conversation,), OFF, 1, f"plain {self._num_plain}").seconds

    def run_pairs(self, case: BenchCase, modes: Sequence[Mode], number: int) -> Mapping[str, PairedRun]:
        salt = f"{case.name}, round {number}, " if self._isolated else None
        return run_modes(self.engines, case, OFF, modes, number, salt)


def run_modes(
    engines: Mapping[str, LocalEngine],
    case: BenchCase,
    off: Mode,
    modes: Sequence[Mode],
    number: int,
    salt: str | None,
) -> Mapping[str, PairedRun]:
    """Round `number` of a case: all modes, which share KV and corpus if `salt` is None."""
    conversations = case.make(0)
    runs: dict[str, BenchRepetition] = {}
    for mode in rotate(tuple(dict.fromkeys((off, *modes))), number):
        own_salt = "" if salt is None else salt + mode.name
        run = engines[mode.engine].run(conversations, mode, case.concurrency, own_salt)
        run.check(case, mode)
        case.claim(mode, number, run)
        runs[mode.name] = run
    return {mode.name: PairedRun(runs[off.name], runs[mode.name]) for mode in modes}


def drafting_since(before: DraftingStats, after: DraftingStats) -> DraftingStats:
    """Decisions between two totals."""
    return DraftingStats(
        draft_length_counts={
            name: Counter(counts) - Counter(before.draft_length_counts.get(name, {}))
            for name, counts in after.draft_length_counts.items()
        },
        no_draft_counts=Counter(after.no_draft_counts) - Counter(before.no_draft_counts),
        predicted_seconds=after.predicted_seconds - before.predicted_seconds,
        realised_seconds=after.realised_seconds - before.realised_seconds,
        plain_seconds=after.plain_seconds - before.plain_seconds,
        exploring_seconds=after.exploring_seconds - before.exploring_seconds,
    )
