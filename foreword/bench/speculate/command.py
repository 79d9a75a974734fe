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
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foreword.bench.common import DEMO, PROBE_TOKENS, expected_weight, rounds_text, with_all_drafters
from foreword.bench.prompts import PromptExample, read_examples
from foreword.bench.session import BenchSession, BenchStep
from foreword.bench.speculate.local import (
    MIXED_REPLAY,
    RANDOM,
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
    ConversationFactory,
    PromptBudget,
    library_functions,
    make_conversations,
    prompt_conversations,
)
from foreword.cli.flags import read_config
from foreword.config.options import Config
from foreword.core.params import Speculation
from foreword.errors import ConfigError

DEFAULTS = {"rounds": 7, "concurrency": "1,4,16,64", "requests": 4, "max_tokens": 128, "full_cache": True}
QUICK_DEFAULTS = {"rounds": 5, "concurrency": "1,4", "requests": 3, "max_tokens": 64, "full_cache": False}
MAX_QUICK_PROMPTS = 8  # of each category of a file, unless --requests is given
MAX_FULL_CONCURRENCY = 16  # of the case with a full cache
FULL_SHARE = 3  # its cache holds one third of the tokens of its requests
CHARS_PER_TOKEN = 3  # estimates


def run(args: argparse.Namespace) -> int:
    examples = read_examples(args) if args.prompts or args.prompt_field else ()
    _set_defaults(args, examples)
    _check(args, examples)
    draw = importlib.import_module("foreword.bench.speculate.plot").draw if args.plot else None
    with BenchSession(args) as session, contextlib.ExitStack() as stack:
        if args.base_url:
            measurement = _remote(args, examples)
        elif args.replay_acceptance:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            measurement = _replay(args, examples, session, Path(folder) / "recording.jsonl")
        else:
            measurement = _local(args, examples, session)
        session.run(measurement.steps, measurement.plan)
        result = measurement.result()
        return session.finish(
            result,
            print_result,
            finished=sum(bool(cell["modes"]) for cell in result["cells"]),
            passed=result["equal"] and result["answered_all"],
            draw=draw,
        )


def _set_defaults(args: argparse.Namespace, examples: Sequence[PromptExample]) -> None:
    """Set the flags that were not given."""
    defaults: dict[str, Any] = dict(QUICK_DEFAULTS if args.quick else DEFAULTS)
    if examples:
        largest = max(Counter(example.category for example in examples).values())
        defaults["requests"] = min(largest, MAX_QUICK_PROMPTS) if args.quick else largest
    for name, value in defaults.items():
        setattr(args, name, value if getattr(args, name) is None else getattr(args, name))


@dataclass(slots=True)
class _Measurement:
    """Cases on a target that steps may replace, and the cells that are complete."""

    target: BenchTarget
    model: str
    modes: tuple[Mode, ...]
    rounds: int
    speculate: str = AUTO.name  # what the mode `auto` runs
    token_s: float = 0.0  # estimate, of a plain step of one request
    steps: list[BenchStep] = field(default_factory=list)
    cells: list[dict[str, Any]] = field(default_factory=list)
    num_cases: int = 0
    _pairs: dict[str, dict[str, list[PairedRun]]] = field(default_factory=dict)  # by case and mode

    def add(self, cases: Sequence[SpecCase], runs_per_mode: float = 1.0) -> None:
        """Plan an uncounted round and `rounds` counted ones of each case."""
        self.token_s = self.token_s or _measure_token_s(self.target, cases[0].make(0)[0])
        self.num_cases += len(cases)
        for case in cases:
            weight = sum(map(functools.partial(_weight, case.concurrency), case.make(0)))
            runs = 1 + runs_per_mode * len(_applicable_modes(self.modes, case))
            for number in range(self.rounds + 1):
                label = f"{case.name}, " + (f"round {number} of {self.rounds}" if number else "warm-up")
                measure = functools.partial(self._measure, case, number)
                self.steps.append(BenchStep(case.name, label, weight * runs * self.token_s, measure))

    @property
    def plan(self) -> str:
        modes = (self.speculate if mode is AUTO else mode.name for mode in self.modes)
        names = "; ".join((OFF.name, *modes))
        return f"{self.num_cases} cells in modes {names}, {rounds_text(self.rounds)} and a warm-up of each"

    def result(self) -> dict[str, Any]:
        cells = self.cells
        return {
            "model": self.model,
            "rounds": self.rounds,
            "speculate": self.speculate,
            "modes": [OFF.name, *(mode.name for mode in self.modes)],
            "equal": all(figures.get("equal", True) for cell in cells for figures in cell["modes"].values()),
            "answered_all": not any(cell["errors"] for cell in cells),
            "worst": {AUTO.name: worst_cases(cells, AUTO.name)},
            "cells": cells,
        }

    def _measure(self, case: SpecCase, number: int) -> None:
        modes = _applicable_modes(self.modes, case)
        pairs = self._pairs.setdefault(case.name, {})
        for name, pair in self.target.run_pairs(case, modes, number).items():
            if number > 0:
                pairs.setdefault(name, []).append(pair)
        if number == self.rounds:
            self.cells.append(case_result(case, modes, self._pairs.pop(case.name)))


