"""The cost of a grammar per step: requests with and without one, in turn, on the same engine.

    python -m benchmarks.constrained --model FOLDER [--concurrent 1,16] [--tokens 64] [--rounds 5]

Every request runs to --tokens tokens without speculation; no token is forced. Prompts are short. The
schema is an endless list of objects with texts, numbers, an enumeration and a date: a random model is
mostly inside texts, where most tokens are legal, and between them, where few are. A counting expression
never returns to a state, so that no mask is assembled from cached parts: the worst case. Prints the
median time per token of each kind and the median of their ratios, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks.script import print_json, run_script
from foreword import LLM, SamplingParams, StructuredOutput
from foreword.bench.regime import require
from foreword.bench.statistics import rotate
from foreword.bench.tables import print_table

SCHEMA = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "amount": {"type": "number", "minimum": 0, "maximum": 1000},
            "state": {"enum": ["open", "closed", "cancelled"]},
            "date": {"type": "string", "format": "date"},
            "labels": {"type": "array", "items": {"type": "string", "maxLength": 6}, "maxItems": 4},
        },
        "required": ["name", "amount", "state", "date", "labels"],
        "additionalProperties": False,
    },
}
CONSTRAINTS = {
    "plain": None,
    "JSON schema": StructuredOutput("json_schema", json.dumps(SCHEMA)),
    "regex": StructuredOutput("regex", "([a-zA-Z ]+[,.\n])*"),
    "regex that counts": StructuredOutput("regex", "[a-zA-Z ,.\n]{4000,}"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    args = _arguments(arguments)
    llm = LLM(
        args.model,
        speculate="off",
        dtype=args.dtype,
        max_model_len=1024,
        kv_cache_memory="40000tokens",
        prefix_caching=False,
    )
    rows: list[list[str]] = []
    results = []
    for concurrent in map(int, args.concurrent.split(",")):
        times = _token_times(llm, concurrent, args.tokens, args.rounds)
        for kind, seconds in times.items():
            ratio = statistics.median(own / plain for own, plain in zip(seconds, times["plain"], strict=True))
            each = statistics.median(seconds) * 1000
            rows.append([str(concurrent), kind, f"{each:.3f}", f"{ratio:.3f}"])
            results.append({"concurrent": concurrent, "kind": kind, "ms_per_token": each, "ratio": ratio})
    print_table("What a grammar costs", ("requests", "kind", "ms a token", "to plain"), rows)
    print_json({"bench": "constrained", "model": args.model, "tokens": args.tokens, "results": results})
    return 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default=None, help="checkpoint (default: the bundled demo)")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--concurrent", default="1,16", metavar="N,...")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(arguments)


def _token_times(llm: LLM, concurrent: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Seconds per token of a request, by kind and round; the first round, which compiles grammars, is not
    counted.
    """
    times: dict[str, list[float]] = {kind: [] for kind in CONSTRAINTS}
    for number in range(rounds + 1):
        for kind in rotate(list(CONSTRAINTS), number):
            seconds = _seconds(llm, CONSTRAINTS[kind], concurrent, tokens, number)
            if number:
                times[kind].append(seconds)
    return times


def _seconds(llm: LLM, structured: StructuredOutput | None, concurrent: int, tokens: int, seed: int) -> float:
    params = [
        SamplingParams(
            temperature=1.0, seed=100 * seed + i, max_tokens=tokens, min_tokens=tokens, structured=structured
        )
        for i in range(concurrent)
    ]
    prompts = [{"prompt_token_ids": [40 + i, 41, 42, 43]} for i in range(concurrent)]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    require("lengths of answers", {len(output.token_ids) for output in outputs}, {tokens})
    drafted = [output.metrics.draft_tokens for output in outputs if output.metrics]
    require("draft tokens verified", sum(count or 0 for count in drafted), 0)
    return seconds / tokens


if __name__ == "__main__":
    sys.exit(run_script(main))
