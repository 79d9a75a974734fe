"""`foreword bench serve`: many clients against a running server (--base-url) or a new one.

Regime: --num-requests streamed chat requests a round from the given prompts, each with its own seed,
--concurrency at once, over HTTP. Rounds with speculation off and on alternate, by the per-request
`speculation` field; the first round of each is not counted. Latencies are the client's: time to first
token (TTFT), time between chunks (of one or several tokens), and the whole answer (E2E). Every request
must be answered, with the same text in every round, or the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import time
from collections.abc import Iterator, Sequence
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
from foreword.cli.flags import read_config
from foreword.cli.sse_reader import choices_of, iter_chunks_async, text_of
from foreword.cli.terminal import loading_bar, track_progress
from foreword.config.options import Config
from foreword.errors import ForewordError

__all__ = ["ClientResult", "ServeRepetition", "measure_repetition", "run", "summary"]

ON = "auto"
PERCENTS = (50, 90, 99)


@dataclass(slots=True)
class ClientResult:
    """One request as its client saw it."""

    text: str = ""
    num_tokens: int = 0
    ttft_s: float | None = None
    inter_token_s: list[float] = field(default_factory=list)  # between chunks with text
    total_s: float = 0.0
    error: str | None = None  # None: answered in full


@dataclass(frozen=True, slots=True)
class ServeRepetition:
    """All requests of one round."""

    results: tuple[ClientResult, ...]
    seconds: float  # from the first request to the last answer

    @property
    def texts(self) -> tuple[str, ...]:
        return tuple(result.text for result in self.results)

    @property
    def errors(self) -> list[str]:
        return [result.error for result in self.results if result.error is not None]

    @property
    def tokens_per_second(self) -> float:
        return sum(result.num_tokens for result in self.results) / self.seconds


def run(args: argparse.Namespace) -> int:
    config = read_config(args)
    examples = read_examples(args)
    with _server(args.base_url, with_all_drafters(config)) as url:
        with contextlib.closing(HTTPBackend(url, config.api_key, config.served_model_name)) as remote:
            model = remote.name
        rounds = asyncio.run(_measure_repetitions(url, config.api_key, model, examples, args))
    result = summary(rounds, args)
    _show(result, args)
    repetitions = [repetition for of_mode in rounds.values() for repetition in of_mode]
    for error in sorted({error for repetition in repetitions for error in repetition.errors}):
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
    """Counted rounds by mode."""
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
    params = sampling_params(mode, args.max_tokens, args.temperature, seed)
    messages = [{"role": "user", "content": examples[seed % len(examples)].prompt}]
    _, body = request_body(model, messages, params)
    return body | {"stream": True, "stream_options": {"include_usage": True}}


async def measure_repetition(
    http: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], concurrency: int
) -> ServeRepetition:
    """Send all bodies, `concurrency` at once, and wait for the last answer."""
    semaphore = asyncio.Semaphore(concurrency)

    async def send(body: dict[str, Any]) -> ClientResult:
        async with semaphore:
            return await _send(http, body)

    started = time.perf_counter()
    results = await asyncio.gather(*map(send, bodies))
    return ServeRepetition(tuple(results), time.perf_counter() - started)


async def _send(http: httpx.AsyncClient, body: dict[str, Any]) -> ClientResult:
    result = ClientResult()
    started = last = time.perf_counter()
    finished = False
    try:
        async with http.stream("POST", "/v1/chat/completions", json=body) as response:
            response.raise_for_status()
            async for chunk in iter_chunks_async(response):
                now = time.perf_counter()
                usage = chunk.get("usage")
                count = usage.get("completion_tokens") if isinstance(usage, dict) else None
                result.num_tokens = count if isinstance(count, int) else result.num_tokens
                for choice in choices_of(chunk):
                    finished = finished or choice.get("finish_reason") is not None
                    last = _record_chunk(result, text_of(choice), started, last, now)
    except (httpx.HTTPError, ForewordError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.total_s = time.perf_counter() - started
    if result.error is None and not finished:
        result.error = "the stream ended without a finish_reason"
    return result


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


def summary(repetitions: dict[str, list[ServeRepetition]], args: argparse.Namespace) -> dict[str, Any]:
    """The JSON line: figures by mode, and whether all was answered with equal texts."""
    rounds = [repetition for of_mode in repetitions.values() for repetition in of_mode]
    rates = {mode: [one.tokens_per_second for one in of_mode] for mode, of_mode in repetitions.items()}
    return {
        "bench": "serve",
        "rounds": args.rounds,
        "num_requests": args.num_requests,
        "concurrency": args.concurrency,
        "temperature": args.temperature,
        "answered_all": not any(repetition.errors for repetition in rounds),
        "equal": len({repetition.texts for repetition in rounds}) == 1,
        "throughput_ratio": ratio([1 / rate for rate in rates[OFF]], [1 / rate for rate in rates[ON]]),
        "modes": {
            mode: {"tokens_per_second": statistics.median(rates[mode]), **_latencies(of_mode)}
            for mode, of_mode in repetitions.items()
        },
    }


def _latencies(repetitions: Sequence[ServeRepetition]) -> dict[str, dict[str, float]]:
    """Milliseconds by latency and percentile; a latency without samples has none."""
    results = [result for one in repetitions for result in one.results if result.error is None]
    samples = {
        "ttft_ms": [result.ttft_s for result in results if result.ttft_s is not None],
        "itl_ms": [gap for result in results for gap in result.inter_token_s],
        "e2e_ms": [result.total_s for result in results],
    }
    return {
        name: {
            f"p{percent}": value * 1000
            for percent in PERCENTS
            if (value := percentile(values, percent)) is not None
        }
        for name, values in samples.items()
    }


def _show(result: dict[str, Any], args: argparse.Namespace) -> None:
    names = ("ttft_ms", "itl_ms", "e2e_ms")
    titles = [f"{name.removesuffix('_ms').upper()} ms p50/p90/p99" for name in names]
    rows = []
    for mode, of in result["modes"].items():
        times = ["/".join(f"{of[name].get(f'p{percent}', 0):.0f}" for percent in PERCENTS) for name in names]
        rows.append([mode, f"{of['tokens_per_second']:.0f}", *times])
    rows.append(["ratio", f"{result['throughput_ratio']:.2f}x"])
    state = "all answered" if result["answered_all"] else "NOT ALL ANSWERED"
    equal = "equal" if result["equal"] else "NOT EQUAL"
    title = f"serve: {args.num_requests} requests, {args.concurrency} at once; {state}; texts {equal}"
    print_table(title, ["speculation", "tokens/s", *titles], rows)
    print_json(result)
