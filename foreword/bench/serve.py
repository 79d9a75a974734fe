"""`foreword bench serve`: many clients against a server, one that runs (--base-url) or one of our own.

Regime: --num-requests streamed chat requests a round from the given prompts, each with a seed of its
own, --concurrency at once, over HTTP on this machine or the network. Rounds with speculation off
and on alternate, by the per-request `speculation` field; the first round of each is not counted.
Latencies are those that the client sees: time to first token (TTFT), time between chunks (a chunk
may hold several tokens), and the whole answer (E2E). Every request must be answered, and with the
same text in every round, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from foreword.bench.common import (
    OFF,
    PromptExample,
    percentile,
    print_json,
    print_table,
    ratio,
    read_examples,
    rotate,
    sampling_params,
    with_all_drafters,
)
from foreword.bench.server import ServerProcess
from foreword.cli.client import HTTPBackend, request_body
from foreword.cli.options import read_config
from foreword.cli.sse_reader import Chunk, choices_of, iter_chunks_async, text_of
from foreword.cli.terminal import loading_bar, track_progress
from foreword.config.options import Config
from foreword.errors import ForewordError

__all__ = ["ClientResult", "ServeRepetition", "measure_repetition", "run", "summary"]

ON = "auto"
PERCENTS = (50, 90, 99)


@dataclass(slots=True)
class ClientResult:
    """What one client saw. Times in seconds; `error` None: answered in full."""

    text: str = ""
    num_tokens: int = 0
    ttft_s: float | None = None
    inter_token_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ServeRepetition:
    """All calls of one round, and how long they took together."""

    results: tuple[ClientResult, ...]
    seconds: float

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(call.text for call in self.results)

    @property
    def errors(self) -> list[str]:
        return [call.error for call in self.results if call.error is not None]

    @property
    def tokens_per_second(self) -> float:
        return sum(call.num_tokens for call in self.results) / self.seconds


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    examples = read_examples(args)
    with _server(args.base_url, with_all_drafters(config)) as url:
        with contextlib.closing(HTTPBackend(url, config.api_key, config.served_model_name)) as remote:
            model = remote.name
        rounds = asyncio.run(_measure_repetitions(url, config.api_key, model, examples, args))
    result = summary(rounds, args)
    _show(result, args)
    for error in sorted({error for of in rounds.values() for one in of for error in one.errors}):
        print(f"error: {error}")
    return 0 if result["answered_all"] and result["equal"] else 1


@contextlib.contextmanager
def _server(base_url: str | None, config: Config) -> Iterator[str]:
    if base_url:
        yield base_url.rstrip("/").removesuffix("/v1")
        return
    with contextlib.ExitStack() as stack:
        with loading_bar("starting a server"):
            server = stack.enter_context(ServerProcess(config))
        yield server.url


async def _measure_repetitions(
    url: str, api_key: str | None, model: str, examples: Sequence[PromptExample], args: argparse.Namespace
) -> dict[str, list[ServeRepetition]]:
    """Rounds by mode, without the first of each."""
    headers = {"Authorization": f"Bearer {api_key.split(',')[0]}"} if api_key else {}
    limits = httpx.Limits(max_connections=args.concurrency, max_keepalive_connections=args.concurrency)
    done: dict[str, list[ServeRepetition]] = {OFF: [], ON: []}
    plan = [(number, mode) for number in range(args.rounds + 1) for mode in rotate((OFF, ON), number)]
    async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=None) as http:
        for number, mode in track_progress(plan, "measuring", len(plan)):
            bodies = [_body(model, examples, mode, seed, args) for seed in range(args.num_requests)]
            measured = await measure_repetition(http, bodies, args.concurrency)
            if number > 0:
                done[mode].append(measured)
    return done


def _body(
    model: str, examples: Sequence[PromptExample], mode: str, seed: int, args: argparse.Namespace
) -> dict[str, Any]:
    asked = sampling_params(mode, args.max_tokens, args.temperature, seed)
    messages = [{"role": "user", "content": examples[seed % len(examples)].prompt}]
    _, body = request_body(model, messages, asked)
    return body | {"stream": True, "stream_options": {"include_usage": True}}


async def measure_repetition(
    http: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], concurrency: int
) -> ServeRepetition:
    """Send all bodies, `concurrency` at once, and wait for the last answer."""
    room = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, Any]) -> ClientResult:
        async with room:
            return await _send(http, body)

    started = time.perf_counter()
    calls = await asyncio.gather(*map(one, bodies))
    return ServeRepetition(tuple(calls), time.perf_counter() - started)


async def _send(http: httpx.AsyncClient, body: dict[str, Any]) -> ClientResult:
    call = ClientResult()
    started = last = time.perf_counter()
    finished = False
    try:
        async for chunk in _chunks(http, body):
            now = time.perf_counter()
            call.num_tokens = _usage(chunk, call.num_tokens)
            for choice in choices_of(chunk):
                finished = finished or choice.get("finish_reason") is not None
                last = _record_chunk(call, text_of(choice), started, last, now)
    except (httpx.HTTPError, ForewordError) as error:
        call.error = f"{type(error).__name__}: {error}"
    call.total_s = time.perf_counter() - started
    if call.error is None and not finished:
        call.error = "the stream ended without a finish_reason"
    return call


def _usage(chunk: Chunk, before: int) -> int:
    """Tokens of the answer, where the chunk tells."""
    usage = chunk.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return tokens if isinstance(tokens, int) else before


def _record_chunk(result: ClientResult, text: str, started: float, last: float, now: float) -> float:
    """Add a chunk's text; returns the time of the newest text."""
    if not text:
        return last
    result.text += text
    if result.ttft_s is None:
        result.ttft_s = now - started
    else:
        result.inter_token_s.append(now - last)
    return now


