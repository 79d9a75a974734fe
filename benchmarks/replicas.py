"""The router of replicas: its overhead, what prefix routing saves, and the cost of hashing a prompt.

    python -m benchmarks.replicas overhead [--rounds 8] [--concurrency 1,8,32,256] [--tokens 64]
    python -m benchmarks.replicas prefixes [--rounds 3] [--prefixes 12] [--prefix-tokens 600] [--requests 96]
    python -m benchmarks.replicas hashing

Regime: engines of the bundled demo (or --model) in processes of their own, requests from this process, no
HTTP. Kills under load are those of `python -m benchmarks.kills --replicas 3`.

overhead  the only engine of a server, and one of two replicas that gets all requests, in turn; the others
          are idle. Speculation is off, the requests of a round are sent at once. Also the processor
          time of this process a token.
prefixes  3 engines (--replicas) whose KV caches hold 5/8 of the prefixes each, so that one cannot keep them
          all and all together can. Each request is a random prefix and 24 tokens of its own; 6 are open
          at a time. Routed by prefix, and to the replicas in turn, each with new engines.
hashing   extend_hashes() of prompts of 1k to 120k tokens, which the router calls 4096 tokens at a time.

Prints a table and one JSON line. Exit code 1 if an answer differs between the ways.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import Any

from benchmarks.script import print_json, run_script, speed_ratio
from foreword.bench.statistics import percentile, rotate, time_call
from foreword.bench.tables import print_table
from foreword.checkpoint import CheckpointInfo, prepare_checkpoint
from foreword.cli.configuration import read_config
from foreword.cli.flags import ENGINE_GROUPS, add_config_options
from foreword.cli.terminal import loading_bar
from foreword.core.outputs import TokenEvent
from foreword.core.params import SamplingParams, Speculation
from foreword.core.request import Request
from foreword.engine_client.base import EngineClient
from foreword.engine_client.make_client import make_engine_client
from foreword.engine_client.replica import ReplicaLoad, RoutingPolicy, choose
from foreword.kv_cache.prefix_cache import extend_hashes

ALONE, ROUTED = "alone", "routed"
OWN_TOKENS, ANSWER_TOKENS, OPEN_REQUESTS = 24, 8, 6  # of `prefixes`
CACHED_PREFIXES = 5 / 8  # share that one replica's cache holds
HASHED_LENGTHS = (1_000, 4_096, 30_000, 120_000)
HASH_REPEATS = 20
OFF = Speculation("off")


@dataclass(slots=True)
class Answer:
    token_ids: list[int] = field(default_factory=list)
    num_cached: int = 0
    first_s: float = 0.0
    token_s: float = 0.0  # a token, after the first


async def ask(client: EngineClient, request: Request) -> Answer:
    """Raises RuntimeError if the request fails."""
    answer, started_s, first_s = Answer(), time.perf_counter(), 0.0
    async for event in client.submit(request):
        if not isinstance(event, TokenEvent):
            raise RuntimeError(f"request {request.id}: {event}")
        first_s = first_s or time.perf_counter()
        answer.token_ids += event.token_ids
        answer.num_cached = event.num_cached
    answer.first_s = first_s - started_s
    answer.token_s = (time.perf_counter() - first_s) / max(len(answer.token_ids) - 1, 1)
    return answer


def make_request(request_id: str, prompt_ids: Sequence[int], num_tokens: int) -> Request:
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, speculation=OFF)
    return Request(request_id, tuple(prompt_ids), params, seed=7, arrival_s=time.monotonic())


@dataclass(slots=True)
class Round:
    """Means of one round."""

    first_s: float
    token_s: float
    cpu_s: float  # of this process, a token
    answers: list[list[int]]


async def run_round(client: EngineClient, name: str, count: int, num_tokens: int) -> Round:
    prompts = [[40 + number % 50, 50, 60, 70 + number // 50, *range(100, 116)] for number in range(count)]
    cpu_s = time.process_time()
    asked = [make_request(f"{name}-{number}", prompt, num_tokens) for number, prompt in enumerate(prompts)]
    answers = await asyncio.gather(*(ask(client, request) for request in asked))
    cpu_s = time.process_time() - cpu_s
    return Round(
        statistics.fmean(answer.first_s for answer in answers),
        statistics.fmean(answer.token_s for answer in answers),
        cpu_s / (count * num_tokens),
        [answer.token_ids for answer in answers],
    )


async def measure_overhead(prepared: CheckpointInfo, args: argparse.Namespace) -> dict[str, Any]:
    """Figures by number of requests at once."""
    config = replace(prepared.config, speculate="off", max_num_seqs=max(args.concurrency))
    clients = {
        name: make_engine_client(
            replace(config, replicas=replicas), prepared.never_sampled_ids, prepared.tokenizer.vocabulary
        )
        for name, replicas in ((ALONE, 1), (ROUTED, 2))
    }
    for client in clients.values():
        await client.start()
    clients[ROUTED].set_policy(lambda *_: "0")
    results: dict[str, Any] = {}
    for count in args.concurrency:
        rounds: dict[str, list[Round]] = {ALONE: [], ROUTED: []}
        for number in range(args.rounds + 1):  # the first warms up
            for way in rotate((ALONE, ROUTED), number):
                name = f"{way} {count} {number}"
                rounds[way].append(await run_round(clients[way], name, count, args.tokens))
        assert all(one.answers == rounds[ALONE][0].answers for each in rounds.values() for one in each)
        alone, routed = rounds[ALONE][1:], rounds[ROUTED][1:]
        results[str(count)] = {
            "first_ms": [statistics.median(one.first_s for one in each) * 1e3 for each in (alone, routed)],
            "token_ms": [statistics.median(one.token_s for one in each) * 1e3 for each in (alone, routed)],
            "cpu_us": [statistics.median(one.cpu_s for one in each) * 1e6 for each in (alone, routed)],
            "first_ratio": speed_ratio([o.first_s for o in routed], [o.first_s for o in alone]),
            "token_ratio": speed_ratio([o.token_s for o in routed], [o.token_s for o in alone]),
        }
    for client in clients.values():
        await client.close()
    return results


def take_turns(candidates: Sequence[ReplicaLoad], last_id: str | None = None) -> str:
    """Round robin."""
    return min(candidates, key=lambda each: each.chosen_at).id


async def measure_prefixes(
    prepared: CheckpointInfo, args: argparse.Namespace, policy: RoutingPolicy, number: int
) -> dict[str, Any]:
    """One round with new engines."""
    size = prepared.config.block_size
    kv_tokens = int(args.prefixes * CACHED_PREFIXES) * args.prefix_tokens
    kv_tokens += OPEN_REQUESTS * (args.prefix_tokens + OWN_TOKENS + ANSWER_TOKENS + size)
    config = replace(
        prepared.config, replicas=max(prepared.config.replicas, 3), kv_cache_memory=f"{kv_tokens}tokens"
    )
    client = make_engine_client(config, prepared.never_sampled_ids, prepared.tokenizer.vocabulary)
    client.set_policy(policy)
    info = await client.start()
    random, gate = Random(number), asyncio.Semaphore(OPEN_REQUESTS)
    limit = min(info.vocab_size, 250)
    prefixes = [[random.randrange(limit) for _ in range(args.prefix_tokens)] for _ in range(args.prefixes)]
    prompts = [
        [*random.choice(prefixes), *(random.randrange(limit) for _ in range(OWN_TOKENS))]
        for _ in range(args.requests)
    ]

    async def ask_one(index: int) -> Answer:
        async with gate:
            return await ask(client, make_request(str(index), prompts[index], ANSWER_TOKENS))

    started_s = time.perf_counter()
    answers = await asyncio.gather(*map(ask_one, range(len(prompts))))
    elapsed_s = time.perf_counter() - started_s
    await client.close()
    first_s = [answer.first_s for answer in answers]
    return {
        "cached_share": sum(answer.num_cached for answer in answers) / sum(map(len, prompts)),
        "first_p50_s": statistics.median(first_s),
        "first_p90_s": percentile(first_s, 90),
        "requests_per_s": len(prompts) / elapsed_s,
        "answers": [answer.token_ids for answer in answers],
    }


def measure_hashing(block_size: int) -> dict[str, float]:
    """Microseconds by number of prompt tokens, the fastest of a few."""
    microseconds = {}
    for length in HASHED_LENGTHS:
        hash_prompt = partial(extend_hashes, tokens=range(length), block_size=block_size, namespace="")
        repeats = (time_call(partial(hash_prompt, [])) for _ in range(HASH_REPEATS))
        microseconds[str(length)] = 1e6 * min(repeats)
    return microseconds


def main() -> int:
    args = _parse()
    prepared = prepare_checkpoint(replace(read_config(args), log_level="error"))
    if args.part == "hashing":
        hashing = measure_hashing(prepared.config.block_size)
        rows = [[length, f"{value:.0f}", f"{value / int(length):.3f}"] for length, value in hashing.items()]
        print_table("hashing a prompt", ("tokens", "us", "us a token"), rows)
        print_json({"bench": "replicas hashing", "us": hashing})
        return 0
    if args.part == "overhead":
        with loading_bar(f"{args.rounds} rounds of {args.concurrency} requests at once"):
            overhead = asyncio.run(measure_overhead(prepared, args))
        rows = [[count, *_cells(figures)] for count, figures in overhead.items()]
        ways = ("", " routed")
        columns = ["requests"]
        for name in ("first ms", "token ms"):
            columns += [name + way for way in ways] + ["ratio"]
        columns += ["cpu us" + way for way in ways]
        print_table("alone and routed; processor time of the API process a token", columns, rows)
        print_json({"bench": "replicas overhead", "rounds": args.rounds, **overhead})
        return 0
    return _report_prefixes(prepared, args)


def _cells(figures: dict[str, Any]) -> list[str]:
    cells = []
    for name in ("first", "token"):
        ratio = figures[f"{name}_ratio"]
        interval = f" [{ratio['low']:.2f}, {ratio['high']:.2f}]" if "low" in ratio else ""
        cells += [*(f"{value:.3f}" for value in figures[f"{name}_ms"]), f"{ratio['ratio']:.3f}{interval}"]
    return [*cells, *(f"{value:.1f}" for value in figures["cpu_us"])]


def _report_prefixes(prepared: CheckpointInfo, args: argparse.Namespace) -> int:
    policies: dict[str, RoutingPolicy] = {"by prefix": choose, "in turn": take_turns}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in policies}
    with loading_bar(f"{args.rounds} rounds of {args.requests} requests"):
        for number in range(args.rounds):
            for name in rotate(tuple(policies), number):
                found[name].append(asyncio.run(measure_prefixes(prepared, args, policies[name], number)))
    is_equal = all(
        one.pop("answers") == other.pop("answers") for one, other in zip(*found.values(), strict=True)
    )
    medians = {
        name: {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        for name, rounds in found.items()
    }
    rows = [[name, *(f"{value:.3f}" for value in figures.values())] for name, figures in medians.items()]
    print_table(
        f"{args.prefixes} prefixes of {args.prefix_tokens} tokens",
        ("routing", *next(iter(medians.values()))),
        rows,
    )
    print_json({"bench": "replicas prefixes", "equal": is_equal, **medians})
    return 0 if is_equal else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=("overhead", "prefixes", "hashing"))
    parser.add_argument("--rounds", type=int, default=8, metavar="N")
    parser.add_argument(
        "--concurrency",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[1, 8, 32, 256],
        metavar="N,N",
    )
    parser.add_argument("--tokens", type=int, default=64, metavar="N")
    parser.add_argument("--prefixes", type=int, default=12, metavar="N")
    parser.add_argument("--prefix-tokens", type=int, default=600, metavar="N")
    parser.add_argument("--requests", type=int, default=96, metavar="N")
    add_config_options(parser, ENGINE_GROUPS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(run_script(main))
