"""`foreword bench latency`: one request at a time.

Regime: batch 1, greedy, the prompt's KV in the prefix cache after the first round (which is not
counted), answers of at most --max-tokens. Modes alternate within each round; a ratio is the median
over rounds of (time without speculation / time with it) for the same prompt, summed by kind. All
modes must give the same tokens, or the exit code is 1.

Step overhead: a step's time without the model's forward pass, in microseconds, median over steps in
which 1 or 64 requests decode. Start-up: from starting `foreword serve` to the first streamed token.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from foreword.cli.bench_common import (
    OFF,
    PromptExample,
    modes,
    sampling_params,
    ratio,
    read_examples,
    rotate,
    print_table,
    print_json,
    with_all_drafters,
)
from foreword.cli.bench_startup import measure_startup_s
from foreword.cli.bench_step import measure_step_overhead
from foreword.cli.options import engine_fields, read_config
from foreword.cli.terminal import loading_bar, track_progress
from foreword.llm import LLM, RequestOutput

__all__ = ["ModeSamples", "figures_by_category", "run"]


@dataclass(slots=True)
class ModeSamples:
    """All runs of one mode on one kind of prompt; the lists have one entry a prompt and round."""

    seconds: list[float] = field(default_factory=list)
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


Samples = dict[str, dict[str, ModeSamples]]  # by kind, then by mode


def run(args: argparse.Namespace) -> int:
    config = with_all_drafters(read_config(args))
    examples = read_examples(args)
    with loading_bar("loading") as progress:
        llm = LLM(on_progress=progress, **engine_fields(config))
    compared = modes(llm.info.resolved.drafters)
    samples, equal = _measure(llm, examples, compared, args)
    counts = (1, 64)
    overhead = {str(count): measure_step_overhead(config, examples, count) for count in track_progress(counts, "step overhead", len(counts))}
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


def _measure(llm: LLM, examples: Sequence[PromptExample], compared: Sequence[str], args: argparse.Namespace) -> tuple[Samples, bool]:
    """Samples, and whether every mode gave the same tokens."""
    samples: Samples = defaultdict(lambda: {mode: ModeSamples() for mode in compared})
    equal = True
    plan = list(_plan(examples, compared, args.rounds + 1))
    answers: dict[PromptExample, tuple[int, ...]] = {}
    for round_, example, mode in track_progress(plan, "measuring", len(plan)):
        started = time.perf_counter()
        output = llm.chat([{"role": "user", "content": example.prompt}], sampling_params(mode, args.max_tokens))[0]
        seconds = time.perf_counter() - started
        if output.token_ids != answers.setdefault(example, output.token_ids):
            equal = False
            print(f"{mode}: other tokens than without speculation for {example.prompt!r}", file=sys.stderr)
        if round_ > 0:
            samples[example.category][mode].add(output, seconds)
    return dict(samples), equal


def _plan(examples: Sequence[PromptExample], compared: Sequence[str], rounds: int) -> Iterator[tuple[int, PromptExample, str]]:
    for round_ in range(rounds):
        for example in examples:
            for mode in rotate(compared, round_):
                yield round_, example, mode


def figures_by_category(samples: Samples, compared: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Figures by kind and mode; a ratio that does not exist is absent."""
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
    rows = [(kind, mode, *_cells(figures)) for kind, of in result["kinds"].items() for mode, figures in of.items()]
    print_table(f"one request at a time; answers {equal} in all modes", columns, rows)
    stages = list(result["step_overhead_us"]["1"])
    spans = [(count, *(f"{of[stage]:.0f}" for stage in stages)) for count, of in result["step_overhead_us"].items()]
    print_table("a step without the forward pass, microseconds", ("running", *stages), spans)
    if result["startup_s"]:
        print_table("from process start to the first token", ("stage", "s"), [(k, f"{v:.2f}") for k, v in result["startup_s"].items()])
    print_json(result)


def _cells(figures: dict[str, float]) -> tuple[str, ...]:
    accepted = f"{figures['acceptance']:.0%}" if "acceptance" in figures else ""
    length = f"{figures['mean_acceptance_length']:.2f}" if "mean_acceptance_length" in figures else ""
    return f"{figures['tokens_per_second']:.0f}", f"{figures['ratio']:.2f}x", accepted, length
