"""A running server over HTTP: latencies are the client's, counts come from its /metrics."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from foreword.bench.measurement import OFF, BenchCase, BenchRepetition, Mode, PairedRun, RequestResult
from foreword.bench.statistics import rotate
from foreword.bench.workloads import CODE_SAMPLE, PROSE_SAMPLE, Conversation
from foreword.cli.client import (
    choices_of,
    connection_options,
    iter_chunks_async,
    request_body,
    text_of,
    token_ids_of,
)
from foreword.core.params import SamplingParams, Speculation
from foreword.errors import ForewordError
from foreword.metrics.definitions import PREFIX
from foreword.metrics.request_stats import SpecDecodeStats
from foreword.tokenizer.generation_config import DEFAULTED_FIELDS

# By metric, drafter or stage, and position in the draft ("" for none).
Counters = Mapping[tuple[str, str, str], float]
ALPHABET = "abcdefghijklmnopqrstuvwxyz 0123456789 ABCDEFGHIJKLMNOPQRSTUVWXYZ .,:;!?(){}[]+-*/=_"
PRIMING = Mode("priming", speculation=Speculation("off"))


class RemoteTarget:
    """A Foreword server without other users. Raises ForewordError where a request fails.

    model     a name of its list; None: the first
    isolated  every pair has new prompts, so that no mode drafts from another's answers, and they are read
              once into the prefix cache before, so that both modes find them there
    """

    runs_per_mode = 2.0

    def __init__(
        self,
        base_url: str,
        api_key: str | None,
        transport: httpx.AsyncBaseTransport | None = None,
        model: str | None = None,
        isolated: bool = True,
    ) -> None:
        self._options = connection_options(base_url, api_key) | {"transport": transport}
        url = self._options["base_url"]
        self._isolated = isolated
        cards = json.loads(self._request("GET", "/v1/models"))["data"]
        card = next((card for card in cards if model in (None, card["id"])), None)
        if card is None:
            raise ForewordError(
                f"{url} has no model {model}; it has {', '.join(card['id'] for card in cards)}"
            )
        self.model = str(card["id"])
        self.max_len = int(card["max_model_len"])
        counters = self.read_counters()
        drafters = {drafter for name, drafter, _ in counters if name == "spec_drafts_total"}
        self.drafters = tuple(sorted(drafters))

    def count(self, text: str) -> int:
        """Tokens of a text."""
        return len(self._tokens(text))

    def plain_ids(self) -> tuple[int, ...]:
        """Token ids of printable text, for random prompts."""
        return tuple(sorted(set(self._tokens(ALPHABET + CODE_SAMPLE + PROSE_SAMPLE))))

    def run_pairs(self, case: BenchCase, modes: Sequence[Mode], number: int) -> Mapping[str, PairedRun]:
        return {
            mode.name: self._run_pair(case, mode, number, index + number * len(modes))
            for index, mode in enumerate(modes)
        }

    def run_plain(self, conversation: Conversation) -> float:
        """Seconds of one conversation without speculation. Raises ForewordError if it is not answered."""
        repetition = self._run_repetition((conversation,), PRIMING, 1)
        for result in repetition.results:
            if result.error is not None:
                raise ForewordError(f"{self._options['base_url']}: {result.error}")
        return repetition.seconds

    def read_counters(self) -> Counters:
        """Samples of /metrics without the prefix; no buckets."""
        families = text_string_to_metric_families(self._request("GET", "/metrics"))
        return {
            _key(sample): sample.value
            for family in families
            for sample in family.samples
            if "le" not in sample.labels
        }

    def _run_pair(self, case: BenchCase, mode: Mode, number: int, variant: int) -> PairedRun:
        conversations = case.make(variant)
        if self._isolated:
            first_turns = [replace(each, turns=each.turns[:1], max_tokens=1) for each in conversations]
            self._run_repetition(first_turns, PRIMING, case.concurrency)
        rounds = {
            ordered.name: self._run_repetition(conversations, ordered, case.concurrency)
            for ordered in rotate((OFF, mode), number)
        }
        for ordered in (OFF, mode):
            rounds[ordered.name].check(case, ordered)
        return PairedRun(rounds[OFF.name], rounds[mode.name])

    def _run_repetition(
        self, conversations: Sequence[Conversation], mode: Mode, concurrency: int
    ) -> BenchRepetition:
        before = self.read_counters()
        started = time.perf_counter()
        results, at_once = asyncio.run(self._run_conversations(conversations, mode, concurrency))
        seconds = time.perf_counter() - started
        after = self.read_counters()
        stages = {
            stage: value - before.get((name, stage, ""), 0.0)
            for (name, stage, _), value in after.items()
            if name == "step_seconds_sum"
        }
        preemptions = _increase(before, after, "preemptions_total", "")
        drafts = draft_stats_since(before, after)
        return BenchRepetition(tuple(results), seconds, stages, drafts, preemptions, max_at_once=at_once)

    async def _run_conversations(
        self, conversations: Sequence[Conversation], mode: Mode, concurrency: int
    ) -> tuple[list[RequestResult], int]:
        """Also the most conversations in flight."""
        semaphore = asyncio.Semaphore(concurrency)
        running = most = 0
        limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
        async with httpx.AsyncClient(**self._options, limits=limits) as http:

            async def run(number: int, conversation: Conversation) -> list[RequestResult]:
                nonlocal running, most
                async with semaphore:
                    running += 1
                    most = max(most, running)
                    try:
                        return await run_conversation(http, self.model, number, conversation, mode)
                    finally:
                        running -= 1

            results = await asyncio.gather(*(run(*item) for item in enumerate(conversations)))
        return [result for of_conversation in results for result in of_conversation], most

    def _tokens(self, text: str) -> list[int]:
        return list(json.loads(self._request("POST", "/tokenize", {"prompt": text}))["tokens"])

    def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> str:
        async def send() -> str:
            async with httpx.AsyncClient(**self._options) as http:
                return (await http.request(method, path, json=body)).raise_for_status().text

        try:
            return asyncio.run(send())
        except httpx.HTTPError as error:
            url = f"{self._options['base_url']}{path}"
            raise ForewordError(f"{url}: {error or type(error).__name__}") from None


async def run_conversation(
    http: httpx.AsyncClient, model: str, number: int, conversation: Conversation, mode: Mode
) -> list[RequestResult]:
    """Send all turns, until one fails or the context is full."""
    results: list[RequestResult] = []
    history: list[str] = []
    for turn in range(conversation.num_turns):
        path, body = _request_body(model, conversation, history, mode, turn)
        result, text = await _send(http, path, body, RequestResult(number, turn, conversation.seed + turn))
        if turn and result.error is not None and "400" in result.error:
            break
        results.append(result)
        history.append(text)
        if result.error is not None:
            break
    return results


def _request_body(
    model: str, conversation: Conversation, history: Sequence[str], mode: Mode, turn: int
) -> tuple[str, dict[str, Any]]:
    """Path and JSON body of the next turn; it names all fields of which the checkpoint may have defaults."""
    params = SamplingParams(
        temperature=conversation.temperature,
        max_tokens=conversation.max_tokens,
        ignore_eos=conversation.ignore_eos,
        seed=conversation.seed + turn,
    )
    speculation = {"method": mode.speculation.method, "max_tokens": mode.speculation.max_draft_tokens}
    more: dict[str, Any] = {"speculation": speculation, "stream": True, "return_token_ids": True}
    if conversation.prediction is not None:
        more["prediction"] = {"type": "content", "content": conversation.prediction}
    if conversation.prompt_ids:
        path, body = request_body(model, "", params, DEFAULTED_FIELDS)
        return path, {**body, **more, "prompt": list(conversation.prompt_ids)}
    messages = conversation.messages(history)
    raw = "\n\n".join(message["content"] for message in messages)
    path, body = request_body(model, raw if conversation.raw else messages, params, DEFAULTED_FIELDS)
    return path, {**body, **more}


async def _send(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], result: RequestResult
) -> tuple[RequestResult, str]:
    """The filled result, and the answer's text."""
    started = last = time.perf_counter()
    ids: list[int] = []
    text, finished = "", False
    try:
        async with http.stream("POST", path, json=body) as response:
            response.raise_for_status()
            async for chunk in iter_chunks_async(response):
                for choice in choices_of(chunk):
                    now, burst = time.perf_counter(), token_ids_of(choice)
                    text += text_of(choice)
                    finished = finished or choice.get("finish_reason") is not None
                    ids += burst
                    last = _record_burst(result, len(burst), started, last, now)
    except (httpx.HTTPError, ForewordError) as error:
        result.error = f"{type(error).__name__}: {error}"
    if result.error is None and not finished:
        result.error = "the stream ended without a finish_reason"
    result.output, result.num_tokens, result.total_s = tuple(ids), len(ids), time.perf_counter() - started
    return result, text


