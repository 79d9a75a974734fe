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
import contextlib
import functools
import gc
import importlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from foreword.bench.command import parse_names, parse_numbers
from foreword.bench.engine import LocalEngine, LocalTarget
from foreword.bench.measurement import (
    ADAPTIVE,
    AUTO,
    FIXED,
    OFF,
    PLAIN,
    REPLAY,
    BenchCase,
    Measurement,
    Mode,
    model_name,
    with_all_drafters,
)
from foreword.bench.prompts import read_examples
from foreword.bench.remote import RemoteTarget
from foreword.bench.session import BenchSession, BenchStep
from foreword.bench.speculate.report import case_result, print_result, worst_cases
from foreword.bench.tables import rounds_text
from foreword.bench.workloads import (
    ALL_CATEGORIES,
    MIXED,
    QUICK_CATEGORIES,
    Conversation,
    ConversationFactory,
    PromptBudget,
    TokenSource,
    make_conversations,
    prompt_conversations,
    stable_seed,
)
from foreword.cli.configuration import read_config
from foreword.config.options import Config
from foreword.core.params import Speculation
from foreword.errors import ConfigError

DEFAULTS = {"rounds": 7, "concurrency": "1,4,16,64", "requests": 4, "max_tokens": 128, "full_cache": True}
QUICK_DEFAULTS = {"rounds": 5, "concurrency": "1,4", "requests": 3, "max_tokens": 64, "full_cache": False}
MAX_QUICK_PROMPTS = 8  # prompts of each category of a file, unless --requests is given
MAX_FULL_CONCURRENCY = 16  # highest concurrency of the case with a full cache
FULL_SHARE = 3  # its cache holds one third of the tokens of its requests

MIXED_REPLAY = REPLAY + "mixed"
RANDOM = "random"


@dataclass(slots=True)
class _Plan:
    """A measurement, and names for its result."""

    measurement: Measurement
    model: str
    speculate: str = AUTO.name  # the drafters of the mode `auto`

    def __str__(self) -> str:
        modes = (self.speculate if mode is AUTO else mode.name for mode in self.measurement.modes)
        names, rounds = "; ".join((OFF.name, *modes)), rounds_text(self.measurement.rounds)
        return f"{self.measurement.num_cases} cells in modes {names}, {rounds} and a warm-up of each"

    def result(self) -> dict[str, Any]:
        cells = self.measurement.cells  # an interrupted one is left out
        return {
            "model": self.model,
            "rounds": self.measurement.rounds,
            "speculate": self.speculate,
            "modes": [OFF.name, *(mode.name for mode in self.measurement.modes)],
            "equal": all(figures.get("equal", True) for cell in cells for figures in cell["modes"].values()),
            "answered_all": not any(cell["errors"] for cell in cells),
            "worst": {AUTO.name: worst_cases(cells, AUTO.name)},
            "cells": cells,
        }


@dataclass(frozen=True, slots=True)
class _CaseFactory:
    """Cases of the flags, with conversations from `make`."""

    args: argparse.Namespace
    examples: Sequence[Conversation]  # () unless prompts are those of a file
    make: ConversationFactory

    def cases(self, categories: Sequence[str], loads: Sequence[int]) -> list[BenchCase]:
        cases = [self.case(category, load) for load in loads for category in categories]
        return list({case.name: case for case in cases}.values())

    def case(self, category: str, load: int, full: bool = False) -> BenchCase:
        """A case with the prompts of a file has each of them once at most."""
        count = max(int(self.args.requests), load)
        if self.examples:
            count = min(count, sum(example.category == category for example in self.examples))
        return BenchCase(
            category, min(load, count), lambda variant: self.make(category, count, variant), full
        )


def run(args: argparse.Namespace) -> int:
    examples = read_examples(args) if args.prompts or args.prompt_field else ()
    _set_defaults(args, examples)
    _check(args, examples)
    draw = importlib.import_module("foreword.bench.speculate.plot").draw if args.plot else None
    with BenchSession(args) as session, contextlib.ExitStack() as stack:
        if args.base_url:
            plan = _remote(args, examples)
        elif args.replay_acceptance:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            plan = _replay(args, examples, session, Path(folder) / "recording.jsonl")
        else:
            plan = _local(args, examples, session)
        session.run(plan.measurement.steps, str(plan))
        result = plan.result()
        return session.finish(
            result,
            print_result,
            finished=sum(bool(cell["modes"]) for cell in result["cells"]),
            passed=result["equal"] and result["answered_all"],
            draw=draw,
        )


def _set_defaults(args: argparse.Namespace, examples: Sequence[Conversation]) -> None:
    """Set the flags that were not given."""
    defaults: dict[str, Any] = dict(QUICK_DEFAULTS if args.quick else DEFAULTS)
    if examples:
        largest = max(Counter(example.category for example in examples).values())
        defaults["requests"] = min(largest, MAX_QUICK_PROMPTS) if args.quick else largest
    for name, value in defaults.items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))


