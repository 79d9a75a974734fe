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

from foreword.bench.common import rotate
from foreword.bench.speculate.types import OFF, BenchRepetition, Mode, PairedRun, RequestResult, SpecCase
from foreword.bench.speculate.workloads import CODE_SAMPLE, PROSE_SAMPLE, Conversation, interleave
from foreword.cli.client import request_body
from foreword.cli.sse_reader import choices_of, iter_chunks_async, text_of, token_ids_of
from foreword.core.params import SamplingParams, Speculation
from foreword.errors import ForewordError
from foreword.metrics.catalog import PREFIX
from foreword.metrics.spec_stats import SpecDecodeStats

__all__ = ["Counters", "RemoteTarget", "draft_stats_since", "run_conversation"]

Counters = Mapping[
    tuple[str, str, str], float
]  # by metric, drafter or stage, and place in the draft ("" for none)
ALPHABET = "abcdefghijklmnopqrstuvwxyz 0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ .,:;!?(){}[]+-*/=_"
PRIMED = Mode("primed", speculation=Speculation("off"))


class RemoteTarget:
    """A Foreword server that nobody else uses. Raises ForewordError where it cannot be asked.

    reach    tokens that a prompt and its answer may fill
    drafters those that it runs
    """

    def __init__(
        self, base_url: str, api_key: str | None, transport: httpx.AsyncBaseTransport | None = None
    ) -> None:
        headers = {"Authorization": f"Bearer {api_key.split(',')[0]}"} if api_key else {}
        url = base_url.rstrip("/").removesuffix("/v1")
        self._options: dict[str, Any] = {
            "base_url": url,
            "headers": headers,
            "transport": transport,
            "timeout": None,
        }
        card = json.loads(self._request("GET", "/v1/models"))["data"][0]
        self.model = str(card["id"])
        self.max_len = int(card["max_model_len"])
        self.drafters = tuple(
            sorted({drafter for name, drafter, _ in self.read_counters() if name == "spec_drafts_total"})
        )

    def count(self, text: str) -> int:
        return len(self._tokens(text))

    def plain_ids(self) -> tuple[int, ...]:
        """Ids to draw random prompts from: those of printable text, which a server takes for sure."""
        return tuple(sorted(set(self._tokens(ALPHABET + CODE_SAMPLE + PROSE_SAMPLE))))

    def run_pairs(self, case: SpecCase, modes: Sequence[Mode], number: int) -> Mapping[str, PairedRun]:
        return {
            mode.name: self._run_pair(case, mode, number, index + number * len(modes))
            for index, mode in enumerate(modes)
        }

    def read_counters(self) -> Counters:
        """Every sample of /metrics, without the prefix."""
        families = text_string_to_metric_families(self._request("GET", "/metrics"))
        return {
            _key(sample): sample.value
            for family in families
            for sample in family.samples
            if "le" not in sample.labels
        }

    def _run_pair(self, case: SpecCase, mode: Mode, number: int, variant: int) -> PairedRun:
        scripts = case.make(variant)
        first_turns = [replace(script, turns=script.turns[:1], max_tokens=1) for script in scripts]
        self._run_repetition(first_turns, PRIMED, case.concurrency)
        rounds = {
            which.name: self._run_repetition(scripts, which, case.concurrency)
            for which in rotate((OFF, mode), number)
        }
        return PairedRun(rounds[OFF.name], rounds[mode.name])

    def _run_repetition(
        self, conversations: Sequence[Conversation], mode: Mode, concurrency: int
    ) -> BenchRepetition:
        before = self.read_counters()
        started = time.perf_counter()
        calls = asyncio.run(self._run_conversations(conversations, mode, concurrency))
        seconds = time.perf_counter() - started
        after = self.read_counters()
        preempted = ("preemptions_total", "", "")
        stages = {
            stage: value - before.get((name, stage, ""), 0.0)
            for (name, stage, _), value in after.items()
            if name == "step_seconds_sum"
        }
        preemptions = int(after.get(preempted, 0) - before.get(preempted, 0))
        return BenchRepetition(tuple(calls), seconds, stages, draft_stats_since(before, after), preemptions)

    async def _run_conversations(
        self, conversations: Sequence[Conversation], mode: Mode, concurrency: int
    ) -> list[RequestResult]:
        room = asyncio.Semaphore(concurrency)
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        async with httpx.AsyncClient(**self._options, limits=limits) as http:

            async def one(number: int, script: Conversation) -> list[RequestResult]:
                async with room:
                    return await run_conversation(http, self.model, number, script, mode)

            found = await asyncio.gather(
                *(one(number, script) for number, script in enumerate(conversations))
            )
        return [call for calls in found for call in calls]

    def _tokens(self, text: str) -> list[int]:
        return list(json.loads(self._request("POST", "/tokenize", {"prompt": text}))["tokens"])

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        try:
            return asyncio.run(_answer_to(self._options, method, path, body))
        except httpx.HTTPError as error:
            raise ForewordError(
                f"{self._options['base_url']}{path}: {error or type(error).__name__}"
            ) from None


