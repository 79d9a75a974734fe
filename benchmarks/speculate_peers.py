"""Speculation in Foreword, transformers and llama-cpp-python: the same model and prompts, on against off.

    python benchmarks/speculate_peers.py [--model FOLDER --drafter FOLDER] [--env FOLDER] [--rounds 5]

The first run installs the other engines into an environment (--env), as benchmarks/peers.py does.

Regime: the bundled demo (or --model, a Llama or Qwen2 checkpoint in bfloat16), greedy, one request at a
time (the others do not speculate in batches), the prompts of `foreword bench speculate` as token ids, no
prefix cache. Engines and modes take turns within each round; a ratio is the time without speculation over
the time with it in the same round, for all prompts of a category, with a 95 % interval over the rounds.
The first round is not counted.

    foreword       auto: the default
    transformers   lookup: generate(prompt_lookup_num_tokens=10); assistant: generate(assistant_model=...)
    llama.cpp      lookup: LlamaPromptLookupDecoding of llama-cpp-python, 10 tokens

`other answers` counts the prompts whose tokens change with speculation, in any round. Prints a table and
one JSON line; exit code 1 if that happens to Foreword, and without figures if a mode never drafted, or `off`
did.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers_setup import TO_GGUF, convert, make_environment
from peers_worker import Worker
from script import print_json, run_script, track_progress

from foreword.bench.engine import LocalEngine
from foreword.bench.measurement import AUTO, OFF
from foreword.bench.regime import require
from foreword.bench.statistics import geometric_mean_ratio, rotate
from foreword.bench.tables import print_table
from foreword.bench.workloads import (
    CATEGORIES,
    Conversation,
    PromptBudget,
    make_conversations,
)
from foreword.config.options import Config
from foreword.demo import DRAFTER, MODEL

HERE = Path(__file__).parent
RANDOM = "random"


@dataclass(frozen=True, slots=True)
class PeerPrompt:
    """A prompt as token ids, with the history of Foreword's conversation."""

    category: str
    prompt: tuple[int, ...]
    tokens: int


@dataclass(slots=True)
class Contender:
    """An engine and its modes, `off` among them."""

    name: str
    modes: tuple[str, ...]
    worker: Worker | None
    version: str = ""
    seconds: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    answers: dict[tuple[PeerPrompt, str], set[tuple[int, ...]]] = field(
        default_factory=lambda: defaultdict(set)
    )

    drafted: Counter[str] = field(default_factory=Counter)  # draft tokens by mode

    def check(self) -> None:
        """Raise RegimeError where `off` drafted, or another mode never did."""
        for mode in self.modes:
            drafted = self.drafted[mode] > 0
            require(f"{self.name} {mode}: draft tokens were verified", drafted, mode != OFF.name)

    def changed(self, mode: str, questions: Sequence[PeerPrompt]) -> int:
        """Prompts whose answer ever differed from that without speculation."""
        return sum(
            len(self.answers[question, mode] | self.answers[question, OFF.name]) > 1 for question in questions
        )


def main() -> int:
    args = _parse()
    engine = LocalEngine(_config(args))
    questions = list(_questions(engine, args))
    contenders = [Contender("foreword", (OFF.name, AUTO.name), None), *_load_peers(engine, args)]
    plan = [
        (number, category, contender, mode)
        for number in range(args.rounds + 1)
        for category in dict.fromkeys(question.category for question in questions)
        for contender, mode in rotate([(one, mode) for one in contenders for mode in one.modes], number)
    ]
    for number, category, contender, mode in track_progress(plan, "measuring", len(plan)):
        mine = [question for question in questions if question.category == category]
        taken = sum(_ask(contender, mode, question, engine, number) for question in mine)
        if number > 0:
            contender.seconds[category, mode].append(taken)
    for contender in contenders:
        if contender.worker is not None:
            contender.worker.close()
    for contender in contenders:
        contender.check()
    return _report(contenders, questions, args)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, default=MODEL, metavar="FOLDER", help="checkpoint (default: the bundled demo)"
    )
    parser.add_argument(
        "--drafter", type=Path, metavar="FOLDER", help="draft model (default: the demo's, with the demo)"
    )
    parser.add_argument(
        "--env", type=Path, default=Path("build/peers"), metavar="FOLDER", help="environment of the others"
    )
    parser.add_argument(
        "--files", type=Path, default=Path("build/speculate-peers"), metavar="FOLDER", help="GGUF file, log"
    )
    parser.add_argument(
        "--categories", default=",".join(name for name in CATEGORIES if name != RANDOM), metavar="LIST"
    )
    parser.add_argument(
        "--requests", type=int, default=3, metavar="N", help="scripts of a category (default: 3)"
    )
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N")
    parser.add_argument("--context", type=int, default=2048, metavar="N")
    parser.add_argument("--rounds", type=int, default=5, metavar="N")
    parser.add_argument("--threads", type=int, default=1, metavar="N")
    args = parser.parse_args()
    args.drafter = args.drafter or (DRAFTER if args.model == MODEL else None)
    return args