def _local(args: argparse.Namespace, examples: Sequence[Conversation], session: BenchSession) -> _Plan:
    config = with_all_drafters(read_config(args))
    target, load_s = _load(config, args, session)
    engine = target.engines[ADAPTIVE]
    if examples:
        _check_lengths(args, examples, engine)
    factory = _CaseFactory(args, examples, _conversations(engine.max_len, args, examples, engine))
    return _plan_locally(target, config, factory, _categories(args, examples), load_s)


def _replay(
    args: argparse.Namespace, examples: Sequence[Conversation], session: BenchSession, file: Path
) -> _Plan:
    """Recorded answers as drafts, in one category per acceptance rate."""
    rates = parse_acceptance_rates(args.replay_acceptance)
    categories = replay_categories(rates)
    base = [name for name in _categories(args, examples) if name not in (MIXED, RANDOM)]
    if not base:
        raise ConfigError("--replay-acceptance needs a category besides mixed and random", "categories")
    config = _replaying(args)
    with session.waiting(f"recording answers of {model_name(config)}"):
        recorder = LocalEngine(_without_speculation(config))
        if examples:
            _check_lengths(args, examples, recorder)
        make_base = _conversations(recorder.max_len, args, examples, recorder)
        make = functools.partial(make_replay_conversations, base=base, make=make_base)
        loads = _parse_loads(args, recorder.info.resolved.max_num_seqs)
        groups = [make(name, max(args.requests, loads[-1]), 0) for name in categories]
        record_outputs(recorder, groups, rates, loads[-1], file)
    del recorder, make_base
    gc.collect()
    config = replace(config, replay_file=str(file), replay_cost=getattr(args, "replay_cost", False))
    target, load_s = _load(config, args, session)
    return _plan_locally(target, config, _CaseFactory(args, (), make), categories, load_s)


def _remote(args: argparse.Namespace, examples: Sequence[Conversation]) -> _Plan:
    target = RemoteTarget(args.base_url, read_config(args).api_key)
    factory = _CaseFactory(args, examples, _conversations(target.max_len, args, examples, target))
    cases = factory.cases(_categories(args, examples), _parse_loads(args))
    modes = _modes(target.drafters, args)
    needed = max(len(case.make(0)) for case in cases) * len(modes) * (args.rounds + 1)
    if examples and min(Counter(example.category for example in examples).values()) < needed:
        print(
            f"bench speculate: prompts repeat, since {args.rounds} rounds take {needed} of a category: the "
            "server may draft from its earlier answers",
            file=sys.stderr,
        )
    measurement = Measurement(target, modes, args.rounds, case_result)
    measurement.add(cases, target.run_plain)
    return _Plan(measurement, target.model, *(target.drafters if len(target.drafters) == 1 else ()))


def _plan_locally(
    target: LocalTarget, config: Config, factory: _CaseFactory, categories: Sequence[str], load_s: float
) -> _Plan:
    """All cases, then the one with the small cache, on engines that replace the first ones."""
    args, resolved = factory.args, target.engines[ADAPTIVE].info.resolved
    loads = _parse_loads(args, resolved.max_num_seqs)
    measurement = Measurement(target, _modes(resolved.drafters, args), args.rounds, case_result)
    measurement.add(factory.cases(categories, loads), target.run_plain)
    plan = _Plan(measurement, model_name(config), config.speculate_text())
    if not args.full_cache:
        return plan
    load = max((load for load in loads if load <= MAX_FULL_CONCURRENCY), default=loads[0])
    category = next(name for name in (MIXED_REPLAY, MIXED, categories[-1]) if name in categories)
    case = factory.case(category, load, full=True)
    small = _small_cache(config, target.engines[ADAPTIVE], case)

    def reload() -> None:
        target.engines.clear()
        gc.collect()
        measurement.target = LocalTarget(_engine_configs(small, args))

    measurement.steps.append(BenchStep(case.name, f"{case.name}, loading", load_s, reload))
    measurement.add([case], target.run_plain)
    return plan


def _modes(drafters: Sequence[str], args: argparse.Namespace) -> tuple[Mode, ...]:
    """Modes compared with `off`; a single drafter is the same as `auto`. Raises ConfigError.

    --quick leaves out each drafter alone.
    """
    names = () if len(drafters) == 1 or (args.quick and not args.modes) else drafters
    alone = [Mode(name, speculation=Speculation(name)) for name in names]
    lengths = [
        Mode(f"fixed {length}", FIXED, Speculation(max_draft_tokens=length))
        for length in _parse_lengths(args)
    ]
    plain = [Mode("plain", PLAIN, Speculation("off"))] if args.plain else []
    modes = (*alone, AUTO, *lengths, *plain)
    if not args.modes:
        return modes
    names = parse_names("modes", args.modes, [mode.name for mode in modes])
    return tuple(mode for mode in modes if mode.name in names)


def _conversations(
    max_len: int, args: argparse.Namespace, examples: Sequence[Conversation], model: TokenSource
) -> ConversationFactory:
    if examples:
        return functools.partial(prompt_conversations, examples=examples, max_tokens=args.max_tokens)
    budget = PromptBudget.from_context(min(max_len, args.context), args.max_tokens, model)
    return functools.partial(make_conversations, budget=budget)


