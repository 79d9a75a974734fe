"""What speculation is worth under `foreword bench gpu`, at rates of acceptance that are set: recorded answers are drafted.

Off is an engine that was started without speculation. All engines of a comparison are loaded side by side and take turns.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from foreword.bench.gpu.config import ROLES
from foreword.bench.gpu.engines import BenchEngine, BenchRequest, BenchResult, EngineFactory, make_requests
from foreword.bench.gpu.report import Measurement
from foreword.bench.gpu.steps import ratio, run_paired

__all__ = ["SpeculationTimings"]

ROLE = ROLES[0]
DRAFTED = 5  # tokens at most
RIGHT, MIDDLING, WRONG = 0.8, 0.6, 0.0
RATES = (RIGHT, MIDDLING, WRONG)
SEEDS = 10_000  # between the seeds of two rates


class SpeculationTimings:
    def __init__(self, yard: EngineFactory) -> None:
        self.yard = yard
        scale = yard.scale
        self.rounds = scale.rounds
        self.crowd = scale.streams[-1]
        self.asked = make_requests(self.crowd, scale.prompt, scale.replayed, scale.shape(ROLE).vocab)

    def parts(self) -> Iterator[Measurement]:
        with self.yard.bed(ROLE) as off:
            replay = {
                "speculate": "replay",
                "replay_file": self._recording(off),
                "num_speculative_tokens": DRAFTED,
            }
            with self.yard.bed(ROLE, **replay) as adaptive:
                for rate in (RIGHT, WRONG):
                    yield self._part(f"replay {rate:g}, 1 stream", off, adaptive, rate, 1)
                yield self._part(f"replay {WRONG:g}, {self.crowd} streams", off, adaptive, WRONG, self.crowd)
            with self.yard.bed(ROLE, **replay, draft_length="fixed") as fixed:
                yield self._part(f"replay {RIGHT:g}, always {DRAFTED}, 1 stream", off, fixed, RIGHT, 1)
            with self.yard.bed(ROLE, **replay, replay_cost=True, draft_model=self.yard.drafter(ROLE)) as paid:
                for count in (1, self.crowd):
                    yield self._part(
                        f"draft model paid, {MIDDLING:g}, {count} streams", off, paid, MIDDLING, count
                    )

    def _part(self, name: str, off: BenchEngine, on: BenchEngine, rate: float, count: int) -> Measurement:
        return Measurement(name, lambda: self._compared(off, on, rate, count), 4)

    def _compared(self, off: BenchEngine, on: BenchEngine, rate: float, count: int) -> Mapping[str, Any]:
        """Tokens a second, as many times those without; and whether the tokens are the same."""
        drafted = [replace(question, method="replay") for question in _seeded(self.asked[:count], rate)]
        runs: dict[str, Callable[[], BenchResult]] = {
            "off": lambda: off.answer(self.asked[:count]),
            "on": lambda: on.answer(drafted),
        }
        rounds = run_paired(runs, self.rounds)
        tries = sum(one.drafted for one in rounds["on"])
        found = {
            "ok": all(
                one.tokens == other.tokens for one, other in zip(rounds["on"], rounds["off"], strict=True)
            ),
            "times off": ratio(rounds["on"], rounds["off"], lambda one: one.rate),
            "off tok/s": statistics.median(one.rate for one in rounds["off"]),
            "tok/s": statistics.median(one.rate for one in rounds["on"]),
            "tokens a step": statistics.median(one.counted / max(one.steps, 1) for one in rounds["on"])
            / count,
        }
        return {**found, "acceptance": sum(one.accepted for one in rounds["on"]) / tries} if tries else found

    def _recording(self, off: BenchEngine) -> str:
        """Every answer once for each rate, under another seed: greedy answers do not depend on it."""
        answered = off.answer(self.asked)
        path = self.yard.folder / "answers.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for rate in RATES:
                for question, tokens in zip(_seeded(self.asked, rate), answered.tokens, strict=True):
                    prompt = list(question.prompt_ids)
                    line = {
                        "prompt_token_ids": prompt,
                        "token_ids": tokens,
                        "seed": question.seed,
                        "error_rate": 1.0 - rate,
                    }
                    file.write(json.dumps(line) + "\n")
        return str(path)


def _seeded(asked: Sequence[BenchRequest], rate: float) -> list[BenchRequest]:
    """Under seeds of this rate."""
    return [replace(question, seed=question.seed + SEEDS * (1 + RATES.index(rate))) for question in asked]
