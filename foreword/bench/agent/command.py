"""`foreword bench agent`: sessions of a coding agent, with speculation off, with `suffix` alone, and `auto`.

Regime: a session is a loop of 8 to 20 steps with recorded tool results (workload.py); tools take no time,
and the next step is sent when the answer before has ended. A cell has a number of sessions at once, with
the contexts of --contexts in turn. In each round all modes run the same sessions one after the other, in
rotated order; every round has sessions of its own, and no mode finds KV or answers of another. `off` is an
engine that was started without speculation, the other modes share a second one. The first round is not
counted: it has two answers a session and the smallest context, and compares hashes of the raw logits.

Without --model the answers are recorded too, and the weights random (model.py). That shows the machinery in
the shape of an agent's traffic: prompts that grow by a result, cached prefixes, drafts that are right as
often as the scripts repeat themselves. It does not show how predictable a model's own answers are. With
--model the model answers by itself, within its context; --model demo is such a run of 1,024 tokens.

Ratios are to `off`, above 1 is better, with 95 % intervals over the rounds. Answers and their events must be
equal in all modes, nothing may be drafted with speculation off, and the sessions claimed must run at once,
or the exit code is 1. The prefix cache holds all sessions of a cell. Two more
figures: microseconds of the parser for a token, and milliseconds until a grammar of 100 tools is ready.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from foreword.bench.agent.engine import AgentEngine, AgentSession
from foreword.bench.agent.measures import measure_grammar, measure_parser
from foreword.bench.agent.model import CONTEXT, write_checkpoint
from foreword.bench.agent.workload import Sources, make_script
from foreword.bench.common import (
    DEMO,
    expected_weight,
    geometric_mean_ratio,
    print_table,
    ratio_text,
    rotate,
    rounds_text,
    with_all_drafters,
)
from foreword.bench.regime import require
from foreword.bench.session import BenchSession, BenchStep
from foreword.bench.speculate.statistics import mode_figures, repetition_figures
from foreword.bench.speculate.types import (
    ADAPTIVE,
    AUTO,
    OFF,
    PLAIN,
    BenchRepetition,
    Mode,
    PairedRun,
    RequestResult,
    SpecCase,
)
from foreword.chat_formats.chat_format import BoundFormat
from foreword.chat_formats.events import CallEnd
from foreword.cli.flags import read_config
from foreword.config.options import Config
from foreword.core.params import Speculation
from foreword.errors import ConfigError

MeasureCost = Callable[[AgentEngine, BoundFormat, Sources], Mapping[str, Any]]

CATEGORY = "agent"
SUFFIX = Mode("suffix", speculation=Speculation("suffix"))
PLAIN_OFF = replace(OFF, engine=PLAIN)  # of an engine without drafters
OWN_ANSWER_TOKENS = 96  # of answers that are not recorded
OVERSHOOT, MAX_ANSWER_TOKENS = 1.2, 2048  # of a script's context, and of its longest answer
WARMUP_STEPS = 1  # of the sessions that are not counted, whose logits are hashed
ROUND_NUMBERS = 1000  # sessions of a round
COST_S = 2.0  # of a measure of the parser or a grammar, for the estimate
ANSWER_TOKENS, STEPS = 100, 12  # of a session, for the estimate


def run(args: argparse.Namespace) -> int:
    contexts, loads = _numbers("contexts", args.contexts), _numbers("concurrency", args.concurrency)
    modes, config = _modes(args.modes), read_config(args)
    with BenchSession(args) as session, tempfile.TemporaryDirectory() as folder:
        with session.waiting("reading the package's files"):
            sources = Sources()
        recorded = config.model is None
        if recorded:
            with session.waiting("writing a model"):
                model = write_checkpoint(Path(folder), sources.texts.values())
            config = _recorded_config(config, model, contexts, max(loads))
        with session.waiting(f"loading the model {config.model}"):
            config = with_all_drafters(config)
            off = replace(config, speculate="off", draft_model=None)
            engines = {PLAIN: AgentEngine(off, recorded), ADAPTIVE: AgentEngine(config, recorded)}
        measurement = _Measurement(engines, sources, contexts, modes, args.rounds)
        session.run(measurement.plan(loads), f"{len(loads)} cells, {rounds_text(args.rounds)}")
        result = measurement.result("recorded answers" if recorded else str(config.model or DEMO))
        finished = len(measurement.cells) + len(measurement.costs)
        return session.finish(result, _show, finished=finished, passed=result["equal"])


def _modes(text: str) -> tuple[Mode, ...]:
    """Raises ConfigError."""
    known = {mode.name: mode for mode in (SUFFIX, AUTO)}
    names = text.split(",")
    if not set(names) <= set(known):
        raise ConfigError(f"--modes must be of {', '.join(known)}, got {text!r}", "modes")
    return tuple(known[name] for name in names)


def _recorded_config(config: Config, model: Path, contexts: Sequence[int], load: int) -> Config:
    """The sampler that records replace runs on the host. Raises ConfigError."""
    limits = [int(OVERSHOOT * context) + MAX_ANSWER_TOKENS for context in contexts]
    if max(limits) > CONTEXT:
        most = int((CONTEXT - MAX_ANSWER_TOKENS) / OVERSHOOT)
        raise ConfigError(f"--contexts: at most {most}, got {max(contexts)}", "contexts")
    tokens = sum(limits[number % len(limits)] for number in range(max(load, len(limits))))
    return replace(
        config,
        model=str(model),
        overlap=False,
        max_num_seqs=config.max_num_seqs or load,
        max_model_len=config.max_model_len or max(limits),
        kv_cache_memory=config.kv_cache_memory or f"{tokens}tokens",
    )


@dataclass(slots=True)
class _Measurement:
    """Cells by sessions at once, and their rounds."""

    engines: Mapping[str, AgentEngine]
    sources: Sources
    contexts: Sequence[int]
    modes: Sequence[Mode]  # compared with off
    num_rounds: int
    cells: list[dict[str, Any]] = field(default_factory=list)
    costs: dict[str, Any] = field(default_factory=dict)  # of the parser, and of a grammar
    exact: bool = True  # hashes of logits are equal
    _pairs: dict[str, list[PairedRun]] = field(default_factory=dict)  # of the cell, by mode

    def plan(self, loads: Sequence[int]) -> list[BenchStep]:
        engine = self.engines[ADAPTIVE]
        steps = []
        if engine.format is not None:
            for name, measure in (("parser", measure_parser), ("grammar", measure_grammar)):
                run = functools.partial(self._measure_cost, name, measure, engine, engine.format)
                steps.append(BenchStep(name, name, COST_S, run))
        for load in loads:
            for number in range(self.num_rounds + 1):
                sizes = self._sizes(load, number)
                seconds = sum(expected_weight(STEPS * ANSWER_TOKENS, load, size) for size in sizes) / 500
                label = f"{load} at once, " + (
                    f"round {number} of {self.num_rounds}" if number else "warm-up"
                )
                run = functools.partial(self._measure, load, number)
                steps.append(BenchStep(f"x{load}", label, seconds * (1 + len(self.modes)), run))
        return steps

    def result(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "contexts": list(self.contexts),
            "rounds": self.num_rounds,
            "equal": self.exact and all(of["equal"] for cell in self.cells for of in cell["modes"].values()),
            **self.costs,
            "cells": self.cells,
        }

    def _measure_cost(self, name: str, measure: MeasureCost, engine: AgentEngine, bound: BoundFormat) -> None:
        self.costs[name] = measure(engine, bound, self.sources)

    def _sizes(self, load: int, number: int) -> list[int]:
        """Contexts of the sessions of a round; of the first, which is not counted, the smallest."""
        contexts = self.contexts if number else [min(self.contexts)]
        return [contexts[index % len(contexts)] for index in range(max(load, len(contexts)))]

    def _make_sessions(self, load: int, number: int) -> list[AgentSession]:
        engine = self.engines[ADAPTIVE]
        limit = CONTEXT if engine.recorded else engine.max_len - OWN_ANSWER_TOKENS
        sessions = []
        for index, size in enumerate(self._sizes(load, number), number * ROUND_NUMBERS + load):
            script = make_script(index, self.sources, min(size, limit), engine.count)
            if number == 0:
                script = replace(script, steps=script.steps[:WARMUP_STEPS])
            sessions.append(engine.make_session(script, index, OWN_ANSWER_TOKENS))
        return sessions

    def _measure(self, load: int, number: int) -> None:
        sessions = tuple(self._make_sessions(load, number))
        case = SpecCase(CATEGORY, load, lambda _: sessions)
        rounds: dict[str, BenchRepetition] = {}
        for mode in rotate((PLAIN_OFF, *self.modes), number):
            engine = self.engines[mode.engine]
            engine.use_answers(sessions)
            engine.sampler.with_hashes = number == 0
            salt = f"{case.name}, {mode.name}, round {number}"
            rounds[mode.name] = done = engine.run(sessions, mode, load, salt)
            done.check(case, mode)
            _check_sessions(mode, sessions, done, engine.recorded)
        if number == 0:
            hashes = {tuple(result.logits_hashes for result in one.results) for one in rounds.values()}
            self.exact &= len(hashes) == 1
            self._pairs = {mode.name: [] for mode in self.modes}
            return
        for mode in self.modes:
            self._pairs[mode.name].append(PairedRun(rounds[OFF.name], rounds[mode.name]))
        if number == self.num_rounds:
            self.cells.append(_cell_result(load, self._pairs))


def _check_sessions(
    mode: Mode, sessions: Sequence[AgentSession], done: BenchRepetition, recorded: bool
) -> None:
    """Raise RegimeError where the sessions were not what they claim."""
    if not recorded:
        return
    require(f"{mode.name}: steps", len(done.results), sum(session.num_turns for session in sessions))
    require(f"{mode.name}: preemptions", done.preemptions, 0)
    calls = sum(isinstance(event, CallEnd) for result in done.results for event in result.events)
    require(f"{mode.name}: calls parsed", calls, sum(len(session.script.steps) for session in sessions))


def _cell_result(load: int, pairs: Mapping[str, Sequence[PairedRun]]) -> dict[str, Any]:
    plain = [pair.plain for pair in next(iter(pairs.values()))]
    results = [result for one in plain for result in one.results]
    lengths = [len(result.prompt_ids) for result in results]
    return {
        "sessions_at_once": load,
        "sessions": sum(len(_session_seconds(one)) for one in plain),
        "steps": len(results),
        "prompt_tokens": {"median": statistics.median(lengths), "max": max(lengths)},
        "answer_tokens": statistics.median(result.num_tokens for result in results),
        "plain": _times(plain) | _cached(plain) | repetition_figures(plain),
        "modes": {name: _mode_result(of_mode) for name, of_mode in pairs.items()},
    }


def _mode_result(pairs: Sequence[PairedRun]) -> dict[str, Any]:
    others = [pair.other for pair in pairs]
    by_session = [_session_ratios(pair) for pair in pairs]
    ratios = {
        "session": geometric_mean_ratio([_mean(of_round.values()) for of_round in by_session]),
        "slowest_session": geometric_mean_ratio([min(of_round.values()) for of_round in by_session]),
        "step": geometric_mean_ratio([_step_ratio(pair) for pair in pairs]),
    }
    shown = {name: ratio.as_dict() for name, ratio in ratios.items() if ratio is not None}
    figures = mode_figures(pairs)
    figures["equal"] &= all(
        [result.events for result in pair.plain.results] == [result.events for result in pair.other.results]
        for pair in pairs
    )
    return figures | shown | _times(others) | _cached(others)


def _session_ratios(pair: PairedRun) -> dict[int, float]:
    plain, other = _session_seconds(pair.plain), _session_seconds(pair.other)
    return {number: seconds / other[number] for number, seconds in plain.items()}


def _session_seconds(one: BenchRepetition) -> dict[int, float]:
    """Seconds of each session: of all its steps, since tools take no time."""
    seconds: dict[int, float] = {}
    for result in one.results:
        seconds[result.conversation] = seconds.get(result.conversation, 0.0) + result.total_s
    return seconds


def _step_ratio(pair: PairedRun) -> float:
    others = {result.key: result for result in pair.other.results}
    steps = ((result, others.get(result.key)) for result in pair.plain.results)
    return _mean(plain.total_s / other.total_s for plain, other in steps if other is not None)


def _times(rounds: Sequence[BenchRepetition]) -> dict[str, float]:
    results = [result for one in rounds for result in one.results]
    return {
        "session_s": statistics.median(
            seconds for one in rounds for seconds in _session_seconds(one).values()
        ),
        "step_s": statistics.median(result.total_s for result in results),
        "first_token_s": statistics.median(result.ttft_s or 0.0 for result in results),
    }


def _cached(rounds: Sequence[BenchRepetition]) -> dict[str, float]:
    """Cached shares: of all prompt tokens, of those after a result, of those that the step before had."""
    pairs: list[tuple[RequestResult, RequestResult]] = []
    prompt = cached = 0
    for one in rounds:
        by_key = {result.key: result for result in one.results}
        pairs += [(by_key[number, turn - 1], result) for (number, turn), result in by_key.items() if turn]
        prompt += sum(len(result.prompt_ids) for result in one.results)
        cached += sum(result.num_cached for result in one.results)
    known = sum(len(before.prompt_ids) + before.num_tokens for before, _ in pairs)
    later_cached = sum(result.num_cached for _, result in pairs)
    return {
        "cached": cached / prompt,
        "cached_after_result": later_cached / max(sum(len(result.prompt_ids) for _, result in pairs), 1),
        "reused": later_cached / max(known, 1),
    }


def _mean(values: Iterable[float]) -> float:
    """Geometric."""
    return math.exp(statistics.fmean(map(math.log, values)))


def _numbers(name: str, text: str) -> list[int]:
    """Whole numbers from 1 on, sorted. Raises ConfigError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) for word in words):
        raise ConfigError(f"--{name} must be whole numbers from 1 on joined by commas, got {text!r}", name)
    return sorted({int(word) for word in words})


