"""Recorded sessions without a model: known answers go through the drafters and the controller.

A step of R rows costs 1 + row_cost * (R - 1), prompts cost nothing, and drafting takes no time: all figures
are counts, equal on every machine. They show what drafters find, not how fast an engine is.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from foreword.bench.agent.checkpoint import write_tokenizer
from foreword.bench.agent.engine import AgentSession, SessionWriter, answer_text
from foreword.bench.agent.sources import Sources
from foreword.bench.agent.workload import AgentStep, make_script
from foreword.bench.command import parse_names, parse_numbers
from foreword.bench.session import BenchSession, BenchStep
from foreword.bench.tables import print_table, share_text
from foreword.core.outputs import Draft
from foreword.core.params import SamplingParams
from foreword.core.request import Request, RequestState
from foreword.kernels.cpu.library import load_library
from foreword.speculation.draft_length.controller import DraftLengthController
from foreword.speculation.draft_length.cost_model import Calibration
from foreword.speculation.draft_length.policy import RequestStep, StepRecord
from foreword.speculation.drafters.suffix import SuffixDrafter
from foreword.speculation.drafters.text import TextDrafter
from foreword.speculation.engine_drafter import EngineDrafter
from foreword.speculation.proposer import Proposer
from foreword.tokenizer.tokenizer import Tokenizer

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512)
MAX_DRAFT_TOKENS = 32
CORPUS_BYTES = 16 << 20
SESSION_S = 2.0  # estimate
MODES = {"suffix": ("suffix",), "text": ("text",), "auto": ("suffix", "text")}
TALLIED = ("tokens", "drafted", "accepted")
PROSE, SYNTAX = "prose", "syntax"  # places beside those of styles.PLACES


def _tallies() -> defaultdict[str, Counter[str]]:
    return defaultdict(Counter)


@dataclass(slots=True)
class Replay:
    """Figures of one run. A tally counts TALLIED: tokens emitted, draft tokens verified, those accepted."""

    steps: int = 0
    cost: float = 0.0
    plain_cost: float = 0.0  # cost of the same answers without drafts
    total: Counter[str] = field(default_factory=Counter)
    by_drafter: defaultdict[str, Counter[str]] = field(default_factory=_tallies)
    by_place: defaultdict[str, Counter[str]] = field(default_factory=_tallies)  # by place of the first token

    def merge(self, other: Replay) -> None:
        self.steps += other.steps
        self.cost += other.cost
        self.plain_cost += other.plain_cost
        self.total.update(other.total)
        for mine, theirs in ((self.by_drafter, other.by_drafter), (self.by_place, other.by_place)):
            for name, tally in theirs.items():
                mine[name].update(tally)

    def as_dict(self) -> dict[str, object]:
        return {
            "speed": self.plain_cost / self.cost,
            "tokens_per_step": self.total["tokens"] / self.steps,
            "acceptance": self.total["accepted"] / max(self.total["drafted"], 1),
            **_tallied(self.total),
            "by_drafter": {name: _tallied(tally) for name, tally in self.by_drafter.items()},
            "by_place": {name: _tallied(tally) for name, tally in self.by_place.items()},
        }


def _tallied(tally: Counter[str]) -> dict[str, int]:
    return {name: tally[name] for name in TALLIED}


@dataclass(slots=True)
class _Live:
    """A session, and its request."""

    session: AgentSession
    places: Sequence[Sequence[str]]  # each token's place, by turn
    turn: int
    state: RequestState


class OfflineReplay:
    """Answers sessions, as many at once as there are, with an empty corpus at the start."""

    def __init__(self, tokenizer: Tokenizer, row_cost: float) -> None:
        self._tokenizer = tokenizer
        self._row_cost = row_cost

    def run(
        self, sessions: Sequence[AgentSession], drafters: Sequence[EngineDrafter], vocab_size: int
    ) -> Replay:
        seconds = {rows: self._seconds(rows) for rows in ROWS}
        policy = DraftLengthController(Calibration(seconds, seconds), MAX_DRAFT_TOKENS)
        proposer = Proposer(drafters, vocab_size, policy)
        live = [
            _Live(session, self._places(session), 0, _make_state(session, 0, number))
            for number, session in enumerate(sessions)
        ]
        for each in live:
            proposer.start(each.state)
        replay = Replay()
        while live:
            self._step(live, proposer, replay)
            live = [each for each in live if _next_turn(each, proposer)]
        assert not proposer.errors, proposer.errors
        proposer.check()
        replay.plain_cost = _plain_cost(sessions, self._seconds)
        return replay

    def _seconds(self, rows: int) -> float:
        return 1.0 + self._row_cost * (rows - 1)

    def _step(self, live: Sequence[_Live], proposer: Proposer, replay: Replay) -> None:
        states = [each.state for each in live]
        records = []
        for each, draft in zip(live, proposer.propose(states), strict=True):
            state, answer = each.state, each.session.answers[each.turn]
            rest = answer[state.num_output :]
            token_ids = draft.token_ids[: len(rest) - 1] if draft else ()
            pairs = zip(token_ids, rest, strict=False)
            accepted = next((i for i, (a, b) in enumerate(pairs) if a != b), len(token_ids))
            run = rest[: accepted + 1]
            records.append(RequestStep(state, 1, len(token_ids), True, len(run), len(state.tokens)))
            _count(replay, each.places[each.turn][state.num_output :], draft, len(token_ids), accepted)
            state.num_computed = len(state.tokens) + len(run) - 1
            state.append(run)
        cost = self._seconds(sum(record.num_draft_tokens + 1 for record in records))
        replay.steps += len(live)
        replay.cost += cost
        if not proposer.is_skipping:
            proposer.record_step(StepRecord(tuple(records), {"forward": cost}))

    def _places(self, session: AgentSession) -> list[list[str]]:
        """The place of each token of each answer."""
        places = [
            self._token_places(answer, *_spans(step))
            for answer, step in zip(session.answers, session.script.steps, strict=False)
        ]
        return [*places, [PROSE] * len(session.answers[-1])]

    def _token_places(
        self, answer: Sequence[int], text: str, spans: Sequence[tuple[int, int, str]]
    ) -> list[str]:
        """By the byte at which a token begins."""
        lengths = [len(self._tokenizer.token_bytes(token_id)) for token_id in answer]
        of_byte = [SYNTAX] * (sum(lengths) + 1)
        for begin, end, place in spans:
            first, last = (len(text[:at].encode()) for at in (begin, end))
            of_byte[first:last] = [place] * (last - first)
        return [of_byte[at] for at in accumulate(lengths[:-1], initial=0)]


def _spans(step: AgentStep) -> tuple[str, list[tuple[int, int, str]]]:
    """An answer, and the places in it that are no syntax, as (begin, end, place)."""
    text = answer_text(step)
    at = len(step.text)
    spans = [(0, at, PROSE)]
    for key, value in step.arguments.items():
        written = json.dumps(value, ensure_ascii=False)
        begin = text.index(f"{json.dumps(key)}: {written}", at) + len(json.dumps(key)) + 2
        at = begin + len(written)
        is_text = isinstance(value, str)
        spans.append((begin + is_text, at - is_text, step.places.get(key, "other")))
    return text, spans


def _count(replay: Replay, places: Sequence[str], draft: Draft | None, drafted: int, accepted: int) -> None:
    checked = {"drafted": drafted, "accepted": accepted}
    replay.total.update(checked | {"tokens": accepted + 1})
    if draft is not None and drafted:
        replay.by_drafter[draft.drafter].update(checked | {"tokens": accepted})
    for index in range(accepted + 1):
        replay.by_place[places[index]]["tokens"] += 1
    for index in range(drafted):
        replay.by_place[places[min(index, accepted)]].update(drafted=1, accepted=int(index < accepted))


def _make_state(session: AgentSession, turn: int, number: int) -> RequestState:
    length = len(session.answers[turn])
    params = SamplingParams(temperature=0.0, max_tokens=length, ignore_eos=True)
    request = Request(f"{number}-{turn}", session.prompts[turn], params, 0, cache_salt=f"key{number}")
    state = RequestState(request, number, 1 << 20)
    state.num_computed = state.num_prompt - 1
    return state


def _next_turn(each: _Live, proposer: Proposer) -> bool:
    """Begin the next request of a session whose answer is complete. False after the last."""
    state = each.state
    if state.num_output < len(each.session.answers[each.turn]):
        return True
    proposer.finish(state.id, tuple(state.tokens[state.num_prompt :]))
    each.turn += 1
    if each.turn == len(each.session.answers):
        return False
    each.state = _make_state(each.session, each.turn, int(state.id.partition("-")[0]))
    proposer.start(each.state)
    return True


def _plain_cost(sessions: Sequence[AgentSession], seconds: Callable[[int], float]) -> float:
    """Cost of the same answers without drafts: a row of each session that is left, in each step."""
    lengths = Counter(sum(map(len, session.answers)) for session in sessions)
    cost, left, done = 0.0, len(sessions), 0
    for length in sorted(lengths):
        cost += (length - done) * seconds(left)
        left -= lengths[length]
        done = length
    return cost


def run_offline(args: argparse.Namespace) -> int:
    """`foreword bench agent --offline`."""
    contexts, loads = parse_numbers("contexts", args.contexts), parse_numbers("concurrency", args.concurrency)
    modes = parse_names("modes", args.modes, MODES)
    with BenchSession(args) as session, tempfile.TemporaryDirectory() as folder:
        with session.waiting("reading the package's files"):
            sources = Sources()
        with session.waiting("training a tokenizer"):
            write_tokenizer(Path(folder), sources.texts.values())
            tokenizer = Tokenizer.from_directory(folder)
        cells: list[dict[str, Any]] = []

        def measure(context: int, load: int) -> None:
            sessions = make_sessions(tokenizer, sources, args.set, context, args.rounds * load)
            figures = {mode: _run_mode(tokenizer, sessions, load, args.row_cost, mode) for mode in modes}
            cells.append({"context": context, "sessions_at_once": load, "modes": figures})

        steps = []
        for context, load in itertools.product(contexts, loads):
            name, seconds = f"context {context}, {load} at once", SESSION_S * args.rounds * load
            steps.append(BenchStep(name, name, seconds, functools.partial(measure, context, load)))
        session.run(steps, f"{args.rounds} rounds of {len(steps)} cells")
        result = {"set": args.set, "row_cost": args.row_cost, "cells": cells}
        return session.finish(result, _show, finished=len(cells), passed=True)


def make_sessions(
    tokenizer: Tokenizer, sources: Sources, of_set: str, context: int, number: int
) -> list[AgentSession]:
    """The first sessions of a set."""
    writer = SessionWriter(tokenizer)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    return [writer.write(make_script(n, sources, context, count, of_set), n) for n in range(number)]


def _run_mode(
    tokenizer: Tokenizer, sessions: Sequence[AgentSession], load: int, row_cost: float, mode: str
) -> dict[str, Any]:
    """All sessions, `load` at once; each round has drafters of its own."""
    total = Replay()
    for first in range(0, len(sessions), load):
        drafters = make_drafters(tokenizer, MODES[mode])
        run = OfflineReplay(tokenizer, row_cost).run(
            sessions[first : first + load], drafters, tokenizer.vocab_size
        )
        total.merge(run)
    return total.as_dict()


def make_drafters(tokenizer: Tokenizer, names: Sequence[str]) -> list[EngineDrafter]:
    library, reason = load_library()
    assert library is not None, reason
    drafters: list[EngineDrafter] = []
    for name in names:
        if name == "text":
            text = TextDrafter((), library)
            text.set_vocabulary(tokenizer.engine_vocabulary())
            drafters.append(text)
        else:
            drafters.append(SuffixDrafter(CORPUS_BYTES, (), library))
    return drafters


def _show(result: Mapping[str, Any]) -> None:
    rows, places = [], []
    for cell in result["cells"]:
        key = [str(cell["context"]), str(cell["sessions_at_once"])]
        for mode, of in cell["modes"].items():
            drafters = ", ".join(f"{n} {t['tokens'] / of['tokens']:.0%}" for n, t in of["by_drafter"].items())
            figures = f"{of['speed']:.2f}", f"{of['tokens_per_step']:.2f}", share_text(of["acceptance"])
            rows.append([*key, mode, *figures, drafters])
            for place, tally in sorted(of["by_place"].items()):
                shares = tally["tokens"] / of["tokens"], tally["accepted"] / tally["tokens"]
                accepted = share_text(tally["accepted"] / tally["drafted"] if tally["drafted"] else None)
                places.append([*key, mode, place, *map(share_text, shares), accepted])
    columns = ("context", "at once", "mode", "speed", "tokens/step", "accepted", "drafted tokens")
    legend = ("speed: cost of the steps without drafts, over that with them.",)
    print_table(f"agent offline: {result['set']}, row cost {result['row_cost']}", columns, rows, legend)
    columns = ("context", "at once", "mode", "place", "of all tokens", "from drafts", "accepted")
    print_table("by place", columns, places, ("accepted: share of the tokens that were drafted there.",))
