"""`foreword bench agent`: sessions of a coding agent, with speculation off, with `suffix` alone, and `auto`.

Regime: a session is a loop of 8 to 30 steps with recorded tool results (workload.py), of one of two sets of
styles (styles.py): `tuning`, or `held-out`, which no drafter is tuned on. Tools take no time, and the next
step is sent when the answer before has ended. A cell has a number of sessions at once, with the contexts of
--contexts in turn. In each round all modes run the same sessions one after the other, in rotated order; every
round has sessions of its own, and no mode finds KV or answers of another. `off` is an engine that was started
without speculation, the other modes share a second one. The first round is not counted: it has two answers a
session and the smallest context, and compares hashes of the raw logits.

Without --model the answers are recorded too, and the weights random, of --shape (checkpoint.py). That shows
the machinery in the shape of an agent's traffic: prompts that grow by a result, cached prefixes, drafts that
are right as often as the scripts repeat themselves. It does not show how predictable a model's own answers
are. With --model the model answers by itself, within its context; --model demo is such a run of 1,024 tokens.

Generation is the time after an answer's first token; the first token's is mostly its prompt's. With --offline
there is no engine: the known answers go through the drafters and the controller, and figures are counts
(replay.py).

Ratios are to `off`, above 1 is better, with 95 % intervals over the rounds. Answers and their events must be
equal in all modes, nothing may be drafted with speculation off, and the sessions claimed must run at once,
or the exit code is 1. The prefix cache holds all sessions of a cell. Two more
figures: microseconds of the parser for a token, and milliseconds until a grammar of 100 tools is ready.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from foreword.bench.agent.checkpoint import AGENT_SHAPES, CONTEXT, write_checkpoint
from foreword.bench.agent.engine import AgentEngine, AgentTarget
from foreword.bench.agent.replay import run_offline
from foreword.bench.agent.sources import Sources
from foreword.bench.command import parse_names, parse_numbers
from foreword.bench.figures import matched_results, mode_figures, repetition_figures
from foreword.bench.measurement import (
    ADAPTIVE,
    AUTO,
    OFF,
    PLAIN,
    BenchCase,
    BenchRepetition,
    Measurement,
    Mode,
    PairedRun,
    Pairs,
    RequestResult,
    expected_weight,
    model_name,
    with_all_drafters,
)
from foreword.bench.session import BenchSession, BenchStep
from foreword.bench.statistics import geometric_mean, geometric_mean_ratio
from foreword.bench.tables import equal_text, print_table, ratio_number, ratio_text, rounds_text, share_text
from foreword.chat_formats.chat_format import BoundFormat
from foreword.chat_formats.parser import ChatParser
from foreword.chat_formats.tools import ReasoningOptions, Tool, ToolUse
from foreword.cli.configuration import read_config
from foreword.config.options import Config
from foreword.core.params import SamplingParams, Speculation
from foreword.errors import ConfigError
from foreword.grammar.tool_calls import ConstraintTask
from foreword.tokenizer.input_processor import make_requests

MeasureCost = Callable[[AgentEngine, BoundFormat, Sources], Mapping[str, Any]]

CATEGORY = "agent"
ALONE = [Mode(name, speculation=Speculation(name)) for name in ("suffix", "text")]
OVERSHOOT, MAX_ANSWER_TOKENS = 1.2, 2048  # limits of a script: share of its context, and longest answer
COST_S = 2.0  # estimate: the time to measure the parser or a grammar
ANSWER_TOKENS, STEPS, TOKENS_PER_S = 100, 12, 500  # estimates of a session

PARSED_CHARACTERS = (5_000, 50_000, 500_000)  # lengths of a call's argument
NUM_TOOLS, NUM_PARAMETERS = 100, 3
TYPES: Sequence[dict[str, Any]] = (
    {"type": "string"},
    {"type": "integer", "minimum": 0},
    {"type": "boolean"},
    {"type": "array", "items": {"type": "string"}},
    {"enum": ["fast", "exact", "auto"]},
    {
        "type": "object",
        "properties": {"path": {"type": "string"}, "line": {"type": "integer"}},
        "required": ["path"],
    },
)


def run(args: argparse.Namespace) -> int:
    if args.offline:
        return run_offline(args)
    contexts = parse_numbers("contexts", args.contexts)
    loads = parse_numbers("concurrency", args.concurrency)
    known = {mode.name: mode for mode in (*ALONE, AUTO)}
    modes = tuple(known[name] for name in parse_names("modes", args.modes, known))
    config = read_config(args)
    with BenchSession(args) as session, tempfile.TemporaryDirectory() as folder:
        with session.waiting("reading the package's files"):
            sources = Sources()
        recorded = config.model is None
        if recorded:
            with session.waiting("writing a model"):
                texts, shape = sources.texts.values(), AGENT_SHAPES[args.shape]
                model = write_checkpoint(Path(folder), texts, shape)
            config = _recorded_config(config, model, contexts, max(loads))
        with session.waiting(f"loading the model {config.model}"):
            config = with_all_drafters(config)
            off = replace(config, speculate="off", draft_model=None)
            target = AgentTarget({PLAIN: off, ADAPTIVE: config}, recorded, sources, contexts, args.set)
        measurement = Measurement(target, modes, args.rounds, _cell_result)
        for load in loads:
            sizes = (target.contexts_of(load, number) for number in range(args.rounds + 1))
            seconds = [_expected_s(load, of_round, len(modes)) for of_round in sizes]
            measurement.plan(BenchCase(CATEGORY, load, lambda _: ()), seconds)
        costs: dict[str, Any] = {}
        steps = _cost_steps(target, costs) + measurement.steps
        session.run(steps, f"{len(loads)} cells, {rounds_text(args.rounds)}")
        cells = measurement.cells
        result = {
            "model": f"recorded answers, {args.shape}" if recorded else model_name(config),
            "set": args.set,
            "contexts": contexts,
            "rounds": args.rounds,
            "equal": target.exact and all(of["equal"] for cell in cells for of in cell["modes"].values()),
            **costs,
            "cells": cells,
        }
        return session.finish(result, _show, finished=len(cells) + len(costs), passed=result["equal"])


def _expected_s(load: int, contexts: Sequence[int], num_modes: int) -> float:
    weight = sum(expected_weight(STEPS * ANSWER_TOKENS, load, context) for context in contexts)
    return weight * (1 + num_modes) / TOKENS_PER_S


def _cost_steps(target: AgentTarget, costs: dict[str, Any]) -> list[BenchStep]:
    """Measure the parser and a grammar, for a model with tools."""
    engine = target.engines[ADAPTIVE]
    if engine.format is None:
        return []
    bound = engine.format

    def measure(name: str, cost: MeasureCost) -> None:
        costs[name] = cost(engine, bound, target.sources)

    measures: Mapping[str, MeasureCost] = {"parser": measure_parser, "grammar": measure_grammar}
    return [
        BenchStep(name, name, COST_S, functools.partial(measure, name, cost))
        for name, cost in measures.items()
    ]


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


def _cell_result(case: BenchCase, modes: Sequence[Mode], pairs: Pairs) -> dict[str, Any]:
    plain = [pair.plain for pair in next(iter(pairs.values()))]
    results = [result for one in plain for result in one.results]
    lengths = [len(result.prompt_ids) for result in results]
    return {
        "sessions_at_once": case.concurrency,
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
        "session": geometric_mean_ratio([geometric_mean(of_round.values()) for of_round in by_session]),
        "slowest_session": geometric_mean_ratio([min(of_round.values()) for of_round in by_session]),
        "step": geometric_mean_ratio([_step_ratio(pair) for pair in pairs]),
        "generation": geometric_mean_ratio(
            [_generation_s(pair.plain) / _generation_s(pair.other) for pair in pairs]
        ),
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


def _generation_s(one: BenchRepetition) -> float:
    """Seconds of all requests after their first token."""
    return sum(result.total_s - (result.ttft_s or 0.0) for result in one.results)


def _step_ratio(pair: PairedRun) -> float:
    return geometric_mean(plain.total_s / other.total_s for plain, other in matched_results(pair))


def _times(rounds: Sequence[BenchRepetition]) -> dict[str, float]:
    results = [result for one in rounds for result in one.results]
    return {
        "session_s": statistics.median(
            seconds for one in rounds for seconds in _session_seconds(one).values()
        ),
        "step_s": statistics.median(result.total_s for result in results),
        "first_token_s": statistics.median(result.ttft_s or 0.0 for result in results),
        "generation_s": statistics.median(map(_generation_s, rounds)),
        "prompt_s": statistics.median(sum(result.ttft_s or 0.0 for result in one.results) for one in rounds),
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
        "generation",
        "first token",
        "cached",
        "reused",
        "accepted",
        "tokens/step",
    )
    legend = (
        "session [95 %]: time of a session: seconds with off, else the ratio to it.",
        "slowest: the session that gained least, mean over the rounds.",
        "generation: time after first tokens, seconds of all requests with off, else the ratio to it.",
        "first token: of a step, over off.",
        "cached: share of the prompt tokens after a tool's result.",
        "reused: the same of the tokens that the step before had read or written.",
    )
    contexts = ", ".join(map(str, result["contexts"]))
    title = f"agent: {result['model']}, contexts {contexts}; answers and events {equal_text(result['equal'])}"
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
        "" if is_off else ratio_number(of["slowest_session"]["ratio"]),
        f"{of['generation_s']:.1f} s" if is_off else ratio_number(of["generation"]["ratio"]),
        f"{of['first_token_s'] * 1e3:.0f} ms" if is_off else ratio_number(of["first_token"]["ratio"]),
        f"{of['cached_after_result']:.1%}",
        f"{of['reused']:.1%}",
        share_text(of.get("acceptance")),
        f"{of['tokens_per_step']:.2f}",
    ]


def measure_parser(engine: AgentEngine, bound: BoundFormat, sources: Sources) -> dict[str, dict[str, float]]:
    """Microseconds of a token, in answers with one call that writes a file, by characters of the file."""
    source, costs = "\n".join(sources.texts.values()), {}
    for size in PARSED_CHARACTERS:
        arguments = json.dumps({"file_path": "a.py", "content": source[:size]}, ensure_ascii=False)
        answer = f'I write it.\n<tool_call>\n{{"name": "Write", "arguments": {arguments}}}\n</tool_call>'
        token_ids = engine.tokenizer.encode(answer, add_special_tokens=False)
        decode = engine.tokenizer.decode
        tokens = [(token_id, decode([token_id])) for token_id in token_ids]
        parser = ChatParser(bound, engine.use, False, "call_{}".format)
        started = time.perf_counter()
        for token_id, text in tokens:
            parser.feed(token_id, text)
        parser.flush(ended_by_model=True)
        seconds = time.perf_counter() - started
        assert parser.num_calls == 1, "the call was not parsed"
        costs[str(size)] = {"tokens": len(tokens), "us_per_token": seconds / len(tokens) * 1e6}
    return costs


def measure_grammar(engine: AgentEngine, bound: BoundFormat, sources: Sources) -> dict[str, float]:
    """Milliseconds until the grammar of NUM_TOOLS tools can mask, for their first turn and for the next."""
    tools = _make_tools(sources)
    texts = [json.dumps([tool.name, tool.description, tool.parameters]) for tool in tools]
    figures: dict[str, float] = {"tools": len(tools), "bytes": sum(map(len, texts))}
    grammars = engine.client._engine.grammars
    grammars.set_vocabulary(engine.tokenizer.vocabulary())
    _compile(engine, bound, tools[:1])  # threads have started
    for name in ("first_turn_ms", "next_turn_ms"):
        figures[name] = _compile(engine, bound, tools) * 1e3
    return figures


def _compile(engine: AgentEngine, bound: BoundFormat, tools: tuple[Tool, ...]) -> float:
    """Seconds."""
    started = time.perf_counter()
    constraint = ConstraintTask(bound, ToolUse(tools), ReasoningOptions(), False, None).constrain()
    (request,) = make_requests(
        (0,), SamplingParams(structured=constraint.structured), engine.tokenizer, "grammar", engine.max_len
    )
    engine.client._engine.grammars.compile(request).result()
    return time.perf_counter() - started


def _make_tools(sources: Sources) -> tuple[Tool, ...]:
    """NUM_TOOLS tools of three described parameters, about 55 KB together."""
    rng, tools = Random(0), []
    for number in range(NUM_TOOLS):
        properties = {
            f"{rng.choice(('path', 'text', 'mode', 'limit', 'options'))}_{index}": {
                **rng.choice(TYPES),
                "description": rng.choice(sources.sentences),
            }
            for index in range(NUM_PARAMETERS)
        }
        schema = {"type": "object", "properties": properties, "required": list(properties)}
        tools.append(Tool(f"tool_{number}", rng.choice(sources.sentences), schema))
    return tuple(tools)