def _check_lengths(args: argparse.Namespace, examples: Sequence[Conversation], engine: LocalEngine) -> None:
    """Raises ConfigError for a prompt of a file that does not fit the context."""
    for example in examples:
        num_tokens = len(engine.prompt_ids(example, ()))
        if num_tokens + args.max_tokens > engine.max_len:
            raise ConfigError(
                f"--prompts {args.prompts}: the {num_tokens} tokens of line {example.line} and --max-tokens "
                f"{args.max_tokens} exceed the context of {engine.max_len}",
                "prompts",
            )


def _load(config: Config, args: argparse.Namespace, session: BenchSession) -> tuple[LocalTarget, float]:
    """Engines, and the seconds that loading took."""
    started = time.perf_counter()
    with session.waiting(f"loading the model {model_name(config)}"):
        target = LocalTarget(_engine_configs(config, args))
    return target, time.perf_counter() - started


def _engine_configs(config: Config, args: argparse.Namespace) -> Mapping[str, Config]:
    configs = {ADAPTIVE: config}
    if lengths := _parse_lengths(args):
        configs[FIXED] = replace(config, draft_length="fixed", num_speculative_tokens=max(lengths))
    if args.plain:
        configs[PLAIN] = _without_speculation(config)
    return configs


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


def _small_cache(config: Config, engine: LocalEngine, case: BenchCase) -> Config:
    """A cache for a third of the case's requests, at least for its longest two."""
    conversations = case.make(0)[: case.concurrency]
    sizes = sorted(len(engine.prompt_ids(each, ())) + each.max_tokens for each in conversations)
    tokens = max(sum(sizes) // FULL_SHARE, sum(sizes[-2:]))
    return replace(config, kv_cache_memory=f"{tokens}tokens", max_model_len=min(engine.max_len, tokens))


def _check(args: argparse.Namespace, examples: Sequence[Conversation]) -> None:
    """Check the flags before anything is loaded. Raises ConfigError."""
    _categories(args, examples)
    _parse_loads(args)
    _parse_lengths(args)
    if args.base_url and (args.fixed or args.plain or args.replay_acceptance):
        raise ConfigError(
            "--fixed, --plain and --replay-acceptance load engines in this process: leave out --base-url"
        )


def _categories(args: argparse.Namespace, examples: Sequence[Conversation]) -> tuple[str, ...]:
    known = tuple(dict.fromkeys(example.category for example in examples)) or ALL_CATEGORIES
    if args.categories is None:
        return QUICK_CATEGORIES if args.quick and not examples else known
    return parse_names("categories", args.categories, known)


def _parse_lengths(args: argparse.Namespace) -> list[int]:
    return parse_numbers("fixed", args.fixed) if args.fixed else []


def _parse_loads(args: argparse.Namespace, most: int | None = None) -> list[int]:
    """Concurrencies, at most that of the engine."""
    given = parse_numbers("concurrency", args.concurrency)
    return sorted({min(load, most or load) for load in given})


def parse_acceptance_rates(text: str) -> tuple[float, ...]:
    """ "0,0.3,0.9" as numbers. Raises ConfigError."""
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        rates = (-1.0,)
    if not all(0 <= rate <= 1 for rate in rates):
        raise ConfigError(f"--replay-acceptance must be numbers from 0 to 1 joined by commas, got {text!r}")
    return rates


def replay_categories(rates: Sequence[float]) -> tuple[str, ...]:
    """Categories of replayed answers: they measure random weights, or the machinery apart from drafting.

    In "replay 0.6" each draft token is right with probability 0.6; "replay mixed" has requests of all rates.
    """
    return (*(f"{REPLAY}{rate:g}" for rate in rates), *((MIXED_REPLAY,) if len(rates) > 1 else ()))


def make_replay_conversations(
    category: str, count: int, variant: int, base: Sequence[str], make: ConversationFactory
) -> tuple[Conversation, ...]:
    """Conversations of the base categories in turn, under seeds of their own."""
    columns = [make(name, count, variant) for name in base if name != RANDOM]
    return tuple(
        replace(columns[number % len(columns)][number], category=category, seed=stable_seed(category, number))
        for number in range(count)
    )


def record_outputs(
    engine: LocalEngine,
    groups: Sequence[tuple[Conversation, ...]],
    rates: Sequence[float],
    concurrency: int,
    path: Path,
) -> None:
    """Answer everything once without speculation and write the replay file."""
    lines = []
    for conversations in groups:
        for result in engine.run(conversations, OFF, concurrency, "recording").results:
            category = conversations[result.conversation].category
            rate = (
                rates[result.conversation % len(rates)]
                if category == MIXED_REPLAY
                else float(category.removeprefix(REPLAY))
            )
            line = {"prompt_token_ids": result.prompt_ids, "token_ids": result.output}
            lines.append({**line, "seed": result.seed, "error_rate": 1.0 - rate})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
