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
import functools
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from foreword.bench.common import (
    DEMO,
    NO_DRAFTS,
    OFF,
    PROBE_TOKENS,
    expected_weight,
    percentile,
    print_table,
    ratio_legend,
    ratio_text,
    rotate,
    rounds_text,
    sampling_params,
    seconds_per_token,
    speed_ratio,
    verdict,
    with_all_drafters,
)
from foreword.bench.prompts import PromptExample, read_examples
from foreword.bench.regime import require, require_concurrency
from foreword.bench.server import ServerProcess
from foreword.bench.session import BenchSession, BenchStep
from foreword.cli.client import HTTPBackend, request_body, server_url
from foreword.cli.flags import read_config
from foreword.cli.sse_reader import choices_of, iter_chunks_async, text_of
from foreword.config.options import Config
from foreword.errors import ForewordError
from foreword.metrics.definitions import PREFIX

ON = "auto"
PERCENTS = (50, 90, 99)
DRAFTED = PREFIX + "spec_draft_tokens_total"


@dataclass(slots=True)
class ClientResult:
    """One request as its client saw it."""

    text: str = ""
    num_tokens: int = 0
    ttft_s: float | None = None
    inter_token_s: list[float] = field(default_factory=list)  # between chunks with text
    total_s: float = 0.0
    error: str | None = None  # None: answered in full
    sent_s: float = 0.0  # time.perf_counter()


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
    with BenchSession(args) as session:
        examples, config = read_examples(args), read_config(args)
        done: dict[str, list[ServeRepetition]] = {OFF: [], ON: []}
        drafted = {OFF: 0, ON: 0}
        with _server(args.base_url, with_all_drafters(config), session) as url, asyncio.Runner() as runner:
            with contextlib.closing(
                HTTPBackend(url, config.api_key, next(iter(config.served_names()), None))
            ) as remote:
                model, defaulted = remote.name, tuple(remote.sampling_defaults)
            http = _client(url, config.api_key, args.concurrency)

            def measure(number: int, mode: str) -> None:
                seeds = range(args.num_requests)
                bodies = [_body(model, examples, mode, seed, args, defaulted) for seed in seeds]
                before = runner.run(_count_drafted(http))
                repetition = runner.run(measure_repetition(http, bodies, args.concurrency))
                drafted[mode] += runner.run(_count_drafted(http)) - before
                require("draft tokens verified with speculation off", drafted[OFF], 0)
                if number > 0:
                    done[mode].append(repetition)

            def probe() -> int:
                body = _body(model, examples, OFF, 0, args, defaulted) | {"max_tokens": PROBE_TOKENS}
                (result,) = runner.run(measure_repetition(http, [body], 1)).results
                if result.error is not None:
                    raise ForewordError(f"{url}: the first request failed: {result.error}")
                return result.num_tokens

            concurrency = min(args.concurrency, args.num_requests)
            weight = expected_weight(args.max_tokens * args.num_requests, concurrency)
            expected_s = weight * seconds_per_token(probe)
            steps = [
                BenchStep(
                    mode,
                    f"{mode}, round {number} of {args.rounds}" if number else f"{mode}, warm-up",
                    expected_s,
                    functools.partial(measure, number, mode),
                )
                for number in range(args.rounds + 1)
                for mode in rotate((OFF, ON), number)
            ]
            session.run(steps, f"speculation off and on, {rounds_text(args.rounds)} and a warm-up of each")
            runner.run(http.aclose())
        rounds = min(map(len, done.values()))
        result = summary({mode: of_mode[:rounds] for mode, of_mode in done.items()}, args)
        result["drafted"] = drafted[ON]
        return session.finish(
            result, _show, finished=rounds, passed=result["answered_all"] and result["equal"]
        )


@contextlib.contextmanager
def _server(base_url: str | None, config: Config, session: BenchSession) -> Iterator[str]:
    if base_url:
        yield server_url(base_url)
        return
    with contextlib.ExitStack() as stack:
        with session.waiting(f"starting a server of {config.model or DEMO}"):
            server = stack.enter_context(ServerProcess(config))
        yield server.url


def _client(url: str, api_key: str | None, concurrency: int) -> httpx.AsyncClient:
    headers = {"Authorization": f"Bearer {api_key.split(',')[0]}"} if api_key else {}
    limits = httpx.Limits(max_connections=concurrency, max_keepalive_connections=concurrency)
    return httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=None)


