"""A search for counterexamples to exactness: random requests and engines by seed.

    python -m benchmarks.exact_search [--seconds 60] [--cases 1000] [--seed 0] [--heads 0.4] [--tiers 0.4]

A case is a small random checkpoint (family, shape, format, quantization, type of the KV cache, adapters),
random requests (sampling, penalties, limits, logprobs, n, grammars) and a random engine (drafters, batch,
step budget, block size, cache, prefix cache). Each answer in the crowded engine is compared with that of
the request alone with speculation off: token ids, the hash of each token's raw logits, the bits of
log-probabilities, texts, finish reasons, errors. Then each request comes again, with what was learned.

--heads: share of cases with a trained head that drafts: the bundled model with its own, a random EAGLE-3
head, or the MTP head of a random checkpoint. --tiers: share of cases whose KV cache outlives the engine, on
disk, in memory or both: the requests come again in another engine, which has the blocks of the first.

Prints the seed of each case that differs (`--seed SEED --cases 1` repeats it), a summary and one JSON line;
exit code 1 if one differs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.script import print_json, run_script
from foreword import LLM, SamplingParams, StructuredOutput
from foreword.bench.tables import print_table
from foreword.demo import DRAFTER as DEMO_DRAFTER
from foreword.demo import HEAD as DEMO_HEAD
from foreword.demo import MODEL as DEMO_MODEL
from foreword.engine.loader import load
from foreword.engine_client import local
from foreword.engine_client.engine_process import KVMemory
from foreword.errors import GrammarFailed, InvalidRequest
from foreword.kernels.cpu.library import supported_isas
from foreword.utils.mapped_memory import MemoryFile
from tests.support.adversarial_grammars import COSTLY_REGEXES
from tests.support.feature_matrix import FINISH_OPTIONS, OUTPUT_OPTIONS, SAMPLING, STRUCTURED
from tests.support.heads import write_random_head
from tests.test_exact import HEADS, MAX_MODEL_LEN, PLAIN, SETTINGS, fingerprint, prompts
from tests.test_exact_random import PRECISIONS, SPECULATE, random_adapters, random_model

MAX_REQUESTS = 16
HEAD_METHODS: Mapping[str, tuple[str, ...]] = {
    "eagle3": ("eagle3", "auto", "suffix,eagle3"),
    "mtp": ("mtp", "auto", "suffix,mtp", "text,mtp"),
}
TIERS = ("disk", "memory", "disk,memory")
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
            found = run_case(seed, Path(folder), tally, args.heads, args.tiers)
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
    parser.add_argument("--heads", type=float, default=0.4, help="share of cases with a trained head")
    parser.add_argument(
        "--tiers", type=float, default=0.4, help="share of cases whose cache outlives engines"
    )
    return parser.parse_args(arguments)


def run_case(seed: int, path: Path, tally: Counter[str], heads: float, tiers: float) -> str:
    """The first difference of a case; "" if there is none."""
    chance = random.Random(seed)
    models = random_models(chance, path, chance.random() < heads)
    tier = chance.choice(TIERS) if chance.random() < tiers else ""
    family, options = models.family, models.options
    lora = {} if models.kind in ("demo", "mtp") else random_adapters(chance, family, path)
    adapters = lora.get("lora_request", [None])
    asked = [
        Asked(prompt, params, chance.choice(adapters))
        for prompt, params in random_requests(chance, chance.randint(4, MAX_REQUESTS))
    ]
    options |= {name: lora[name] for name in ("lora_modules",) if name in lora}
    setting = {name: chance.choice(values) for name, values in SETTINGS.items()}
    setting |= {"speculate": chance.choice(models.methods), "block_size": chance.choice((8, 16, 32))}
    setting |= {"prefix_caching": True} if tier else {}
    plain = open_engine(models.target, None, PLAIN, **options)
    expected = [_answer(plain, [request])[0] for request in asked]
    options |= {"threads": 3 - options["threads"]}
    drafter = models.drafter_of(setting["speculate"])
    with open_tier(tier, path / "kv") as stored:
        crowded = open_engine(models.target, drafter, setting, **options, **stored)
        answered = [i for i, answer in enumerate(expected) if isinstance(answer, Mapping)]
        answers = _answer(crowded, [asked[i] for i in answered]) if answered else []
        actual = dict(zip(answered, answers, strict=True))
        crowded.check()
        if tier:
            _count(crowded, tally)
            del crowded  # its blocks are written at its end
            gc.collect()
            crowded = open_engine(models.target, drafter, setting, **options, **stored)
        again = {i: _answer(crowded, [request])[0] for i, request in enumerate(asked)}
        crowded.check()
    _count(crowded, tally)
    tally["answers"] += len(actual) + len(again)
    tally["errors"] += len(asked) - len(answered)
    tally["tokens"] += sum(sum(expected[i]["lengths"]) for i in answered)
    for answers_of_pass in (actual, again):
        for i, answer in answers_of_pass.items():
            if answer != expected[i]:
                return f"{family} {options} {setting} {tier} {asked[i]}: {answer} instead of {expected[i]}"
    return ""


@dataclass(frozen=True, slots=True)
class Models:
    """The checkpoints of a case."""

    target: Path
    draft_model: Path
    head: Path | None  # EAGLE-3; None: the target has an MTP head, or no head is used
    methods: tuple[str, ...]
    family: str
    options: dict[str, Any]
    kind: str  # of its head: "demo", "eagle3", "mtp" or ""

    def drafter_of(self, method: str) -> Path | None:
        """`draft_model` of an engine with these drafters."""
        if "draft" in method or (method == "auto" and not self.kind):
            return self.draft_model
        return self.head if method != "off" else None


def random_models(chance: random.Random, path: Path, with_head: bool) -> Models:
    plain_methods = tuple(method for method in SPECULATE if not any(head in method for head in HEADS))
    if not with_head:
        model, drafter, family, options = random_model(chance, path)
        return Models(model, drafter, None, plain_methods, family, options, "")
    kind = chance.choice(("demo", "eagle3", "mtp"))
    if kind == "demo":
        options = {"threads": chance.randint(1, 2), "cpu_isa": chance.choice(supported_isas())}
        options |= chance.choice(PRECISIONS)
        return Models(DEMO_MODEL, DEMO_DRAFTER, DEMO_HEAD, HEAD_METHODS["eagle3"], kind, options, kind)
    model, drafter, family, options = random_model(chance, path, mtp=kind == "mtp")
    head = write_random_head(path / "head", path / "model") if kind == "eagle3" else None
    return Models(model, drafter, head, HEAD_METHODS[kind], family, options, kind)


@contextlib.contextmanager
def open_tier(tier: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Options of engines whose KV cache outlives them.

    An engine in this process has private memory: here it takes that of the engine before, as processes do.
    """
    options = {"kv_cache_dir": str(folder)} if "disk" in tier else {}
    if "memory" not in tier:
        yield options
        return
    memory = KVMemory()

    def load_with_memory(*args: Any, **kwargs: Any) -> Any:
        return load(*args, kv_memory=MemoryFile(memory.fd), **kwargs)

    try:
        with mock.patch.object(local, "load", load_with_memory):
            yield options
    finally:
        memory.close()


def _count(llm: LLM, tally: Counter[str]) -> None:
    """Totals of an engine."""
    stats = llm.stats
    tally["preemptions"] += stats.preemptions_total
    tally["adopted_tokens"] += stats.adopted_tokens
    for name, tier in stats.kv_tiers.items():
        tally[f"{name}_hit_tokens"] += tier.hit_tokens


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


def open_engine(model: Path, drafter: Path | None, setting: Mapping[str, Any], **options: Any) -> LLM:
    return LLM(
        str(model),
        speculate=setting["speculate"],
        draft_length=setting["draft_length"],
        draft_model=None if drafter is None else str(drafter),
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
    except (InvalidRequest, GrammarFailed) as error:
        return [(type(error).__name__, str(error))] * len(asked)
    return [fingerprint(output) for output in outputs]


if __name__ == "__main__":
    sys.exit(run_script(main))
