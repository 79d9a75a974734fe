"""The controller against every fixed draft length of every drafter, on the demo with its draft model.

    python -m benchmarks.draft_lengths [--cells "chat x8,repeat x32"] [--rounds 4]

Regime: of a cell (category and requests at once) each round has prompts of its own, which all modes answer
in turn, in rotated order; the first round is not counted. Modes are speculation off; the same on the engine
of the fixed lengths, as a control; `auto`; and the lengths 1, 2, 4 and 8 of each drafter alone. Engines are
in this process; no mode finds KV or answers of another.

Ratios are to off of the same round, with 95 % intervals. "of best" is `auto` over off or the fixed length
that was best in the other rounds: the fastest of nine noisy figures of one round is mostly lucky. All
answers must be equal, nothing may be drafted while speculation is off, and four fifths of the requests
claimed must run at once, or the exit code is 1. Prints a table and then one JSON line.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.script import print_json, run_script
from foreword.bench.engine import LocalTarget
from foreword.bench.figures import best_fixed, mode_figures
from foreword.bench.measurement import ADAPTIVE, AUTO, FIXED, OFF, BenchCase, Mode, PairedRun
from foreword.bench.regime import require
from foreword.bench.tables import print_table
from foreword.bench.workloads import (
    Conversation,
    PromptBudget,
    make_conversations,
)
from foreword.config.options import Config
from foreword.core.params import Speculation
from foreword.demo import DEFAULT_MODEL

CELLS = (
    *(("repeat", load) for load in (1, 8, 32, 64)),
    *(("code edit", load) for load in (1, 8, 32, 64)),
    *(("chat", load) for load in (1, 4, 8, 32)),
    *(("sampled chat", load) for load in (8, 32)),
    *(("json", load) for load in (1, 8, 32)),
    *(("agent", load) for load in (1, 8, 16)),
    *(("mixed", load) for load in (4, 16, 32, 64)),
)
CONTROL = Mode("off again", FIXED, Speculation("off"))
DRAFTERS, LENGTHS = ("suffix", "draft"), (1, 2, 4, 8)
SAMPLED, TEMPERATURE = "sampled ", 0.7
CONTEXT, REQUESTS_PER_SLOT, MIN_REQUESTS = 2048, 2, 16


def main(words: Sequence[str] | None = None) -> int:
    args = _parse(words)
    base = Config(
        model=DEFAULT_MODEL,
        draft_model=DEFAULT_MODEL,
        max_num_seqs=max(load for _, load in args.cells),
        max_request_slowdown=args.max_request_slowdown,
    )
    fixed = replace(base, draft_length="fixed", num_speculative_tokens=max(LENGTHS))
    target = LocalTarget({ADAPTIVE: base, FIXED: fixed})
    lengths = [
        Mode(f"{drafter} {length}", FIXED, Speculation(drafter, length))
        for drafter in DRAFTERS
        for length in LENGTHS
    ]
    cells = [
        _measure(target, category, load, (CONTROL, AUTO, *lengths), args) for category, load in args.cells
    ]
    mean = math.exp(sum(math.log(cell["of_best"]["ratio"]) for cell in cells) / len(cells))
    _show(cells, mean)
    print_json({"bench": "draft_lengths", "rounds": args.rounds, "cells": cells, "of_best": mean})
    return 0


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=_cells, default=CELLS, metavar="LIST")
    parser.add_argument("--rounds", type=int, default=4, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N", help="of an ordinary answer")
    parser.add_argument("--max-request-slowdown", type=float, default=0.02, metavar="SHARE")
    return parser.parse_args(words)


def _cells(text: str) -> list[tuple[str, int]]:
    """ "chat x8,repeat x32"."""
    cells = []
    for name in text.split(","):
        category, _, load = name.strip().rpartition(" x")
        if not category or not load.isdecimal():
            raise argparse.ArgumentTypeError(f"{name!r} is no cell such as 'chat x8'")
        cells.append((category, int(load)))
    return cells


def _measure(
    target: LocalTarget, category: str, load: int, modes: Sequence[Mode], args: argparse.Namespace
) -> dict[str, Any]:
    pairs: dict[str, list[PairedRun]] = {mode.name: [] for mode in modes}
    for number in range(args.rounds + 1):
        conversations = _conversations(target, category, load, number, args.max_tokens)
        case = BenchCase(category, load, lambda _, made=conversations: made)  # type: ignore[misc]
        for name, pair in target.run_pairs(case, modes, number).items():
            if number:
                pairs[name].append(pair)
    figures = {mode.name: mode_figures(pairs[mode.name]) for mode in modes}
    require(
        f"{category} x{load}: modes with equal answers", sum(f["equal"] for f in figures.values()), len(modes)
    )
    of_best = best_fixed(pairs, AUTO.name, [mode.name for mode in modes if mode not in (CONTROL, AUTO)])
    return {"cell": case.name, "of_best": of_best, "modes": figures}


def _conversations(
    target: LocalTarget, category: str, load: int, variant: int, max_tokens: int
) -> tuple[Conversation, ...]:
    engine = target.engines[ADAPTIVE]
    budget = PromptBudget.from_context(min(engine.max_len, CONTEXT), max_tokens, engine)
    count = max(REQUESTS_PER_SLOT * load, MIN_REQUESTS)
    made = make_conversations(category.removeprefix(SAMPLED), count, variant, budget)
    if category.startswith(SAMPLED):
        return tuple(replace(one, temperature=TEMPERATURE) for one in made)
    return made


def _show(cells: Sequence[dict[str, Any]], mean: float) -> None:
    def text(ratio: dict[str, float]) -> str:
        interval = f" [{ratio['low']:.2f}, {ratio['high']:.2f}]" if "low" in ratio else ""
        return f"{ratio['ratio']:.2f}{interval}"

    rows = []
    for cell in cells:
        auto, modes = cell["modes"][AUTO.name], cell["modes"]
        name = cell["of_best"]["best"]
        best = 1.0 if name == OFF.name else modes[name]["throughput"]["ratio"]
        rows.append(
            (
                cell["cell"],
                text(modes[CONTROL.name]["throughput"]),
                text(auto["throughput"]),
                f"{best:.2f} ({name})",
                text(cell["of_best"]),
                f"{auto['first_token']['ratio']:.2f}",
                f"{auto['slowest_request']['ratio']:.2f}",
            )
        )
    columns = ("cell", "off again", "auto", "best fixed", "auto of best", "first token", "slowest request")
    print_table(f"ratios to speculation off; geometric mean of best: {mean:.3f}", columns, rows)


if __name__ == "__main__":
    sys.exit(run_script(main))
