"""What the time to the first token tells one key about the prompts of another.

    python -m benchmarks.tenants [--rounds 200] [--prompt-tokens 512] [MODEL and flags of serve]

Regime: the bundled demo (or MODEL) in a real server with two keys, one request at a time, greedy, one token
each. A round has a new random prompt P of that many tokens: alice sends P; then, in random order, bob sends
P, which alice's key has in the cache ("other"), and a new prompt as long ("new"). At the end bob sends P
again, which is in his own cache ("own"): the difference that would be seen if namespaces leaked.

auc  probability that a time of the row is below one of "new", ties half: 0.5 tells nothing
z    standard errors by which it differs from 0.5 (Mann-Whitney)

Prints a table and one JSON line. Exit code 1 if "other" has cached tokens or |z| > 4, or "own" has none.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from collections.abc import Sequence

import httpx

from benchmarks.script import print_json, run_script, track_progress
from foreword.bench.regime import RegimeError
from foreword.bench.server import ServerProcess
from foreword.bench.statistics import percentile
from foreword.bench.tables import print_table
from foreword.cli.configuration import read_config
from foreword.cli.flags import ENGINE_GROUPS, add_config_options

MAX_Z = 4.0
MAX_ID = 256  # prompts are token ids below this, which every vocabulary has


def send(http: httpx.Client, key: str, prompt: Sequence[int]) -> tuple[float, int]:
    """(seconds to the first token, cached tokens)"""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    start_s, first_s, cached = time.perf_counter(), math.nan, 0
    with http.stream(
        "POST", "/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}
    ) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith("data: {") and math.isnan(first_s):
                first_s = time.perf_counter() - start_s
            if '"cached_tokens":' in line:
                cached = int(line.rpartition('"cached_tokens":')[2].partition("}")[0].partition(",")[0])
    return first_s, cached


def area_under_curve(times: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """(probability that one of `times` is below one of `others`, its standard errors from 0.5)"""
    wins = sum((a < b) + (a == b) / 2 for a in times for b in others)
    pairs = len(times) * len(others)
    error = math.sqrt((len(times) + len(others) + 1) / (12 * pairs))
    return wins / pairs, (wins / pairs - 0.5) / error


def measure(url: str, rounds: int, prompt_tokens: int) -> dict[str, dict[str, float]]:
    """Figures of each row."""
    rng = random.Random(0)
    times: dict[str, list[float]] = {"new": [], "other": [], "own": []}
    cached = dict.fromkeys(times, 0)

    def new_prompt() -> list[int]:
        return [rng.randrange(32, MAX_ID) for _ in range(prompt_tokens)]

    with httpx.Client(base_url=url, timeout=600) as http:
        for _ in track_progress(range(rounds), "rounds", rounds):
            prompt = new_prompt()
            send(http, "alice", prompt)
            rows = [("other", prompt), ("new", new_prompt())]
            rng.shuffle(rows)
            for row, sent in (*rows, ("own", prompt)):
                seconds, num_cached = send(http, "bob", sent)
                times[row].append(seconds)
                cached[row] += num_cached
    return {
        row: {
            "median_ms": statistics.median(seconds) * 1000,
            "p90_ms": (percentile(seconds, 90) or math.nan) * 1000,
            "cached_tokens": cached[row] / rounds,
            **dict(zip(("auc", "z"), area_under_curve(seconds, times["new"]), strict=True)),
        }
        for row, seconds in times.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    add_config_options(parser, ENGINE_GROUPS)
    args = parser.parse_args()
    with ServerProcess(read_config(args), ["--api-key", "alice,bob"]) as server:
        result = measure(server.url, args.rounds, args.prompt_tokens)
    columns = ("median_ms", "p90_ms", "cached_tokens", "auc", "z")
    rows = [(row, *(f"{figures[name]:.2f}" for name in columns)) for row, figures in result.items()]
    print_table("time to the first token", ("bob's prompt", *columns), rows)
    print_json({"rounds": args.rounds, "prompt_tokens": args.prompt_tokens, **result})
    other = result["other"]
    if other["cached_tokens"] or abs(other["z"]) > MAX_Z or not result["own"]["cached_tokens"]:
        raise RegimeError("the time to the first token tells one key about another's prompts")
    return 0


if __name__ == "__main__":
    raise SystemExit(run_script(main))