def _measure_token_s(target: BenchTarget, conversation: Conversation) -> float:
    """Seconds of a plain step of one request, with its share of the prompt."""
    short = replace(conversation, turns=conversation.turns[:1], max_tokens=PROBE_TOKENS, ignore_eos=True)
    target.run_plain(short)
    return target.run_plain(short) / _weight(1, short)


def _weight(concurrency: int, conversation: Conversation) -> float:
    """Time of a conversation among others, in steps of one request."""
    history = [text for _, text in conversation.history]
    num_chars = sum(map(len, (*history, *conversation.turns)))
    prompt_tokens = len(conversation.prompt_ids) or num_chars / CHARS_PER_TOKEN
    return expected_weight(conversation.max_tokens * conversation.num_turns, concurrency, prompt_tokens)


def _local(
    args: argparse.Namespace, examples: Sequence[PromptExample], session: BenchSession
) -> _Measurement:
    config = with_all_drafters(read_config(args))
    started = time.perf_counter()
    with session.waiting(f"loading the model {config.model or DEMO}"):
        target = _load(config, args)
    load_s = time.perf_counter() - started
    make = _local_factory(target.engines[ADAPTIVE], args, examples)
    return _plan_locally(target, config, args, _categories(args, examples), make, examples, load_s)


def _replay(
    args: argparse.Namespace, examples: Sequence[PromptExample], session: BenchSession, file: Path
) -> _Measurement:
    """Recorded answers as drafts, in one category per acceptance rate."""
    rates = parse_acceptance_rates(args.replay_acceptance)
    base = [name for name in _categories(args, examples) if name not in (MIXED, RANDOM)]
    if not base:
        raise ConfigError("--replay-acceptance needs a category besides mixed and random", "categories")
    config = _replaying(args)
    with session.waiting(f"recording answers of {config.model or DEMO}"):
        recorder = LocalEngine(_without_speculation(config))
        make_base = _local_factory(recorder, args, examples)
        make = functools.partial(make_replay_conversations, base=base, make=make_base)
        loads = _parse_loads(args, recorder.info.resolved.max_num_seqs)
        groups = [make(name, max(args.requests, loads[-1]), 0) for name in replay_categories(rates)]
        record_outputs(recorder, groups, rates, loads[-1], file)
    del recorder, make_base
    gc.collect()
    config = replace(config, replay_file=str(file), replay_cost=getattr(args, "replay_cost", False))
    started = time.perf_counter()
    with session.waiting(f"loading the model {config.model or DEMO}"):
        target = _load(config, args)
    load_s = time.perf_counter() - started
    return _plan_locally(target, config, args, replay_categories(rates), make, (), load_s)


def _remote(args: argparse.Namespace, examples: Sequence[PromptExample]) -> _Measurement:
    target = RemoteTarget(args.base_url, read_config(args).api_key)
    if examples:
        make: ConversationFactory = functools.partial(
            prompt_conversations, examples=examples, max_tokens=args.max_tokens
        )
    else:
        context = min(target.max_len, args.context)
        budget = PromptBudget.from_context(
            context, args.max_tokens, target.count, target.plain_ids(), library_functions()
        )
        make = functools.partial(make_conversations, budget=budget)
    cases = _make_cases(_categories(args, examples), _parse_loads(args), args, make, examples)
    modes = _modes(target.drafters, args)
    needed = max(len(case.make(0)) for case in cases) * len(modes) * (args.rounds + 1)
    if examples and min(Counter(example.category for example in examples).values()) < needed:
        print(
            f"bench speculate: prompts repeat, since {args.rounds} rounds take {needed} of a category: the "
            "server may draft from its earlier answers",
            file=sys.stderr,
        )
    measurement = _Measurement(
        target, target.model, modes, args.rounds, *(target.drafters if len(target.drafters) == 1 else ())
    )
    measurement.add(cases, runs_per_mode=2.0)
    return measurement


