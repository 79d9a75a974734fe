"""A search for counterexamples to exactness: random requests and engines by seed.

    python -m benchmarks.exact_search [--seconds 60] [--cases 1000] [--seed 0]

A case is a small random checkpoint (family, shape, format, quantization, type of the KV cache, adapters),
random requests (sampling, penalties, limits, logprobs, n, grammars) and a random engine (drafters, batch,
step budget, block size, cache, prefix cache). Each answer in the crowded engine is compared with that of
the request alone with speculation off: token ids, the hash of each token's raw logits, the bits of
log-probabilities, texts, finish reasons, errors. Prints the seed of each case that differs (`--seed SEED
--cases 1` repeats it), a summary and one JSON line; exit code 1 if one differs.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.script import print_json, run_script
from foreword import LLM, SamplingParams, StructuredOutput
from foreword.bench.tables import print_table
from foreword.errors import InvalidRequest
from tests.support.adversarial_grammars import COSTLY_REGEXES
from tests.support.feature_matrix import FINISH_OPTIONS, OUTPUT_OPTIONS, SAMPLING, STRUCTURED
from tests.test_exact import MAX_MODEL_LEN, PLAIN, SETTINGS, fingerprint, prompts
from tests.test_exact_random import SPECULATE, random_adapters, random_model

MAX_REQUESTS = 16
GRAMMARS: tuple[dict[str, Any], ...] = (
    *STRUCTURED.values(),
    *({"structured": StructuredOutput("regex", regex)} for regex in COSTLY_REGEXES),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """A request of a case."""

    prompt: dict[str, list[int]]
    params: SamplingParams
    lora: str | None


def main(arguments: Sequence[str] | None = None) -> int:
    args = _arguments(arguments)
    tally: Counter[str] = Counter()
    differing: list[int] = []
    end_s = time.monotonic() + args.seconds
    for seed in range(args.seed, args.seed + args.cases):
        if time.monotonic() > end_s:
            break
        with tempfile.TemporaryDirectory() as folder:
            found = run_case(seed, Path(folder), tally)
        tally["cases"] += 1
        if found:
            differing.append(seed)
            print(f"seed {seed} differs: {found:.2000}", flush=True)
        elif sys.stderr.isatty():
            print(f"\r{tally['cases']} cases", end="", file=sys.stderr)
    print_table(
        "Answers against the request alone", ("count", "of"), [[str(n), of] for of, n in tally.items()]
    )
    print_json({"bench": "exact_search", "seed": args.seed, **tally, "differing": differing})
    return 1 if differing else 0


def _arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0, help="no case begins later")
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    return parser.parse_args(arguments)


def run_case(seed: int, path: Path, tally: Counter[str]) -> str:
    """The first difference of a case; "" if there is none."""
    chance = random.Random(seed)
    model, drafter, family, options = random_model(chance, path)
    lora = random_adapters(chance, family, path)
    adapters = lora.get("lora_request", [None])
    asked = [
        Asked(prompt, params, chance.choice(adapters))
        for prompt, params in random_requests(chance, chance.randint(4, MAX_REQUESTS))
    ]
    options |= {name: lora[name] for name in ("lora_modules",) if name in lora}
    setting = {name: chance.choice(values) for name, values in SETTINGS.items()}
    setting |= {"speculate": chance.choice(SPECULATE), "block_size": chance.choice((8, 16, 32))}
    plain = open_engine(model, drafter, PLAIN, **options)
    expected = [_answer(plain, [request])[0] for request in asked]
    crowded = open_engine(model, drafter, setting, **options | {"threads": 3 - options["threads"]})
    answered = [i for i, answer in enumerate(expected) if isinstance(answer, Mapping)]
    actual = (
        dict(zip(answered, _answer(crowded, [asked[i] for i in answered]), strict=True)) if answered else {}
    )
    again = {i: _answer(crowded, [request])[0] for i, request in enumerate(asked)}  # with what was learned
    crowded.check()
    tally["answers"] += len(actual) + len(again)
    tally["errors"] += len(asked) - len(answered)
    tally["tokens"] += sum(sum(expected[i]["lengths"]) for i in answered)
    tally["preemptions"] += crowded.stats.preemptions_total
    for answers in (actual, again):
        for i, answer in answers.items():
            if answer != expected[i]:
                return f"{family} {options} {setting} {asked[i]}: {answer} instead of {expected[i]}"
    return ""


def random_requests(chance: random.Random, count: int) -> list[tuple[dict[str, list[int]], SamplingParams]]:
    """Random prompts with merged random parameters; some fail."""
    ids = prompts()
    asked = []
    while len(asked) < count:
        fields: dict[str, Any] = {"max_tokens": chance.choice((5, 20, 40)), "seed": chance.randrange(1 << 63)}
        for group, share in ((SAMPLING, 1.0), (SAMPLING, 0.5), (FINISH_OPTIONS, 0.3), (OUTPUT_OPTIONS, 0.5)):
            fields |= chance.choice(list(group.values())) if chance.random() < share else {}
        fields |= chance.choice(GRAMMARS) if chance.random() < 0.4 else {}
        with contextlib.suppress(InvalidRequest):  # contradictory limits
            asked.append(({"prompt_token_ids": chance.choice(ids)}, SamplingParams(**fields)))
    return asked


def open_engine(model: Path, drafter: Path, setting: Mapping[str, Any], **options: Any) -> LLM:
    method = setting["speculate"]
    return LLM(
        str(model),
        speculate=method,
        draft_length=setting["draft_length"],
        draft_model=str(drafter) if "draft" in method or method == "auto" else None,
        num_speculative_tokens=setting["num_speculative_tokens"],
        max_num_seqs=setting["concurrent"],
        max_num_batched_tokens=setting["chunk"],
        prefix_caching=setting["prefix_caching"],
        kv_cache_memory="240tokens" if setting["cache"] == "small" else "8000tokens",
        block_size=setting.get("block_size", 16),
        max_model_len=MAX_MODEL_LEN,
        test_mode=True,
        **options,
    )


def _answer(llm: LLM, asked: Sequence[Asked]) -> list[Any]:
    """Fields that no setting may change; the error's type and text if the requests end in one."""
    try:
        outputs = llm.generate(
            [request.prompt for request in asked],
            [request.params for request in asked],
            lora_request=[request.lora for request in asked] if any(r.lora for r in asked) else None,
        )
    except InvalidRequest as error:
        return [(type(error).__name__, str(error))] * len(asked)
    return [fingerprint(output) for output in outputs]


if __name__ == "__main__":
    sys.exit(run_script(main))
