"""Engines killed at random moments under load: every stream continues with the same tokens.

    python -m benchmarks.kills [--kills 200] [--streams 32] [--pause 1.0] [--replicas 3]

Regime: the bundled demo (or --model) in a real server, speculation `auto`. Clients stream their cases in
turn over HTTP: greedy, sampled, penalties, logprobs, four choices at once, JSON by a schema. First each
case is answered without kills; then the engine process gets SIGKILL repeatedly, at a random moment within
--pause seconds after it is ready, one time in eight while it is still loading. With --replicas a random
one of the engines is killed, mostly when all are ready. Each answer is compared with the first: texts,
logprobs, finish reasons and usage of all choices.

pause     time after a kill in which no stream got a token
silence   longest time after a kill between two tokens of one stream; quiet_silence: without kills

Prints a table and one JSON line. Exit code 1 if a request was unanswered or its answer differs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.script import print_json, run_script
from foreword.bench.server import ServerProcess
from foreword.bench.statistics import percentile
from foreword.bench.tables import print_table
from foreword.cli.configuration import read_config
from foreword.cli.flags import ENGINE_GROUPS, add_config_options
from foreword.cli.terminal import loading_bar

SPAWNER = b"foreword.engine_client.forkserver"
POLL_S = 0.01
KILL_LOADING_EVERY = 8  # every eighth kill does not wait for the engine to be ready
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")  # cache hits depend on earlier requests
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "tags": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["name", "tags"],
}
REQUEST_KINDS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 1.0, "n": 4},
    {"temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 40},
    {
        "temperature": 0,
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
    },
    {"temperature": 0.7, "response_format": {"type": "json_object"}},
)
TOPICS = (
    "the sea",
    "a railway",
    "two sisters",
    "the market",
    "a long winter",
    "an old clock",
    "bread",
    "the observatory",
)


@dataclass(slots=True)
class Choice:
    """One choice as its client received it."""

    text: str = ""
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(slots=True)
class Answer:
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: Any = None
    error: str | None = None
    heard: list[float] = field(default_factory=list, compare=False)  # times of its chunks

    def add(self, chunk: Mapping[str, Any]) -> None:
        if "error" in chunk:
            self.error = str(chunk["error"])
        if chunk.get("usage"):
            self.usage = {name: count for name, count in chunk["usage"].items() if name in COUNTS}
        for part in chunk.get("choices", ()):
            choice = self.choices.setdefault(part["index"], Choice())
            choice.text += part["delta"].get("content") or ""
            choice.logprobs += (part.get("logprobs") or {}).get("content") or ()
            choice.finish_reason = part["finish_reason"] or choice.finish_reason


@dataclass(slots=True)
class KillFindings:
    """Observations of the clients."""

    answered: int = 0
    tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    different: list[int] = field(default_factory=list)
    heard: list[list[float]] = field(default_factory=list)  # by answer
    quiet_silence_s: float = 0.0
    kills: list[float] = field(default_factory=list)


class Clients:
    """Repeat the cases until the kills are over."""

    def __init__(self, http: httpx.AsyncClient, args: argparse.Namespace) -> None:
        self.http = http
        self.args = args
        self.findings = KillFindings()
        self.over = False
        self._quiet: dict[int, Answer] = {}

    async def record_reference(self) -> None:
        """The answers of all cases without kills."""
        cases = range(self.args.streams)
        answers = await asyncio.gather(*(self._ask(case) for case in cases))
        self._quiet = dict(zip(cases, answers, strict=True))
        for answer in answers:
            assert answer.error is None, answer.error
        heard, self.findings.heard = self.findings.heard, []
        self.findings.quiet_silence_s = max(longest_silences([0.0], heard), default=0.0)

    async def run_under_kills(self) -> None:
        await asyncio.gather(*(self._client(case) for case in range(self.args.streams)))

    async def _client(self, case: int) -> None:
        while not self.over:
            answer = await self._ask(case)
            self.findings.answered += 1
            self.findings.tokens += (answer.usage or {}).get("completion_tokens", 0)
            if answer.error is not None:
                self.findings.errors[answer.error] += 1
            elif answer != self._quiet[case]:
                self.findings.different.append(case)

    async def _ask(self, case: int) -> Answer:
        answer = Answer()
        try:
            async with self.http.stream(
                "POST", "/v1/chat/completions", json=request_body(case, self.args.max_tokens)
            ) as response:
                if response.status_code != 200:
                    answer.error = f"{response.status_code} {(await response.aread())[:200]!r}"
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        answer.heard.append(time.monotonic())
                        answer.add(json.loads(line[6:]))
        except httpx.HTTPError as error:
            answer.error = repr(error)
        self.findings.heard.append(answer.heard)
        return answer


def request_body(case: int, max_tokens: int) -> dict[str, Any]:
    """The request of a case; the same number gives the same request."""
    topic = TOPICS[case // len(REQUEST_KINDS) % len(TOPICS)]
    messages = [{"role": "user", "content": f"Tell me a story about {topic}, part {case}."}]
    common = {
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": max_tokens,
        "seed": case,
    }
    return {"messages": messages, "model": "demo", **common, **REQUEST_KINDS[case % len(REQUEST_KINDS)]}


class Killer:
    """Kills a server's engines at random moments."""

    def __init__(self, server_pid: int, http: httpx.AsyncClient, args: argparse.Namespace) -> None:
        self._server_pid = server_pid
        self._http = http
        self._args = args
        self._random = Random(args.random_seed)

    async def run(self, kills: list[float]) -> None:
        killed: set[int] = set()
        for number in range(self._args.kills):
            pid = self._random.choice(await self._engines(killed))
            if number % KILL_LOADING_EVERY != KILL_LOADING_EVERY - 1:
                await self._ready()
            await asyncio.sleep(self._random.random() * self._args.pause)
            kills.append(time.monotonic())
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            killed.add(pid)
        await self._engines(killed)
        await self._ready()

    async def _engines(self, killed: set[int]) -> list[int]:
        """Process ids of all engines that were not killed, once there are enough."""
        while True:
            pids = [pid for pid in find_engines(self._server_pid) if pid not in killed]
            if len(pids) == self._args.replicas:
                return pids
            await asyncio.sleep(POLL_S)

    async def _ready(self) -> None:
        """Wait until all engines can step; the detail names those that cannot."""
        while True:
            response = await self._http.get("/health")
            if response.status_code == 200 and not response.json()["detail"]:
                return
            await asyncio.sleep(POLL_S)