async def _chunks(http: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[Chunk]:
    """The JSON objects of a stream. Raises httpx.HTTPError and ForewordError."""
    async with http.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        async for chunk in iter_chunks_async(response):
            yield chunk


def summary(repetitions: dict[str, list[ServeRepetition]], args: argparse.Namespace) -> dict[str, Any]:
    """The JSON line: figures by mode, and whether all was answered alike."""
    everything = [one for of in repetitions.values() for one in of]
    rates = {mode: [one.tokens_per_second for one in of] for mode, of in repetitions.items()}
    return {
        "bench": "serve",
        "rounds": args.rounds,
        "num_requests": args.num_requests,
        "concurrency": args.concurrency,
        "temperature": args.temperature,
        "answered_all": not any(one.errors for one in everything),
        "equal": len({one.texts for one in everything}) == 1,
        "throughput_ratio": ratio([1 / rate for rate in rates[OFF]], [1 / rate for rate in rates[ON]]),
        "modes": {
            mode: {"tokens_per_second": statistics.median(rates[mode]), **_latencies(of)}
            for mode, of in repetitions.items()
        },
    }


def _latencies(repetitions: Sequence[ServeRepetition]) -> dict[str, dict[str, float]]:
    """Milliseconds by kind of latency and percentile; what was never seen is absent."""
    calls = [call for one in repetitions for call in one.results if call.error is None]
    seen = {
        "ttft_ms": [call.ttft_s for call in calls if call.ttft_s is not None],
        "itl_ms": [gap for call in calls for gap in call.inter_token_s],
        "e2e_ms": [call.total_s for call in calls],
    }
    return {
        name: {
            f"p{percent}": value * 1000
            for percent in PERCENTS
            if (value := percentile(values, percent)) is not None
        }
        for name, values in seen.items()
    }


def _show(result: dict[str, Any], args: argparse.Namespace) -> None:
    names = ("ttft_ms", "itl_ms", "e2e_ms")
    columns = [
        "speculation",
        "tokens/s",
        *(f"{name.removesuffix('_ms').upper()} ms p50/p90/p99" for name in names),
    ]
    rows = []
    for mode, of in result["modes"].items():
        spans = ["/".join(f"{of[name].get(f'p{percent}', 0):.0f}" for percent in PERCENTS) for name in names]
        rows.append([mode, f"{of['tokens_per_second']:.0f}", *spans])
    rows.append(["ratio", f"{result['throughput_ratio']:.2f}x"])
    state = "all answered" if result["answered_all"] else "NOT ALL ANSWERED"
    equal = "equal" if result["equal"] else "NOT EQUAL"
    print_table(
        f"serve: {args.num_requests} requests, {args.concurrency} at once; {state}; texts {equal}",
        columns,
        rows,
    )
    print_json(result)