def _plan_locally(
    target: LocalTarget,
    config: Config,
    args: argparse.Namespace,
    categories: Sequence[str],
    make: ConversationFactory,
    examples: Sequence[PromptExample],
    load_s: float,
) -> _Measurement:
    """All cases, then the one with the small cache, on engines that replace the first ones."""
    resolved = target.engines[ADAPTIVE].info.resolved
    loads = _parse_loads(args, resolved.max_num_seqs)
    measurement = _Measurement(
        target,
        str(config.model or DEMO),
        _modes(resolved.drafters, args),
        args.rounds,
        config.speculate_text(),
    )
    measurement.add(_make_cases(categories, loads, args, make, examples))
    if not args.full_cache:
        return measurement
    load = max((load for load in loads if load <= MAX_FULL_CONCURRENCY), default=loads[0])
    category = next(name for name in (MIXED_REPLAY, MIXED, categories[-1]) if name in categories)
    case = _make_case(category, load, args, make, examples, full=True)
    small = _small_cache(config, target.engines[ADAPTIVE], case)

    def reload() -> None:
        target.engines.clear()
        gc.collect()
        measurement.target = _load(small, args)

    measurement.steps.append(BenchStep(case.name, f"{case.name}, loading", load_s, reload))
    measurement.add([case])
    return measurement


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
    names = _parse_names("modes", args.modes, [mode.name for mode in modes])
    return tuple(mode for mode in modes if mode.name in names)


def _applicable_modes(modes: Sequence[Mode], case: SpecCase) -> tuple[Mode, ...]:
    """Leave out drafters without input: no category has a grammar, few have predictions."""
    idle = {"grammar"} if any(each.prediction for each in case.make(0)) else {"grammar", "prediction"}
    return tuple(mode for mode in modes if mode.speculation.method not in idle) or tuple(modes)


def _make_cases(
    categories: Sequence[str],
    loads: Sequence[int],
    args: argparse.Namespace,
    make: ConversationFactory,
    examples: Sequence[PromptExample],
) -> list[SpecCase]:
    cases = [_make_case(category, load, args, make, examples) for load in loads for category in categories]
    return list({case.name: case for case in cases}.values())


def _make_case(
    category: str,
    load: int,
    args: argparse.Namespace,
    make: ConversationFactory,
    examples: Sequence[PromptExample],
    full: bool = False,
) -> SpecCase:
    """A case with the prompts of a file has each of them once at most."""
    count = max(int(args.requests), load)
    if examples:
        count = min(count, sum(example.category == category for example in examples))
    return SpecCase(category, min(load, count), lambda variant: make(category, count, variant), full)


def _local_factory(
    engine: LocalEngine, args: argparse.Namespace, examples: Sequence[PromptExample]
) -> ConversationFactory:
    """Raises ConfigError for a prompt of a file that does not fit the context."""
    if not examples:
        return functools.partial(make_conversations, budget=_prompt_budget(engine, args))
    for example in examples:
        first = Conversation(example.turns[:1], example.history)
        num_tokens = len(engine.prompt_ids(first, ()))
        if num_tokens + args.max_tokens > engine.max_len:
            raise ConfigError(
                f"--prompts {args.prompts}: the {num_tokens} tokens of line {example.line} and --max-tokens "
                f"{args.max_tokens} exceed the context of {engine.max_len}",
                "prompts",
            )
    return functools.partial(prompt_conversations, examples=examples, max_tokens=args.max_tokens)


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


def _check(args: argparse.Namespace, examples: Sequence[PromptExample]) -> None:
    """Check the flags before anything is loaded. Raises ConfigError."""
    _categories(args, examples)
    _parse_loads(args)
    _parse_lengths(args)
    if args.base_url and (args.fixed or args.plain or args.replay_acceptance):
        raise ConfigError(
            "--fixed, --plain and --replay-acceptance load engines in this process: leave out --base-url"
        )


def _categories(args: argparse.Namespace, examples: Sequence[PromptExample]) -> tuple[str, ...]:
    known = tuple(dict.fromkeys(example.category for example in examples)) or ALL_CATEGORIES
    if args.categories is None:
        return QUICK_CATEGORIES if args.quick and not examples else known
    return _parse_names("categories", args.categories, known)


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
