"""Engines with random weights under `foreword bench gpu`: what is asked of them, and what they answer."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from foreword.bench.gpu.config import ROLES, BenchConfig, write_model
from foreword.bench.gpu.device import BenchDevice, IdleShare
from foreword.config.options import Config
from foreword.core.outputs import ErrorEvent, StepReport, TokenEvent
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request
from foreword.core.structured import StructuredOutput, Vocabulary
from foreword.engine_client.local import LocalClient

__all__ = ["BenchEngine", "BenchRequest", "BenchResult", "EngineFactory", "make_requests"]

WARM_STEPS = 4
FIRST_ID = 32  # prompts are of ids from here on
BYTES = 256


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """What is asked; the same question may be asked under several names."""

    prompt_ids: tuple[int, ...]
    seed: int
    max_tokens: int
    method: str = "off"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    structured: StructuredOutput | None = None

    def request(self, name: str) -> Request:
        params = SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            max_tokens=self.max_tokens,
            ignore_eos=True,
            seed=self.seed,
            speculation=Speculation(self.method),
            structured=self.structured,
        )
        return Request(name, self.prompt_ids, params, self.seed)


def make_requests(count: int, prompt: int, max_tokens: int, vocab: int, **options: Any) -> list[BenchRequest]:
    """Prompts of random ids, `prompt` tokens each, answered greedily unless options say otherwise."""
    chance = Random(count * 1_000_003 + prompt)
    last = min(vocab, 1 << 16)
    return [
        BenchRequest(
            tuple(chance.randrange(FIRST_ID, last) for _ in range(prompt)), number, max_tokens, **options
        )
        for number in range(count)
    ]


@dataclass(slots=True)
class BenchResult:
    """Answers in the order of the questions.

    seconds   from when all had their first token to the last token of all
    counted   tokens that came in that time, in `steps` steps
    stages    seconds of those steps by stage
    drafted, accepted  tokens of drafts that were verified in all of it
    """

    tokens: list[tuple[int, ...]]
    hashes: list[tuple[int, ...]]
    seconds: float = 0.0
    counted: int = 0
    steps: int = 0
    stages: list[dict[str, float]] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.counted / max(self.seconds, 1e-9)

    @property
    def step_s(self) -> float:
        return self.seconds / max(self.steps, 1)

    def stage_us(self, name: str) -> float:
        """Median of a step."""
        return statistics.median([stages.get(name, 0.0) * 1e6 for stages in self.stages] or [0.0])


class BenchEngine:
    """One engine, driven step by step. Nothing else is open on it while a method runs."""

    def __init__(self, config: Config, device: BenchDevice) -> None:
        self.client = LocalClient(config, (), lambda: _spelling(self.client.info.vocab_size))
        self._device = device
        self._serial = itertools.count()

    def close(self) -> None:
        """Let go of the engine, whoever still holds the bed."""
        del self.client

    def answer(self, asked: Sequence[BenchRequest]) -> BenchResult:
        """All of them at once."""
        return self._finish(_Inflight(asked, next(self._serial)))

    def one_by_one(self, asked: Sequence[BenchRequest]) -> BenchResult:
        found = [self.answer([question]) for question in asked]
        return BenchResult([one.tokens[0] for one in found], [one.hashes[0] for one in found])

    def first_token_s(self, question: BenchRequest) -> float:
        """From asking to the first token, and no further."""
        with self._begun([question]) as seconds:
            return seconds

    def idle(self, asked: Sequence[BenchRequest], steps: int) -> IdleShare | None:
        """Of the device, while all of them decode."""
        with self._begun(asked):
            for _ in range(WARM_STEPS):
                self.client.step()
            return self._device.idle(lambda: [self.client.step() for _ in range(steps)])

    @contextmanager
    def _begun(self, asked: Sequence[BenchRequest]) -> Iterator[float]:
        """All have their first token, so many seconds after they were asked; in the end they are given up."""
        open_ = _Inflight(asked, next(self._serial))
        self._device.wait()
        started = time.perf_counter()
        self._begin(open_)
        yield time.perf_counter() - started
        for name in open_.left:
            self.client.abort(name)
        while not self.client.idle:
            self.client.step()

    def _begin(self, open_: _Inflight) -> None:
        for request in open_.requests:
            self.client.submit(request)
        while open_.waiting:
            open_.take(self.client.step())

    def _finish(self, open_: _Inflight) -> BenchResult:
        self._begin(open_)
        before, preempted = open_.num_tokens, 0
        stages = []
        started = time.perf_counter()
        while open_.left:
            report = self.client.step()
            open_.take(report)
            stages.append(dict(report.stats.stage_seconds))
            preempted = report.stats.preemptions_total
        self._device.wait()
        seconds = time.perf_counter() - started
        counted = open_.num_tokens - before
        return replace(
            open_.answered(),
            seconds=seconds,
            counted=counted,
            steps=len(stages),
            stages=stages,
            preemptions=preempted,
        )


class _Inflight:
    """Questions under way.

    waiting  names of those without a token; left: of those that are not over
    """

    def __init__(self, asked: Sequence[BenchRequest], serial: int) -> None:
        self.requests = [question.request(f"{serial}-{number}") for number, question in enumerate(asked)]
        self.waiting = {request.id for request in self.requests}
        self.left = set(self.waiting)
        self.num_tokens = self._drafted = self._accepted = 0
        self._tokens: dict[str, list[int]] = {request.id: [] for request in self.requests}
        self._hashes: dict[str, list[int]] = {request.id: [] for request in self.requests}

    def take(self, report: StepReport) -> None:
        for event in report.events:
            if isinstance(event, ErrorEvent):
                raise event.error
            assert isinstance(event, TokenEvent)
            self._tokens[event.request_id] += event.token_ids
            self._hashes[event.request_id] += event.logits_hashes
            self.num_tokens += len(event.token_ids)
            self.waiting.discard(event.request_id)
            if event.draft is not None:
                self._drafted += event.draft.num_drafted
                self._accepted += event.draft.num_accepted
            if event.finish_reason is not None:
                self.left.discard(event.request_id)

    def answered(self) -> BenchResult:
        tokens, hashes = (
            [tuple(told[request.id]) for request in self.requests] for told in (self._tokens, self._hashes)
        )
        return BenchResult(tokens, hashes, drafted=self._drafted, accepted=self._accepted)


@dataclass(frozen=True, slots=True)
class EngineFactory:
    """Where engines are made: one at a time, or as many as are compared.

    folder  of model directories and recordings
    """

    scale: BenchConfig
    device: BenchDevice
    folder: Path

    @contextmanager
    def bed(self, role: str, **options: Any) -> Iterator[BenchEngine]:
        """An engine of this role's shape; its memory is free again afterwards."""
        bed = BenchEngine(self.config(role, **options), self.device)
        try:
            yield bed
        finally:
            bed.close()
            self.device.free()

    def config(self, role: str, **options: Any) -> Config:
        scale = self.scale
        model = write_model(self.folder, scale.shape(role), scale.dtype)
        options.setdefault("kv_cache_memory", f"{self.cache_tokens}tokens")
        options.setdefault("max_num_seqs", max(*scale.fast_streams, *scale.batch_sizes))
        options.setdefault("max_num_batched_tokens", max(scale.long_prompt, options["max_num_seqs"]))
        options.setdefault("prefix_caching", False)
        options.setdefault("speculate", "off")
        options.setdefault("max_model_len", scale.long_prompt + 64)
        return Config(
            model=str(model),
            device=scale.device,
            dtype=scale.dtype,
            load_format="dummy",
            **options,
        )

    @property
    def cache_tokens(self) -> int:
        """Of a cache that holds all that is ever asked at once."""
        scale = self.scale
        longest = scale.prompt + max(scale.answer, scale.check_tokens) + 64
        return max(max(*scale.fast_streams, *scale.batch_sizes) * longest, 2 * scale.long_prompt) + 1024

    def drafter(self, role: str) -> str:
        """The directory of the draft model beside a role's."""
        scale = self.scale
        return str(
            write_model(self.folder, scale.drafter if role == ROLES[0] else scale.small_drafter, scale.dtype)
        )


def _spelling(vocab_size: int) -> Vocabulary:
    """The first ids are the bytes, the others three letters each; the last one ends an answer."""
    words = (
        bytes((97 + n % 26, 97 + n // 26 % 26, 97 + n // 676 % 26)) for n in range(vocab_size - BYTES - 1)
    )
    return Vocabulary(
        (*(bytes((n,)) for n in range(BYTES)), *words, b""), (vocab_size - 1,), (vocab_size - 1,)
    )
