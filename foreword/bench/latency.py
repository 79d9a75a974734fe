"""`foreword bench latency`: one request at a time, the overhead of a step, and start-up.

Regime: batch 1, greedy, the prompt's KV in the prefix cache after the first round (which is not counted),
answers of at most --max-tokens. Prompts repeat, so that drafters find their earlier answers. Modes alternate
within each round; a ratio is the geometric mean over rounds of the time without speculation over the time
with it for the same prompts, by category, with its 95 % interval. All modes must give the same tokens, or
the exit code is 1.

Step overhead: a step's time without the forward pass, in microseconds, median over steps in which 1 or 64
requests decode greedily without speculation. Start-up: from starting `foreword serve` to the first token.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from foreword.bench.common import (
    DEMO,
    MODE_LEGEND,
    NO_DRAFTS,
    OFF,
    PROBE_TOKENS,
    expected_weight,
    modes,
    print_table,
    ratio_legend,
    ratio_text,
    rotate,
    rounds_text,
    sampling_params,
    seconds_per_token,
    speed_ratio,
    verdict,
    with_all_drafters,
)
from foreword.bench.prompts import PromptExample, read_examples
from foreword.bench.regime import require
from foreword.bench.server import ServerProcess
from foreword.bench.session import BenchSession, BenchStep
from foreword.checkpoint import CheckpointInfo, prepare_checkpoint
from foreword.cli.banner import EXAMPLE_PROMPT, parse_loading_line
from foreword.cli.client import HTTPBackend
from foreword.cli.flags import engine_fields, read_config
from foreword.config.options import Config
from foreword.core.outputs import TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine_client.local import LocalClient
from foreword.llm import LLM
from foreword.outputs import RequestOutput
from foreword.tokenizer.input_processor import SamplingDefaults, make_requests

OVERHEAD_REQUESTS = (1, 64)
IMPORT_S = 3.0  # estimate: of Python's imports when a server starts
STEPS = 48  # counted steps of the overhead
WARM_STEPS = 4


def measure_step_overhead(
    config: Config, examples: Sequence[PromptExample], num_requests: int
) -> dict[str, float]:
    """Median microseconds of a step while `num_requests` decode: by stage, and without the forward pass."""
    plain = replace(config, speculate="off", draft_model=None, max_num_seqs=num_requests)
    prepared = prepare_checkpoint(plain)
    client = LocalClient(prepared.config, prepared.never_sampled_ids, prepared.tokenizer.vocabulary)
    for request in _requests(prepared, client.info.resolved.max_model_len, examples, num_requests):
        client.submit(request)
    waiting = num_requests
    while waiting:
        waiting -= sum(1 for event in client.step().events if getattr(event, "index", None) == 0)
    steps = [_step_us(client, num_requests) for _ in range(WARM_STEPS + STEPS)][WARM_STEPS:]
    return {stage: statistics.median(step[stage] for step in steps) for stage in steps[0]}


def _step_us(client: LocalClient, num_requests: int) -> dict[str, float]:
    """Raises RegimeError unless every request got one token."""
    started = time.perf_counter()
    report = client.step()
    seconds = time.perf_counter() - started
    num_tokens = [len(event.token_ids) for event in report.events if isinstance(event, TokenEvent)]
    require("tokens of the requests in a step", num_tokens, [1] * num_requests)
    stages = dict(report.stats.stage_seconds)
    total = seconds - stages.pop("forward", 0.0)
    return {name: value * 1e6 for name, value in {"total": total, **stages}.items()}


def _requests(
    prepared: CheckpointInfo, max_model_len: int, examples: Sequence[PromptExample], count: int
) -> list[Request]:
    """Short prompts with answers that outlast the measurement."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4 * (WARM_STEPS + STEPS) + count)
    requests = []
    for number in range(count):
        ids = prepared.tokenizer.encode(examples[number % len(examples)].turns[0])[:32]
        requests += make_requests(
            ids, params, prepared.tokenizer, f"bench-{number}", max_model_len, SamplingDefaults(number)
        )
    return requests


def measure_startup_s(config: Config) -> dict[str, float]:
    """Seconds by stage, and in total, of a new `foreword serve`; the engine's stages lie in `until ready`."""
    started = time.perf_counter()
    with ServerProcess(config) as server:
        ready = time.perf_counter()
        stages = next(filter(None, map(parse_loading_line, server.banner_lines)), {})
        with closing(HTTPBackend(server.url, None)) as remote:
            messages = [{"role": "user", "content": EXAMPLE_PROMPT}]
            next(remote.stream(messages, SamplingParams(max_tokens=8)), None)
            first = time.perf_counter()
    engine = {f"engine: {stage}": seconds for stage, seconds in stages.items()}
    return {**engine, "until ready": ready - started, "first token": first - ready, "total": first - started}