def _record_burst(result: RequestResult, count: int, started: float, last: float, now: float) -> float:
    """Record a burst of tokens; returns the time of the newest."""
    if not count:
        return last
    if result.ttft_s is None:
        result.ttft_s = now - started
    else:
        result.gaps.append((now - last, count))
    return now


def draft_stats_since(before: Counters, after: Counters) -> dict[str, SpecDecodeStats]:
    """Draft statistics between two readings, by drafter."""
    by_drafter: dict[str, SpecDecodeStats] = {}
    for name, drafter, _ in after:
        if name == "spec_drafts_total" and (steps := _increase(before, after, name, drafter)):
            stats = by_drafter[drafter] = SpecDecodeStats()
            stats.num_verify_steps = steps
            stats.num_drafted = _increase(before, after, "spec_draft_tokens_total", drafter)
            stats.num_accepted = _increase(before, after, "spec_accepted_tokens_total", drafter)
            stats.num_emitted = _increase(before, after, "spec_emitted_tokens_total", drafter)
            drafted, accepted = (f"spec_{kind}_tokens_per_position_total" for kind in ("draft", "accepted"))
            stats.drafted_per_position = _counts_by_position(before, after, drafted, drafter)
            stats.accepted_per_position = _counts_by_position(before, after, accepted, drafter)
    return by_drafter


def _increase(before: Counters, after: Counters, name: str, drafter: str, position: str = "") -> int:
    return int(after.get((name, drafter, position), 0) - before.get((name, drafter, position), 0))


def _counts_by_position(before: Counters, after: Counters, name: str, drafter: str) -> list[int]:
    """Counts by position in the draft, without trailing zeros."""
    positions = sorted(int(key[2]) for key in after if key[:2] == (name, drafter))
    counts = [_increase(before, after, name, drafter, str(position)) for position in positions]
    while counts and not counts[-1]:
        counts.pop()
    return counts


def _key(sample: Any) -> tuple[str, str, str]:
    name, labels = sample.name.removeprefix(PREFIX), sample.labels
    return name, labels.get("drafter", labels.get("stage", "")), labels.get("position", "")
