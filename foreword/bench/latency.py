"""`foreword bench latency`: one request at a time, the overhead of a step, and start-up.

Regime: batch 1, greedy, the prompt's KV in the prefix cache after the first round (which is not counted),
answers of at most --max-tokens. Modes alternate within each round; a ratio is the median over rounds of
the time without speculation over the time with it for the same prompt, by category. All modes must give
the same tokens, or the exit code is 1.

Step overhead: a step's time without the forward pass, in microseconds, median over steps in which 1 or 64
requests decode greedily without speculation. Start-up: from starting `foreword serve` to the first token.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

from foreword.bench.common import (
    OFF,
    PromptExample,
    modes,
    print_json,
    print_table,
    ratio,
    read_examples,
    rotate,
    sampling_params,
    with_all_drafters,
)
from foreword.bench.server import ServerProcess
from foreword.checkpoint import CheckpointInfo, prepare_checkpoint
from foreword.cli.banner import EXAMPLE_PROMPT, parse_loading_line
from foreword.cli.client import HTTPBackend
from foreword.cli.flags import engine_fields, read_config
from foreword.cli.terminal import loading_bar, track_progress
from foreword.config.options import Config
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine_client.local import LocalClient
from foreword.llm import LLM, RequestOutput
from foreword.tokenizer.input_processor import SamplingDefaults, make_requests

__all__ = ["ModeSamples", "figures_by_category", "measure_startup_s", "measure_step_overhead", "run"]

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
    steps = [_step_us(client) for _ in range(WARM_STEPS + STEPS)][WARM_STEPS:]
    return {stage: statistics.median(step[stage] for step in steps) for stage in steps[0]}


def _step_us(client: LocalClient) -> dict[str, float]:
    started = time.perf_counter()
    report = client.step()
    seconds = time.perf_counter() - started
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
        ids = prepared.tokenizer.encode(examples[number % len(examples)].prompt)[:32]
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

    seconds: list[float] = field(default_factory=list)  # by round and prompt
    tokens: int = 0
    drafted: int = 0
    accepted: float = 0.0
    verify_steps: int = 0
    emitted: float = 0.0

    def add(self, output: RequestOutput, seconds: float) -> None:
        self.seconds.append(seconds)
        self.tokens += len(output.token_ids)
        figures = output.metrics.as_dict() if output.metrics else {}
        drafted, steps = figures.get("draft_tokens", 0), figures.get("verify_steps", 0)
        self.drafted += drafted
        self.accepted += drafted * figures.get("draft_tokens_acceptance", 0.0)
        self.verify_steps += steps
        self.emitted += steps * figures.get("mean_acceptance_length", 0.0)


Samples = dict[str, dict[str, ModeSamples]]  # by category, then by mode


def run(args: argparse.Namespace) -> int:
    config = with_all_drafters(read_config(args))
    examples = read_examples(args)
    with loading_bar("loading") as progress:
        llm = LLM(on_progress=progress, **engine_fields(config))
    compared = modes(llm.info.resolved.drafters)
    samples, equal = _measure(llm, examples, compared, args)
    counts = (1, 64)
    overhead = {
        str(count): measure_step_overhead(config, examples, count)
        for count in track_progress(counts, "step overhead", len(counts))
    }
    startup = {} if args.skip_startup else measure_startup_s(config)
    result = {
        "bench": "latency",
        "rounds": args.rounds,
        "kinds": figures_by_category(samples, compared),
        "equal": equal,
        "step_overhead_us": overhead,
        "startup_s": startup,
    }
    _show(result)
    return 0 if equal else 1


def _measure(
    llm: LLM, examples: Sequence[PromptExample], compared: Sequence[str], args: argparse.Namespace
) -> tuple[Samples, bool]:
    """Samples, and whether all modes gave the same tokens."""
    samples: Samples = defaultdict(lambda: {mode: ModeSamples() for mode in compared})
    equal = True
    plan = [
        (round_, example, mode)
        for round_ in range(args.rounds + 1)
        for example in examples
        for mode in rotate(compared, round_)
    ]
    answers: dict[PromptExample, tuple[int, ...]] = {}
    for round_, example, mode in track_progress(plan, "measuring", len(plan)):
        started = time.perf_counter()
        output = llm.chat(
            [{"role": "user", "content": example.prompt}], sampling_params(mode, args.max_tokens)
        )[0]
        seconds = time.perf_counter() - started
        if output.token_ids != answers.setdefault(example, output.token_ids):
            equal = False
            print(f"{mode}: tokens differ from speculation off for {example.prompt!r}", file=sys.stderr)
        if round_ > 0:
            samples[example.category][mode].add(output, seconds)
    return dict(samples), equal


def figures_by_category(samples: Samples, compared: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Figures by category and mode; figures without drafts are absent."""
    return {kind: {mode: _figures(of[mode], of[OFF]) for mode in compared} for kind, of in samples.items()}


def _figures(sample: ModeSamples, plain: ModeSamples) -> dict[str, float]:
    figures = {
        "tokens_per_second": sample.tokens / sum(sample.seconds),
        "ratio": ratio(plain.seconds, sample.seconds),
    }
    if sample.drafted:
        figures["acceptance"] = sample.accepted / sample.drafted
        figures["mean_acceptance_length"] = sample.emitted / sample.verify_steps
    return figures


def _show(result: dict[str, Any]) -> None:
    equal = "equal" if result["equal"] else "NOT EQUAL"
    columns = ("kind", "speculation", "tokens/s", "ratio", "accepted", "tokens a step")
    kinds = result["kinds"].items()
    rows = [(kind, mode, *_cells(figures)) for kind, of in kinds for mode, figures in of.items()]
    print_table(f"one request at a time; answers {equal} in all modes", columns, rows)
    stages = list(result["step_overhead_us"]["1"])
    overhead = result["step_overhead_us"].items()
    rows = [(count, *(f"{of[stage]:.0f}" for stage in stages)) for count, of in overhead]
    print_table("a step without the forward pass, microseconds", ("running", *stages), rows)
    if result["startup_s"]:
        startup = [(stage, f"{seconds:.2f}") for stage, seconds in result["startup_s"].items()]
        print_table("from process start to the first token", ("stage", "s"), startup)
    print_json(result)


def _cells(figures: dict[str, float]) -> tuple[str, ...]:
    accepted = f"{figures['acceptance']:.0%}" if "acceptance" in figures else ""
    length = f"{figures['mean_acceptance_length']:.2f}" if "mean_acceptance_length" in figures else ""
    return f"{figures['tokens_per_second']:.0f}", f"{figures['ratio']:.2f}x", accepted, length
