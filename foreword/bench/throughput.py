"""`foreword bench throughput`: many requests at once, in this process.

Regime: --num-requests requests from the given prompts, each with its own seed, at most --concurrency at once,
prefix cache off, no network. Modes alternate within each round; a ratio is the geometric mean over rounds of
tokens/s with speculation over tokens/s without, with its 95 % interval. Every mode must give the same tokens,
or the exit code is 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from foreword.bench.engine import LocalTarget
from foreword.bench.figures import mode_figures
from foreword.bench.measurement import (
    ADAPTIVE,
    OFF,
    BenchCase,
    Measurement,
    Mode,
    Pairs,
    compared_modes,
    has_equal_outputs,
    model_name,
    with_all_drafters,
)
from foreword.bench.prompts import read_examples
from foreword.bench.regime import require
from foreword.bench.serve import load_of, load_text, make_case
from foreword.bench.session import BenchSession
from foreword.bench.tables import MODE_LEGEND, equal_text, print_table, ratio_legend, rounds_text, speed_cells
from foreword.cli.configuration import read_config


def run(args: argparse.Namespace) -> int:
    with BenchSession(args) as session:
        examples = read_examples(args)
        config = with_all_drafters(read_config(args))
        config = replace(config, max_num_seqs=args.concurrency, prefix_caching=False)
        with session.waiting(f"loading the model {model_name(config)}") as progress:
            target = LocalTarget({ADAPTIVE: config}, isolated=False, on_progress=progress)
        modes = compared_modes(target.engines[ADAPTIVE].info.resolved.drafters)
        measurement = Measurement(target, modes, args.rounds, summarize)
        measurement.add([replace(make_case(args, examples), claim=_claim)], target.run_plain)
        session.run(
            measurement.steps, f"{len(modes)} modes, {rounds_text(args.rounds)} and a warm-up of each"
        )
        figures = next(iter(measurement.end(session.errors)), {"rounds": 0, "equal": False})
        result = {**load_of(args), **figures}
        return session.finish(result, _show, finished=result["rounds"], passed=result["equal"])


def _claim(mode: Mode, number: int, repetition: Any) -> None:
    require("prompt tokens from a cache", sum(each.num_cached for each in repetition.results), 0)


def summarize(case: BenchCase, modes: Sequence[Mode], pairs: Pairs) -> dict[str, Any]:
    return {
        "rounds": len(pairs[OFF.name]),
        "tokens": pairs[OFF.name][0].plain.num_tokens,
        "equal": has_equal_outputs(pairs),
        "modes": {name: _figures(mode_figures(of_mode)) for name, of_mode in pairs.items()},
    }


def _figures(figures: Mapping[str, Any]) -> dict[str, Any]:
    speed = {"tokens_per_second": figures["tokens_per_second"], **figures["throughput"]}
    return {**speed, "drafted": figures.get("drafted", 0)}


def _show(result: Mapping[str, Any]) -> None:
    rows = [
        [
            mode,
            f"{of['tokens_per_second']:.0f}",
            *(speed_cells(of, of["drafted"]) if mode != OFF.name else ()),
        ]
        for mode, of in result["modes"].items()
    ]
    legend = (
        f"tokens/s: median of {rounds_text(result['rounds'])}.",
        *ratio_legend(result["rounds"]),
        MODE_LEGEND,
    )
    title = f"throughput: {load_text(result)}; answers {equal_text(result['equal'])} in all modes"
    print_table(title, ("speculation", "tokens/s", "speed [95 %]", "result"), rows, legend)
