"""A record of everything that enters the controller, and a replay that checks its decisions against it.

The controller depends on nothing else, not even on a clock. Lines are JSON. They hold no token of any text: of a draft
only which of its guesses were right.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from foreword.core.draft import Draft
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request, RequestState
from foreword.drafting.base import Ask
from foreword.drafting.control.controller import Controller
from foreword.drafting.control.costs import Calibration, PassCost, sampling_class
from foreword.drafting.policy import Load, Offer, Served, StepFacts

__all__ = ["TracedController", "replay"]

# Parameters that stand for all of their sampling class.
OF_CLASS: tuple[Mapping[str, Any], ...] = ({"temperature": 0.0}, {}, {"top_p": 0.5}, {"min_tokens": 1}, {"logprobs": 0})


class TracedController(Controller):
    """A controller that writes down what it is told and what it decides; each line is on disk before it goes on.

    Raises OSError if the file cannot be written.
    """

    def __init__(
        self, path: Path, calibration: Calibration, max_tokens: int, passes: Mapping[str, PassCost] | None = None
    ) -> None:
        super().__init__(calibration, max_tokens, passes)
        self._path = path
        path.write_text("")
        self._write(
            "setup",
            sampled=[*calibration.sampled.items()],
            single=[*calibration.single.items()],
            reads=[calibration.read_first, calibration.read_further],
            max_tokens=max_tokens,
            passes={name: [*cost.seconds.items()] for name, cost in (passes or {}).items()},
        )

    def start(self, state: RequestState) -> None:
        params = state.params
        self._write(
            "start",
            id=state.id,
            kind=sampling_class(params),
            tokens=[state.num_prompt, len(state.tokens), state.limit],
            bounds=[params.max_tokens, params.speculation.max_tokens],
        )
        super().start(state)

    def finish(self, request_id: str) -> None:
        self._write("finish", id=request_id, length=len(self._requests[request_id].state.tokens))
        super().finish(request_id)

    def score(self, state: RequestState, draft: Draft, run: Sequence[int]) -> None:
        right = [guess == token for guess, token in zip(draft.token_ids, run, strict=False)]
        self._write("score", id=state.id, draft=_draft_record(draft), right=right, run=len(run))
        super().score(state, draft, run)

    def bound(self, ask: Ask) -> int:
        length = super().bound(ask)
        self._write("bound", ask=_ask_record(ask), decided=length)
        return length

    def passes(self, offers: Sequence[Offer], load: Load, drafter: str, backlogs: Sequence[int]) -> list[tuple[int, float]]:
        given = _offers_record(offers, load)
        wanted = super().passes(offers, load, drafter, backlogs)
        self._write("passes", **given, drafter=drafter, backlogs=list(backlogs), decided=_plain(wanted))
        return wanted

    def admit(self, offers: Sequence[Offer], load: Load) -> list[Draft | None]:
        given = _offers_record(offers, load)
        admitted = super().admit(offers, load)
        self._write("admit", **given, decided=_plain(admitted))
        return admitted

    def rest(self) -> int:
        rounds = super().rest()
        self._write("rest", decided=rounds)
        return rounds

    def rested(self, steps: int, asks: int) -> None:
        self._write("rested", steps=steps, asks=asks)
        super().rested(steps, asks)

    def measured(self, facts: StepFacts) -> None:
        served = [[s.state.id, s.num_tokens, s.num_draft, s.samples, s.emitted, s.context] for s in facts.served]
        self._write("measured", served=served, seconds=dict(facts.seconds))
        super().measured(facts)

    def _write(self, what: str, **fields: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"what": what, **fields}) + "\n")


def replay(lines: Iterable[str]) -> Iterator[Any]:
    """Drive a fresh controller by a record and yield its decisions, each equal to the recorded one (asserted)."""
    records = map(json.loads, lines)
    setup = next(records)
    assert setup["what"] == "setup", "a record begins with its setup"
    told = _Told(setup)
    for record in records:
        decided = _plain(getattr(told, record["what"])(record))
        if "decided" in record:
            assert decided == record["decided"], f"decided {decided}, recorded {record['decided']}"
            yield decided


class _Told:
    """A controller that is told what a record says. Methods are named as the lines."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        calibration = Calibration(dict(setup["sampled"]), dict(setup["single"]), *setup["reads"])
        passes = {name: PassCost.measured(dict(seconds)) for name, seconds in setup["passes"].items()}
        self.controller = Controller(calibration, setup["max_tokens"], passes)
        self.states: dict[str, RequestState] = {}

    def start(self, record: Mapping[str, Any]) -> None:
        self.controller.start(self._new(record["id"], record["tokens"], record["bounds"], OF_CLASS[record["kind"]]))

    def finish(self, record: Mapping[str, Any]) -> None:
        self._grown(record["id"], record["length"])
        del self.states[record["id"]]
        self.controller.finish(record["id"])

    def score(self, record: Mapping[str, Any]) -> None:
        length, drafter, confidence = record["draft"]
        guesses = [*map(int, record["right"]), *(length - len(record["right"])) * [1]]
        draft = Draft(tuple(guesses), drafter, tuple(confidence))
        self.controller.score(self.states[record["id"]], draft, (1,) * record["run"])

    def bound(self, record: Mapping[str, Any]) -> int:
        return self.controller.bound(self._ask(record["ask"]))

    def passes(self, record: Mapping[str, Any]) -> list[tuple[int, float]]:
        return self.controller.passes(self._offers(record), Load(*record["load"]), record["drafter"], record["backlogs"])

    def admit(self, record: Mapping[str, Any]) -> list[Draft | None]:
        return self.controller.admit(self._offers(record), Load(*record["load"]))

    def rest(self, record: Mapping[str, Any]) -> int:
        return self.controller.rest()

    def rested(self, record: Mapping[str, Any]) -> None:
        self.controller.rested(record["steps"], record["asks"])

    def measured(self, record: Mapping[str, Any]) -> None:
        served = tuple(Served(self._known(id_), *figures) for id_, *figures in record["served"])
        self.controller.measured(StepFacts(served, record["seconds"]))

    def _new(self, id_: str, tokens: Sequence[int], bounds: Sequence[int | None], params: Mapping[str, Any]) -> RequestState:
        num_prompt, length, limit = tokens
        speculation = Speculation(max_tokens=bounds[1])
        request = Request(id_, (1,) * num_prompt, SamplingParams(max_tokens=bounds[0], speculation=speculation, **params), 0)
        state = self.states[id_] = RequestState(request, 0, limit)
        return self._grown(state.id, length)

    def _known(self, id_: str) -> RequestState:
        """Requests that may not be drafted for are met first in a step that serves them."""
        return self.states.get(id_) or RequestState(Request(id_, (1,), SamplingParams(), 0), 0, 2)

    def _grown(self, id_: str, length: int) -> RequestState:
        """The state, brought to so many tokens."""
        state = self.states[id_]
        state.tokens.extend([1] * (length - len(state.tokens)))
        return state

    def _ask(self, record: Sequence[Any]) -> Ask:
        id_, length, max_tokens = record
        return Ask(self._grown(id_, length), max_tokens)

    def _offers(self, record: Mapping[str, Any]) -> list[Offer]:
        return [
            Offer(self._ask(ask), [Draft((1,) * length, drafter, tuple(confidence)) for length, drafter, confidence in drafts])
            for ask, drafts in record["offers"]
        ]


def _ask_record(ask: Ask) -> list[Any]:
    return [ask.state.id, ask.length, ask.max_tokens]


def _draft_record(draft: Draft) -> list[Any]:
    return [len(draft.token_ids), draft.drafter, list(draft.confidence)]


def _offers_record(offers: Sequence[Offer], load: Load) -> dict[str, Any]:
    listed = [[_ask_record(offer.ask), [_draft_record(draft) for draft in offer.drafts]] for offer in offers]
    return {"offers": listed, "load": [load.prompt_rows, load.prompt_reads]}


def _plain(decision: Any) -> Any:
    """A decision as JSON holds it; of drafts, whose they are and how long."""
    if isinstance(decision, Draft):
        return [decision.drafter, len(decision.token_ids)]
    return [_plain(part) for part in decision] if isinstance(decision, list | tuple) else decision
