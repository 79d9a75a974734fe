"""Ten times the server's capacity for any length of time: it refuses in time and stays stable.

    python -m benchmarks.overload [--minutes 10] [--connections 512] [--factor 10] [--kv-cache-memory N]

Regime: the bundled demo (or --model) with speculation, a KV cache for a dozen requests, and a short
queue. Capacity is measured first, with as many clients as the queue and batch hold. Then one client per
connection sends --factor times as many requests, whether refused or not: short and long prompts, greedy
and sampled, streams and whole answers, two choices, JSON; one in twenty disconnects in the middle.
Another client polls /health. Latencies are those of the clients, on the same machine as the server.

Prints a table and one JSON line. Exit code 1 if an answer was a server error or missing; if a refusal was
not 429 with Retry-After; if an admitted request waited longer than --queue-timeout and a margin; if
/health failed; or if memory (PSS of all the server's processes) of the last third is more than 5 % above
that of the second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import re
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from benchmarks.raw_http import ConnectionBroken, RawConnection, RawResponse
from benchmarks.script import print_json, run_script
from benchmarks.soak import SoakReading, memory_growth
from foreword.bench.remote import RemoteTarget
from foreword.bench.server import ServerProcess
from foreword.bench.statistics import percentile
from foreword.bench.tables import print_table
from foreword.cli.client import EventReader, choices_of, text_of
from foreword.cli.configuration import read_config
from foreword.cli.flags import ENGINE_GROUPS, add_config_options
from foreword.cli.terminal import loading_bar
from foreword.config.options import Config
from foreword.errors import ForewordError

WARM_S, MEASURED_S = 3.0, 10.0  # of the capacity
QUEUE_SLOTS = 64  # open requests where the options set no limit
QUEUE_S = 10.0  # wait in the queue where the options set no limit
MAX_TTFT_S = 5.0  # margin after the queue until the first token
ANSWER_S = 60.0  # margin after the queue until the whole answer
HEALTH_S = 5.0  # for /health to answer
DISCONNECT_AFTER_S = 0.3  # of a client before it disconnects
READINGS = 60
GROWTH = 1.05
WORDS = (
    "draft",
    "token",
    "model",
    "guess",
    "cache",
    "engine",
    "answer",
    "step",
    "queue",
    "prompt",
    "row",
    "block",
)
PATH = "/v1/chat/completions"


@dataclass(slots=True)
class OverloadFindings:
    """Observations of the clients."""

    asked: int = 0
    answered: int = 0
    refused: int = 0
    disconnected: int = 0
    tokens: int = 0
    seconds: float = 0.0
    wrong: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    unhealthy: Counter[str] = field(default_factory=Counter)
    health_s: list[float] = field(default_factory=list)
    readings: list[SoakReading] = field(default_factory=list)


class LoadGenerator:
    """Clients of one server."""

    def __init__(self, server: ServerProcess, config: Config) -> None:
        url = urlsplit(server.url)
        self._host, self._port, self._pid = str(url.hostname), int(url.port or 80), server.pid
        self._config = config
        self._model = RemoteTarget(server.url, None).model
        self._numbers = iter(range(1 << 62))
        self._findings = OverloadFindings()

    async def run(self, clients: int, seconds: float, interval_s: float = 0.0) -> OverloadFindings:
        """Run clients for some seconds; each sends once in `interval_s` on average, or after its answer."""
        self._findings, ends = OverloadFindings(), time.monotonic() + seconds
        watching = [asyncio.create_task(watch) for watch in (self._read(seconds), self._ask_health(ends))]
        await asyncio.gather(*(self._client(number, ends, interval_s) for number in range(clients)))
        self._findings.seconds = seconds  # later answers belong to the phase before
        await asyncio.gather(*watching)
        return self._findings

    async def _client(self, number: int, ends: float, interval_s: float) -> None:
        random = Random(number)
        next_s = time.monotonic() + random.random() * interval_s
        with contextlib.closing(RawConnection(self._host, self._port)) as connection:
            while time.monotonic() < ends:
                await asyncio.sleep(max(next_s - time.monotonic(), 0.0))
                next_s += random.expovariate(1.0) * interval_s
                if time.monotonic() < ends:
                    await self._ask(connection, next(self._numbers))

    async def _ask(self, connection: RawConnection, number: int) -> None:
        found, body, leaves = self._findings, _body(self._model, number), number % 20 == 19
        found.asked += 1
        try:
            async with asyncio.timeout(
                DISCONNECT_AFTER_S if leaves else self._config.queue_timeout + ANSWER_S
            ):
                await self._answer(connection, body)
                return
        except TimeoutError:
            found.disconnected += leaves
            found.wrong["no answer in time"] += not leaves
        except (ConnectionBroken, OSError, EOFError, ForewordError, ValueError) as error:
            found.wrong[f"{type(error).__name__}: {error}"[:120]] += 1
        connection.close()

    async def _answer(self, connection: RawConnection, body: Mapping[str, Any]) -> None:
        found, began = self._findings, time.monotonic()
        reply = await connection.request("POST", PATH, body)
        if reply.status == 429:
            await reply.body()
            found.refused += 1
            found.refused_s.append(time.monotonic() - began)
            found.wrong["429 without Retry-After"] += not reply.headers.get("retry-after", "").isdigit()
            return
        if reply.status != 200:
            raise ForewordError(f"{reply.status} {(await reply.body())[:80]!r}")
        first_s = await (_streamed if body["stream"] else _whole)(reply)
        found.answered += 1
        found.tokens += int(body["max_tokens"])
        if first_s is not None:
            found.first_s.append(first_s - began)
        found.total_s.append(time.monotonic() - began)

    async def _ask_health(self, ends: float) -> None:
        with contextlib.closing(RawConnection(self._host, self._port)) as connection:
            while time.monotonic() < ends:
                began = time.monotonic()
                try:
                    async with asyncio.timeout(HEALTH_S):
                        reply = await connection.request("GET", "/health")
                        await reply.body()
                    self._findings.unhealthy[f"status {reply.status}"] += reply.status != 200
                except (TimeoutError, ConnectionBroken, OSError) as error:
                    self._findings.unhealthy[type(error).__name__] += 1
                    connection.close()
                self._findings.health_s.append(time.monotonic() - began)
                await asyncio.sleep(0.5)

    async def _read(self, seconds: float) -> None:
        for _ in range(READINGS):
            await asyncio.sleep(seconds / READINGS)
            self._findings.readings.append(
                SoakReading(await asyncio.to_thread(proportional_bytes, self._pid), 0, 0)
            )


async def _streamed(reply: RawResponse) -> float | None:
    """Time of the first text. Raises ForewordError if the stream ends without a finish."""
    first_s, open_, reader = None, True, EventReader()
    async for piece in reply.iter_body():
        for choice in (choice for chunk in reader.feed(piece) for choice in choices_of(chunk)):
            first_s = first_s or (time.monotonic() if text_of(choice) else None)
            open_ = open_ and choice.get("finish_reason") is None
    if open_:
        raise ForewordError("a stream ended without a finish_reason")
    return first_s


async def _whole(reply: RawResponse) -> None:
    if any(choice["finish_reason"] is None for choice in json.loads(await reply.body())["choices"]):
        raise ForewordError("an answer without a finish_reason")


def _body(model: str, number: int) -> dict[str, Any]:
    """The body of request `number`."""
    random = Random(number)
    prompt = " ".join(random.choice(WORDS) for _ in range(random.choice((3, 8, 20, 60))))
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": f"Say something of {prompt}."}],
    }
    body |= {"max_tokens": random.choice((32, 96, 256)), "stream": number % 2 == 0, "seed": number}
    body |= {"temperature": random.choice((0.0, 0.8, 1.0)), "ignore_eos": number % 3 == 0}
    if number % 25 == 7:
        body["n"] = 2
    if number % 40 == 3:
        body["response_format"] = {"type": "json_object"}
        body["ignore_eos"] = False
    return body


def proportional_bytes(pid: int) -> int:
    """PSS of a process and its descendants."""
    try:
        own = int(re.findall(r"Pss:\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text())[0]) << 10
        children = " ".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children"))
    except (FileNotFoundError, ProcessLookupError, PermissionError, IndexError):
        return 0  # the process has just ended
    return own + sum(proportional_bytes(int(child)) for child in children.split())


def verdicts(
    findings: OverloadFindings, factor: float, capacity: float, queue_s: float
) -> dict[str, tuple[bool, str]]:
    """Requirements: whether each holds, and its figure."""
    growth, load = (
        memory_growth(findings.readings),
        findings.asked / max(findings.seconds, 1e-9) / max(capacity, 1e-9),
    )
    longest = max(findings.first_s, default=math.inf)
    wrong = sum(findings.wrong.values())
    return {
        "load": (load >= 0.8 * factor, f"{load:.1f}x of {capacity:.1f} requests/s"),
        "answered or refused with 429": (
            not wrong and findings.answered > 0 and findings.refused > 0,
            f"{wrong} were not",
        ),
        "first token in time": (
            longest <= queue_s + MAX_TTFT_S,
            f"{longest:.1f} s of {queue_s + MAX_TTFT_S:g} s",
        ),
        "/health says yes": (not sum(findings.unhealthy.values()), f"{len(findings.health_s)} times"),
        "memory flat": (
            growth is not None and growth <= GROWTH,
            "too short" if growth is None else f"{growth:.3f}x",
        ),
    }


def main() -> int:
    args = _parse()
    given = read_config(args)
    config = replace(
        given,
        kv_cache_memory=given.kv_cache_memory or "2000tokens",
        max_waiting=QUEUE_SLOTS if given.max_waiting == Config().max_waiting else given.max_waiting,
        queue_timeout=QUEUE_S if given.queue_timeout == Config().queue_timeout else given.queue_timeout,
    )
    with ServerProcess(replace(config, port=0)) as server:
        load = LoadGenerator(server, config)
        with loading_bar("what it can do"):
            asyncio.run(load.run(config.max_waiting // 4, WARM_S))
            alone = asyncio.run(load.run(config.max_waiting // 4, MEASURED_S))
        capacity = alone.answered / alone.seconds
        interval_s = args.connections / max(args.factor * capacity, 1e-9)
        with loading_bar(f"{args.minutes:g} minutes of {args.factor:g} times as much"):
            found = asyncio.run(load.run(args.connections, 60 * args.minutes, interval_s))
        restarts = RemoteTarget(server.url, None).read_counters().get(("engine_restarts_total", "", ""), 0.0)
    found.wrong.update({"the engine was started again": int(restarts)} if restarts else {})
    return _report(args, config, found, capacity)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0, metavar="X")
    parser.add_argument("--connections", type=int, default=512, metavar="N")
    parser.add_argument(
        "--factor", type=float, default=10.0, metavar="X", help="how many times more than it can do is asked"
    )
    add_config_options(parser, ENGINE_GROUPS)
    return parser.parse_args()


def _report(args: argparse.Namespace, config: Config, findings: OverloadFindings, capacity: float) -> int:
    checks = verdicts(findings, args.factor, capacity, config.queue_timeout)
    rows = [[name, "yes" if good else "NO", figure] for name, (good, figure) in checks.items()]
    rows += [[name, "", figure] for name, figure in _figures(findings).items()]
    print_table(
        f"overload: {args.minutes:g} minutes, {args.connections} connections",
        ("demand", "holds", "figure"),
        rows,
    )
    for what, count in (findings.wrong + findings.unhealthy).most_common():
        print(f"{count} times: {what}", file=sys.stderr)
    print_json(
        {
            "bench": "overload",
            "minutes": args.minutes,
            "connections": args.connections,
            "capacity_per_s": capacity,
            "asked": findings.asked,
            "answered": findings.answered,
            "refused": findings.refused,
            "left": findings.disconnected,
            "first_token_s": _percents(findings.first_s),
            "answer_s": _percents(findings.total_s),
            "refusal_s": _percents(findings.refused_s),
            "health_s": _percents(findings.health_s),
            "memory_bytes": [one.memory_bytes for one in findings.readings],
            "memory_growth": memory_growth(findings.readings),
            "holds": {name: good for name, (good, _) in checks.items()},
        }
    )
    return 0 if all(good for good, _ in checks.values()) else 1


def _figures(findings: OverloadFindings) -> dict[str, str]:
    spans = {
        "first token": findings.first_s,
        "whole answer": findings.total_s,
        "refusal": findings.refused_s,
        "/health": findings.health_s,
    }
    counts = f"{findings.asked} asked, {findings.answered} answered, {findings.refused} refused"
    counts += f", {findings.disconnected} left"
    return {"requests": counts} | {
        f"{name}, p50 / p99 / longest": " / ".join(f"{value:.2f} s" for value in _percents(values))
        for name, values in spans.items()
    }


def _percents(values: Sequence[float]) -> list[float]:
    """Median, 99th percentile and maximum."""
    return [
        value
        for value in (percentile(values, 50), percentile(values, 99), max(values, default=None))
        if value is not None
    ]


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(run_script(main))
