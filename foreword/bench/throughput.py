"""`foreword bench throughput`: many requests at once, in this process.

Regime: --num-requests requests from the given prompts, each with its own seed, at most --concurrency at once,
prefix cache off, no network. Modes alternate within each round; a ratio is the geometric mean over rounds of
tokens/s with speculation over tokens/s without, with its 95 % interval. Every mode must give the same tokens,
or the exit code is 1.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from foreword.bench.session import BenchSession, BenchStep
from foreword.cli.flags import engine_fields, read_config
from foreword.llm import LLM


def run(args: argparse.Namespace) -> int:
    with BenchSession(args) as session:
        examples = read_examples(args)
        config = with_all_drafters(read_config(args))
        config = replace(config, max_num_seqs=args.concurrency, prefix_caching=False)
        with session.waiting(f"loading the model {config.model or DEMO}") as progress:
            llm = LLM(on_progress=progress, **engine_fields(config))
        compared = modes(llm.info.resolved.drafters)
        measurement = _Measurement(llm, examples, compared, args)
        session.run(
            measurement.steps(), f"{len(compared)} modes, {rounds_text(args.rounds)} and a warm-up of each"
        )
        done = measurement.result(session.errors)
        return session.finish(done, _show, finished=done["rounds"], passed=done["equal"])


class _Measurement:
    """Rounds of all modes, one after the other."""

    def __init__(
        self, llm: LLM, examples: Sequence[PromptExample], compared: Sequence[str], args: argparse.Namespace
    ) -> None:
        self._llm = llm
        self._examples = examples
        self._args = args
        self._seconds: dict[str, list[float]] = {mode: [] for mode in compared}  # of counted rounds
        self._expected: list[tuple[int, ...]] = []
        self._equal = True
        self._drafted = dict.fromkeys(compared, 0)  # draft tokens that were verified

    def steps(self) -> list[BenchStep]:
        args, compared = self._args, tuple(self._seconds)
        token_s = seconds_per_token(self._probe)
        weight = expected_weight(
            args.max_tokens * args.num_requests, min(args.concurrency, args.num_requests)
        )
        return [
            BenchStep(
                mode,
                f"{mode}, round {number} of {args.rounds}" if number else f"{mode}, warm-up",
                weight * token_s,
                functools.partial(self._measure, number, mode),
            )
            for number in range(args.rounds + 1)
            for mode in rotate(compared, number)
        ]

    def result(self, failed: Mapping[str, str]) -> dict[str, Any]:
        """Figures of the rounds that all modes completed."""
        args = self._args
        seconds = {mode: times for mode, times in self._seconds.items() if mode not in failed}
        rounds = min(map(len, seconds.values())) if OFF in seconds else 0
        seconds = {mode: times[:rounds] for mode, times in seconds.items()}
        num_tokens = sum(map(len, self._expected))
        figures = {
            mode: {
                "tokens_per_second": num_tokens / statistics.median(times),
                **speed_ratio(seconds[OFF], times),
                "drafted": self._drafted[mode],
            }
            for mode, times in seconds.items()
            if rounds
        }
        return {
            "rounds": rounds,
            "num_requests": args.num_requests,
            "concurrency": args.concurrency,
            "temperature": args.temperature,
            "tokens": num_tokens,
            "modes": figures,
            "equal": self._equal,
        }

    def _probe(self) -> int:
        messages = self._examples[0].messages
        return len(self._llm.chat(messages, sampling_params(OFF, PROBE_TOKENS))[0].token_ids)

    def _measure(self, number: int, mode: str) -> None:
        seconds, outputs = self._answer(mode)
        self._expected = self._expected or outputs
        self._equal = self._equal and outputs == self._expected
        if number > 0:
            self._seconds[mode].append(seconds)

    def _answer(self, mode: str) -> tuple[float, list[tuple[int, ...]]]:
        """Seconds of a round, and the tokens of its requests."""
        args, examples = self._args, self._examples
        seeds = range(args.num_requests)
        conversations = [examples[seed % len(examples)].messages for seed in seeds]
        params = [sampling_params(mode, args.max_tokens, args.temperature, seed) for seed in seeds]
        started = time.perf_counter()
        outputs = self._llm.chat(conversations, params)
        seconds = time.perf_counter() - started
        figures = [output.metrics.as_dict() for output in outputs if output.metrics]
        self._drafted[mode] += sum(of.get("draft_tokens", 0) for of in figures)
        require("draft tokens verified with speculation off", self._drafted[OFF], 0)
        require("prompt tokens from a cache", sum(of.get("cached_tokens", 0) for of in figures), 0)
        return seconds, [output.token_ids for output in outputs]


def _show(result: Mapping[str, Any]) -> None:
    figures = result["modes"].items()
    rows = [
        [
            mode,
            f"{of['tokens_per_second']:.0f}",
            *((ratio_text(of), verdict(of) if of["drafted"] else NO_DRAFTS) if mode != OFF else ()),
        ]
        for mode, of in figures
    ]
    load = f"{result['num_requests']} requests, {result['concurrency']} at once"
    title = f"throughput: {load}; answers {'equal' if result['equal'] else 'NOT EQUAL'} in all modes"
    legend = (
        f"tokens/s: median of {rounds_text(result['rounds'])}.",
        *ratio_legend(result["rounds"]),
        MODE_LEGEND,
    )
    print_table(title, ("speculation", "tokens/s", "speed [95 %]", "result"), rows, legend)
