"""`foreword bench serve`: many clients against a running server (--base-url) or a new one.

Regime: --num-requests streamed chat requests a round from the given prompts, each with its own seed,
--concurrency at once, over HTTP. Rounds with speculation off and on alternate, by the per-request
`speculation` field; the first round of each is not counted. Latencies are the client's: time to first
token (TTFT), time between chunks (of one or several tokens), and the whole answer (E2E). Every request
must be answered, with the same tokens in every round, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foreword.bench.figures import mode_figures, repetition_figures
from foreword.bench.measurement import (
    AUTO,
    OFF,
    BenchCase,
    BenchRepetition,
    Measurement,
    Mode,
    Pairs,
    has_equal_outputs,
    model_name,
    request_errors,
    with_all_drafters,
)
from foreword.bench.prompts import read_examples
from foreword.bench.remote import RemoteTarget
from foreword.bench.server import ServerProcess
from foreword.bench.session import BenchSession
from foreword.bench.statistics import percentile
from foreword.bench.tables import equal_text, print_table, ratio_legend, rounds_text, speed_cells
from foreword.bench.workloads import Conversation
from foreword.cli.configuration import read_config
from foreword.config.options import Config

PERCENTS = (50, 90, 99)
LATENCIES = ("ttft_ms", "itl_ms", "e2e_ms")


def run(args: argparse.Namespace) -> int:
    with BenchSession(args) as session:
        examples, config = read_examples(args), read_config(args)
        with _server(args.base_url, with_all_drafters(config), session) as url:
            name = next(iter(config.served_names()), None)
            target = RemoteTarget(url, config.api_key, model=name, isolated=False)
            measurement = Measurement(target, (AUTO,), args.rounds, summarize)
            measurement.add([make_case(args, examples)], target.run_plain)
            plan = f"speculation off and on, {rounds_text(args.rounds)} and a warm-up of each"
            session.run(measurement.steps, plan)
        figures = next(iter(measurement.end(session.errors)), None)
        figures = figures or {"rounds": 0, "answered_all": False, "equal": False}
        passed = figures["answered_all"] and figures["equal"]
        return session.finish({**load_of(args), **figures}, _show, finished=figures["rounds"], passed=passed)


def make_case(args: argparse.Namespace, examples: Sequence[Conversation]) -> BenchCase:
    """Requests of `throughput` and `serve`: the examples in turn, each with a seed of its own."""
    conversations = tuple(
        replace(
            example,
            turns=example.turns[:1],
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            seed=seed,
        )
        for seed in range(args.num_requests)
        for example in (examples[seed % len(examples)],)
    )
    return BenchCase("requests", min(args.concurrency, args.num_requests), lambda variant: conversations)


def load_of(args: argparse.Namespace) -> dict[str, Any]:
    """The load, as a part of the result."""
    return {name: getattr(args, name) for name in ("num_requests", "concurrency", "temperature")}


def load_text(result: Mapping[str, Any]) -> str:
    return f"{result['num_requests']} requests, {result['concurrency']} at once"


@contextlib.contextmanager
def _server(base_url: str | None, config: Config, session: BenchSession) -> Iterator[str]:
    if base_url:
        yield base_url
        return
    with contextlib.ExitStack() as stack:
        with session.waiting(f"starting a server of {model_name(config)}"):
            server = stack.enter_context(ServerProcess(config))
        yield server.url


def summarize(case: BenchCase, modes: Sequence[Mode], pairs: Pairs) -> dict[str, Any]:
    """Figures by mode, whether all was answered with equal tokens, and the errors of requests.

    A round with an unanswered request has no figures.
    """
    errors, complete = request_errors(pairs), [pair for pair in pairs[AUTO.name] if not pair.errors]
    result: dict[str, Any] = {
        "rounds": len(pairs[AUTO.name]),
        "answered_all": not errors,
        "request_errors": errors,
        "equal": has_equal_outputs(pairs),
        "modes": {},
    }
    if complete:
        runs = {OFF.name: [pair.plain for pair in complete], AUTO.name: [pair.other for pair in complete]}
        result["modes"] = {name: _figures(of_mode) for name, of_mode in runs.items()}
        figures = mode_figures(complete)
        result |= {"throughput": figures["throughput"], "drafted": figures.get("drafted", 0)}
    return result


def _figures(runs: Sequence[BenchRepetition]) -> dict[str, Any]:
    """Tokens/s, and milliseconds by latency and percentile; a latency without samples has none."""
    results = [result for one in runs for result in one.results]
    samples = (
        [result.ttft_s for result in results if result.ttft_s is not None],
        [gap_s for result in results for gap_s, _ in result.gaps],
        [result.total_s for result in results],
    )
    figures: dict[str, Any] = {"tokens_per_second": repetition_figures(runs)["tokens_per_second"]}
    for name, seconds in zip(LATENCIES, samples, strict=True):
        values = {f"p{percent}": percentile(seconds, percent) for percent in PERCENTS}
        figures[name] = {key: value * 1000 for key, value in values.items() if value is not None}
    return figures


def _show(result: Mapping[str, Any]) -> None:
    rows = []
    for mode, of in result["modes"].items():
        times = [
            "/".join(f"{of[name].get(f'p{percent}', 0):.0f}" for percent in PERCENTS) for name in LATENCIES
        ]
        speed = speed_cells(result["throughput"], result["drafted"]) if mode == AUTO.name else ("", "")
        rows.append([mode, f"{of['tokens_per_second']:.0f}", *speed, *times])
    legend = (
        f"tokens/s: median of {rounds_text(result['rounds'])}.",
        *ratio_legend(result["rounds"]),
        "TTFT, ITL, E2E: milliseconds to the first token, between chunks, and of the whole answer: "
        "p50/p90/p99 over all requests.",
        "off: no speculation; auto: all drafters.",
        *(f"error: {error}" for error in result["request_errors"]),
    )
    columns = ("speculation", "tokens/s", "speed [95 %]", "result", "TTFT", "ITL", "E2E")
    state = "all answered" if result["answered_all"] else "NOT ALL ANSWERED"
    title = f"serve: {load_text(result)}; {state}; texts {equal_text(result['equal'])}"
    print_table(title, columns, rows, legend)