@dataclass(slots=True)
class ModeSamples:
    """Totals of one mode on one category of prompts."""

    seconds: list[float] = field(default_factory=list)  # by round, of all prompts
    tokens: int = 0
    drafted: int = 0
    accepted: float = 0.0
    verify_steps: int = 0
    emitted: float = 0.0

    def add(self, output: RequestOutput, seconds: float, number: int) -> None:
        """Count an answer of round `number`, from 0."""
        if number == len(self.seconds):
            self.seconds.append(0.0)
        self.seconds[number] += seconds
        self.tokens += len(output.token_ids)
        figures = output.metrics.as_dict() if output.metrics else {}
        drafted, steps = figures.get("draft_tokens", 0), figures.get("verify_steps", 0)
        self.drafted += drafted
        self.accepted += drafted * figures.get("draft_tokens_acceptance", 0.0)
        self.verify_steps += steps
        self.emitted += steps * figures.get("mean_acceptance_length", 0.0)


Samples = dict[str, dict[str, ModeSamples]]  # by category, then by mode


def run(args: argparse.Namespace) -> int:
    with BenchSession(args) as session:
        examples = read_examples(args)
        config = with_all_drafters(read_config(args))
        started = time.perf_counter()
        with session.waiting(f"loading the model {config.model or DEMO}") as progress:
            llm = LLM(on_progress=progress, **engine_fields(config))
        load_s = time.perf_counter() - started
        compared = modes(llm.info.resolved.drafters)
        measurement = _Measurement(llm, examples, compared, args)
        overhead: dict[str, dict[str, float]] = {}
        startup: dict[str, float] = {}
        steps = measurement.steps() + [
            BenchStep(
                f"step overhead, {count} requests",
                f"step overhead, {count} requests",
                load_s + expected_weight((WARM_STEPS + STEPS) * count, count) * measurement.token_s,
                functools.partial(_add_overhead, overhead, config, examples, count),
            )
            for count in OVERHEAD_REQUESTS
        ]
        if not args.skip_startup:
            expected_s = IMPORT_S + load_s
            steps.append(
                BenchStep(
                    "start-up",
                    "start-up of a server",
                    expected_s,
                    lambda: startup.update(measure_startup_s(config)),
                )
            )
        plan = f"{len(examples)} prompts, {len(compared)} modes, {rounds_text(args.rounds)} and a warm-up"
        session.run(steps, f"{plan}, then step overhead" + ("" if args.skip_startup else " and start-up"))
        rounds, samples = measurement.complete_rounds(session.errors)
        result = {
            "rounds": rounds,
            "kinds": figures_by_category(samples, compared),
            "equal": measurement.equal,
            "step_overhead_us": overhead,
            "startup_s": startup,
        }
        return session.finish(result, _show, finished=len(samples), passed=measurement.equal)


def _add_overhead(
    overhead: dict[str, dict[str, float]], config: Config, examples: Sequence[PromptExample], count: int
) -> None:
    overhead[str(count)] = measure_step_overhead(config, examples, count)


