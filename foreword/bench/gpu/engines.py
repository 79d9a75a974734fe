"""Engines with random weights for `foreword bench gpu`, and its section "engines".

Expected outputs come from an eager engine without overlap that serves one request at a time. Every other
setting must give the same tokens and logits hashes; ordinary torch (--fast-math) must not. Each setting is a
job; the first one leaves the expected outputs in a file.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from foreword.bench.gpu.config import BenchConfig, write_model
from foreword.bench.gpu.device import BenchDevice, IdleShare
from foreword.bench.gpu.report import Report
from foreword.bench.regime import require
from foreword.config.options import Config
from foreword.core.outputs import ErrorEvent, StepReport, TokenEvent
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request
from foreword.core.structured_output import Vocabulary
from foreword.engine_client.local import LocalClient

WARM_STEPS = 4
FIRST_ID = 32  # lowest token id of a prompt
NUM_BYTES = 256
ROLE = "small"  # of the section "engines"
ERROR_RATE = 0.3  # of the replayed drafts
SMALL_CACHE_SHARE = 3  # a small cache holds a third of the batch
FIXED_DRAFTS = MappingProxyType({"draft_length": "fixed", "num_speculative_tokens": 5})
EXPECTED_FILE = "expected.json"  # in the folder of the report

Outputs = tuple[list[int], list[int]]  # token ids and logits hashes of a request


def make_requests(count: int, prompt: int, max_tokens: int, vocab: int, **params: Any) -> list[Request]:
    """Requests of `prompt` random tokens, the same in every run; greedy by default."""
    rng = Random(count * 1_000_003 + prompt)
    last = min(vocab, 1 << 16)
    prompts = [tuple(rng.randrange(FIRST_ID, last) for _ in range(prompt)) for _ in range(count)]
    return [_request(ids, seed, max_tokens, **params) for seed, ids in enumerate(prompts)]


def make_mixed_requests(config: BenchConfig) -> list[Request]:
    """Prompts of many lengths, some with a common prefix; half greedy, half sampled with filters."""
    rng = Random(5)
    last = min(config.shape(ROLE).vocab, 1 << 16)
    prefix = [rng.randrange(FIRST_ID, last) for _ in range(config.prompt)]
    settings: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1.0},
        {},
        {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
    )
    requests = []
    for number in range(config.num_requests):
        suffix = [rng.randrange(FIRST_ID, last) for _ in range(rng.randint(2, config.prompt))]
        prompt = (*prefix[: rng.choice((0, 0, len(prefix) // 2))], *suffix)[: config.prompt]
        requests.append(_request(prompt, 1000 + number, config.check_tokens, **settings[number % 4]))
    return requests


def _request(prompt_ids: tuple[int, ...], seed: int, max_tokens: int, **params: Any) -> Request:
    sampling = SamplingParams(
        **{"temperature": 0.0, **params},
        max_tokens=max_tokens,
        ignore_eos=True,
        seed=seed,
        speculation=Speculation("off"),
    )
    return Request("", prompt_ids, sampling, seed)


def with_method(requests: Sequence[Request], method: str) -> list[Request]:
    """The same requests with drafts of `method`."""
    return [
        replace(request, params=replace(request.params, speculation=Speculation(method)))
        for request in requests
    ]


def replay_lines(
    requests: Sequence[Request], outputs: Sequence[Sequence[int]], error_rate: float
) -> list[dict[str, Any]]:
    """Lines of a --replay-file."""
    return [
        {
            "prompt_token_ids": list(request.prompt_ids),
            "token_ids": list(token_ids),
            "seed": request.seed,
            "error_rate": error_rate,
        }
        for request, token_ids in zip(requests, outputs, strict=True)
    ]


@dataclass(slots=True)
class BenchResult:
    """Outputs in the order of the requests, and time from the last first token to the last token."""

    tokens: list[list[int]]
    hashes: list[list[int]]
    seconds: float = 0.0
    counted: int = 0  # tokens delivered in that time
    steps: int = 0  # in that time
    stages: list[dict[str, float]] = field(default_factory=list)  # seconds of those steps by stage
    drafted: int = 0  # verified draft tokens, of the whole run
    accepted: int = 0
    preemptions: int = 0

    @property
    def rate(self) -> float:
        """Tokens/s."""
        return self.counted / max(self.seconds, 1e-9)

    @property
    def step_s(self) -> float:
        return self.seconds / max(self.steps, 1)

    def check(self) -> None:
        """Raise RegimeError unless all requests ran until the last step, and none was computed twice."""
        require("preemptions", self.preemptions, 0)
        require("lengths of answers", len({len(ids) for ids in self.tokens}), 1)

    def stage_us(self, name: str) -> float:
        """Median of a step."""
        return statistics.median([stages.get(name, 0.0) * 1e6 for stages in self.stages] or [0.0])


class BenchEngine:
    """One engine, driven step by step; one method runs at a time."""

    def __init__(self, config: Config, device: BenchDevice) -> None:
        self.client = LocalClient(config, (), lambda: _vocabulary(self.client.info.vocab_size))
        self._device = device
        self._serial = itertools.count()
        self._running: dict[str, int] = {}  # index of a request by id

    def close(self) -> None:
        """Drop the engine even if a caller still refers to this object."""
        del self.client

    def run(self, requests: Sequence[Request]) -> BenchResult:
        """Answer all requests at once."""
        result = self._start(requests)
        before = sum(map(len, result.tokens))
        started = time.perf_counter()
        while self._running:
            report = self._step(result)
            result.stages.append(dict(report.stats.stage_seconds))
            result.preemptions = report.stats.preemptions_total
        self._device.wait()
        result.seconds = time.perf_counter() - started
        result.counted, result.steps = sum(map(len, result.tokens)) - before, len(result.stages)
        return result

    def run_singly(self, requests: Sequence[Request]) -> BenchResult:
        """Answer one request at a time; outputs alone."""
        results = [self.run([request]) for request in requests]
        return BenchResult([result.tokens[0] for result in results], [result.hashes[0] for result in results])

    def first_token_s(self, request: Request) -> float:
        """Seconds from submission to the first token."""
        self._device.wait()
        started = time.perf_counter()
        self._start([request])
        seconds = time.perf_counter() - started
        self._abort()
        return seconds

    def token_gaps_s(
        self, requests: Sequence[Request], arriving: Sequence[Request], every: int, steps: int
    ) -> list[float]:
        """Seconds between the first request's tokens, while one of `arriving` is added every few steps."""
        result = self._start(requests)
        times, waiting = [], list(arriving)
        for number in range(steps):
            if waiting and number % every == every - 1:
                name = f"arrival {next(self._serial)}"
                self._running[name] = len(result.tokens)
                result.tokens.append([])
                result.hashes.append([])
                self.client.submit(replace(waiting.pop(), id=name))
            before = len(result.tokens[0])
            self._step(result)
            if len(result.tokens[0]) > before:
                times.append(time.perf_counter())
        self._abort()
        return [after - before for before, after in itertools.pairwise(times)]

    def idle(self, requests: Sequence[Request], steps: int) -> IdleShare | None:
        """Idle shares of the device while all requests decode."""
        self._start(requests)
        for _ in range(WARM_STEPS):
            self.client.step()
        shares = self._device.idle(lambda: [self.client.step() for _ in range(steps)])
        self._abort()
        return shares

    def _start(self, requests: Sequence[Request]) -> BenchResult:
        """Submit all requests and step until each has its first token."""
        self._abort()  # requests of a run that ended with an error
        serial = next(self._serial)
        result = BenchResult([[] for _ in requests], [[] for _ in requests])
        self._running = {f"{serial}-{index}": index for index in range(len(requests))}
        for name, index in self._running.items():
            self.client.submit(replace(requests[index], id=name))
        while not all(result.tokens):
            self._step(result)
        return result

    def _step(self, result: BenchResult) -> StepReport:
        report = self.client.step()
        for event in report.events:
            if isinstance(event, ErrorEvent):
                raise event.error
            assert isinstance(event, TokenEvent)
            index = self._running[event.request_id]
            result.tokens[index] += event.token_ids
            result.hashes[index] += event.logits_hashes
            if event.draft is not None:
                result.drafted += event.draft.num_drafted
                result.accepted += event.draft.num_accepted
            if event.finish_reason is not None:
                del self._running[event.request_id]
        return report

    def _abort(self) -> None:
        for name in self._running:
            self.client.abort(name)
        self._running = {}
        while not self.client.idle:
            self.client.step()


