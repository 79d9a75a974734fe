"""Engines in this process, driven step by step, as `LLM` drives its own."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foreword.cli.bench_common import rotated
from foreword.cli.bench_speculate_prompts import Script, woven
from foreword.cli.bench_speculate_round import OFF, Call, Cell, Mode, Pair, Round, drafting_since
from foreword.config import Config
from foreword.core.events import Failed, StepReport, StepStats, Tokens
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine.local import LocalClient
from foreword.metrics.tally import DraftTally
from foreword.prepare import prepare
from foreword.text.answer import Answer
from foreword.text.prepare import make_requests
from foreword.text.template import ChatTemplate

__all__ = ["LocalEngine", "LocalTarget", "prompt_text"]


@dataclass(slots=True)
class _Open:
    """A request under way. Seconds are of time.perf_counter()."""

    call: Call
    answer: Answer
    sent_s: float
    last_s: float
    history: tuple[str, ...]


class LocalEngine:
    """One engine with its tokenizer. Raises what `LLM` raises."""

    def __init__(self, config: Config) -> None:
        prepared = prepare(config)
        self.tokenizer = prepared.tokenizer
        self.template = ChatTemplate.of(self.tokenizer) if self.tokenizer.chat_template else None
        self.client = LocalClient(prepared.config, prepared.unused_ids, prepared.tokenizer.vocabulary)
        self.info = self.client.info
        self.stats = StepStats()
        last = min(self.tokenizer.vocab_size, self.info.vocab_size)
        special = {*self.tokenizer.eos_token_ids, *prepared.unused_ids}
        self.plain_ids = tuple(token_id for token_id in range(last) if token_id not in special)

    @property
    def reach(self) -> int:
        """Tokens that a prompt and its answer may fill."""
        return self.info.resolved.max_model_len

    def prompt_ids(self, script: Script, history: Sequence[str]) -> list[int]:
        """The prompt of the next turn; `history` holds the answers to the turns before."""
        if script.prompt_ids:
            return list(script.prompt_ids)
        text, templated = prompt_text(script, history, self.template)
        return self.tokenizer.encode(text, add_special_tokens=not templated)

    def run(self, scripts: Sequence[Script], mode: Mode, concurrency: int, tenant: str) -> Round:
        """Answer all scripts, `concurrency` at once; a script keeps its place until its last turn is answered.

        tenant  whose text it is: another one finds neither its KV nor its outputs
        """
        return _Run(self, scripts, mode, tenant).finish(concurrency)

    def step(self) -> StepReport:
        report = self.client.step()
        self.stats = report.stats
        return report


def prompt_text(script: Script, history: Sequence[str], template: ChatTemplate | None) -> tuple[str, bool]:
    """The text of the next turn, and whether a chat template made it."""
    parts = woven(script.turns, history)
    if script.raw or template is None:
        return "\n\n".join(parts), False
    roles = ("user", "assistant")
    return template.render([{"role": roles[index % 2], "content": part} for index, part in enumerate(parts)]), True


class _Run:
    """One round of one mode on one engine."""

    def __init__(self, engine: LocalEngine, scripts: Sequence[Script], mode: Mode, tenant: str) -> None:
        self._engine = engine
        self._scripts = scripts
        self._mode = mode
        self._tenant = tenant
        self._waiting: deque[tuple[int, tuple[str, ...]]] = deque((number, ()) for number in range(len(scripts)))
        self._open: dict[str, _Open] = {}
        self._calls: list[Call] = []
        self._stages: Counter[str] = Counter()
        self._tallies: dict[str, DraftTally] = {}
        self._before = engine.stats

    def finish(self, concurrency: int) -> Round:
        started = time.perf_counter()
        while self._waiting or self._open:
            while self._waiting and len(self._open) < concurrency:
                self._submit(*self._waiting.popleft())
            if self._open:
                self._take(self._engine.step())
        seconds = time.perf_counter() - started
        calls = tuple(sorted(self._calls, key=lambda call: call.key))
        before, after = self._before, self._engine.stats
        preemptions = after.preemptions_total - before.preemptions_total
        drafting = drafting_since(before.drafting, after.drafting)
        return Round(calls, seconds, dict(self._stages), self._tallies, preemptions, drafting)

    def _submit(self, number: int, history: tuple[str, ...]) -> None:
        """Send a script's next turn, unless its history has outgrown the context."""
        script, turn = self._scripts[number], len(history)
        prompt_ids = self._engine.prompt_ids(script, history)
        if turn and len(prompt_ids) + script.max_tokens > self._engine.reach:
            return
        request = self._request(script, turn, prompt_ids)
        self._engine.client.submit(request)
        now = time.perf_counter()
        call = Call(number, turn, request.seed, request.prompt_ids)
        self._open[request.id] = _Open(call, Answer(self._engine.tokenizer, request), now, now, history)

    def _request(self, script: Script, turn: int, prompt_ids: Sequence[int]) -> Request:
        params = SamplingParams(
            temperature=script.temperature,
            max_tokens=script.max_tokens,
            ignore_eos=script.ignore_eos,
            prediction=script.prediction,
            seed=script.seed + turn,
            speculation=self._mode.speculation,
        )
        name = f"{self._tenant}-{script.category}-{script.seed}-{turn}"
        engine = self._engine
        vocab_size = engine.info.vocab_size
        (request,) = make_requests(
            prompt_ids, params, engine.tokenizer, name, engine.reach, tenant=self._tenant, vocab_size=vocab_size
        )
        return request

    def _take(self, report: StepReport) -> None:
        now = time.perf_counter()
        self._stages.update(report.stats.stage_seconds)
        for event in report.events:
            if isinstance(event, Failed):
                raise event.error
            assert isinstance(event, Tokens)
            self._deliver(self._open[event.request_id], event, now)

    def _deliver(self, open_: _Open, event: Tokens, now: float) -> None:
        call, count = open_.call, len(event.token_ids)
        open_.answer.feed(event)
        if event.draft is not None and event.draft.drafted:
            tally = self._tallies.setdefault(event.draft.drafter, DraftTally())
            tally.add(event.draft.drafted, event.draft.accepted, count)
        if count and call.first_s is None:
            call.first_s = now - open_.sent_s
        elif count:
            call.gaps.append((now - open_.last_s, count))
        open_.last_s = now
        if event.finish_reason is not None:
            self._end(event.request_id, now)

    def _end(self, request_id: str, now: float) -> None:
        open_ = self._open.pop(request_id)
        call, answer = open_.call, open_.answer
        call.output, call.num_tokens = tuple(answer.token_ids), answer.num_tokens
        call.total_s = now - open_.sent_s
        self._calls.append(call)
        if call.turn + 1 < self._scripts[call.script].num_turns:
            self._waiting.appendleft((call.script, (*open_.history, answer.text)))


class LocalTarget:
    """Engines by name (ADAPTIVE, FIXED, PLAIN), loaded side by side so that their rounds can take turns."""

    def __init__(self, configs: Mapping[str, Config]) -> None:
        self.engines = {name: LocalEngine(config) for name, config in configs.items()}

    def pairs(self, cell: Cell, modes: Sequence[Mode], number: int) -> Mapping[str, Pair]:
        """Every mode has a tenant of its own, and in each round another: all of them start without KV and corpus."""
        scripts = cell.make(0)
        rounds: dict[str, Round] = {}
        for mode in rotated((OFF, *modes), number):
            tenant = f"{cell.name}, {mode.name}, round {number}"
            rounds[mode.name] = self.engines[mode.engine].run(scripts, mode, cell.concurrency, tenant)
        return {mode.name: Pair(rounds[OFF.name], rounds[mode.name]) for mode in modes}
