"""A running server, asked over HTTP: latencies are those that the client sees, counts those of its /metrics.

Every pair has prompts of its own, which no pair before it has asked: what a drafter learnt from one mode's answers
must not help another. Before a pair its prompts are read once into the prefix cache, so that both find them there.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from foreword.cli.answers import request_body
from foreword.cli.bench_common import rotated
from foreword.cli.bench_speculate_prompts import CODE, PROSE, Script, woven
from foreword.cli.bench_speculate_round import OFF, Call, Cell, Mode, Pair, Round
from foreword.cli.stream import asynchronous_chunks, choices_of, text_of, token_ids_of
from foreword.core.params import SamplingParams, Speculation
from foreword.errors import ForewordError
from foreword.metrics.catalog import PREFIX
from foreword.metrics.tally import DraftTally

__all__ = ["Counts", "RemoteTarget", "converse", "tallies_since"]

Counts = Mapping[tuple[str, str, str], float]  # by metric, drafter or stage, and place in the draft ("" for none)
ALPHABET = "abcdefghijklmnopqrstuvwxyz 0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ .,:;!?(){}[]+-*/=_"
PRIMED = Mode("primed", speculation=Speculation("off"))


class RemoteTarget:
    """A Foreword server that nobody else uses. Raises ForewordError where it cannot be asked.

    reach    tokens that a prompt and its answer may fill
    drafters those that it runs
    """

    def __init__(self, base_url: str, api_key: str | None, transport: httpx.AsyncBaseTransport | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key.split(',')[0]}"} if api_key else {}
        url = base_url.rstrip("/").removesuffix("/v1")
        self._options: dict[str, Any] = {"base_url": url, "headers": headers, "transport": transport, "timeout": None}
        card = json.loads(self._ask("GET", "/v1/models"))["data"][0]
        self.model = str(card["id"])
        self.reach = int(card["max_model_len"])
        self.drafters = tuple(sorted({drafter for name, drafter, _ in self.counts() if name == "spec_drafts_total"}))

    def count(self, text: str) -> int:
        return len(self._tokens(text))

    def plain_ids(self) -> tuple[int, ...]:
        """Ids to draw random prompts from: those of printable text, which a server takes for sure."""
        return tuple(sorted(set(self._tokens(ALPHABET + CODE + PROSE))))

    def pairs(self, cell: Cell, modes: Sequence[Mode], number: int) -> Mapping[str, Pair]:
        return {mode.name: self._pair(cell, mode, number, index + number * len(modes)) for index, mode in enumerate(modes)}

    def counts(self) -> Counts:
        """Every sample of /metrics, without the prefix."""
        families = text_string_to_metric_families(self._ask("GET", "/metrics"))
        return {_key(sample): sample.value for family in families for sample in family.samples if "le" not in sample.labels}

    def _pair(self, cell: Cell, mode: Mode, number: int, variant: int) -> Pair:
        scripts = cell.make(variant)
        first_turns = [replace(script, turns=script.turns[:1], max_tokens=1) for script in scripts]
        self._round(first_turns, PRIMED, cell.concurrency)
        rounds = {which.name: self._round(scripts, which, cell.concurrency) for which in rotated((OFF, mode), number)}
        return Pair(rounds[OFF.name], rounds[mode.name])

    def _round(self, scripts: Sequence[Script], mode: Mode, concurrency: int) -> Round:
        before = self.counts()
        started = time.perf_counter()
        calls = asyncio.run(self._answers(scripts, mode, concurrency))
        seconds = time.perf_counter() - started
        after = self.counts()
        preempted = ("preemptions_total", "", "")
        stages = {
            stage: value - before.get((name, stage, ""), 0.0)
            for (name, stage, _), value in after.items()
            if name == "step_seconds_sum"
        }
        preemptions = int(after.get(preempted, 0) - before.get(preempted, 0))
        return Round(tuple(calls), seconds, stages, tallies_since(before, after), preemptions)

    async def _answers(self, scripts: Sequence[Script], mode: Mode, concurrency: int) -> list[Call]:
        room = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        async with httpx.AsyncClient(**self._options, limits=limits) as http:

            async def one(number: int, script: Script) -> list[Call]:
                async with room:
                    return await converse(http, self.model, number, script, mode)

            found = await asyncio.gather(*(one(number, script) for number, script in enumerate(scripts)))
        return [call for calls in found for call in calls]

    def _tokens(self, text: str) -> list[int]:
        return list(json.loads(self._ask("POST", "/tokenize", {"prompt": text}))["tokens"])

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        try:
            return asyncio.run(_answer_to(self._options, method, path, body))
        except httpx.HTTPError as error:
            raise ForewordError(f"{self._options['base_url']}{path}: {error or type(error).__name__}") from None


async def converse(http: httpx.AsyncClient, model: str, number: int, script: Script, mode: Mode) -> list[Call]:
    """All turns of a script, until one fails or the context is full."""
    calls: list[Call] = []
    history: list[str] = []
    for turn in range(script.num_turns):
        path, body = _body(model, script, history, mode, turn)
        call, text = await _call(http, path, body, Call(number, turn, script.seed + turn))
        if turn and call.error is not None and "400" in call.error:
            break
        calls.append(call)
        history.append(text)
        if call.error is not None:
            break
    return calls


def _body(model: str, script: Script, history: Sequence[str], mode: Mode, turn: int) -> tuple[str, dict[str, Any]]:
    """Path and JSON body of the next turn."""
    params = SamplingParams(
        temperature=script.temperature, max_tokens=script.max_tokens, ignore_eos=script.ignore_eos, seed=script.seed + turn
    )
    asked: dict[str, Any] = {"method": mode.speculation.method, "max_tokens": mode.speculation.max_tokens}
    more: dict[str, Any] = {"speculation": asked, "stream": True, "return_token_ids": True}
    if script.prediction is not None:
        more["prediction"] = {"type": "content", "content": script.prediction}
    if script.prompt_ids:
        path, body = request_body(model, "", params)
        return path, {**body, **more, "prompt": list(script.prompt_ids)}
    parts = woven(script.turns, history)
    asking: Any = "\n\n".join(parts) if script.raw else _messages(parts)
    path, body = request_body(model, asking, params)
    return path, {**body, **more}


async def _answer_to(options: dict[str, Any], method: str, path: str, body: dict[str, Any] | None) -> str:
    async with httpx.AsyncClient(**options) as http:
        response = await http.request(method, path, json=body)
        return response.raise_for_status().text


def _messages(parts: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[index % 2], "content": part} for index, part in enumerate(parts)]


async def _call(http: httpx.AsyncClient, path: str, body: dict[str, Any], call: Call) -> tuple[Call, str]:
    """The call, filled, and the answer's text."""
    started = last = time.perf_counter()
    ids: list[int] = []
    text, finished = "", False
    try:
        async for choice in _choices(http, path, body):
            now, new = time.perf_counter(), token_ids_of(choice)
            text += text_of(choice)
            finished = finished or choice.get("finish_reason") is not None
            ids += new
            last = _note(call, len(new), started, last, now)
    except (httpx.HTTPError, ForewordError) as error:
        call.error = f"{type(error).__name__}: {error}"
    if call.error is None and not finished:
        call.error = "the stream ended without a finish_reason"
    call.output, call.num_tokens, call.total_s = tuple(ids), len(ids), time.perf_counter() - started
    return call, text