@contextmanager
def open_engine(
    config: BenchConfig,
    report: Report,
    part: str,
    role: str,
    options: Mapping[str, Any] | None = None,
    replay: Sequence[Mapping[str, Any]] = (),
    draft: bool = False,
) -> Iterator[BenchEngine]:
    """An engine of the role's shape whose memory is freed on leaving; `options` are Config fields.

    part    figures of the load: seconds by stage, CUDA graphs, warnings. On a GPU it fails without graphs, or
            where torch computes instead of Triton's kernels
    replay  lines of the replay file
    draft   load the role's draft model, too
    """
    fields: dict[str, Any] = {
        "device": config.device,
        "dtype": config.dtype,
        "load_format": "dummy",
        "max_num_seqs": config.streams[-1],
        "max_num_batched_tokens": config.long_prompt,
        "max_model_len": config.long_prompt + 64,
        "prefix_caching": False,
        "speculate": "off",
        **(options or {}),
    }
    request_tokens = config.prompt + max(config.answer, config.check_tokens) + 64
    num_tokens = max(fields["max_num_seqs"] * request_tokens, 2 * config.long_prompt) + 1024
    fields.setdefault("kv_cache_memory", f"{num_tokens}tokens")
    fields["max_num_batched_tokens"] = max(fields["max_num_batched_tokens"], fields["max_num_seqs"])
    with tempfile.TemporaryDirectory(prefix="foreword-bench-") as name:
        folder = Path(name)
        context = max(fields["max_model_len"], 1 << 16)
        fields["model"] = str(write_model(folder, config.shape(role), config.dtype, context))
        if replay:
            fields["replay_file"] = str(folder / "replay.jsonl")
            (folder / "replay.jsonl").write_text("\n".join(map(json.dumps, replay)), encoding="utf-8")
        if draft:
            fields["draft_model"] = str(write_model(folder, config.draft_shape(role), config.dtype, context))
        started = time.perf_counter()
        engine = BenchEngine(Config(**fields), BenchDevice(config.device))
        report.record(part, _describe_load(config, engine, time.perf_counter() - started))
        try:
            yield engine
        finally:
            engine.close()
            BenchDevice(config.device).free()