def find_engines(server_pid: int) -> list[int]:
    """The processes forked by the server's fork server."""
    for pid in _children(server_pid):
        with contextlib.suppress(OSError):
            if SPAWNER in Path(f"/proc/{pid}/cmdline").read_bytes():
                return sorted(_children(pid))
    return []


def _children(pid: int) -> Iterator[int]:
    with contextlib.suppress(OSError):
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            yield from map(int, file.read_text().split())


def longest_pauses(kills: list[float], heard: list[float]) -> list[float]:
    """The longest silence of all streams together between each kill and the next, in seconds."""
    ends = [*kills[1:], float("inf")]
    times = sorted(heard)
    gaps = list(itertools.pairwise(times))
    found = []
    for kill, end in zip(kills, ends, strict=True):
        mine = [after - max(before, kill) for before, after in gaps if after > kill and before < end]
        found += [max(mine)] if mine else []
    return found


def longest_silences(kills: list[float], heard: list[list[float]]) -> list[float]:
    """The longest time between two chunks of one answer between each kill and the next, in seconds."""
    ends = [*kills[1:], float("inf")]
    gaps = [gap for times in heard for gap in itertools.pairwise(times)]
    found = []
    for kill, end in zip(kills, ends, strict=True):
        mine = [after - before for before, after in gaps if after > kill and before < end]
        found += [max(mine)] if mine else []
    return found


async def _run(server: ServerProcess, args: argparse.Namespace) -> tuple[KillFindings, float]:
    limits = httpx.Limits(max_connections=args.streams + 4)
    async with httpx.AsyncClient(base_url=server.url, timeout=None, limits=limits) as http:
        clients = Clients(http, args)
        await clients.record_reference()
        asking = asyncio.create_task(clients.run_under_kills())
        await Killer(server.pid, http, args).run(clients.findings.kills)
        clients.over = True
        await asking
        scrape = (await http.get("/metrics")).text
    restarts = next(
        float(line.split()[1])
        for line in scrape.splitlines()
        if line.startswith("foreword_engine_restarts_total{")
    )
    return clients.findings, restarts


def main() -> int:
    args = _parse()
    args.replicas = read_config(args).replicas
    config = replace(read_config(args), port=0, served_model_name="demo", log_level="error")
    with ServerProcess(config) as server, loading_bar(f"{args.kills} kills under {args.streams} streams"):
        found, restarts = asyncio.run(_run(server, args))
        said = server.read_log() if found.errors else []
    print("\n".join(said), file=sys.stderr)
    return _report(args, found, restarts)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, metavar="N")
    parser.add_argument("--streams", type=int, default=32, metavar="N")
    parser.add_argument(
        "--pause", type=float, default=1.0, metavar="X", help="longest life of a ready engine, in seconds"
    )
    parser.add_argument("--max-tokens", type=int, default=200, metavar="N")
    parser.add_argument("--random-seed", type=int, default=0, metavar="N")
    add_config_options(parser, ENGINE_GROUPS)
    return parser.parse_args()


def _report(args: argparse.Namespace, findings: KillFindings, restarts: float) -> int:
    pauses = longest_pauses(findings.kills, [time_s for times in findings.heard for time_s in times])
    silences = longest_silences(findings.kills, findings.heard)
    good = not findings.errors and not findings.different and findings.answered > 0
    figures = {
        "kills": len(findings.kills),
        "restarts": restarts,
        "answered": findings.answered,
        "tokens": findings.tokens,
        "errors": sum(findings.errors.values()),
        "different": len(findings.different),
        "pause_median_s": statistics.median(pauses) if pauses else None,
        "pause_p95_s": percentile(pauses, 95),
        "pause_max_s": max(pauses, default=None),
        "quiet_silence_s": findings.quiet_silence_s,
        "silence_median_s": statistics.median(silences) if silences else None,
        "silence_p95_s": percentile(silences, 95),
        "silence_max_s": max(silences, default=None),
    }
    rows = [
        [name, f"{value:.3g}" if isinstance(value, float) else str(value)] for name, value in figures.items()
    ]
    print_table(f"kills under {args.streams} streams", ("figure", "value"), rows)
    for error, count in findings.errors.most_common():
        print(f"error, {count} times: {error}", file=sys.stderr)
    if findings.different:
        print(f"cases answered differently: {findings.different[:20]}", file=sys.stderr)
    print_json(
        {"bench": "kills", "streams": args.streams, "replicas": args.replicas, **figures, "holds": good}
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(run_script(main))