def _note(call: Call, count: int, started: float, last: float, now: float) -> float:
    """Note a burst of tokens; returns when the newest came."""
    if not count:
        return last
    if call.first_s is None:
        call.first_s = now - started
    else:
        call.gaps.append((now - last, count))
    return now


async def _choices(http: httpx.AsyncClient, path: str, body: dict[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
    """The choices of a stream's chunks. Raises httpx.HTTPError and ForewordError."""
    async with http.stream("POST", path, json=body) as response:
        response.raise_for_status()
        async for chunk in asynchronous_chunks(response):
            for choice in choices_of(chunk):
                yield choice


def tallies_since(before: Counts, after: Counts) -> dict[str, DraftTally]:
    """What was drafted between two readings, by drafter."""
    tallies: dict[str, DraftTally] = {}
    for name, drafter, _ in after:
        if name == "spec_drafts_total" and (steps := _since(before, after, name, drafter)):
            tally = tallies[drafter] = DraftTally()
            tally.verify_steps = steps
            tally.drafted = _since(before, after, "spec_draft_tokens_total", drafter)
            tally.accepted = _since(before, after, "spec_accepted_tokens_total", drafter)
            tally.emitted = _since(before, after, "spec_emitted_tokens_total", drafter)
            tally.drafted_at = _places(before, after, "spec_draft_tokens_per_position_total", drafter)
            tally.accepted_at = _places(before, after, "spec_accepted_tokens_per_position_total", drafter)
    return tallies


def _since(before: Counts, after: Counts, name: str, drafter: str, place: str = "") -> int:
    return int(after.get((name, drafter, place), 0) - before.get((name, drafter, place), 0))


def _places(before: Counts, after: Counts, name: str, drafter: str) -> list[int]:
    """Counts by place in the draft, up to the last one that grew."""
    places = [int(place) for metric, owner, place in after if (metric, owner) == (name, drafter)]
    grown = [_since(before, after, name, drafter, str(place)) for place in sorted(places)]
    while grown and not grown[-1]:
        grown.pop()
    return grown


def _key(sample: Any) -> tuple[str, str, str]:
    labels = sample.labels
    return sample.name.removeprefix(PREFIX), labels.get("drafter", labels.get("stage", "")), labels.get("position", "")