class _Measurement:
    """Every prompt in every mode, round after round."""

    def __init__(
        self, llm: LLM, examples: Sequence[PromptExample], compared: Sequence[str], args: argparse.Namespace
    ) -> None:
        self.equal = True  # all modes gave the same tokens
        self._llm = llm
        self._examples = examples
        self._compared = compared
        self._args = args
        self._answers: dict[PromptExample, tuple[int, ...]] = {}
        # By round: category, mode, output and seconds of each answer.
        self._measured: list[list[tuple[str, str, RequestOutput, float]]] = [[] for _ in range(args.rounds)]
        self.token_s = seconds_per_token(lambda: len(self._answer(examples[0], OFF, PROBE_TOKENS).token_ids))

    def steps(self) -> list[BenchStep]:
        expected_s = self._args.max_tokens * self.token_s
        rounds = self._args.rounds
        return [
            BenchStep(
                example.category,
                f"{example.category}, {mode}, " + (f"round {number} of {rounds}" if number else "warm-up"),
                expected_s,
                functools.partial(self._measure, number, example, mode),
            )
            for number in range(rounds + 1)
            for example in self._examples
            for mode in rotate(self._compared, number)
        ]

    def complete_rounds(self, failed: Collection[str]) -> tuple[int, Samples]:
        """Their number, and the samples of the categories that did not fail."""
        categories = [example.category for example in self._examples if example.category not in failed]
        rounds = [[each for each in one if each[0] not in failed] for one in self._measured]
        rounds = [one for one in rounds if len(one) == len(categories) * len(self._compared)]
        samples = {name: {mode: ModeSamples() for mode in self._compared} for name in categories if rounds}
        for number, one in enumerate(rounds):
            for category, mode, output, seconds in one:
                samples[category][mode].add(output, seconds, number)
        return len(rounds), samples

    def _measure(self, number: int, example: PromptExample, mode: str) -> None:
        started = time.perf_counter()
        output = self._answer(example, mode, self._args.max_tokens)
        seconds = time.perf_counter() - started
        figures = output.metrics.as_dict() if output.metrics else {}
        if mode == OFF:
            require("draft tokens verified with speculation off", figures.get("draft_tokens", 0), 0)
        resolved = self._llm.info.resolved
        if number > 0 and resolved.prefix_caching and len(output.prompt_token_ids) > resolved.block_size:
            require("the prompt is in the prefix cache", figures.get("cached_tokens", 0) > 0, True)
        if output.token_ids != self._answers.setdefault(example, output.token_ids):
            self.equal = False
            print(f"{mode}: tokens differ from speculation off for {example.turns[0]!r}", file=sys.stderr)
        if number > 0:
            self._measured[number - 1].append((example.category, mode, output, seconds))

    def _answer(self, example: PromptExample, mode: str, max_tokens: int) -> RequestOutput:
        return self._llm.chat(example.messages, sampling_params(mode, max_tokens))[0]


def figures_by_category(samples: Samples, compared: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Figures by category and mode; figures without drafts are absent."""
    return {kind: {mode: _figures(of[mode], of[OFF]) for mode in compared} for kind, of in samples.items()}


def _figures(sample: ModeSamples, plain: ModeSamples) -> dict[str, float]:
    figures = {
        "tokens_per_second": sample.tokens / sum(sample.seconds),
        **speed_ratio(plain.seconds, sample.seconds),
    }
    if sample.drafted:
        figures["acceptance"] = sample.accepted / sample.drafted
        figures["mean_acceptance_length"] = sample.emitted / sample.verify_steps
    return figures


def _show(result: Mapping[str, Any]) -> None:
    equal = "equal" if result["equal"] else "NOT EQUAL"
    columns = ("kind", "speculation", "tokens/s", "speed [95 %]", "result", "accepted", "tokens a step")
    kinds = result["kinds"].items()
    rows = [(kind, mode, *_cells(mode, figures)) for kind, of in kinds for mode, figures in of.items()]
    legend = (
        *ratio_legend(result["rounds"]),
        "accepted: share of draft tokens that were right.",
        "tokens a step: delivered by a step that checks a draft.",
        "Prompts repeat in every round, so that suffix drafts from the earlier answers.",
        MODE_LEGEND,
    )
    print_table(f"one request at a time; answers {equal} in all modes", columns, rows, legend)
    overhead = result["step_overhead_us"]
    if overhead:
        stages = list(next(iter(overhead.values())))
        rows = [(count, *(f"{of[stage]:.0f}" for stage in stages)) for count, of in overhead.items()]
        parts = "total: a whole step less the model's forward pass; the rest: its parts."
        title = "a step without the forward pass, microseconds, by running requests"
        print_table(title, ("running", *stages), rows, (parts,))
    if result["startup_s"]:
        startup = [(stage, f"{seconds:.2f}") for stage, seconds in result["startup_s"].items()]
        parts = "engine stages are part of the time until ready."
        print_table("from process start to the first token", ("stage", "s"), startup, (parts,))


def _cells(mode: str, figures: dict[str, float]) -> tuple[str, ...]:
    accepted = f"{figures['acceptance']:.0%}" if "acceptance" in figures else ""
    length = f"{figures['mean_acceptance_length']:.2f}" if "mean_acceptance_length" in figures else ""
    result = verdict(figures) if "acceptance" in figures else NO_DRAFTS
    over = ("", "") if mode == OFF else (ratio_text(figures), result)
    return f"{figures['tokens_per_second']:.0f}", *over, accepted, length