def _describe_load(config: BenchConfig, engine: BenchEngine, seconds: float) -> Mapping[str, Any]:
    info = engine.client.info
    figures: dict[str, Any] = {"s": seconds, "graphs": info.num_cuda_graphs, "backend": info.backend}
    if not config.is_dry_run:
        has_graphs = info.num_cuda_graphs > 0 or info.resolved.enforce_eager
        figures["ok"] = has_graphs and info.backend.startswith("triton")
    figures |= {f"{stage} s": value for stage, value in info.load_seconds.items()}
    return {**figures, "warnings": list(info.warnings)} if info.warnings else figures


def _vocabulary(size: int) -> Vocabulary:
    """256 bytes, then words of three letters; the last id ends an output."""
    words = (bytes((97 + n % 26, 97 + n // 26 % 26, 97 + n // 676 % 26)) for n in range(size - NUM_BYTES - 1))
    return Vocabulary((*(bytes((n,)) for n in range(NUM_BYTES)), *words, b""), (size - 1,), (size - 1,))


def compare_outputs(expected: dict[int, Outputs], result: BenchResult) -> dict[str, Any]:
    """Compare by request index; outputs of new indices are added to `expected`."""
    tokens_differ, bits_differ, compared = [], [], 0
    for index, (tokens, hashes) in enumerate(zip(result.tokens, result.hashes, strict=True)):
        if index not in expected:
            expected[index] = tokens, hashes
            continue
        compared += 1
        tokens_differ += [index] if tokens != expected[index][0] else []
        bits_differ += [index] if hashes != expected[index][1] else []
    return {
        "ok": not tokens_differ and not bits_differ,
        "answers": len(result.tokens),
        "compared": compared,
        "tokens_differ": tokens_differ,
        "bits_differ": bits_differ,
        "preemptions": result.preemptions,
    }


class EngineChecks:
    """Compares the outputs of an engine with those of the engines before it."""

    def __init__(self, config: BenchConfig, report: Report) -> None:
        self.config, self.report = config, report
        self.requests = make_mixed_requests(config)
        self.batch = self.requests[: config.batch_sizes[0]]
        self.size = f"{len(self.batch)} at once"
        self._file = report.folder / EXPECTED_FILE
        self.expected: dict[int, Outputs] = {}
        if self._file.exists():
            self.expected = {
                int(index): outputs for index, outputs in json.loads(self._file.read_text()).items()
            }

    @contextmanager
    def open(self, name: str, options: Mapping[str, Any], **more: Any) -> Iterator[BenchEngine]:
        options = {"test_mode": True, "max_num_seqs": len(self.batch), **options}
        with open_engine(self.config, self.report, f"{name} engine", ROLE, options, **more) as engine:
            yield engine

    @contextmanager
    def open_with_drafts(self, name: str, options: Mapping[str, Any]) -> Iterator[BenchEngine]:
        outputs = [tokens for _, (tokens, _) in sorted(self.expected.items())]
        lines = replay_lines(self.requests[: len(outputs)], outputs, ERROR_RATE)
        methods = "suffix,ngram,replay" if lines else "suffix,ngram"
        with self.open(name, {"speculate": methods, **FIXED_DRAFTS, **options}, replay=lines) as engine:
            yield engine

    def check(self, name: str, engine: BenchEngine, requests: Sequence[Request], method: str = "off") -> None:
        drafted = with_method(requests, method)
        self._measure(name, lambda: engine.run(drafted), 2)

    def check_singly(self, name: str, engine: BenchEngine) -> None:
        single = self.requests[: self.config.num_single]
        self._measure(name, lambda: engine.run_singly(single), 4)

    def _measure(self, name: str, run: Callable[[], BenchResult], needs_s: float) -> None:
        self.report.measure(name, lambda: compare_outputs(self.expected, run()), needs_s)
        self._file.write_text(json.dumps(self.expected))


def eager(config: BenchConfig, report: Report) -> None:
    checks = EngineChecks(config, report)
    with checks.open("eager", {"enforce_eager": True, "overlap": False}) as engine:
        checks.check_singly("one at a time", engine)
        checks.check(f"{checks.size}, eager", engine, checks.batch)


def graphs(config: BenchConfig, report: Report) -> None:
    checks = EngineChecks(config, report)
    with checks.open("graphs", {"max_num_seqs": max(config.batch_sizes)}) as engine:
        checks.check_singly("graphs, one at a time", engine)
        for count in config.batch_sizes:
            checks.check(f"graphs, {count} at once", engine, checks.requests[:count])


def no_overlap(config: BenchConfig, report: Report) -> None:
    checks = EngineChecks(config, report)
    with checks.open("no overlap", {"overlap": False}) as engine:
        checks.check(f"graphs without overlap, {checks.size}", engine, checks.batch)


def drafts(config: BenchConfig, report: Report) -> None:
    checks = EngineChecks(config, report)
    with checks.open_with_drafts("drafts", {}) as engine:
        for method in engine.client.info.resolved.drafters:
            checks.check(f"{method} drafts, {checks.size}", engine, checks.batch, method)
        checks.check(f"off beside drafts, {checks.size}", engine, checks.batch)
        checks.check("ngram drafts, one at a time", engine, checks.requests[:1], "ngram")


def draft_model(config: BenchConfig, report: Report) -> None:
    checks = EngineChecks(config, report)
    with checks.open("draft model", {"speculate": "draft", **FIXED_DRAFTS}, draft=True) as engine:
        checks.check(f"a draft model, {checks.size}", engine, checks.batch, "draft")
        checks.check("a draft model, one at a time", engine, checks.requests[:1], "draft")


def small_cache(config: BenchConfig, report: Report) -> None:
    checks = EngineChecks(config, report)
    count = len(checks.batch)
    longest = max(len(request.prompt_ids) + config.check_tokens for request in checks.requests)
    cache_tokens = max(count // SMALL_CACHE_SHARE, 1) * (longest + 16) + 16
    options = {
        "kv_cache_memory": f"{cache_tokens}tokens",
        "max_model_len": longest + 8,
        "prefix_caching": True,
        "max_num_batched_tokens": max(count, 48),
    }
    with checks.open_with_drafts("small cache", options) as engine:
        checks.check(f"preemption and small chunks, {checks.size}", engine, checks.batch)
        checks.check(f"preemption and ngram drafts, {checks.size}", engine, checks.batch, "ngram")


def fast_math(config: BenchConfig, report: Report) -> None:
    """The negative control: on one engine of ordinary torch, one at a time against a batch."""
    checks = EngineChecks(config, report)
    with checks.open("fast-math", {"fast_math": True}) as engine:
        single = checks.requests[: config.num_single]
        report.measure(
            "--fast-math, negative control", lambda: _negative_control(engine, single, checks.batch)
        )


def _negative_control(
    engine: BenchEngine, single: Sequence[Request], batch: Sequence[Request]
) -> Mapping[str, Any]:
    """One at a time against a batch, on the same engine."""
    expected: dict[int, Outputs] = {}
    compare_outputs(expected, engine.run_singly(single))
    found = compare_outputs(expected, engine.run(batch))
    return {"caught": not found["ok"], "compared": found["compared"], "bits_differ": found["bits_differ"]}
