"""Mixed traffic for any length of time: flat memory, steady acceptance, the same tokens as without
speculation.

    python -m benchmarks.soak [--minutes 30] [--concurrency 16] [--kv-cache-memory 4000tokens]

Regime: the bundled demo (or --model) in a server of its own, speculation `auto`, a KV cache too small for
the load, so that requests wait and are preempted, and a small corpus of finished outputs, so that it is
overwritten. Clients send the prompts of `foreword bench speculate`, all categories in turn; every other
request is sampled, one in ten has no speculation, one in ten at most two draft tokens, and one in twenty
disconnects in the middle. A random sample of answers is repeated, one at a time, by a twin server without
speculation.

Prints a table and one JSON line. Exit code 1 if a request was unanswered, a twin's answer differs, memory
grew after the first third, or acceptance fell in the last third.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import httpx

from benchmarks.script import print_json, run_script
from foreword.bench.measurement import AUTO, OFF, Mode, RequestResult, with_all_drafters
from foreword.bench.remote import RemoteTarget, draft_stats_since, run_conversation
from foreword.bench.server import ServerProcess
from foreword.bench.tables import print_table
from foreword.bench.workloads import (
    MIXED,
    Conversation,
    PromptBudget,
    make_conversation,
)
from foreword.cli.configuration import read_config
from foreword.cli.flags import ENGINE_GROUPS, add_config_options
from foreword.cli.terminal import loading_bar
from foreword.config.options import Config
from foreword.core.params import Speculation
from foreword.metrics.request_stats import SpecDecodeStats

SHORT_MODE = Mode("at most two", speculation=Speculation(max_draft_tokens=2))
SAMPLED_SHARE = 0.8  # temperature of every other request
DISCONNECT_AFTER_S = 0.3  # of a client before it disconnects
READINGS = 60  # of memory and counts
GROWTH = 1.03  # limit of memory, last third over second
DECAY = 0.9  # limit of acceptance, last third over first


@dataclass(frozen=True, slots=True)
class SoakReading:
    """Resident bytes of all server processes, and draft tokens since the start."""

    memory_bytes: int
    drafted: int
    accepted: int


@dataclass(slots=True)
class SoakFindings:
    """Observations of the clients."""

    answered: int = 0
    tokens: int = 0
    disconnected: int = 0
    compared: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    different: list[int] = field(default_factory=list)
    readings: list[SoakReading] = field(default_factory=list)


class SoakTraffic:
    """Clients of the server under test, and one of its twin."""

    def __init__(self, tested: ServerProcess, twin: ServerProcess, args: argparse.Namespace) -> None:
        self.pid = tested.pid
        self.target = RemoteTarget(tested.url, None)
        self.tested_url, self.twin_url = tested.url, twin.url
        self.args = args
        self.findings = SoakFindings()
        room = PromptBudget.from_context(
            min(self.target.max_len, args.context),
            args.max_tokens,
            self.target,
        )
        self._work = _endless(room)
        self._twins: asyncio.Queue[tuple[int, Conversation, list[RequestResult]]] = asyncio.Queue(maxsize=2)
        self._ends = 0.0

    async def run(self) -> None:
        """Run until the time is over and every request is answered."""
        self._ends = time.monotonic() + 60 * self.args.minutes
        limits = httpx.Limits(max_connections=self.args.concurrency)
        async with (
            httpx.AsyncClient(base_url=self.tested_url, timeout=None, limits=limits) as http,
            httpx.AsyncClient(base_url=self.twin_url, timeout=None) as twin,
        ):
            comparing = asyncio.create_task(self._compare(twin))
            reading = asyncio.create_task(self._read())
            await asyncio.gather(*(self._client(http) for _ in range(self.args.concurrency)))
            await self._twins.join()
            await reading
            comparing.cancel()

    async def _client(self, http: httpx.AsyncClient) -> None:
        while time.monotonic() < self._ends:
            number, script, mode = next(self._work)
            asking = run_conversation(http, self.target.model, number, script, mode)
            if number % 20 == 19:
                await self._leave(asking)
            else:
                self._note(number, script, await asking)

    async def _leave(self, asking: Any) -> None:
        try:
            await asyncio.wait_for(asking, DISCONNECT_AFTER_S)
        except TimeoutError:
            self.findings.disconnected += 1

    def _note(self, number: int, script: Conversation, calls: list[RequestResult]) -> None:
        self.findings.answered += len(calls)
        self.findings.tokens += sum(call.num_tokens for call in calls)
        self.findings.errors.update(call.error for call in calls if call.error is not None)
        if not self._twins.full() and Random(number).random() < self.args.twins:
            self._twins.put_nowait((number, script, calls))

    async def _compare(self, http: httpx.AsyncClient) -> None:
        while True:
            number, script, calls = await self._twins.get()
            alone = await run_conversation(http, self.target.model, number, script, OFF)
            self.findings.compared += 1
            if [call.output for call in alone] != [call.output for call in calls]:
                self.findings.different.append(number)
            self._twins.task_done()

    async def _read(self) -> None:
        """Read memory and counts at even intervals."""
        before = await asyncio.to_thread(self.target.read_counters)
        for _ in range(READINGS):
            await asyncio.sleep(60 * self.args.minutes / READINGS)
            tallies = draft_stats_since(before, await asyncio.to_thread(self.target.read_counters))
            self.findings.readings.append(_make_reading(resident_bytes(self.pid), tallies.values()))


def _endless(room: PromptBudget) -> Iterator[tuple[int, Conversation, Mode]]:
    number = 0
    while True:
        script = make_conversation(MIXED, number, room)
        if number % 2 and script.temperature == 0:
            script = replace(script, temperature=SAMPLED_SHARE)
        yield number, script, {8: OFF, 9: SHORT_MODE}.get(number % 10, AUTO)
        number += 1


def _make_reading(memory_bytes: int, tallies: Any) -> SoakReading:
    totals: Sequence[SpecDecodeStats] = list(tallies)
    return SoakReading(
        memory_bytes, sum(tally.num_drafted for tally in totals), sum(tally.num_accepted for tally in totals)
    )


def resident_bytes(pid: int) -> int:
    """RSS of a process and its descendants."""
    try:
        own = int(re.findall(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())[0]) << 10
        children = " ".join(file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/children"))
    except (FileNotFoundError, ProcessLookupError, IndexError):
        return 0  # the process has just ended
    return own + sum(resident_bytes(int(child)) for child in children.split())


def main() -> int:
    args = _parse()
    config = with_all_drafters(read_config(args))
    tested = replace(
        config,
        port=0,
        kv_cache_memory=config.kv_cache_memory or "4000tokens",
        suffix_corpus_memory=args.corpus,
    )
    alone = replace(config, port=0, speculate="off", draft_model=None)
    with ServerProcess(tested) as server, ServerProcess(_same_context(alone, server)) as twin:
        traffic = SoakTraffic(server, twin, args)
        with loading_bar(f"{args.minutes:g} minutes of traffic"):
            asyncio.run(traffic.run())
        counts = traffic.target.read_counters()
    return _report(args, traffic.findings, int(counts.get(("preemptions_total", "", ""), 0)))


def _same_context(config: Config, server: ServerProcess) -> Config:
    """A small cache may have shortened the context, which ends an answer early."""
    return replace(config, max_model_len=RemoteTarget(server.url, None).max_len)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=30.0, metavar="X")
    parser.add_argument("--concurrency", type=int, default=16, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N")
    parser.add_argument(
        "--context", type=int, default=1024, metavar="N", help="tokens that a prompt and its answer may fill"
    )
    parser.add_argument(
        "--twins",
        type=float,
        default=0.2,
        metavar="X",
        help="share of answers asked again without speculation",
    )
    parser.add_argument("--corpus", default="1MiB", metavar="TEXT", help="memory for finished outputs")
    add_config_options(parser, ENGINE_GROUPS)
    return parser.parse_args()


def verdicts(findings: SoakFindings) -> dict[str, tuple[bool, str]]:
    """Requirements: whether each holds, and its figure."""
    growth, decay = memory_growth(findings.readings), acceptance_change(findings.readings)
    return {
        "all answered": (
            not findings.errors and findings.answered > 0,
            f"{findings.answered} answers, {sum(findings.errors.values())} errors",
        ),
        "no other token": (
            not findings.different and findings.compared > 0,
            f"{len(findings.different)} of {findings.compared} twins differ",
        ),
        "memory flat": (
            growth is not None and growth <= GROWTH,
            "too short" if growth is None else f"{growth:.3f}x",
        ),
        "acceptance not decaying": (
            decay is not None and decay >= DECAY,
            "nothing drafted" if decay is None else f"{decay:.3f}x",
        ),
    }


def memory_growth(readings: Sequence[SoakReading]) -> float | None:
    """The last third over the second; caches fill in the first."""
    third = len(readings) // 3
    if not third:
        return None
    second, last = (
        statistics.median(one.memory_bytes for one in part)
        for part in (readings[third : 2 * third], readings[-third:])
    )
    return last / second if second else None


def acceptance_change(readings: Sequence[SoakReading]) -> float | None:
    """Acceptance in the last third over that in the first."""
    third = len(readings) // 3
    if not third:
        return None
    first = _acceptance(SoakReading(0, 0, 0), readings[third - 1])
    last = _acceptance(readings[-third - 1], readings[-1])
    return last / first if first and last is not None else None


def _acceptance(before: SoakReading, after: SoakReading) -> float | None:
    drafted = after.drafted - before.drafted
    return (after.accepted - before.accepted) / drafted if drafted else None


def _report(args: argparse.Namespace, findings: SoakFindings, preemptions: int) -> int:
    checks = verdicts(findings)
    rows = [[name, "yes" if good else "NO", figure] for name, (good, figure) in checks.items()]
    rows += [
        ["tokens", "", f"{findings.tokens}"],
        ["preemptions", "", f"{preemptions}"],
        ["clients that left", "", f"{findings.disconnected}"],
    ]
    print_table(
        f"soak: {args.minutes:g} minutes, {args.concurrency} at once", ("demand", "holds", "figure"), rows
    )
    for error, count in findings.errors.most_common():
        print(f"error, {count} times: {error}", file=sys.stderr)
    if findings.different:
        print(f"scripts whose twin differs: {findings.different[:20]}", file=sys.stderr)
    last = findings.readings[-1] if findings.readings else SoakReading(0, 0, 0)
    print_json(
        {
            "bench": "soak",
            "minutes": args.minutes,
            "concurrency": args.concurrency,
            "answered": findings.answered,
            "tokens": findings.tokens,
            "compared": findings.compared,
            "different": len(findings.different),
            "preemptions": preemptions,
            "memory_bytes": [one.memory_bytes for one in findings.readings],
            "memory_growth": memory_growth(findings.readings),
            "acceptance": _acceptance(SoakReading(0, 0, 0), last),
            "acceptance_change": acceptance_change(findings.readings),
            "holds": {name: good for name, (good, _) in checks.items()},
        }
    )
    return 0 if all(good for good, _ in checks.values()) else 1


if __name__ == "__main__":
    sys.exit(run_script(main))
