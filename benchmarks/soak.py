"""Many requests through a small cache: all answered, and each as if it had been alone.

    python benchmarks/soak.py [--num-requests 1000] [--concurrency 64] [--kv-cache-memory 4000tokens]

Regime: the bundled demo (or --model) in a server of its own whose cache holds far fewer tokens than the
requests need together, so that requests wait and are preempted all the time; sampled (--temperature),
every request with a seed of its own, speculation on. The same requests then go one at a time through a
fresh server without speculation. Prints a table and one JSON line; exit code 1 if any request got
no answer or another one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from foreword.cli.answers import request_body
from foreword.cli.bench_common import Example, params, read_examples, show, show_json
from foreword.cli.bench_serve import Round, measure_round
from foreword.cli.options import ENGINE_GROUPS, add_config_options, read_config
from foreword.cli.server_process import ServerProcess
from foreword.cli.terminal import loading_bar
from foreword.config import Config
from foreword.metrics.catalog import PREFIX

CHUNK = 50  # requests between two advances of the progress bar at concurrency 1


def main() -> int:
    args = _parse()
    config = replace(read_config(args), kv_cache_memory=read_config(args).kv_cache_memory or "4000tokens", port=0)
    examples = read_examples(args)
    bodies = [_body(examples, seed, args) for seed in range(args.num_requests)]
    crowd, preemptions = _run(config, bodies, args.concurrency, "auto")
    alone, _ = _run(replace(config, speculate="off", draft_model=None, kv_cache_memory=None), bodies, 1, "off")
    return _report(args, crowd, alone, preemptions)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-requests", type=int, default=1000, metavar="N")
    parser.add_argument("--concurrency", type=int, default=64, metavar="N")
    parser.add_argument("--max-tokens", type=int, default=96, metavar="N")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="X")
    parser.add_argument("--prompts", metavar="FILE")
    add_config_options(parser, ENGINE_GROUPS)
    return parser.parse_args()


def _body(examples: Sequence[Example], seed: int, args: argparse.Namespace) -> dict[str, Any]:
    messages = [{"role": "user", "content": examples[seed % len(examples)].prompt}]
    _, body = request_body("soak", messages, params("auto", args.max_tokens, args.temperature, seed))
    return body | {"stream": True, "stream_options": {"include_usage": True}}


def _run(config: Config, bodies: Sequence[dict[str, Any]], concurrency: int, what: str) -> tuple[Round, int]:
    """The answers, and how often a request was put back to make room."""
    with ServerProcess(replace(config, served_model_name="soak")) as server, loading_bar(f"speculation {what}") as progress:
        answered = asyncio.run(_send(server.url, bodies, concurrency, progress))
        families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
        values = {sample.name: sample.value for family in families for sample in family.samples}
        return answered, int(values[PREFIX + "preemptions_total"])


async def _send(url: str, bodies: Sequence[dict[str, Any]], concurrency: int, progress: Any) -> Round:
    """All bodies, `concurrency` at once; a crowd goes in one piece, so that nothing drains in between."""
    piece = len(bodies) if concurrency > 1 else CHUNK
    calls, seconds = [], 0.0
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits(max_connections=concurrency)) as http:
        for start in range(0, len(bodies), piece):
            part = await measure_round(http, bodies[start : start + piece], concurrency)
            calls += part.calls
            seconds += part.seconds
            progress(len(calls), len(bodies))
    return Round(tuple(calls), seconds)


def _report(args: argparse.Namespace, crowd: Round, alone: Round, preemptions: int) -> int:
    different = [seed for seed, (a, b) in enumerate(zip(crowd.texts, alone.texts, strict=True)) if a != b]
    result = {
        "bench": "soak",
        "num_requests": args.num_requests,
        "concurrency": args.concurrency,
        "unanswered": len(crowd.errors) + len(alone.errors),
        "different": len(different),
        "preemptions": preemptions,
        "throughput_ratio": crowd.tokens_per_second / alone.tokens_per_second,
    }
    rows = [[name, f"{value:.2f}" if isinstance(value, float) else str(value)] for name, value in result.items()]
    show("soak: a crowd in a small cache against one at a time", ("figure", "value"), rows)
    show_json(result)
    for error in sorted({*crowd.errors, *alone.errors}):
        print(f"error: {error}", file=sys.stderr)
    if different:
        print(f"seeds with another answer: {different[:20]}", file=sys.stderr)
    return 1 if different or result["unanswered"] else 0


if __name__ == "__main__":
    sys.exit(main())