def _config(args: argparse.Namespace) -> Config:
    drafter = None if args.drafter is None else str(args.drafter)
    return Config(model=str(args.model), draft_model=drafter, threads=args.threads, prefix_caching=False)


def _questions(engine: LocalEngine, args: argparse.Namespace) -> Iterator[PeerPrompt]:
    """Every turn of every conversation; later turns contain Foreword's answers without speculation."""
    reach = min(engine.max_len, args.context)
    room = PromptBudget.from_context(reach, args.max_tokens, engine)
    for category in args.categories.split(","):
        scripts = make_conversations(category, args.requests, 0, room)
        for call in engine.run(scripts, OFF, 1, "questions").results:
            yield PeerPrompt(category, call.prompt_ids, scripts[call.conversation].max_tokens)


def _load_peers(engine: LocalEngine, args: argparse.Namespace) -> Iterator[Contender]:
    environment = make_environment(args.env)
    args.files.mkdir(parents=True, exist_ok=True)
    log, gguf = args.files / "peers.log", args.files / f"{args.model.resolve().name}.gguf"
    log.write_bytes(b"")
    convert(environment, TO_GGUF, "gguf", args.model, gguf)
    loads: Mapping[str, dict[str, Any]] = {
        "transformers": {
            "path": str(args.model),
            "drafter": None if args.drafter is None else str(args.drafter),
        },
        "llama_cpp": {"path": str(gguf), "context": min(engine.max_len, args.context)},
    }
    for name, arguments in loads.items():
        script = HERE / f"speculate_peers_{name}.py"
        worker = Worker(environment.python, script, log, environment.variables)
        facts = worker("load", threads=args.threads, **arguments)
        yield Contender(name.replace("_", "."), tuple(facts["modes"]), worker, facts["version"])


def _ask(contender: Contender, mode: str, question: PeerPrompt, engine: LocalEngine, number: int) -> float:
    """Seconds of one answer."""
    if contender.worker is None:
        script = Conversation(prompt_ids=question.prompt, max_tokens=question.tokens)
        run = engine.run((script,), OFF if mode == OFF.name else AUTO, 1, f"{mode} {number}")
        seconds, ids = run.results[0].total_s, run.results[0].output
        contender.drafted[mode] += run.num_drafted
    else:
        stop = list(engine.tokenizer.eos_token_ids)
        answer = contender.worker(
            "answer", mode=mode, prompt=question.prompt, tokens=question.tokens, stop=stop
        )
        seconds, ids = answer["seconds"], answer["ids"]
        contender.drafted[mode] += answer["drafted"]
    contender.answers[question, mode].add(tuple(ids))
    return float(seconds)


def _report(
    contenders: Sequence[Contender], questions: Sequence[PeerPrompt], args: argparse.Namespace
) -> int:
    ways = [(contender, mode) for contender in contenders for mode in contender.modes if mode != OFF.name]
    found = {f"{contender.name} {mode}": _figures(contender, mode, questions) for contender, mode in ways}
    categories = list(dict.fromkeys(question.category for question in questions))
    rows = [[category, *(_cell(found[way][category]) for way in found)] for category in categories]
    print_table(
        "time off over time on, tokens/s off and on, prompts answered otherwise", ("category", *found), rows
    )
    versions = {contender.name: contender.version for contender in contenders if contender.version}
    regime = {"model": args.model.name, "rounds": args.rounds, "threads": args.threads}
    print_json({"bench": "speculate peers", **regime, "versions": versions, "modes": found})
    return 1 if contenders[0].changed(AUTO.name, questions) else 0


def _figures(contender: Contender, mode: str, questions: Sequence[PeerPrompt]) -> dict[str, dict[str, Any]]:
    figures: dict[str, dict[str, Any]] = {}
    for category in dict.fromkeys(question.category for question in questions):
        mine = [question for question in questions if question.category == category]
        plain, other = contender.seconds[category, OFF.name], contender.seconds[category, mode]
        ratio = geometric_mean_ratio([a / b for a, b in zip(plain, other, strict=True)])
        figures[category] = {
            **(ratio.as_dict() if ratio else {}),
            "tokens_per_second": {way: _rate(contender, way, mine) for way in (OFF.name, mode)},
            "prompts": len(mine),
            "other_answers": contender.changed(mode, mine),
        }
    return figures


def _rate(contender: Contender, mode: str, questions: Sequence[PeerPrompt]) -> float:
    """Tokens/s of the median round."""
    tokens = sum(len(next(iter(contender.answers[question, mode]))) for question in questions)
    return tokens / statistics.median(contender.seconds[questions[0].category, mode])


def _cell(figures: Mapping[str, Any]) -> str:
    bounds = f" [{figures['low']:.2f}, {figures['high']:.2f}]" if "low" in figures else ""
    off, on = figures["tokens_per_second"].values()
    changed = f"{figures['other_answers']}/{figures['prompts']}"
    return f"{figures['ratio']:.2f}x{bounds} {off:.0f} to {on:.0f}/s {changed}"


if __name__ == "__main__":
    sys.exit(run_script(main))
