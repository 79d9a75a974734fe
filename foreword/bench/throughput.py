"""`foreword bench throughput`: many requests at once, in this process.

Regime: --num-requests requests from the given prompts, each with its own seed, at most --concurrency at once,
prefix cache off, no network. Modes alternate within each round; a ratio is the median over rounds of tokens/s
with speculation over tokens/s without. Every mode must give the same tokens, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
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
from foreword.cli.flags import engine_fields, read_config
from foreword.cli.terminal import loading_bar, track_progress
from foreword.llm import LLM

__all__ = ["run"]


def run(args: argparse.Namespace) -> int:
    config = with_all_drafters(read_config(args))
    config = replace(config, max_num_seqs=args.concurrency, prefix_caching=False)
    with loading_bar("loading") as progress:
        llm = LLM(on_progress=progress, **engine_fields(config))
    compared = modes(llm.info.resolved.drafters)
    examples = read_examples(args)
    plan = [(round_, mode) for round_ in range(args.rounds + 1) for mode in rotate(compared, round_)]
    seconds: dict[str, list[float]] = {mode: [] for mode in compared}
    expected: list[tuple[int, ...]] = []
    equal = True
    for round_, mode in track_progress(plan, "measuring", len(plan)):
        round_s, outputs = _answer(llm, examples, mode, args)
        expected = expected or outputs
        equal = equal and outputs == expected
        if round_ > 0:
            seconds[mode].append(round_s)
    _show(args, seconds, sum(map(len, expected)), equal)
    return 0 if equal else 1


def _answer(
    llm: LLM, examples: Sequence[PromptExample], mode: str, args: argparse.Namespace
) -> tuple[float, list[tuple[int, ...]]]:
    """Seconds of a round, and the tokens of its requests."""
    seeds = range(args.num_requests)
    conversations = [[{"role": "user", "content": examples[seed % len(examples)].prompt}] for seed in seeds]
    params = [sampling_params(mode, args.max_tokens, args.temperature, seed) for seed in seeds]
    started = time.perf_counter()
    outputs = llm.chat(conversations, params)
    return time.perf_counter() - started, [output.token_ids for output in outputs]


def _show(args: argparse.Namespace, seconds: dict[str, list[float]], num_tokens: int, equal: bool) -> None:
    figures: dict[str, dict[str, float]] = {
        mode: {
            "tokens_per_second": num_tokens / statistics.median(times),
            "ratio": ratio(seconds[OFF], times),
        }
        for mode, times in seconds.items()
    }
    rows = [[mode, f"{of['tokens_per_second']:.0f}", f"{of['ratio']:.2f}x"] for mode, of in figures.items()]
    result: dict[str, Any] = {
        "bench": "throughput",
        "rounds": args.rounds,
        "num_requests": args.num_requests,
        "concurrency": args.concurrency,
        "temperature": args.temperature,
        "tokens": num_tokens,
        "modes": figures,
        "equal": equal,
    }
    load = f"{args.num_requests} requests, {args.concurrency} at once"
    title = f"throughput: {load}; answers {'equal' if equal else 'NOT EQUAL'}"
    print_table(title, ("speculation", "tokens/s", "ratio"), rows)
    print_json(result)
