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
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

from foreword.bench.engine import LocalEngine, LocalTarget
from foreword.bench.figures import mode_figures
from foreword.bench.measurement import (
    ADAPTIVE,
    OFF,
    BenchCase,
    BenchRepetition,
    Measurement,
    Mode,
    Pairs,
    compared_modes,
    expected_weight,
    has_equal_outputs,
    model_name,
    with_all_drafters,
)
from foreword.bench.prompts import read_examples
from foreword.bench.regime import require
from foreword.bench.server import ServerProcess
from foreword.bench.session import BenchSession, BenchStep
from foreword.bench.tables import (
    MODE_LEGEND,
    equal_text,
    print_table,
    ratio_legend,
    rounds_text,
    share_text,
    speed_cells,
)
from foreword.bench.workloads import Conversation, prompt_conversations
from foreword.cli.banner import EXAMPLE_PROMPT, parse_loading_line
from foreword.cli.client import HTTPBackend
from foreword.cli.configuration import read_config
from foreword.config.options import Config
from foreword.core.outputs import TokenEvent
from foreword.core.params import SamplingParams
from foreword.tokenizer.input_processor import make_requests

OVERHEAD_REQUESTS = (1, 64)
IMPORT_S = 3.0  # estimate: of Python's imports when a server starts
STEPS = 48  # counted steps of the overhead
WARM_STEPS = 4


def measure_step_overhead(
    config: Config, examples: Sequence[Conversation], num_requests: int
) -> dict[str, float]:
    """Median microseconds of a step while `num_requests` decode: by stage, and without the forward pass."""
    plain = replace(config, speculate="off", draft_model=None, max_num_seqs=num_requests)
    engine = LocalEngine(plain)
    # Short prompts with answers that outlast the measurement.
    max_tokens = 4 * (WARM_STEPS + STEPS) + num_requests
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    for number in range(num_requests):
        ids = engine.tokenizer.encode(examples[number % len(examples)].turns[0])[:32]
        (request,) = make_requests(ids, params, engine.tokenizer, f"bench-{number}", engine.max_len)
        engine.client.submit(request)
    waiting = num_requests
    while waiting:
        waiting -= sum(1 for event in engine.step().events if getattr(event, "index", None) == 0)
    steps = [_step_us(engine, num_requests) for _ in range(WARM_STEPS + STEPS)][WARM_STEPS:]
    return {stage: statistics.median(step[stage] for step in steps) for stage in steps[0]}


def _step_us(engine: LocalEngine, num_requests: int) -> dict[str, float]:
    """Raises RegimeError unless every request got one token."""
    started = time.perf_counter()
    report = engine.step()
    seconds = time.perf_counter() - started
    num_tokens = [len(event.token_ids) for event in report.events if isinstance(event, TokenEvent)]
    require("tokens of the requests in a step", num_tokens, [1] * num_requests)
    stages = dict(report.stats.stage_seconds)
    total = seconds - stages.pop("forward", 0.0)
    return {name: value * 1e6 for name, value in {"total": total, **stages}.items()}


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


def run(args: argparse.Namespace) -> int:
    with BenchSession(args) as session:
        examples = read_examples(args)
        config = with_all_drafters(read_config(args))
        started = time.perf_counter()
        with session.waiting(f"loading the model {model_name(config)}") as progress:
            target = LocalTarget({ADAPTIVE: config}, isolated=False, on_progress=progress)
        load_s = time.perf_counter() - started
        engine = target.engines[ADAPTIVE]
        modes = compared_modes(engine.info.resolved.drafters)
        measurement = Measurement(target, modes, args.rounds, summarize)
        categories = dict.fromkeys(example.category for example in examples)
        measurement.add(
            [_make_case(category, examples, args, engine) for category in categories], target.run_plain
        )
        overhead: dict[str, dict[str, float]] = {}
        startup: dict[str, float] = {}
        steps = list(measurement.steps)
        for count in OVERHEAD_REQUESTS:
            name = f"step overhead, {count} requests"
            expected_s = expected_weight((WARM_STEPS + STEPS) * count, count) * measurement.token_s
            measure = functools.partial(_add_overhead, overhead, config, examples, count)
            steps.append(BenchStep(name, name, load_s + expected_s, measure))
        if not args.skip_startup:
            start = functools.partial(_add_startup, startup, config)
            steps.append(BenchStep("start-up", "start-up of a server", IMPORT_S + load_s, start))
        plan = f"{len(examples)} prompts, {len(modes)} modes, {rounds_text(args.rounds)} and a warm-up"
        session.run(steps, f"{plan}, then step overhead" + ("" if args.skip_startup else " and start-up"))
        kinds = measurement.end(session.errors)
        result: dict[str, Any] = {
            "rounds": min((kind["rounds"] for kind in kinds), default=0),
            "kinds": {kind["category"]: kind["modes"] for kind in kinds},
            "equal": all(kind["equal"] for kind in kinds),
            "step_overhead_us": overhead,
            "startup_s": startup,
        }
        return session.finish(result, _show, finished=len(kinds), passed=result["equal"])


def _add_overhead(
    overhead: dict[str, dict[str, float]], config: Config, examples: Sequence[Conversation], count: int
) -> None:
    overhead[str(count)] = measure_step_overhead(config, examples, count)


def _add_startup(startup: dict[str, float], config: Config) -> None:
    startup.update(measure_startup_s(config))


def _make_case(
    category: str, examples: Sequence[Conversation], args: argparse.Namespace, engine: LocalEngine
) -> BenchCase:
    """The prompts of a category, one at a time."""
    resolved = engine.info.resolved
    firsts = [replace(example, turns=example.turns[:1]) for example in examples]
    count = sum(example.category == category for example in firsts)
    conversations = prompt_conversations(category, count, 0, firsts, args.max_tokens)

    def claim(mode: Mode, number: int, repetition: BenchRepetition) -> None:
        if number and resolved.prefix_caching:
            longer = [each for each in repetition.results if len(each.prompt_ids) > resolved.block_size]
            uncached = sum(not each.num_cached for each in longer)
            require(f"{mode.name}: prompts that are not in the prefix cache", uncached, 0)

    return BenchCase(category, 1, lambda variant: conversations, claim=claim)


def summarize(case: BenchCase, modes: Sequence[Mode], pairs: Pairs) -> dict[str, Any]:
    """Figures by mode; figures without drafts are absent."""
    return {
        "category": case.category,
        "rounds": len(pairs[OFF.name]),
        "equal": has_equal_outputs(pairs),
        "modes": {name: _figures(mode_figures(of_mode)) for name, of_mode in pairs.items()},
    }


def _figures(figures: Mapping[str, Any]) -> dict[str, Any]:
    names = ("tokens_per_second", "acceptance", "mean_acceptance_length")
    return {**{name: figures[name] for name in names if name in figures}, **figures["throughput"]}


def _show(result: Mapping[str, Any]) -> None:
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
    print_table(
        f"one request at a time; answers {equal_text(result['equal'])} in all modes", columns, rows, legend
    )
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


def _cells(mode: str, figures: Mapping[str, float]) -> tuple[str, ...]:
    length = f"{figures['mean_acceptance_length']:.2f}" if "mean_acceptance_length" in figures else ""
    speed = ("", "") if mode == OFF.name else speed_cells(figures, "acceptance" in figures)
    return f"{figures['tokens_per_second']:.0f}", *speed, share_text(figures.get("acceptance")), length