def _body(
    model: str,
    examples: Sequence[PromptExample],
    mode: str,
    seed: int,
    args: argparse.Namespace,
    defaulted: Sequence[str],
) -> dict[str, Any]:
    """A body that names the `defaulted` fields: the checkpoint's defaults do not change a measurement."""
    params = sampling_params(mode, args.max_tokens, args.temperature, seed)
    _, body = request_body(model, examples[seed % len(examples)].messages, params, defaulted)
    return body | {"stream": True, "stream_options": {"include_usage": True}}


async def measure_repetition(
    http: httpx.AsyncClient, bodies: Sequence[dict[str, Any]], concurrency: int
) -> ServeRepetition:
    """Send all bodies, `concurrency` at once, and wait for the last answer. Raises RegimeError."""
    semaphore = asyncio.Semaphore(concurrency)

    async def send(body: dict[str, Any]) -> ClientResult:
        async with semaphore:
            return await _send(http, body)

    started = time.perf_counter()
    results = await asyncio.gather(*map(send, bodies))
    repetition = ServeRepetition(tuple(results), time.perf_counter() - started)
    if not repetition.errors:
        spans = [(result.sent_s, result.sent_s + result.total_s) for result in results]
        require_concurrency(spans, min(concurrency, len(bodies)))
        require("answers without a number of tokens", sum(not result.num_tokens for result in results), 0)
    return repetition


async def _count_drafted(http: httpx.AsyncClient) -> int:
    """Draft tokens that the server has verified, for all its users; 0 where it does not speculate."""
    response = (await http.get("/metrics")).raise_for_status()
    lines = [line for line in response.text.splitlines() if line.startswith(DRAFTED)]
    return int(sum(float(line.rpartition(" ")[2]) for line in lines))


async def _send(http: httpx.AsyncClient, body: dict[str, Any]) -> ClientResult:
    started = last = time.perf_counter()
    result = ClientResult(sent_s=started)
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


def summary(repetitions: Mapping[str, list[ServeRepetition]], args: argparse.Namespace) -> dict[str, Any]:
    """Figures by mode, whether all was answered with equal texts, and the errors of requests."""
    rounds = [repetition for of_mode in repetitions.values() for repetition in of_mode]
    rates = {mode: [one.tokens_per_second for one in of_mode] for mode, of_mode in repetitions.items()}
    has_tokens = bool(rounds) and all(rate > 0 for of_mode in rates.values() for rate in of_mode)
    result = {
        "rounds": len(repetitions[OFF]),
        "num_requests": args.num_requests,
        "concurrency": args.concurrency,
        "temperature": args.temperature,
        "answered_all": not any(repetition.errors for repetition in rounds),
        "request_errors": sorted({error for repetition in rounds for error in repetition.errors}),
        "equal": len({repetition.texts for repetition in rounds}) <= 1,
        "modes": {
            mode: {"tokens_per_second": statistics.median(rates[mode]), **_latencies(of_mode)}
            for mode, of_mode in repetitions.items()
            if of_mode
        },
    }
    if has_tokens:
        slowness = {mode: [1 / rate for rate in of_mode] for mode, of_mode in rates.items()}
        result["throughput"] = speed_ratio(slowness[OFF], slowness[ON])
    return result


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


def _show(result: Mapping[str, Any]) -> None:
    names = ("ttft_ms", "itl_ms", "e2e_ms")
    rows = []
    for mode, of in result["modes"].items():
        times = ["/".join(f"{of[name].get(f'p{percent}', 0):.0f}" for percent in PERCENTS) for name in names]
        over = result["throughput"] if mode == ON and "throughput" in result else None
        speed = ("", "")
        if over is not None:
            speed = ratio_text(over), verdict(over) if result["drafted"] else NO_DRAFTS
        rows.append([mode, f"{of['tokens_per_second']:.0f}", *speed, *times])
    state = "all answered" if result["answered_all"] else "NOT ALL ANSWERED"
    equal = "equal" if result["equal"] else "NOT EQUAL"
    load = f"{result['num_requests']} requests, {result['concurrency']} at once"
    legend = (
        f"tokens/s: median of {rounds_text(result['rounds'])}.",
        *ratio_legend(result["rounds"]),
        "TTFT, ITL, E2E: milliseconds to the first token, between chunks, and of the whole answer: "
        "p50/p90/p99 over all requests.",
        "off: no speculation; auto: all drafters.",
        *(f"error: {error}" for error in result["request_errors"]),
    )
    columns = [
        "speculation",
        "tokens/s",
        "speed [95 %]",
        "result",
        *(name.removesuffix("_ms").upper() for name in names),
    ]
    print_table(f"serve: {load}; {state}; texts {equal}", columns, rows, legend)