def _show(result: Mapping[str, Any]) -> None:
    rows = []
    for cell in result["cells"]:
        plain = cell["plain"]
        rows.append(_row(cell, OFF.name, plain, f"{plain['session_s']:.1f} s"))
        for name, of in cell["modes"].items():
            rows.append(_row(cell, name, of, ratio_text(of["session"])))
    columns = (
        "at once",
        "mode",
        "session [95 %]",
        "slowest",
        "first token",
        "cached",
        "reused",
        "accepted",
        "tokens/step",
    )
    legend = (
        "session [95 %]: time of a session: seconds with off, else the ratio to it.",
        "slowest: the session that gained least, mean over the rounds.",
        "first token: of a step, over off.",
        "cached: share of the prompt tokens after a tool's result.",
        "reused: the same of the tokens that the step before had read or written.",
    )
    equal = "equal" if result["equal"] else "NOT EQUAL"
    contexts = ", ".join(map(str, result["contexts"]))
    title = f"agent: {result['model']}, contexts {contexts}; answers and events {equal}"
    if rows:
        print_table(title, columns, rows, legend)
    for size, of in result.get("parser", {}).items():
        print(f"parser: {of['us_per_token']:.1f} us a token of a call with {size} characters")
    if "grammar" in result:
        of = result["grammar"]
        ready = f"ready after {of['first_turn_ms']:.0f} ms, next turn {of['next_turn_ms']:.0f} ms"
        print(f"grammar of {of['tools']} tools, {of['bytes'] / 1000:.0f} KB: {ready}")


def _row(cell: Mapping[str, Any], mode: str, of: Mapping[str, Any], session: str) -> list[str]:
    is_off = mode == OFF.name
    return [
        str(cell["sessions_at_once"]),
        mode,
        session,
        "" if is_off else ratio_text({"ratio": of["slowest_session"]["ratio"]}),
        f"{of['first_token_s'] * 1e3:.0f} ms"
        if is_off
        else ratio_text({"ratio": of["first_token"]["ratio"]}),
        f"{of['cached_after_result']:.1%}",
        f"{of['reused']:.1%}",
        f"{of['acceptance']:.0%}" if of.get("acceptance") is not None else "",
        f"{of['tokens_per_step']:.2f}",
    ]
