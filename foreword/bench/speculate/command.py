"""`foreword bench speculate`: what speculation gains by category and load, and that it never loses.

Regime: in every case (category and concurrency) all modes answer the same requests, one mode after the
other, in another order each round; the first round is not counted. Modes are `off`, each drafter alone,
`auto`, and fixed lengths if asked for. No mode finds KV or answers of another, nor of its own earlier
rounds. Requests are greedy except long answers (temperature 0.8) and random tokens. One more case has a
KV cache too small for its requests.

Ratios are to `off`, above 1 is better, with 95 % intervals over the rounds. All modes must give the same
tokens, or the exit code is 1. --base-url measures a server over HTTP; --replay-acceptance drafts recorded
answers with a set share of right tokens, so that random weights can be measured too.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foreword.bench.common import DEMO, print_json, with_all_drafters
from foreword.bench.speculate.local import (
    MIXED_REPLAY,
    LocalEngine,
    LocalTarget,
    make_replay_conversations,
    parse_acceptance_rates,
    record_outputs,
    replay_categories,
)
from foreword.bench.speculate.remote import RemoteTarget
from foreword.bench.speculate.report import case_result, print_result, worst_cases
from foreword.bench.speculate.types import (
    ADAPTIVE,
    AUTO,
    FIXED,
    OFF,
    PLAIN,
    BenchTarget,
    Mode,
    PairedRun,
    SpecCase,
)
from foreword.bench.speculate.workloads import (
    ALL_CATEGORIES,
    MIXED,
    QUICK_CATEGORIES,
    Conversation,
    PromptBudget,
    library_functions,
    make_conversations,
)
from foreword.cli.flags import read_config
from foreword.cli.terminal import loading_bar, track_progress
from foreword.config.options import Config
from foreword.core.params import Speculation
from foreword.errors import ConfigError

__all__ = ["run"]

ConversationFactory = Callable[[str, int, int], tuple[Conversation, ...]]  # (category, count, variant)
DEFAULTS = {
    "rounds": 7,
    "categories": ",".join(ALL_CATEGORIES),
    "concurrency": "1,4,16,64",
    "requests": 4,
    "max_tokens": 128,
}
QUICK_DEFAULTS = {
    "rounds": 2,
    "categories": ",".join(QUICK_CATEGORIES),
    "concurrency": "1,4",
    "requests": 2,
    "max_tokens": 48,
}
MAX_FULL_CONCURRENCY = 16  # of the case with a full cache
FULL_SHARE = 3  # its cache holds one third of the tokens of its requests


def run(args: argparse.Namespace) -> int:
    for name, value in (QUICK_DEFAULTS if args.quick else DEFAULTS).items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))
    _check(args)
    draw = importlib.import_module("foreword.bench.speculate.plot").draw if args.plot else None
    result = _remote(args) if args.base_url else _replay(args) if args.replay_acceptance else _local(args)
    print_result(result)
    if draw is not None:
        draw(result, Path(args.plot))
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1, allow_nan=False), encoding="utf-8")
    print_json(result)
    return 0 if result["equal"] and result["answered_all"] else 1


def _local(args: argparse.Namespace) -> dict[str, Any]:
    config = with_all_drafters(read_config(args))
    target = _load(config, args)
    make = functools.partial(make_conversations, budget=_prompt_budget(target.engines[ADAPTIVE], args))
    return _measure_locally(target, config, args, _categories(args), make)


def _replay(args: argparse.Namespace) -> dict[str, Any]:
    """Recorded answers as drafts, in one category per acceptance rate."""
    rates = parse_acceptance_rates(args.replay_acceptance)
    base = [name for name in _categories(args) if name != MIXED]
    config = _replaying(args)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recording.jsonl"
        recorder = LocalEngine(_without_speculation(config))
        make = functools.partial(make_replay_conversations, base=base, budget=_prompt_budget(recorder, args))
        loads = _parse_loads(args, recorder.info.resolved.max_num_seqs)
        groups = [make(name, _num_requests(args, loads[-1]), 0) for name in replay_categories(rates)]
        record_outputs(recorder, groups, rates, loads[-1], file)
        del recorder
        gc.collect()
        config = replace(config, replay_file=str(file), replay_cost=getattr(args, "replay_cost", False))
        return _measure_locally(_load(config, args), config, args, replay_categories(rates), make)


def _remote(args: argparse.Namespace) -> dict[str, Any]:
    target = RemoteTarget(args.base_url, read_config(args).api_key)
    context = min(target.max_len, args.context)
    budget = PromptBudget.from_context(
        context, args.max_tokens, target.count, target.plain_ids(), library_functions()
    )
    make = functools.partial(make_conversations, budget=budget)
    cases = _make_cases(_categories(args), _parse_loads(args), args, make)
    modes = _modes(target.drafters, args)
    return _result(target.model, args, modes, _measure(target, cases, modes, args.rounds))


def _measure_locally(
    target: LocalTarget,
    config: Config,
    args: argparse.Namespace,
    categories: Sequence[str],
    make: ConversationFactory,
) -> dict[str, Any]:
    """All cases, then the one with the small cache, on engines that replace the first ones."""
    resolved = target.engines[ADAPTIVE].info.resolved
    modes = _modes(resolved.drafters, args)
    loads = _parse_loads(args, resolved.max_num_seqs)
    results = _measure(target, _make_cases(categories, loads, args, make), modes, args.rounds)
    if args.full_cache:
        load = max((load for load in loads if load <= MAX_FULL_CONCURRENCY), default=loads[0])
        category = next(name for name in (MIXED_REPLAY, MIXED, categories[-1]) if name in categories)
        case = _make_case(category, load, args, make, full=True)
        small = _small_cache(config, target.engines[ADAPTIVE], case)
        target.engines.clear()
        gc.collect()
        results += _measure(_load(small, args), [case], modes, args.rounds)
    return _result(str(config.model or DEMO), args, modes, results)


def _measure(
    target: BenchTarget, cases: Sequence[SpecCase], modes: Sequence[Mode], rounds: int
) -> list[dict[str, Any]]:
    plan = [(case, number) for case in cases for number in range(rounds + 1)]
    pairs: dict[str, dict[str, list[PairedRun]]] = {case.name: {} for case in cases}
    for case, number in track_progress(plan, "measuring", len(plan)):
        for name, pair in target.run_pairs(case, _applicable_modes(modes, case), number).items():
            if number > 0:
                pairs[case.name].setdefault(name, []).append(pair)
    return [case_result(case, _applicable_modes(modes, case), pairs[case.name]) for case in cases]


def _result(
    model: str, args: argparse.Namespace, modes: Sequence[Mode], cases: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "bench": "speculate",
        "model": model,
        "rounds": args.rounds,
        "modes": [OFF.name, *(mode.name for mode in modes)],
        "equal": all(figures.get("equal", True) for cell in cases for figures in cell["modes"].values()),
        "answered_all": not any(cell["errors"] for cell in cases),
        "worst": {AUTO.name: worst_cases(cases, AUTO.name)},
        "cells": cases,
    }


def _modes(drafters: Sequence[str], args: argparse.Namespace) -> tuple[Mode, ...]:
    """Modes compared with `off`; a single drafter is the same as `auto`. Raises ConfigError."""
    alone = [Mode(name, speculation=Speculation(name)) for name in drafters] if len(drafters) > 1 else []
    lengths = [
        Mode(f"fixed {length}", FIXED, Speculation(max_tokens=length)) for length in _parse_lengths(args)
    ]
    plain = [Mode("plain", PLAIN, Speculation("off"))] if args.plain else []
    modes = (*alone, AUTO, *lengths, *plain)
    if not args.modes:
        return modes
    names = _parse_names("modes", args.modes, [mode.name for mode in modes])
    return tuple(mode for mode in modes if mode.name in names)


def _applicable_modes(modes: Sequence[Mode], case: SpecCase) -> tuple[Mode, ...]:
    """Leave out drafters without input: no category has a grammar, few have predictions."""
    idle = {"grammar"} if any(each.prediction for each in case.make(0)) else {"grammar", "prediction"}
    return tuple(mode for mode in modes if mode.speculation.method not in idle) or tuple(modes)


def _make_cases(
    categories: Sequence[str], loads: Sequence[int], args: argparse.Namespace, make: ConversationFactory
) -> list[SpecCase]:
    return [_make_case(category, load, args, make) for load in loads for category in categories]


def _make_case(
    category: str, load: int, args: argparse.Namespace, make: ConversationFactory, full: bool = False
) -> SpecCase:
    count = _num_requests(args, load)
    return SpecCase(category, load, lambda variant: make(category, count, variant), full)


def _num_requests(args: argparse.Namespace, load: int) -> int:
    """Requests of a round."""
    return max(int(args.requests), load)


def _prompt_budget(engine: LocalEngine, args: argparse.Namespace) -> PromptBudget:
    def count(text: str) -> int:
        return len(engine.tokenizer.encode(text, add_special_tokens=False))

    return PromptBudget.from_context(
        min(engine.max_len, args.context), args.max_tokens, count, engine.plain_ids, library_functions()
    )


def _load(config: Config, args: argparse.Namespace) -> LocalTarget:
    configs: dict[str, Config] = {ADAPTIVE: config}
    if lengths := _parse_lengths(args):
        configs[FIXED] = replace(config, draft_length="fixed", num_speculative_tokens=max(lengths))
    if args.plain:
        configs[PLAIN] = _without_speculation(config)
    with loading_bar("loading"):
        return LocalTarget(configs)


def _without_speculation(config: Config) -> Config:
    return replace(config, speculate="off", draft_model=None, replay_file=None, replay_cost=False)


def _replaying(args: argparse.Namespace) -> Config:
    """The config of the measured engines, without the recording. Raises ConfigError."""
    given = {name: value for name, value in vars(args).items() if name not in ("speculate", "replay_cost")}
    drafters = getattr(args, "speculate", "replay")
    if "replay" not in drafters.split(","):
        message = f"--replay-acceptance needs the drafter replay, --speculate names {drafters}"
        raise ConfigError(message, "speculate")
    return replace(read_config(argparse.Namespace(**given)), speculate=drafters, replay_file="recording")


def _small_cache(config: Config, engine: LocalEngine, case: SpecCase) -> Config:
    """A cache for a third of the case's requests, at least for its longest two."""
    conversations = case.make(0)[: case.concurrency]
    sizes = sorted(len(engine.prompt_ids(each, ())) + each.max_tokens for each in conversations)
    tokens = max(sum(sizes) // FULL_SHARE, sum(sizes[-2:]))
    return replace(config, kv_cache_memory=f"{tokens}tokens", max_model_len=min(engine.max_len, tokens))


def _check(args: argparse.Namespace) -> None:
    """Check the flags before anything is loaded. Raises ConfigError."""
    for read in (_categories, _parse_loads, _parse_lengths):
        read(args)
    if args.base_url and (args.fixed or args.plain or args.replay_acceptance):
        raise ConfigError(
            "--fixed, --plain and --replay-acceptance load engines in this process: leave out --base-url"
        )


def _categories(args: argparse.Namespace) -> tuple[str, ...]:
    return _parse_names("categories", args.categories, ALL_CATEGORIES)


def _parse_names(name: str, text: str, known: Sequence[str]) -> tuple[str, ...]:
    """Words of a list, in the order of `known`. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    unknown = [word for word in words if word not in known]
    if unknown:
        raise ConfigError(f"--{name}: {unknown[0]!r} is none of {', '.join(known)}", name)
    return tuple(word for word in known if word in words)


def _parse_numbers(name: str, text: str) -> list[int]:
    """Whole numbers from 1 on, sorted, each once. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"--{name} must be whole numbers from 1 on joined by commas, got {text!r}", name)
    return sorted({int(word) for word in words})


def _parse_lengths(args: argparse.Namespace) -> list[int]:
    return _parse_numbers("fixed", args.fixed) if args.fixed else []


def _parse_loads(args: argparse.Namespace, most: int | None = None) -> list[int]:
    """Concurrencies, at most that of the engine."""
    given = _parse_numbers("concurrency", args.concurrency)
    return sorted({min(load, most or load) for load in given})