async def run_conversation(
    http: httpx.AsyncClient, model: str, number: int, conversation: Conversation, mode: Mode
) -> list[RequestResult]:
    """All turns of a script, until one fails or the context is full."""
    calls: list[RequestResult] = []
    history: list[str] = []
    for turn in range(conversation.num_turns):
        path, body = _request_body(model, conversation, history, mode, turn)
        call, text = await _send(http, path, body, RequestResult(number, turn, conversation.seed + turn))
        if turn and call.error is not None and "400" in call.error:
            break
        calls.append(call)
        history.append(text)
        if call.error is not None:
            break
    return calls


def _request_body(
    model: str, conversation: Conversation, history: Sequence[str], mode: Mode, turn: int
) -> tuple[str, dict[str, Any]]:
    """Path and JSON body of the next turn."""
    params = SamplingParams(
        temperature=conversation.temperature,
        max_tokens=conversation.max_tokens,
        ignore_eos=conversation.ignore_eos,
        seed=conversation.seed + turn,
    )
    asked: dict[str, Any] = {"method": mode.speculation.method, "max_tokens": mode.speculation.max_tokens}
    more: dict[str, Any] = {"speculation": asked, "stream": True, "return_token_ids": True}
    if conversation.prediction is not None:
        more["prediction"] = {"type": "content", "content": conversation.prediction}
    if conversation.prompt_ids:
        path, body = request_body(model, "", params)
        return path, {**body, **more, "prompt": list(conversation.prompt_ids)}
    parts = interleave(conversation.turns, history)
    asking: Any = "\n\n".join(parts) if conversation.raw else _messages(parts)
    path, body = request_body(model, asking, params)
    return path, {**body, **more}


async def _answer_to(options: dict[str, Any], method: str, path: str, body: dict[str, Any] | None) -> str:
    async with httpx.AsyncClient(**options) as http:
        response = await http.request(method, path, json=body)
        return response.raise_for_status().text


def _messages(parts: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[index % 2], "content": part} for index, part in enumerate(parts)]


async def _send(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], result: RequestResult
) -> tuple[RequestResult, str]:
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
            last = _record_burst(result, len(new), started, last, now)
    except (httpx.HTTPError, ForewordError) as error:
        result.error = f"{type(error).__name__}: {error}"
    if result.error is None and not finished:
        result.error = "the stream ended without a finish_reason"
    result.output, result.num_tokens, result.total_s = tuple(ids), len(ids), time.perf_counter() - started
    return result, text


def _record_burst(result: RequestResult, count: int, started: float, last: float, now: float) -> float:
    """Note a burst of tokens; returns when the newest came."""
    if not count:
        return last
    if result.ttft_s is None:
        result.ttft_s = now - started
    else:
        result.gaps.append((now - last, count))
    return now


async def _choices(
    http: httpx.AsyncClient, path: str, body: dict[str, Any]
) -> AsyncIterator[Mapping[str, Any]]:
    """The choices of a stream's chunks. Raises httpx.HTTPError and ForewordError."""
    async with http.stream("POST", path, json=body) as response:
        response.raise_for_status()
        async for chunk in iter_chunks_async(response):
            for choice in choices_of(chunk):
                yield choice


def draft_stats_since(before: Counters, after: Counters) -> dict[str, SpecDecodeStats]:
    """What was drafted between two readings, by drafter."""
    tallies: dict[str, SpecDecodeStats] = {}
    for name, drafter, _ in after:
        if name == "spec_drafts_total" and (steps := _increase(before, after, name, drafter)):
            tally = tallies[drafter] = SpecDecodeStats()
            tally.num_verify_steps = steps
            tally.num_drafted = _increase(before, after, "spec_draft_tokens_total", drafter)
            tally.num_accepted = _increase(before, after, "spec_accepted_tokens_total", drafter)
            tally.num_emitted = _increase(before, after, "spec_emitted_tokens_total", drafter)
            tally.drafted_per_position = _counts_by_position(
                before, after, "spec_draft_tokens_per_position_total", drafter
            )
            tally.accepted_per_position = _counts_by_position(
                before, after, "spec_accepted_tokens_per_position_total", drafter
            )
    return tallies


def _increase(before: Counters, after: Counters, name: str, drafter: str, position: str = "") -> int:
    return int(after.get((name, drafter, position), 0) - before.get((name, drafter, position), 0))


def _counts_by_position(before: Counters, after: Counters, name: str, drafter: str) -> list[int]:
    """Counts by place in the draft, up to the last one that grew."""
    places = [int(place) for metric, owner, place in after if (metric, owner) == (name, drafter)]
    grown = [_increase(before, after, name, drafter, str(place)) for place in sorted(places)]
    while grown and not grown[-1]:
        grown.pop()
    return grown


def _key(sample: Any) -> tuple[str, str, str]:
    labels = sample.labels
    return (
        sample.name.removeprefix(PREFIX),
        labels.get("drafter", labels.get("stage", "")),
        labels.get("position", ""),
    )
