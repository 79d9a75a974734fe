"""A conversation that outlives its engine: time to the first token by tier, and kills at random moments.

    python -m benchmarks.kv_tiers [MODEL] [--shape 0.5b] [--tokens 4000] [--tiers memory,disk] [--kills 300]

MODEL is a directory or a GGUF file; without it the weights are random, of --shape. One client in this
process, one engine in another, speculation off. A conversation of --tokens tokens is computed (cold); then it
comes again after each of these, with the engine ready:

    warm      nothing
    kill      SIGKILL of the engine
    reload    the client replaces the engine
    load      the model is unloaded and loaded: another client, with the same fork server
    restart   another client and fork server

The time is that from the request to its first token, and the tokens must be those of the cold answer.

--kills: streams of conversations of a quarter of the tokens, while the engine is killed at random moments,
within a second after it is ready. Every answer is compared with that of an undisturbed engine, by hashes of
logits. Prints a table and one JSON line; exit code 1 if an answer was lost or differed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.script import print_json, run_script
from foreword.bench.agent.checkpoint import AGENT_SHAPES, write_checkpoint
from foreword.bench.tables import print_table
from foreword.checkpoint import prepare_checkpoint
from foreword.config.options import Config
from foreword.core.outputs import ErrorEvent, StepStats, TokenEvent
from foreword.core.params import SamplingParams
from foreword.core.request import Request
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.make_client import make_engine_client
from foreword.engine_client.router import EngineRouter

TIERS: dict[str, dict[str, Any]] = {
    "none": {},
    "memory": {"kv_cache_shared_memory": True},
    "disk": {"kv_cache_dir": "kv"},
    "both": {"kv_cache_shared_memory": True, "kv_cache_dir": "kv"},
}
EVENTS = ("cold", "warm", "kill", "reload", "load", "restart")
ANSWER_TOKENS, NUM_STREAMS, MAX_PAUSE_S, POLL_S = 8, 4, 1.0, 0.01
Answer = list[tuple[int, int]]


class Counts:
    """Sums of what successive engines report."""

    def __init__(self) -> None:
        self.totals = dict.fromkeys(("adopted_tokens", "disk_hit_tokens", "refused_files"), 0)
        self._last = StepStats()

    def on_step(self, stats: StepStats) -> None:
        if stats.step < self._last.step:
            self.end_engine()
        self._last = stats

    def end_engine(self) -> None:
        last, self._last, totals = self._last, StepStats(), self.totals
        disk = last.kv_tiers.get("disk")
        totals["adopted_tokens"] += last.adopted_tokens
        if disk is not None:
            totals["disk_hit_tokens"] += disk.hit_tokens
            totals["refused_files"] += sum(disk.refused.values())


class Server:
    """Clients of one model, one after another."""

    def __init__(self, config: Config) -> None:
        self._prepared = prepare_checkpoint(config)
        self._fork_server = ForkServer()
        self.counts = Counts()
        self._numbers = itertools.count()
        self.never_sampled = set(self._prepared.never_sampled_ids)
        self.client: EngineRouter

    async def start(self) -> None:
        prepared = self._prepared
        options = (prepared.config, prepared.never_sampled_ids, prepared.tokenizer.vocabulary)
        self.client = make_engine_client(*options, fork_server=self._fork_server)
        self.client.on_step = self.counts.on_step
        await self.client.start()

    async def close(self) -> None:
        await self.client.close()
        self.counts.end_engine()

    async def happen(self, event: str) -> None:
        """Make an event happen, and wait until an engine is ready."""
        if event == "kill":
            await self.kill()
        elif event == "reload":
            async for _ in self.client.reload():
                pass
        elif event in ("load", "restart"):
            await self.close()
            if event == "restart":
                await self._fork_server.close()
                self._fork_server = ForkServer()
            await self.start()

    async def kill(self) -> None:
        before, (pid,) = self.client.readiness.restarts, self.client.pids.values()
        os.kill(pid, signal.SIGKILL)
        while self.client.readiness.restarts == before or not self.client.readiness.is_ready:
            await asyncio.sleep(POLL_S)

    async def ask(self, prompt: Sequence[int], seed: int = 0) -> tuple[Answer, float]:
        """Tokens with the hashes of their logits, and seconds to the first."""
        params = SamplingParams(max_tokens=ANSWER_TOKENS, temperature=float(seed % 2), ignore_eos=True)
        request = Request(f"{next(self._numbers)}", tuple(prompt), params, seed, arrival_s=time.monotonic())
        answer: Answer = []
        started_s, first_s = time.perf_counter(), 0.0
        async for event in self.client.submit(request):
            assert isinstance(event, TokenEvent), event.error if isinstance(event, ErrorEvent) else event
            first_s = first_s or time.perf_counter() - started_s
            answer += zip(event.token_ids, event.logits_hashes, strict=True)
        return answer, first_s

    async def wait_written(self) -> None:
        """Wait until the disk has all that it gets: the engine reports with each answer."""
        written = -1
        while True:
            await self.ask([1])
            disk = self.counts._last.kv_tiers.get("disk")
            if disk is None or disk.written_bytes == written:
                return
            written = disk.written_bytes
            await asyncio.sleep(1.0)


async def measure(config: Config, prompt: Sequence[int]) -> dict[str, float]:
    """Seconds to the first token after each event. Raises AssertionError if an answer differs."""
    server = Server(config)
    await server.start()
    seconds, expected = {}, None
    for event in EVENTS:
        await server.happen(event)
        answer, seconds[event] = await server.ask(prompt)
        expected = expected or answer
        assert answer == expected, f"{event}: another answer"
        await server.wait_written()
    await server.close()
    await server._fork_server.close()
    return seconds


@contextlib.asynccontextmanager
async def kills(server: Server, count: int, rng: Random) -> AsyncIterator[asyncio.Task[None]]:
    async def run() -> None:
        for _ in range(count):
            await asyncio.sleep(rng.random() * MAX_PAUSE_S)
            await server.kill()

    task = asyncio.create_task(run())
    try:
        yield task
    finally:
        task.cancel()


async def measure_kills(config: Config, prompts: Sequence[Sequence[int]], count: int) -> dict[str, int]:
    """Answers while the engine is killed: how many, and how many were different or lost."""
    server, rng = Server(config), Random(0)
    await server.start()
    expected = [(await server.ask(prompt, seed))[0] for seed, prompt in enumerate(prompts)]
    result = {"answers": 0, "different": 0, "lost": 0}

    async def stream(task: asyncio.Task[None], number: int) -> None:
        seeds = itertools.cycle(range(number, len(prompts), NUM_STREAMS))
        while not task.done():
            seed = next(seeds)
            result["answers"] += 1
            try:
                answer, _ = await server.ask(prompts[seed], seed)
                result["different"] += answer != expected[seed]
            except AssertionError:
                result["lost"] += 1

    async with kills(server, count, rng) as task:
        await asyncio.gather(*(stream(task, number) for number in range(NUM_STREAMS)))
        await task
    await server.close()
    await server._fork_server.close()
    return {**result, "kills": count, **server.counts.totals}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--shape", choices=tuple(AGENT_SHAPES), default="27m")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--tiers", default="none,memory,disk")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kills", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or str(write_checkpoint(Path(folder) / "model", ["a"], AGENT_SHAPES[args.shape]))
        rng, results = Random(0), dict[str, dict[str, Any]]()
        prompt = [rng.randrange(10, 250) for _ in range(args.tokens)]
        prompts = [prompt[: args.tokens // 4 - rng.randrange(64)] for _ in range(NUM_STREAMS * 3)]
        prompts = [[seed + 10, *text] for seed, text in enumerate(prompts)]
        for tier in args.tiers.split(","):
            options = {**TIERS[tier]}
            if "kv_cache_dir" in options:
                options["kv_cache_dir"] = str(Path(folder) / f"kv-{tier}")
            config = Config(
                model=model,
                speculate="off",
                test_mode=True,
                threads=args.threads,
                max_model_len=args.tokens + 64,
                kv_cache_memory=f"{2 * args.tokens + 1024}tokens",
                log_level="error",
                **options,
            )
            if args.kills:
                # Memory for half of the conversations: blocks are evicted too
                config = replace(config, kv_cache_memory=f"{args.tokens * 3 // 2}tokens")
                results[tier] = dict(asyncio.run(measure_kills(config, prompts, args.kills)))
            else:
                results[tier] = dict(asyncio.run(measure(config, prompt)))
    show(results)
    print_json({"tokens": args.tokens, "shape": args.shape, "model": args.model, "tiers": results})
    return any(each.get("different") or each.get("lost") for each in results.values())


def show(results: dict[str, dict[str, Any]]) -> None:
    names = list(next(iter(results.values())))
    rows = [[tier, *(f"{each[name]:.3g}" for name in names)] for tier, each in results.items()]
    print_table("A conversation that outlives its engine", ["tier", *names], rows)


if __name__ == "__main__":
    raise SystemExit(run_script(main))
